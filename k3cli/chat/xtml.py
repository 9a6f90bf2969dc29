"""K3's chat format: messages as tags made of control ids, everything between them plain text. Revision "b".

Each piece of text is encoded on its own and never as special ids, so no text can open or close a tag.
Source: chat-format notes, sections 2.1 to 2.5 and 2.9.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, ClassVar

from k3cli.chat import messages as shapes
from k3cli.chat.arguments import split_arguments
from k3cli.chat.parser import StreamParser
from k3cli.chat.renderer import RenderContext, Renderer, check_tail
from k3cli.chat.specials import Family
from k3cli.chat.tags import Tags
from k3cli.chat.tokenizer import Tokenizer
from k3cli.chat.transcript import TranscriptEntry, read_xtml
from k3cli.chat.xtml_parser import XtmlParser
from k3cli.errors import UsageError

_TOOLS = "# Tools\nHere are the available tools, described in JSONSchema.\n\n```json\n{}\n```"
_NEW_TOOLS = (
    "## New Tools Available\n"
    "The system dynamically extends the toolset via lazy-loading.\n"
    "You have access to all existing and extended tools.\n"
    "Here are the specs for the extended tools.\n\n"
    "```json\n{}\n```"
)
_EFFORT = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the response channel), "
    "supported values include `low`, `medium`, `high`, and `max`.\n"
    "Now the system is invoked with `thinking_effort={}`."
)
_CHOICE = "The system is invoked with `tool_choice={}`.\nYou {} call any tools in the next message."
_CHOICES = {"required": "MUST", "none": "MUST NOT"}
_FORMAT = (
    "The system is invoked with `response_format={}`.\n"
    "Your response must be raw JSON data without markdown code blocks (```json) or any additional formatting."
)
_SCHEMA = "\nThe JSON data must match the following schema:\n```json\n{}\n```"


class XtmlRenderer(Renderer):
    """See `Renderer` for the contract of each method."""

    family: ClassVar[Family] = "k3"
    format_version = "k3-xtml-b1"
    default_thinking = True
    default_effort = "max"

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        self._tags = Tags(tokenizer)

    @property
    def stop_ids(self) -> frozenset[int]:
        """End of message; the two tokenizer-level ends as well, which are never part of an answer."""
        return self.tokenizer.specials_among("<|end_of_msg|>", "[EOS]", "[EOT]")

    def render_head(
        self,
        tools: Sequence[Mapping[str, Any]] = (),
        thinking: bool | None = None,
        effort: str | None = None,
        system: str | None = None,
    ) -> list[int]:
        ids: list[int] = []
        if shapes.check_tools(tools, "tools"):
            ids += self._internal("tool-declare", _TOOLS.format(shapes.canonical_json(list(tools), "tools")))
        if shapes.check_effort(effort) is not None and self._thinking(thinking):
            ids += self._internal("thinking-effort", _EFFORT.format(effort))
        if system is not None:
            ids += self._tags.message([("role", "system")], self.tokenizer.encode_text(system))
        return ids

    def _in_order(self, messages: Sequence[Mapping[str, Any]], context: RenderContext) -> Iterator[Numbered]:
        """Each run of tool results in the order of the calls of the message before it."""
        for role, run in groupby(enumerate(messages), key=lambda item: item[1]["role"]):
            numbered = list(run)
            yield from sort_results(numbered, context.calls) if role == "tool" else numbered

    def render_tail(
        self, tool_choice: str | None, response_format: Mapping[str, Any] | None, context: RenderContext
    ) -> list[int]:
        choice, form = check_tail(tool_choice, response_format, context)
        ids: list[int] = []
        if choice in _CHOICES:
            ids += self._internal("tool-choice", _CHOICE.format(choice, _CHOICES[choice]))
        if form is not None and form["type"] != "text":
            body = _FORMAT.format(form["type"])
            if form["type"] == "json_schema":
                given = form["json_schema"]
                schema = given.get("schema", given.get("json_schema", given))
                body += _SCHEMA.format(shapes.canonical_json(schema, "response_format.json_schema"))
            ids += self._internal("response-format", body)
        return ids

    def generation_prompt(self, thinking: bool | None = None) -> list[int]:
        channel = "think" if self._thinking(thinking) else "response"
        return [*self._tags.open("message", [("role", "assistant")]), *self._tags.open(channel)]

    def parser(self, thinking: bool | None = None, mint: Callable[[], str] | None = None) -> StreamParser:
        return XtmlParser(self.tokenizer, "think" if self._thinking(thinking) else "response", mint)

    def parse_transcript(self, ids: Sequence[int]) -> list[TranscriptEntry]:
        return read_xtml(self.tokenizer, ids)

    def _internal(self, kind: str, body: str) -> list[int]:
        return self._tags.message([("role", "system"), ("type", kind)], self.tokenizer.encode_text(body))

    def _message(self, message: Mapping[str, Any], context: RenderContext, where: str) -> list[int]:
        role = message["role"]
        if role == "tool":
            return self._tool_result(message, context, where)
        if role == "assistant":
            ids = self._assistant(message, context.thinking, where)
            context.reply(message)
            return ids
        if role == "system" and message.get("tools"):
            tools = message["tools"]
            names = shapes.tool_names(tools)
            again = sorted(set(names) & set(context.tool_names))
            if again:
                raise UsageError(f"{where} declares {', '.join(again)} again", "only tools that are new")
            ids = self._internal("tool-declare", _NEW_TOOLS.format(shapes.canonical_json(tools, where)))
            context.tool_names += names
            return ids
        return self._tags.message([("role", role), *_name(message)], self._body(message, where))

    def _body(self, message: Mapping[str, Any], where: str) -> list[int]:
        """Each part of the content on its own: pieces of text are never merged across parts."""
        ids: list[int] = []
        for text in shapes.content_parts(message.get("content"), where):
            ids += self.tokenizer.encode_text(text)
        return ids

    def _assistant(self, message: Mapping[str, Any], thinking: bool, where: str) -> list[int]:
        tags, text = self._tags, self.tokenizer.encode_text
        body: list[int] = []
        if thinking:
            reasoning = message.get("reasoning_content")
            if reasoning is None:
                reasoning = message.get("reasoning")
            body += [*tags.open("think"), *text(reasoning or ""), *tags.close("think")]
        body += [*tags.open("response"), *self._body(message, where), *tags.close("response")]
        if message.get("tool_calls"):
            body += tags.open("tools")
            for index, call in enumerate(message["tool_calls"], start=1):
                body += self._call(call["function"], index)
            body += tags.close("tools")
        return tags.message([("role", "assistant"), *_name(message)], body)

    def _call(self, function: Mapping[str, Any], index: int) -> list[int]:
        tags, text = self._tags, self.tokenizer.encode_text
        ids = tags.open("call", [("tool", function["name"]), ("index", str(index))])
        arguments = split_arguments(function.get("arguments"))
        if arguments is None:
            ids += [*tags.open("json", [("type", "object")]), *text(function["arguments"]), *tags.close("json")]
        for argument in arguments or ():
            ids += tags.open("argument", [("key", argument.key), ("type", argument.type)])
            ids += [*text(argument.text), *tags.close("argument")]
        return ids + tags.close("call")

    def _tool_result(self, message: Mapping[str, Any], context: RenderContext, where: str) -> list[int]:
        position = context.tool_index
        name = message.get("tool")
        if name is None:
            name = message.get("name")
        if name is None and position < len(context.calls):
            name = context.calls[position][1]
        if name is None:
            raise UsageError(
                f"{where} is a tool result without a name, and no tool call of the last answer is left for it",
                "tool or name, or one result for each call",
            )
        attributes = [("role", "tool"), ("tool", name), ("index", str(position + 1))]
        ids = self._tags.message(attributes, self._body(message, where))
        context.tool_index += 1
        return ids


Numbered = tuple[int, Mapping[str, Any]]


def sort_results(run: list[Numbered], calls: Sequence[tuple[str | None, str]]) -> list[Numbered]:
    """A run of tool results in the order of the calls they answer, renamed after them.

    When any of them answers no call, the run stays as it came. Of two calls with one id the first counts.
    """
    place: dict[str, int] = {}
    for position, (call_id, _) in enumerate(calls):
        if call_id is not None:
            place.setdefault(call_id, position)
    matched: list[tuple[int, int, Mapping[str, Any]]] = []
    for number, message in run:
        call_id = message.get("tool_call_id")
        if call_id is None:
            call_id = message.get("id")
        if call_id is None or call_id not in place:
            return run
        position = place[call_id]
        matched.append((position, number, {**message, "tool": calls[position][1]}))
    return [(number, message) for _, number, message in sorted(matched, key=lambda item: item[:2])]


def _name(message: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [("name", message["name"])] if message.get("name") else []
