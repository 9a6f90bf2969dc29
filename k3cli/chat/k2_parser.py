"""Streaming parser of K2-style answers (Kimi-Linear): plain text, and a section of tool calls, each mark one id.

Source: chat-format notes, sections 1.6 and 5. A `<think>` channel is read when the vocabulary has those tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal

from k3cli.chat.parser import OpenCall, StreamParser
from k3cli.chat.tokenizer import Tokenizer

_CALL_ID = re.compile(r"(?:functions\.)?(.+):\d+", re.DOTALL)

Place = Literal["text", "think", "section", "id", "arguments"]


class K2Parser(StreamParser):
    """See `StreamParser`. Begins right after `<|im_assistant|>assistant<|im_middle|>`.

    A call's id is what the model wrote, since the tool's result has to repeat it. recorded: reading a history back;
    arguments are then kept even when they are no JSON object.
    """

    def __init__(self, tokenizer: Tokenizer, mint: Callable[[], str] | None = None, *, recorded: bool = False) -> None:
        super().__init__(tokenizer, mint, recorded)
        self._section_end = tokenizer.special("<|tool_calls_section_end|>")
        self._im_end = tokenizer.special("<|im_end|>")
        self._marks: dict[int, Callable[[], None]] = {
            tokenizer.special("<|tool_calls_section_begin|>"): self._begin_section,
            self._section_end: self._end_section,
            tokenizer.special("<|tool_call_begin|>"): self._begin_id,
            tokenizer.special("<|tool_call_argument_begin|>"): self._begin_arguments,
            tokenizer.special("<|tool_call_end|>"): self._finish_call,
            self._im_end: self._finish_message,
        }
        self._think_end: int | None = None
        if len(tokenizer.specials_among("<think>", "</think>")) == 2:
            self._think_end = tokenizer.special("</think>")
            self._marks[tokenizer.special("<think>")] = self._begin_think
            self._marks[self._think_end] = self._leave_think
        self._place: Place = "text"
        self._held = ""
        self._call: OpenCall | None = None
        self._at_end = False

    def close_ids(self) -> list[int]:
        if self._at_end:
            return []
        if self._place == "text":
            return [self._im_end]
        if self._place == "think" and self._think_end is not None:
            return [self._think_end, self._im_end]
        return [self._section_end, self._im_end]

    def _take(self, token: int) -> None:
        if self._tokenizer.is_text(token):
            self._body(self._decoder.push(self._tokenizer.token_bytes(token)))
            return
        self._body(self._decoder.flush())
        if token in self._marks:
            self._marks[token]()
        else:
            self._stop_or_stray(token)

    def _body(self, text: str) -> None:
        if self._place == "text":
            self._say("response", text)
        elif self._place == "think":
            self._say("think", text)
        elif self._place == "arguments" and self._call is not None:
            self._grow_call(self._call, text)
        else:
            self._held += text

    def _cut(self) -> None:
        self._body(self._decoder.flush())
        self._abandon()

    def _abandon(self) -> None:
        """The call being written, or text between calls, has no future."""
        if self._place == "id":
            self._malformed("unfinished-call", f"a call that began with {self._held!r} was not completed")
        elif self._call is not None:
            self._drop_call(self._call)
        elif self._held.strip():
            self._malformed("stray-text", self._held)
        self._held = ""
        self._call = None

    def _begin_think(self) -> None:
        if self._place != "text" or self._content:
            self._misplaced("<think>")
            return
        self._place = "think"
        self._say("think", "")

    def _leave_think(self) -> None:
        if self._place == "think":
            self._place = "text"
        else:
            self._misplaced("</think>")

    def _begin_section(self) -> None:
        if self._place not in ("text", "think"):
            self._misplaced("<|tool_calls_section_begin|>")
            self._abandon()
        self._place = "section"

    def _end_section(self) -> None:
        if self._place in ("text", "think"):
            self._misplaced("<|tool_calls_section_end|>")
            return
        self._abandon()
        self._place = "text"

    def _begin_id(self) -> None:
        if self._place in ("text", "think"):
            self._malformed("missing-tag", "a call outside the tool section")
        self._abandon()
        self._place = "id"

    def _begin_arguments(self) -> None:
        if self._place != "id":
            self._misplaced("<|tool_call_argument_begin|>")
            return
        call_id, self._held = self._held.strip(), ""
        named = _CALL_ID.fullmatch(call_id)
        problem = None if named is not None else f"its id {call_id!r} is not of the form functions.NAME:INDEX"
        self._call = self._begin_call(named[1] if named else call_id, call_id, problem)
        self._place = "arguments"

    def _finish_call(self) -> None:
        if self._place == "arguments" and self._call is not None:
            self._end_call(self._call, any_arguments=self._recorded)
            self._call = None
            self._place = "section"
        elif self._place == "id":
            self._abandon()
            self._place = "section"
        else:
            self._misplaced("<|tool_call_end|>")

    def _finish_message(self) -> None:
        self._at_end = True
        if self._place not in ("text", "section"):
            self._malformed("unclosed-message", f"the message ended inside {self._place}")
        self._abandon()
        self._end("stop")

    def _misplaced(self, mark: str) -> None:
        self._malformed("unexpected-tag", f"{mark} where it has no meaning")
