"""The part of stream parsing that all formats share: text that is held back, calls being written, the message."""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from k3cli.chat.arguments import is_json_object
from k3cli.chat.events import (
    ChatEvent,
    End,
    Malformed,
    TextDelta,
    ThinkingDelta,
    ToolCall,
    ToolCallDelta,
    ToolCallStart,
)
from k3cli.chat.tokenizer import StreamDecoder, Tokenizer

_DETAIL = 200
"""Longest detail of a Malformed event, characters."""


def random_call_id() -> str:
    """An id for a tool call. K3 never sees it."""
    return "call_" + secrets.token_hex(12)


@dataclass
class OpenCall:
    """A call being written. `problem` is why it can no longer become a ToolCall."""

    index: int
    id: str
    name: str
    problem: str | None = None
    parts: list[str] = field(default_factory=list)


class StreamParser(ABC):
    """Reads the ids of one assistant message, one at a time, as they are sampled.

    It works on ids: a marker typed as text is text. The result does not depend on how the ids arrive. After `End`
    nothing more may be fed. `close_ids` and `message` can be asked at any time.
    """

    def __init__(self, tokenizer: Tokenizer, mint: Callable[[], str] | None, recorded: bool) -> None:
        """mint: makes the ids of calls that have none. recorded: the ids are history, in which nothing ends here."""
        self.ended = False
        self._recorded = recorded
        self._stops = tokenizer.specials_among("[EOS]", "[EOT]")
        self._tokenizer = tokenizer
        self._mint = mint or random_call_id
        self._events: list[ChatEvent] = []
        self._decoder = StreamDecoder()
        self._content: list[str] = []
        self._reasoning: list[str] | None = None
        self._calls: list[ToolCall] = []
        self._n_calls = 0

    def feed(self, token: int) -> list[ChatEvent]:
        """The events that one more id brings about, often none."""
        assert not self.ended, "an id was fed after the end of the message"
        self._take(token)
        return self._drain()

    def finish(self, reason: str) -> list[ChatEvent]:
        """The answer was cut here ("length", "cancelled", ...): what is held back, then `End(reason)`.

        A call that is not complete is reported as malformed, never as a call. Nothing happens after an `End`.
        """
        if not self.ended:
            self._cut()
            self._end(reason)
        return self._drain()

    @abstractmethod
    def close_ids(self) -> list[int]:
        """Ids that end the message in good form from here on; empty once its end was sampled.

        An unfinished call is left visibly unfinished: no one who reads the ids can take it for a call.
        """

    def message(self) -> dict[str, Any]:
        """The assistant message so far: role, content, reasoning_content (if it had that channel), tool_calls."""
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self._content)}
        if self._reasoning is not None:
            message["reasoning_content"] = "".join(self._reasoning)
        if self._calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments_json}}
                for call in self._calls
            ]
        return message

    @abstractmethod
    def _take(self, token: int) -> None: ...

    @abstractmethod
    def _cut(self) -> None:
        """Flush for `finish`."""

    def _drain(self) -> list[ChatEvent]:
        events, self._events = self._events, []
        return events

    def _end(self, reason: str) -> None:
        self.ended = True
        self._events.append(End(reason))

    def _stop_or_stray(self, token: int) -> None:
        """An id that is neither text nor a mark of the format."""
        if token not in self._stops:
            name = self._tokenizer.special_names.get(token, "out of the vocabulary")
            self._malformed("stray-token", f"{name} (id {token})")
        elif not self._recorded:
            self._cut()
            self._end("stop")

    def _malformed(self, reason: str, detail: str) -> None:
        shown = detail if len(detail) <= _DETAIL else detail[: _DETAIL - 3] + "..."
        self._events.append(Malformed(reason, shown))

    def _say(self, channel: Literal["think", "response"], text: str) -> None:
        """Text of a channel. Opens the thinking channel even when the text is empty."""
        if channel == "think":
            self._reasoning = [] if self._reasoning is None else self._reasoning
            if text:
                self._reasoning.append(text)
                self._events.append(ThinkingDelta(text))
        elif text:
            self._content.append(text)
            self._events.append(TextDelta(text))

    def _begin_call(self, name: str, call_id: str | None, problem: str | None) -> OpenCall:
        """A new call; announced unless it has a `problem` already. The index is ours: the model's is not relied on."""
        self._n_calls += 1
        call = OpenCall(self._n_calls, call_id or self._mint(), name, problem)
        if problem is None:
            self._events.append(ToolCallStart(call.index, call.id, call.name))
        return call

    def _grow_call(self, call: OpenCall, text: str) -> None:
        if text:
            call.parts.append(text)
            if call.problem is None:
                self._events.append(ToolCallDelta(call.index, text))

    def _end_call(self, call: OpenCall, *, any_arguments: bool = False) -> None:
        """The call's closing mark was read. `any_arguments`: in a recorded history, keep text that is no object."""
        arguments = "".join(call.parts)
        if call.problem is None and not any_arguments and not is_json_object(arguments):
            call.problem = f"arguments are no JSON object: {arguments}"
        if call.problem is not None:
            self._malformed("bad-call", f"call {call.index} {call.name!r}: {call.problem}")
            return
        done = ToolCall(call.index, call.id, call.name, arguments)
        self._calls.append(done)
        self._events.append(done)

    def _drop_call(self, call: OpenCall) -> None:
        """The message went on, or ended, before the call was complete."""
        self._malformed("unfinished-call", f"call {call.index} {call.name!r} was not completed")
