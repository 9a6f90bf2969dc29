"""Names: of new sessions, and how a person points at a turn."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from k3cli.errors import SessionError, UsageError
from k3cli.words import counted

if TYPE_CHECKING:
    from k3_sessions.store import Store
    from k3_sessions.types import Turn

_FIRST = "amber bold calm crisp deep early fair green keen light mild north plain quick quiet red sharp still warm wide"
_SECOND = "birch brook cedar cliff dune fern field ford grove heath hill lake maple moor oak pine reed ridge stone vale"


def new_name(taken: Callable[[str], bool]) -> str:
    """A name nobody uses yet, easy to type again: `calm-cedar-4f`."""
    while True:
        name = f"{secrets.choice(_FIRST.split())}-{secrets.choice(_SECOND.split())}-{secrets.token_hex(1)}"
        if not taken(name):
            return name


def find_turn(store: Store, session: str, wanted: str) -> Turn:
    """`resolve_turn` over the stored turns and marks of a session."""
    return resolve_turn(store.log(session), wanted, session, store.session(session).marks)


def resolve_turn(turns: Sequence[Turn], wanted: str, session: str, marks: Mapping[str, str] | None = None) -> Turn:
    """The turn a person means: a mark, a number (1 is the first), `-1` (the newest), `-2` ..., or the start of its id.

    `turns` run from the root to the newest. Raises SessionError when nothing fits, UsageError when several do.
    """
    count = len(turns)
    if marks and wanted in marks:
        by_id = {turn.id: turn for turn in turns}
        if marks[wanted] in by_id:
            return by_id[marks[wanted]]
    prefix = wanted.removeprefix("sha256:").lower()
    fits = [turn for turn in turns if prefix and turn.id.removeprefix("sha256:").startswith(prefix)]
    # One id in forty begins with eight digits, and nobody has so many turns.
    if re.fullmatch(r"-?\d{1,9}", wanted) and not (fits and len(wanted) >= 6):
        number = int(wanted)
        if number == 0 or abs(number) > count:
            raise SessionError(
                f"session {session} has no turn {wanted}",
                f"1 to {count}, or -1 (the newest) back to -{count}" if count else "a session with turns",
                f"k3 log {session} lists them",
            )
        return turns[number - 1 if number > 0 else number]
    if not fits:
        raise SessionError(
            f"session {session} has no turn {wanted!r}",
            "a mark, a number, -1 for the newest, or the start of a turn id",
            f"k3 log {session} lists them",
        )
    if len(fits) > 1:
        raise UsageError(
            f"{wanted!r} fits {counted(len(fits), 'turn')}", "one of " + ", ".join(short_id(t.id, 16) for t in fits)
        )
    return fits[0]


def short_id(turn_id: str, length: int = 10) -> str:
    """How a turn id is shown: enough of it to type again."""
    return turn_id.removeprefix("sha256:")[:length]
