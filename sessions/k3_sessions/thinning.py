"""Which joint boundaries of a session stay when a new turn has been stored."""

from __future__ import annotations

from collections.abc import Sequence

from k3_sessions.config import ThinningPolicy
from k3_sessions.records import Kept


def log_spaced(index: int, newest: int) -> bool:
    """Whether turn `index` is the one kept for its octave of age when `newest` is the last turn.

    A turn of age 2^k .. 2^(k+1)-1 stays if 2^k divides its index. Whatever stays at one age stayed at every younger
    age, so dropping turn by turn never misses one that a later turn would want.
    """
    age = newest - index
    return age < 1 or index % (1 << (age.bit_length() - 1)) == 0


def choose(path: Sequence[str], kept: Sequence[Kept], protected: set[str], policy: ThinningPolicy) -> tuple[Kept, ...]:
    """The part of `kept` that stays, oldest first.

    path: turn ids from the first to the head. protected: fork points, marks and the head, never dropped.
    """
    index = {turn: number for number, turn in enumerate(path)}
    newest = len(path) - 1
    ordered = sorted((entry for entry in kept if entry.turn in index), key=lambda entry: index[entry.turn])
    recent = {entry.turn for entry in ordered[max(0, len(ordered) - policy.last) :]}
    stay = [
        entry
        for entry in ordered
        if entry.turn in protected
        or entry.turn in recent
        or (policy.log_spaced and log_spaced(index[entry.turn], newest))
    ]
    # Over the bound: drop first what its neighbours replace most cheaply, that is with the fewest tokens of replay.
    while True:
        loose = [i for i, entry in enumerate(stay) if entry.turn not in protected and entry.turn not in recent]
        counted = sum(entry.turn not in protected for entry in stay)
        if not loose or counted <= policy.max_kept:
            return tuple(stay)
        cheapest = min(loose, key=lambda i: stay[i].position - (stay[i - 1].position if i else 0))
        del stay[cheapest]
