"""K2's chat format as Kimi-Linear uses it: role marks, plain text, tool calls with ids that say name and index.

Only what is documented for Kimi-Linear is rendered. It has no thinking channel and no effort; how it declares tools,
and whether it has a default system text, is not known, so tools are refused and nothing is inserted.
Source: chat-format notes, sections 1.6, 3.1 and 5.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from k3cli.chat import messages as shapes
from k3cli.chat.k2_parser import K2Parser
from k3cli.chat.parser import StreamParser
from k3cli.chat.renderer import RenderContext, Renderer, check_tail
from k3cli.chat.specials import Family
from k3cli.chat.tokenizer import Tokenizer
from k3cli.chat.transcript import TranscriptEntry, read_k2
from k3cli.errors import UsageError
from k3cli.words import counted

_CALL_ID = re.compile(r"functions\.(.+):\d+", re.DOTALL)
_FORMAT = "the Kimi-Linear chat format"


class K2Renderer(Renderer):
    """See `Renderer` for the contract of each method."""

    family: ClassVar[Family] = "k2"
    format_version = "k2-1"
    default_thinking = False
    default_effort = None

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        self._middle = tokenizer.special("<|im_middle|>")
        self._end = tokenizer.special("<|im_end|>")

    @property
    def stop_ids(self) -> frozenset[int]:
        """End of message; the two tokenizer-level ends as well, which are never part of an answer."""
        return self.tokenizer.specials_among("<|im_end|>", "[EOS]", "[EOT]")

    def render_head(
        self,
        tools: Sequence[Mapping[str, Any]] = (),
        thinking: bool | None = None,
        effort: str | None = None,
        system: str | None = None,
    ) -> list[int]:
        if shapes.check_tools(tools, "tools"):
            raise UsageError(
                f"{counted(len(tools), 'tool')} for {_FORMAT}, whose way to declare tools is not documented",
                "no tools",
                "describe the tools in the system text",
            )
        self._thinking(thinking)
        if shapes.check_effort(effort) is not None:
            raise UsageError(f"effort {effort!r} for {_FORMAT}, which has none", "no effort")
        return [] if system is None else self._wrap("system", "system", self.tokenizer.encode_text(system))

    def render_tail(
        self, tool_choice: str | None, response_format: Mapping[str, Any] | None, context: RenderContext
    ) -> list[int]:
        choice, form = check_tail(tool_choice, response_format, context)
        if choice not in (None, "auto"):
            raise UsageError(f"tool_choice {choice!r} for {_FORMAT}, which cannot say it", "auto")
        if form is not None and form["type"] != "text":
            raise UsageError(f"response_format {form['type']!r} for {_FORMAT}, which cannot say it", "text")
        return []

    def generation_prompt(self, thinking: bool | None = None) -> list[int]:
        self._thinking(thinking)
        return self._begin("assistant", "assistant")

    def parser(self, thinking: bool | None = None, mint: Callable[[], str] | None = None) -> StreamParser:
        self._thinking(thinking)
        return K2Parser(self.tokenizer, mint)

    def parse_transcript(self, ids: Sequence[int]) -> list[TranscriptEntry]:
        return read_k2(self.tokenizer, ids)

    def _thinking(self, thinking: bool | None) -> bool:
        if thinking:
            raise UsageError(f"thinking for {_FORMAT}, which has no thinking channel", "thinking off")
        return False

    def _begin(self, mark: str, label: str) -> list[int]:
        return [self.tokenizer.special(f"<|im_{mark}|>"), *self.tokenizer.encode_text(label), self._middle]

    def _wrap(self, mark: str, label: str, body: Sequence[int]) -> list[int]:
        return [*self._begin(mark, label), *body, self._end]

    def _message(self, message: Mapping[str, Any], context: RenderContext, where: str) -> list[int]:
        role = message["role"]
        if role != "tool" and message.get("name"):
            raise UsageError(f"{where} has a name, which {_FORMAT} cannot say", "no name")
        if message.get("tools"):
            raise UsageError(f"{where} declares tools; how {_FORMAT} does that is not documented", "no tools")
        parts = shapes.content_parts(message.get("content"), where)
        text = self.tokenizer.encode_text
        if role == "tool":
            call_id = message.get("tool_call_id") or message.get("id") or self._open_call(context)
            if call_id is None:
                raise UsageError(f"{where} is a tool result without tool_call_id", "the id of the call it answers")
            ids = self._wrap("system", "tool", text(f"## Return of {call_id}\n" + "".join(parts)))
            context.tool_index += 1
            return ids
        body = text("".join(parts))
        if role == "assistant":
            if message.get("reasoning_content") or message.get("reasoning"):
                raise UsageError(f"{where} has reasoning, for which {_FORMAT} has no channel", "content only")
            body += self._calls(message.get("tool_calls") or (), where)
            ids = self._wrap(role, role, body)
            context.reply(message)
            return ids
        return self._wrap(role, role, body)

    def _open_call(self, context: RenderContext) -> str | None:
        at = context.tool_index
        return context.calls[at][0] if at < len(context.calls) else None

    def _calls(self, calls: Sequence[Mapping[str, Any]], where: str) -> list[int]:
        if not calls:
            return []
        special, text = self.tokenizer.special, self.tokenizer.encode_text
        ids = [special("<|tool_calls_section_begin|>")]
        for call in calls:
            name, call_id = call["function"]["name"], call.get("id")
            said = _CALL_ID.fullmatch(call_id or "")
            if said is None or said[1] != name:
                raise UsageError(f"{where} has a call of {name!r} with id {call_id!r}", f"functions.{name}:INDEX")
            arguments = call["function"].get("arguments")
            if not isinstance(arguments, str):
                arguments = shapes.plain_json(arguments or {}, f"{where} arguments of {name!r}")
            ids += [special("<|tool_call_begin|>"), *text(call_id or "")]
            ids += [special("<|tool_call_argument_begin|>"), *text(arguments), special("<|tool_call_end|>")]
        return [*ids, special("<|tool_calls_section_end|>")]
