"""How many drafts are worth verifying: measured cost of a step by its rows, against the chance of each draft.

A step of n rows gives one token and as many more as drafts are accepted; what it costs is measured (`costs`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from k3cli.engine.drafting.costs import SLOPE, Costs

GAIN = 1.03
"""A window must promise at least this many times the speed of plain decoding."""
SHARE, FREE = 0.02, 1.5
"""What drafts may lose: this share of plain steps, and so many steps before the first. With less, an answer that began
badly on a busy machine does without drafts to its end, however sure they are."""
HICCUP = 0.1
"""Steps that keeping up with one step counts for at most."""

DEAR = 0.01
"""A draft that takes more of a step than this has to earn it."""
HOPE, TRUST = 1.0, 6
"""Steps that asking is thought to win before anything is known, and how many answers that counts for."""
FADE = 0.95
"""Weight of an answer against the one behind it."""
TRIALS = 0.015
"""Share of the steps that may be spent to see whether asking pays again."""


def describe() -> list[tuple[str, str, str]]:
    """The rules for people: name, value, reason."""
    return [
        (
            "rows of a step",
            f"decided at each step: expected tokens against cost, {GAIN} times plain speed at least",
            "cost by rows and acceptance are measured while decoding; --json tells them after each turn",
        ),
        (
            "cost of one more row",
            f"{SLOPE:.0%} of a step",
            "assumed until steps of that many rows were timed; they come by and by",
        ),
        (
            "loss allowed",
            f"{SHARE:.0%} of the steps, and {FREE} steps once",
            "what drafts cost and do not win may not be more; then decoding goes on without them",
        ),
        (
            "asking a draft model",
            f"while it wins steps, else for {TRIALS:.1%} of the time",
            "measured: tokens it brought, less the rows verified and the time of the draft",
        ),
    ]


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


class Asking:
    """Whether a draft that takes time is worth asking for: while it wins steps always, else now and then.

    One miss says little: a draft model that is wrong every other time may still give two tokens a step. So the mean of
    what answers brought decides, the latest counting most.
    """

    def __init__(self) -> None:
        self._won, self._weight = HOPE * TRUST, float(TRUST)
        self._since = 0
        self._last = 0.0

    @property
    def mean(self) -> float:
        """Steps that an answer wins, rows and drafting paid."""
        return self._won / self._weight

    def due(self) -> bool:
        """Whether to ask at this step; to be called once a step. An answer that paid is followed by another."""
        self._since += 1
        return self.mean > 0 or self._last > 0 or self._since * TRIALS >= -self.mean

    def note(self, won: float) -> None:
        """An answer brought `won` steps, negative when it cost more than it gave."""
        self._won, self._weight = FADE * self._won + won, FADE * self._weight + 1
        self._since, self._last = 0, won

    def keep(self) -> list[float]:
        return [self._won, self._weight]

    def recall(self, kept: Sequence[float]) -> None:
        self._won, self._weight = kept

    def copy(self) -> Asking:
        child = Asking()
        child._won, child._weight = self._won, self._weight
        return child


class Policy:
    """Decides the rows of each step of one timeline, and keeps its turns from losing time over drafts."""

    def __init__(self, costs: Costs, rows: int) -> None:
        """rows: most rows of a step, 1 <= rows <= costs.window."""
        assert 1 <= rows <= costs.window, (rows, costs.window)
        self.costs = costs
        self.rows = rows
        self.acceptance = Acceptance(costs.window)
        self.asking = Asking()
        self._lost = 0.0
        self._plain = 0.0
        self._paid = 0.0  # of the draft at hand, whose step is still to come

    def begin(self) -> None:
        """A turn starts. What the turns before it have lost is still owed; what they won is not for losing."""
        self._lost = self._owed()
        self._plain = 0.0

    def _owed(self) -> float:
        return max(0.0, self._lost - SHARE * self._plain)

    def keep(self) -> list[float]:
        """What the next turn goes on with, should another process run it: what is owed, what asking brings, costs."""
        return [self._owed(), *self.asking.keep(), *self.costs.keep()]

    def recall(self, kept: Sequence[float]) -> None:
        """Goes on from what was kept on this machine with the same window; anything else is passed over."""
        whole = len(kept) == 3 + 2 * (self.costs.window - 1) and all(map(math.isfinite, kept))
        # An imported session may hold anything; what was won is the one number that may be below zero.
        if whole and kept[2] >= 1 and all(value >= 0 for value in (kept[0], *kept[3:])):
            self._lost, self._plain = kept[0], 0.0
            self.asking.recall(kept[1:3])
            self.costs.recall(kept[3:])

    def fork(self) -> Policy:
        """For a copy of the timeline: it knows what asking brings, and owes nothing."""
        child = Policy(self.costs, self.rows)
        child.asking = self.asking.copy()
        return child

    def resting(self) -> bool:
        """Whether to do without a draft this time: drafts that cost time were not worth it lately."""
        costs = self.costs
        if costs.draft_seconds and not costs.seconds:
            return True  # what a draft takes is known, but not whether that is much
        price = costs.price
        if price <= DEAR:
            return False
        # A draft that can't be verified for want of room would be paid for nothing.
        least = price + costs.ceiling(min(2, self.rows)) - 1
        return least > self._room() or not self.asking.due()

    def pay(self, seconds: float) -> None:
        """The draft at hand took so long: it leaves less for the rows of its step."""
        self._paid = seconds / self.costs.seconds if self.costs.seconds else 0.0

    def spend(self, seconds: float) -> None:
        """What drafts cost besides: their own state kept up with a step, whether one was asked for or not.

        An interruption counts little: it says nothing about drafts.
        """
        if self.costs.seconds:
            self._lost += min(seconds / self.costs.seconds, HICCUP)

    def choose(self, drafts: int, confidence: Sequence[float] | None) -> int:
        """Rows of the next step, from 1 to 1 + drafts. confidence: see drafter.Draft."""
        if not self.costs.seconds:
            return 1  # the first step is a plain one: what others cost is counted in such steps
        curve, costs = self.costs.curve(), self.costs
        chances = self.acceptance.rates() if confidence is None else confidence
        room = self._room()
        best, rows, tokens, whole = GAIN, 1, 1.0, 1.0
        for i in range(min(drafts, self.rows - 1, len(chances))):
            cost = curve[i + 2]
            if costs.ceiling(i + 2) - 1 > room:
                break
            whole *= chances[i]
            tokens += whole
            if tokens / cost > best:
                best, rows = tokens / cost, i + 2
        return rows

    def note(
        self,
        rows: int,
        used: int,
        tested: int,
        hits: int,
        draft_seconds: float,
        asked: bool = False,
        instead: float = 0.0,
    ) -> None:
        """A step of `rows` rows, of which `used` were kept; `hits` of `tested` drafts were right.

        draft_seconds: what the drafts took; it counts as a loss, too. asked, instead: see drafter.Draft.
        """
        drafting = self.costs.note_draft(draft_seconds) if asked else draft_seconds / self.costs.seconds
        won = used - self.costs.ceiling(rows) - drafting
        self._plain += used
        self._lost -= won
        self._paid = 0.0
        for place in range(1, tested + 1):
            self.acceptance.note(place, place <= hits)
        if asked:
            self.asking.note(won - instead)

    def _room(self) -> float:
        """Steps of one row that may still be lost."""
        return FREE + SHARE * self._plain - self._lost - self._paid
