"""Numbers and recorded values as people write them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """1 -> "1 turn", 1200 -> "1,200 turns". plural: where it is not the noun and an s; an adjective may stand in
    front ("kept checkpoint")."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def listed(noun: str, names: Sequence[str]) -> str:
    """["a"] -> "session a", ["a", "b"] -> "sessions a, b"."""
    return f"{noun}{'s' * (len(names) > 1)} {', '.join(names)}"


def in_words(value: Any) -> str:
    """What a record holds, on one line, without the marks of a programming language: nothing is "none", a truth "yes"
    or "no", several things stand one after the other."""
    if value is None or value == "":
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {in_words(part)}" for key, part in value.items()) or "none"
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        parts = (" ".join(map(in_words, part)) if isinstance(part, (list, tuple)) else in_words(part) for part in value)
        return ", ".join(parts) or "none"
    return " ".join(str(value).split())
