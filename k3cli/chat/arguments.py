"""Arguments of a tool call: JSON text taken apart one level deep, literal bytes kept, as the format wants them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from k3cli.chat.messages import plain_json

_SPACE = re.compile(r"[ \t\n\r]*")
_TYPES = {'"': "string", "{": "object", "[": "array", "t": "boolean", "f": "boolean", "n": "null"}


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON value")


# Numbers stay text: nothing is rounded, and a number of any length is read.
_DECODER = json.JSONDecoder(parse_int=str, parse_float=str, parse_constant=_refuse)


@dataclass(frozen=True)
class Argument:
    """One argument: `type` is string, number, boolean, null, object or array; `text` what stands in the tag's body
    (a string's characters, or JSON text)."""

    key: str
    type: str
    text: str


def split_arguments(arguments: str | Mapping[str, Any] | None) -> tuple[Argument, ...] | None:
    """The arguments of a call in their order (repeated keys included), or None: the raw text goes into a `json` block.

    Text: "" has no arguments; a JSON object is split, its non-string values kept byte for byte and anything after its
    closing brace ignored; everything else (not JSON, no object, nested too deep, a string that UTF-8 cannot hold)
    is None. A mapping is written as JSON with `, ` and `: `; UsageError when a value has no JSON form.
    """
    if arguments is None or arguments == "":
        return ()
    if isinstance(arguments, str):
        try:
            return tuple(_split(arguments))
        except (ValueError, RecursionError):
            return None
    return tuple(_from_value(key, value) for key, value in arguments.items())


def is_json(text: str) -> bool:
    """Whether `text` is one JSON value (strict: no NaN, nothing after it)."""
    return _decoded(text) is not None


def is_json_object(text: str) -> bool:
    """Whether `text` is one JSON object."""
    decoded = _decoded(text)
    return decoded is not None and isinstance(decoded[0], dict)


def quote(text: str) -> str:
    """The inside of a JSON string (no quotes around it). Joining pieces gives the quoting of the joined text."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _decoded(text: str) -> tuple[Any] | None:
    try:
        return (_DECODER.decode(text),)
    except (ValueError, RecursionError):
        return None


def _skip(text: str, pos: int) -> int:
    space = _SPACE.match(text, pos)
    assert space is not None  # the pattern matches the empty string
    return space.end()


def _expect(text: str, pos: int, mark: str) -> int:
    pos = _skip(text, pos)
    if not text.startswith(mark, pos):
        raise ValueError(f"no {mark!r} at {pos}")
    return pos + len(mark)


def _split(text: str) -> list[Argument]:
    """One JSON object at the start of `text`, its members as they stand. Raises ValueError or RecursionError."""
    found: list[Argument] = []
    pos = _skip(text, _expect(text, 0, "{"))
    if text.startswith("}", pos):
        return found
    while True:
        _expect(text, pos, '"')
        key, pos = _DECODER.raw_decode(text, _skip(text, pos))
        start = _skip(text, _expect(text, pos, ":"))
        value, pos = _DECODER.raw_decode(text, start)
        kind = _TYPES.get(text[start], "number")
        body = value if kind == "string" else text[start:pos]
        # A lone surrogate has no bytes: encoding it raises UnicodeEncodeError, a ValueError.
        (key + body).encode()
        found.append(Argument(key, kind, body))
        pos = _skip(text, pos)
        if text.startswith("}", pos):
            return found
        pos = _skip(text, _expect(text, pos, ","))


def _from_value(key: str, value: Any) -> Argument:
    if isinstance(value, str):
        return Argument(key, "string", value)
    text = plain_json(value, f"argument {key!r} of a tool call")
    return Argument(key, _TYPES.get(text[0], "number"), text)
