"""What a turn does not go beyond: the context, and a cancel."""

from __future__ import annotations

from collections.abc import Callable

from k3cli.errors import ContextError
from k3cli.words import counted

Cancel = Callable[[], bool]
"""Asked between steps; True ends the work there."""


def never() -> bool:
    """The `Cancel` of work that nobody interrupts."""
    return False


def overflow(history: int, new: int, limit: int) -> ContextError:
    """The refusal that names both counts."""
    return ContextError(
        f"the history holds {counted(history, 'token')} and {new:,} more make {history + new:,}",
        f"at most {limit:,}, the context limit",
        "start a new session, fork from an earlier turn, or send less",
    )


def room_for_answer(history: int, prompt: int, limit: int) -> int:
    """Tokens that an answer may have after `prompt` more tokens. ContextError when not even one fits."""
    room = limit - history - prompt
    if room < 1:
        raise overflow(history, prompt + 1, limit)
    return room
