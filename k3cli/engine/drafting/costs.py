"""What steps and drafts cost, measured while decoding: by their rows, in steps of one row.

More rows cost more (experts, attention at long context, on a CPU simply arithmetic); by how much depends on the
machine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

SLOPE = 0.12
"""Cost of one more row, as a share of a step of one row, until it is measured."""
BELIEF = 3
"""Samples that the assumed or common slope counts for."""
MEMORY = 30
"""Steps of each row count that are remembered."""
FOLLOW = 0.2
"""How fast the cost of a step of one row follows what is seen."""
UNKNOWN, DOUBT = 0.25, 2.0
"""A row count that was not timed may cost as much as this share of a step for each more row; where fewer rows were
timed, so many times what a row of those takes."""
LEAP = 3
"""Rows beyond the most that were timed that may be tried next."""
WARM = 0.5
"""Steps that the first draft counts for at most: it makes tables and compiles what later ones use."""


class Costs:
    """What a step costs by row count; one for a model and a drafter, shared by everything that decodes with them.

    Two things are followed apart: the seconds of a step of one row, which change with the context and with whatever
    else the machine does, and how many times that a step of n rows takes, which hardly changes. So a busy minute
    doesn't make the row counts that were used in it look expensive.
    """

    def __init__(self, window: int) -> None:
        """window: most rows of a step."""
        self.window = window
        self.seconds = 0.0
        """Of a step of one row, now; 0 before the first step."""
        self.draft_seconds = 0.0
        """Of asking a draft model; 0 until it was asked twice."""
        self._warm = False
        self._ratio = [0.0] * (window + 1)
        self._count = [0] * (window + 1)
        self._curve: list[float] | None = None

    def copy(self) -> Costs:
        """What is known of steps, for timelines with another drafter."""
        child = Costs(self.window)
        child.seconds, child._ratio, child._count = self.seconds, list(self._ratio), list(self._count)
        return child

    def note(self, rows: int, seconds: float) -> None:
        """One step of 1 <= rows <= window."""
        if not self.seconds:
            self.seconds = seconds / (1 + SLOPE * (rows - 1))
        expected, follow = self.curve()[rows], FOLLOW
        # What is far off is an interruption, which tells little.
        ratio = min(max(seconds / self.seconds, 0.25), 2 * expected)
        if rows > 1:
            count = self._count[rows] = min(self._count[rows] + 1, MEMORY)
            self._ratio[rows] += (ratio - self._ratio[rows]) / count
            # Steps of a row count that is not yet known well say more about itself than about the machine.
            follow *= count / MEMORY
            self._curve = None
        self.seconds *= 1 + follow * (ratio / expected - 1)

    def note_draft(self, seconds: float) -> float:
        """A draft took this long. Returns the steps of one row that it counts for: an interruption counts little."""
        if not self._warm:
            self._warm = True
            return min(seconds / self.seconds, WARM)
        if not self.draft_seconds:
            self.draft_seconds = seconds
        seconds = min(seconds, 3 * self.draft_seconds)
        self.draft_seconds += FOLLOW * (seconds - self.draft_seconds)
        return seconds / self.seconds

    @property
    def price(self) -> float:
        """Steps of one row that a draft takes; 0 while that is not known."""
        return self.draft_seconds / self.seconds if self.seconds else 0.0

    def measured(self) -> dict[int, float]:
        """Steps of one row that a step takes, by the row counts that were timed."""
        return {n: self._ratio[n] for n in range(2, self.window + 1) if self._count[n]}

    def curve(self) -> list[float]:
        """Cost of 1 ... window rows (index 0 stands for none) in steps of one row; what was not measured, on a line."""
        if self._curve is None:
            # One slow step must not rule a row count out for good: few samples weigh little against the line.
            slopes = [(BELIEF, SLOPE)] + [(self._count[n], (r - 1) / (n - 1)) for n, r in self.measured().items()]
            slope = max(0.0, sum(w * b for w, b in slopes) / sum(w for w, _ in slopes))
            self._curve = [0.0, 1.0]
            for n in range(2, self.window + 1):
                line, count = 1 + slope * (n - 1), self._count[n]
                cost = (count * self._ratio[n] + BELIEF * line) / (count + BELIEF)
                self._curve.append(max(cost, self._curve[-1]))  # more rows never cost less: what says so is noise
        return self._curve

    def ceiling(self, rows: int) -> float:
        """What a step of so many rows may cost, in steps of one row: nothing that is known speaks for more.

        More rows are thus tried by and by: what they may cost at worst has to be there to be lost. inf: too many for
        now.
        """
        if rows == 1:
            return 1.0
        curve = self.curve()
        if self._count[rows]:
            return max(curve[rows], self._ratio[rows])
        if rows > LEAP + max(self.measured(), default=1):
            return math.inf
        known = [(ratio - 1) / (n - 1) for n, ratio in self.measured().items() if n < rows]
        slope = max(DOUBT * max(known), SLOPE) if known else UNKNOWN
        return max(curve[rows], 1 + slope * (rows - 1))

    def rehearsed(self, seconds: Mapping[int, float], draft_seconds: float) -> None:
        """Takes over what steps of so many rows took before anything was decoded, and what a draft did; 0: unknown."""
        for n in sorted(seconds):
            for _ in range(BELIEF):
                self.note(n, seconds[n])
        # Another drafter than before: what that took says nothing.
        self._warm, self.draft_seconds = draft_seconds > 0, draft_seconds

    def keep(self) -> list[float]:
        """What steps take by their rows, from 2 on: so many steps of one row, as seen so often (0: never)."""
        return [*self._ratio[2:], *map(float, self._count[2:])]

    def recall(self, kept: Sequence[float]) -> None:
        """Takes over what another process on this machine has seen, of row counts that this one has not timed yet."""
        ratios, counts = kept[: self.window - 1], kept[self.window - 1 :]
        for n, (ratio, count) in enumerate(zip(ratios, counts, strict=True), 2):
            if count and not self._count[n]:
                self._ratio[n], self._count[n] = ratio, min(int(count), BELIEF)
        self._curve = None
