"""How many drafts are worth verifying: measured cost of a step by its rows, against the chance of each draft.

A step of n rows gives one token and as many more as drafts are accepted; what it costs is measured (`costs`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from k3cli.engine.drafting.costs import SLOPE, Costs

GAIN = 1.03
"""A window must promise at least this many times the speed of plain decoding."""
SHARE, FREE = 0.0125, 2.0
"""What asking a draft model may lose, all that keeps drafts up among it: this share of plain steps, and so many steps
before the first."""
MATCH_SHARE, MATCH_FREE = 0.01, 1.5
"""What the rows of matches may lose, which nobody was asked for. An allowance of its own: a model that is not worth
asking, or a busy machine, must not take from an answer that repeats itself what is sure."""
DEBT = 3.0
"""Steps lost beyond that at which drafts sleep: only keeping them up can have cost so much, where steps are short."""
PEEK = 17
"""Tokens after which a match is looked for asleep."""
HICCUP = 0.1
"""Steps that keeping up with one step, or looking for a match, counts for at most."""

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
            f"asking: {SHARE:.2%} of the steps and {FREE:g} once; matches: {MATCH_SHARE:.0%} and {MATCH_FREE:g}",
            "what either costs and does not win may not be more; then decoding goes on without it",
        ),
        (
            "sleeping",
            f"from {DEBT:g} steps more on until they are made up for",
            f"where steps are so short that keeping up alone costs more: a match is looked for every {PEEK} tokens",
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


class Allowance:
    """What drafts of one kind may lose: a share of plain steps, and some steps before the first."""

    def __init__(self, share: float, free: float) -> None:
        self.share, self.free = share, free
        self.lost = 0.0
        """Steps of one row, less those that were won."""
        self._plain = 0.0

    def begin(self, owed: float | None = None) -> None:
        """A turn starts. What the turns before it have lost is still owed; what they won is not for losing."""
        self.lost, self._plain = self.owed() if owed is None else owed, 0.0

    def owed(self) -> float:
        return max(0.0, self.lost - self.share * self._plain)

    def room(self) -> float:
        """Steps of one row that may still be lost."""
        return self.free + self.share * self._plain - self.lost

    def grow(self, tokens: int) -> None:
        """So many steps of plain decoding are behind us."""
        self._plain += tokens


class Policy:
    """Decides the rows of each step of one timeline, and keeps its turns from losing time over drafts."""

    def __init__(self, costs: Costs, rows: int) -> None:
        """rows: most rows of a step, 1 <= rows <= costs.window."""
        assert 1 <= rows <= costs.window, (rows, costs.window)
        self.costs = costs
        self.rows = rows
        self.acceptance = Acceptance(costs.window)
        self.asking = Asking()
        self.models = Allowance(SHARE, FREE)
        self.matches = Allowance(MATCH_SHARE, MATCH_FREE)
        self.slept = 0
        """Tokens of this turn that were decoded asleep."""
        self._asleep = False
        self._unseen = PEEK  # tokens since a match was looked for
        self._on_match = False

    def begin(self) -> None:
        """A turn starts: see Allowance.begin."""
        self.models.begin()
        self.matches.begin()
        self.slept, self._unseen = 0, PEEK

    def keep(self) -> list[float]:
        """What the next turn goes on with, should another process run it: what is owed, what asking brings, costs."""
        return [self.models.owed(), self.matches.owed(), *self.asking.keep(), *self.costs.keep()]

    def recall(self, kept: Sequence[float]) -> None:
        """Goes on from what was kept on this machine with the same window; anything else is passed over."""
        whole = len(kept) == 4 + 2 * (self.costs.window - 1) and all(map(math.isfinite, kept))
        # An imported session may hold anything; what was won is the one number that may be below zero.
        if whole and kept[3] >= 1 and all(value >= 0 for value in (*kept[:2], *kept[4:])):
            self.models.begin(kept[0])
            self.matches.begin(kept[1])
            self.asking.recall(kept[2:4])
            self.costs.recall(kept[4:])

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

    def _room(self) -> float:
        """Steps that asking and keeping up may still lose: their own, and what matches have won in this turn.

        With less, a few misses ended asking in turns that were far ahead.
        """
        return self.models.room() - min(0.0, self.matches.lost)

    def asleep(self) -> bool:
        """Whether to do without drafts and all that keeps them up until the debt is paid off, but for a look at times.

        What matches win pays it off, so that text which repeats wakes them.
        """
        self._asleep = -self._room() > (0.0 if self._asleep else DEBT)
        return self._asleep

    def peeks(self) -> bool:
        """Whether to look for a match asleep: every PEEK tokens, and while one goes on."""
        return self._on_match or self._unseen >= PEEK

    def doze(self, tokens: int) -> None:
        """So many tokens were decoded asleep, without a look."""
        self.slept += tokens
        self._unseen += tokens
        self._grow(tokens)

    def _grow(self, tokens: int) -> None:
        self.models.grow(tokens)
        self.matches.grow(tokens)

    def spend(self, seconds: float) -> None:
        """What drafts cost besides: their own state kept up with a step, whether one was asked for or not.

        An interruption counts little: it says nothing about drafts.
        """
        if self.costs.seconds:
            self.models.lost += min(seconds / self.costs.seconds, HICCUP)

    def choose(self, drafts: int, confidence: Sequence[float] | None, asked: bool = False, seconds: float = 0.0) -> int:
        """Rows of the next step, from 1 to 1 + drafts. confidence, asked: see drafter.Draft.

        seconds: what the draft took. If someone was asked, it leaves less for the rows.
        """
        if not self.costs.seconds:
            return 1  # the first step is a plain one: what others cost is counted in such steps
        curve, costs = self.costs.curve(), self.costs
        chances = self.acceptance.rates() if confidence is None else confidence
        room = self._room() - seconds / costs.seconds if asked else self.matches.room()
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
        self._unseen, self._on_match = 0, hits > 0
        won = used - self.costs.ceiling(rows)
        if asked:
            won -= self.costs.note_draft(draft_seconds)
            self.models.lost -= won
            self.asking.note(won - instead)
        else:
            # Matches are looked for in any case: what could be done without is asking.
            self.matches.lost -= won
            self.spend(draft_seconds)
        self._grow(used)
        for place in range(1, tested + 1):
            self.acceptance.note(place, place <= hits)
