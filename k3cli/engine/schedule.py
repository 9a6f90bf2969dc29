"""The order in which positions were evaluated, kept so that they can be evaluated the same way again.

Prefill and decode reduce in different orders, so the same tokens give the same bits only along the same path. A
schedule is a list of runs over consecutive positions: `["prefill", n]` is one chunk of n tokens, `["decode", n]` is n
tokens evaluated as rows of verify windows (neighbouring decode runs are joined: window cuts never change a bit).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from k3cli.errors import DamagedError

KINDS = ("prefill", "decode")


class Schedule:
    """Runs that cover the positions [start, stop)."""

    def __init__(self, start: int = 0, runs: Iterable[tuple[str, int]] = ()) -> None:
        self.start = start
        self.stop = start
        self._runs: list[tuple[str, int]] = []
        for kind, n in runs:
            self.add(kind, n)

    def __iter__(self) -> Iterator[tuple[str, int]]:
        return iter(self._runs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Schedule) and (self.start, self._runs) == (other.start, other._runs)

    def __repr__(self) -> str:
        return f"Schedule({self.start}, {self._runs})"

    def add(self, kind: str, n: int) -> None:
        """Append a run of n tokens; a decode run joins the one before it."""
        assert kind in KINDS, kind
        assert n > 0, n
        if kind == "decode" and self._runs and self._runs[-1][0] == "decode":
            n_before = self._runs.pop()[1]
            self._runs.append(("decode", n_before + n))
        else:
            self._runs.append((kind, n))
        self.stop += n

    def extend(self, other: Schedule) -> None:
        """Append the runs of a schedule that starts where this one stops."""
        assert other.start == self.stop, (other.start, self.stop)
        for kind, n in other:
            self.add(kind, n)

    def between(self, start: int, stop: int) -> Schedule:
        """The runs that cover [start, stop). A cut inside a prefill chunk is refused: it would be another path."""
        assert self.start <= start <= stop <= self.stop, (self.start, start, stop, self.stop)
        out = Schedule(start)
        at = self.start
        for kind, n in self._runs:
            low, high = max(at, start), min(at + n, stop)
            if low < high:
                if kind == "prefill" and high - low != n:
                    raise DamagedError(
                        f"the recorded prefill chunk [{at}, {at + n}) is cut at {low if low > at else high}",
                        "state kept only at chunk ends",
                        "resume from an earlier turn",
                    )
                out.add(kind, high - low)
            at += n
        return out

    def copy(self) -> Schedule:
        return Schedule(self.start, self._runs)

    def to_json(self) -> list[list[Any]]:
        return [[kind, n] for kind, n in self._runs]

    @classmethod
    def from_json(cls, start: int, data: Sequence[Any]) -> Schedule:
        """Read recorded runs; anything but [kind, count] pairs is refused as damage."""
        out = cls(start)
        for run in data:
            if not (
                isinstance(run, Sequence)
                and len(run) == 2
                and run[0] in KINDS
                and isinstance(run[1], int)
                and run[1] > 0
            ):
                raise DamagedError(
                    f"the recorded schedule holds {run!r}", f"[{' or '.join(KINDS)}, count]", "run `k3 verify`"
                )
            out.add(run[0], run[1])
        return out
