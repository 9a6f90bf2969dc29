"""How many drafts are worth verifying: measured cost of a step by its rows, against the chance of each draft.

A step of n rows gives one token and as many more as drafts are accepted. More rows cost more (experts, attention at
long context, on a CPU simply arithmetic), by how much depends on the machine: so it is measured while decoding.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median

SLOPE = 0.12
"""Cost of one more row, as a share of a step of one row, until it is measured."""
SAMPLES = 15
"""Steps of each row count that are remembered; their median is the cost."""
GAIN = 1.03
"""A window must promise at least this many times the speed of plain decoding."""
SHARE, FREE = 0.02, 1.5
"""What drafts may lose in one turn: this share of the turn's plain steps, and at least so many steps."""


def describe() -> list[tuple[str, str, str]]:
    """The rules for people: name, value, reason."""
    return [
        (
            "rows of a step",
            f"decided at each step: expected tokens against cost, {GAIN} times plain speed at least",
            "cost by rows and acceptance are measured while decoding; --json tells them after each turn",
        ),
        ("cost of one more row", f"{SLOPE:.0%} of a step", "assumed until steps of that many rows were timed"),
        (
            "loss allowed",
            f"{SHARE:.0%} of a turn's steps, or {FREE} steps",
            "drafts that were not accepted may not cost more; then decoding goes on without them",
        ),
    ]


class Costs:
    """Seconds of a step by row count; one for a model, shared by everything that decodes with it."""

    def __init__(self, window: int) -> None:
        """window: most rows of a step."""
        self.window = window
        self._samples: list[deque[float]] = [deque(maxlen=SAMPLES) for _ in range(window + 1)]
        self._curve: list[float] | None = None

    def note(self, rows: int, seconds: float) -> None:
        """One step of 1 <= rows <= window."""
        self._samples[rows].append(seconds)
        self._curve = None

    def measured(self) -> dict[int, float]:
        """Median seconds by row count, where steps were timed."""
        return {n: median(s) for n, s in enumerate(self._samples) if s}

    def curve(self) -> list[float]:
        """Cost of 1 ... window rows (index 0 stands for none) in steps of one row: measured, interpolated, assumed."""
        if self._curve is None:
            self._curve = self._fit()
        return self._curve

    def _fit(self) -> list[float]:
        known = self.measured()
        if 1 not in known:
            if not known:
                return [0.0] + [1 + SLOPE * (n - 1) for n in range(1, self.window + 1)]
            first = min(known)
            known[1] = known[first] / (1 + SLOPE * (first - 1))
        one = known[1]
        out, before = [0.0], 1
        for n in range(1, self.window + 1):
            if n in known:
                # More rows never cost less: what says so is noise.
                cost = max(known[n] / one, out[-1])
                before = n
            else:
                later = next((m for m in range(n, self.window + 1) if m in known), None)
                if later is None:
                    cost = out[before] + SLOPE * (n - before)
                else:
                    rise = max(known[later] / one - out[before], 0.0)
                    cost = out[before] + rise * (n - before) / (later - before)
            out.append(cost)
        return out


class Acceptance:
    """Share of drafts accepted at each place of a window, given those before it were; recent ones count more."""

    def __init__(self, window: int) -> None:
        self._tested = [2.0] * window
        self._accepted = [1.2] * window

    def note(self, place: int, accepted: bool) -> None:
        """place: 1 for the first draft."""
        self._tested[place] = self._tested[place] * 0.98 + 1
        self._accepted[place] = self._accepted[place] * 0.98 + accepted

    def rates(self) -> list[float]:
        """For the places 1, 2, ..."""
        return [a / t for a, t in zip(self._accepted[1:], self._tested[1:], strict=True)]


class Policy:
    """Decides the rows of each step of one timeline, and keeps a turn from losing time over drafts."""

    def __init__(self, costs: Costs, rows: int) -> None:
        """rows: most rows of a step, 1 <= rows <= costs.window."""
        assert 1 <= rows <= costs.window, (rows, costs.window)
        self.costs = costs
        self.rows = rows
        self.acceptance = Acceptance(costs.window)
        self._lost = 0.0
        self._plain = 0.0
        self._rest = 0
        self._pause = 1

    def begin(self) -> None:
        """A turn starts; what it may lose is counted from here."""
        self._lost = self._plain = 0.0

    def resting(self) -> bool:
        """Whether to do without a draft this time: drafts that cost time were not worth it lately."""
        self._rest = max(0, self._rest - 1)
        return self._rest > 0

    def choose(self, drafts: int, confidence: Sequence[float] | None) -> int:
        """Rows of the next step, from 1 to 1 + drafts. confidence: see drafter.Draft."""
        curve = self.costs.curve()
        chances = self.acceptance.rates() if confidence is None else confidence
        room = max(FREE, SHARE * self._plain) - self._lost
        best, rows, tokens, whole = GAIN, 1, 1.0, 1.0
        for i in range(min(drafts, self.rows - 1, len(chances))):
            cost = curve[i + 2]
            if cost - 1 > room:
                break
            whole *= chances[i]
            tokens += whole
            if tokens / cost > best:
                best, rows = tokens / cost, i + 2
        return rows

    def note(self, rows: int, used: int, tested: int, hits: int, draft_seconds: float) -> None:
        """A step of `rows` rows, of which `used` were kept; `hits` of `tested` drafts were right.

        draft_seconds: what asking for the drafts took; it counts as a loss, too.
        """
        one = self.costs.measured().get(1)
        drafting = draft_seconds / one if one else 0.0
        self._plain += used
        self._lost += self.costs.curve()[rows] - used + drafting
        for place in range(1, tested + 1):
            self.acceptance.note(place, place <= hits)
        # A draft that takes a noticeable part of a step has to earn it, or it is asked for less and less often.
        if drafting > 0.01 and used < 1 + drafting:
            self._pause = min(2 * self._pause, 64)
            self._rest = self._pause
        elif used > 1:
            self._pause = 1
