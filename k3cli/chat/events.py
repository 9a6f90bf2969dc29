"""What a parser reports while an answer streams in. Text never contains a marker, nor half of one."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ThinkingDelta:
    """A piece of the thinking channel."""

    text: str


@dataclass(frozen=True)
class TextDelta:
    """A piece of the answer."""

    text: str


@dataclass(frozen=True)
class ToolCallStart:
    """A call has begun; it may still fail. `index` counts the calls of a message from 1."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class ToolCallDelta:
    """A piece of the arguments' JSON text. Joined they are `ToolCall.arguments_json`, if that call completes."""

    index: int
    text: str


@dataclass(frozen=True)
class ToolCall:
    """A complete call with a name and a JSON object for arguments. Only this may be acted upon."""

    index: int
    id: str
    name: str
    arguments_json: str


@dataclass(frozen=True)
class Malformed:
    """The model left the format. reason: a stable word; detail: what was found, for people, shortened."""

    reason: str
    detail: str


@dataclass(frozen=True)
class End:
    """The answer is over; always the last event. reason: "stop", or what was given to `finish`."""

    reason: str


ChatEvent = ThinkingDelta | TextDelta | ToolCallStart | ToolCallDelta | ToolCall | Malformed | End
