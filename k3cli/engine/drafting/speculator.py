"""A drafter at work on one timeline: asked, checked, timed, and turned off when it fails."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from k3cli.engine.drafting.costs import Costs
from k3cli.engine.drafting.drafter import NOTHING, Draft, Drafter
from k3cli.engine.drafting.policy import Policy

if TYPE_CHECKING:
    from k3cli.engine.sampling import Sampling


@dataclass
class DecodeStats:
    """What one run of decoding did. Seconds are wall time; `verify` includes drawing from its rows, `draft` what
    drafters do with tokens that stay.

    steps: windows evaluated. tokens: rows kept, which is tokens evaluated. rows[n]: windows of n rows. tested[i],
    accepted[i]: drafts at place i of a window (0: the first draft) that were compared with the drawn token, and that
    were equal to it.
    """

    window: int
    steps: int = 0
    tokens: int = 0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    commit_seconds: float = 0.0
    rows: list[int] = field(default_factory=list)
    tested: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rows = [0] * (self.window + 1)
        self.tested = [0] * (self.window - 1)
        self.accepted = [0] * (self.window - 1)

    def note(self, rows: int, used: int, tested: int, hits: int) -> None:
        """One window: its rows, how many were kept, how many drafts were compared and how many of those were right."""
        self.steps += 1
        self.tokens += used
        self.rows[rows] += 1
        for i in range(tested):
            self.tested[i] += 1
            self.accepted[i] += i < hits

    def acceptance(self) -> list[float]:
        """Share accepted by place, given those before it were; ends at the last place that was tested."""
        return [round(a / t, 4) for a, t in zip(self.accepted, self.tested, strict=True) if t]


@dataclass(frozen=True)
class Loss:
    """A drafter that was turned off: its name, and why. left: the name of the one that goes on without it, "" for
    plain decoding."""

    name: str
    why: str
    left: str


class Speculator:
    """Proposes drafts for the steps of one timeline; never raises for what a drafter does.

    drafter: the one at work; of two in one that which is left when the other has failed. failure: why it, or the other,
    was turned off, "" while all work. asleep: the step behind the last `propose` is not observed. idle: nor accounted.
    """

    def __init__(self, drafter: Drafter, costs: Costs, rows: int, vocab: int, machine: str = "") -> None:
        """rows: most rows of a step. vocab: ids a draft may hold, those below it.

        machine: names where costs were measured, and with which drafter: what was seen elsewhere says nothing here.
        """
        self.drafter = drafter
        self.policy = Policy(costs, rows)
        self.failure = ""
        self.asleep = self.idle = False
        self._off = False
        self._vocab = vocab
        self._machine = machine
        self._losses: list[Loss] = []
        self._last = NOTHING

    def begin(self, context: Sequence[int], sampling: Sampling) -> None:
        """A run of decoding starts; `context` is every token of the timeline."""
        self.policy.begin()
        if not self._off:
            try:
                self.drafter.begin(context, sampling)
            except Exception as error:
                self._fail(error)

    def propose(self, context: Sequence[int], room: int) -> tuple[list[int], float]:
        """Drafts worth verifying behind the last token of `context`, at most `room`, and the seconds that took."""
        most = min(room, self.policy.rows - 1)
        self._last = Draft(asked=False)
        self.asleep = self.idle = not self._off and self.policy.asleep()
        if self._off or most < 1:
            return [], 0.0
        # Asleep, or while it rests, only that part of a drafter is asked that costs next to nothing.
        resting = self.asleep or self.policy.resting()
        drafter = getattr(self.drafter, "cheap", None) if resting else self.drafter
        self.idle = self.asleep and (drafter is None or not self.policy.peeks())
        if drafter is None or self.idle:
            return [], 0.0
        began = time.perf_counter()
        try:
            draft = drafter.propose(context, len(context) - 1, most)
            ids = self._checked(draft, most)
        except Exception as error:
            self._fail(error, drafter)
            draft, ids = NOTHING, []
        self._last = replace(draft, asked=draft.asked and not resting)
        seconds = time.perf_counter() - began
        rows = self.policy.choose(len(ids), draft.confidence, self._last.asked, seconds) if ids else 1
        return ids[: rows - 1], time.perf_counter() - began

    def account(self, rows: int, used: int, tested: int, hits: int, draft_seconds: float, seconds: float) -> None:
        """The step behind the last `propose` is over; see policy.Policy.note. seconds: of the step itself."""
        self.policy.costs.note(rows, seconds)
        last = self._last
        self.policy.note(rows, used, tested, hits, draft_seconds, last.asked, last.instead)

    @property
    def needs_hidden(self) -> bool:
        """Whether `observe` has a use for hidden rows."""
        return not self._off and self.drafter.needs_hidden

    def observe(self, accepted: Sequence[int], position: int, hidden: Any = None) -> None:
        """See drafter.Drafter."""
        if not self._off:
            try:
                self.drafter.observe(accepted, position, hidden)
            except Exception as error:
                self._fail(error)

    def keep(self, position: int) -> Mapping[str, Any]:
        """What the drafter wants kept beside the state at `position`, and the policy's account with it.

        {} for a drafter that keeps nothing: an account alone is not worth a file.
        """
        kept = dict(self._asked("keep", position) or {})
        if kept and self._machine:
            kept[self._account] = torch.tensor(self.policy.keep())
        return kept

    def recall(self, kept: Mapping[str, Any], position: int) -> None:
        """Hands the drafter what was kept at `position`, where the timeline goes on."""
        if kept:
            self._asked("recall", kept, position)
        if (account := kept.get(self._account)) is not None:
            self.policy.recall([float(value) for value in account.reshape(-1)])

    @property
    def _account(self) -> str:
        return f"policy.{self._machine}"

    def _asked(self, call: str, *arguments: Any) -> Any:
        """What a call gives that not every drafter has; None from others and from one that failed."""
        found = None if self._off else getattr(self.drafter, call, None)
        try:
            return None if found is None else found(*arguments)
        except Exception as error:
            self._fail(error)
            return None

    def fork(self) -> Speculator:
        """For a copy of the timeline: shares what was measured, not what changes with the tokens."""
        child = Speculator(self._forked(), self.policy.costs, self.policy.rows, self._vocab, self._machine)
        child.policy = self.policy.fork()
        child.failure, child._off, child._losses = self.failure, self._off, list(self._losses)
        return child

    def _forked(self) -> Drafter:
        while not self._off:
            try:
                return self.drafter.fork()
            except Exception as error:
                self._fail(error)
        return self.drafter

    def take_losses(self) -> list[Loss]:
        """What was turned off since this was asked last."""
        taken, self._losses = self._losses, []
        return taken

    def describe(self) -> dict[str, Any]:
        """What decisions are made from: cost of a step by rows, what the drafter measures and has seen."""
        costs = self.policy.costs
        found: dict[str, Any] = {
            "step_seconds": round(costs.seconds, 6),
            "cost": [round(cost, 3) for cost in costs.curve()[1:]],
            "timed": sorted(costs.measured()),
            "draft_price": round(costs.price, 3),
            "draft_wins": round(self.policy.asking.mean, 2),
        }
        if self.policy.slept:
            found["slept"] = self.policy.slept
        seen = getattr(self.drafter, "context_rows", None)
        if seen is not None:
            found["draft_context"] = seen
        rates = getattr(self.drafter, "hit_rates", None)
        return found | ({} if rates is None else {"hit_rates": rates()})

    def _checked(self, draft: Draft, most: int) -> list[int]:
        ids = [int(token) for token in draft.ids]
        if len(ids) > most:
            raise ValueError(f"{len(ids)} drafts, at most {most} asked for")
        if ids and not 0 <= min(ids) <= max(ids) < self._vocab:
            raise ValueError(f"a draft holds ids from {min(ids)} to {max(ids)}, the vocabulary 0 to {self._vocab - 1}")
        if draft.confidence is not None and len(draft.confidence) != len(ids):
            raise ValueError(f"{len(draft.confidence)} confidences for {len(ids)} drafts")
        return ids

    def _fail(self, error: Exception, asked: Drafter | None = None) -> None:
        """Goes on with what is left of the drafter. asked: the one that was called, if not all of it."""
        self.failure = f"{type(error).__name__}: {error}"
        without = getattr(self.drafter, "without", None)
        halves = None if without is None else without(None if asked is self.drafter else asked)
        if halves is None:
            self._losses.append(Loss(self.drafter.name, self.failure, ""))
            self._off = True
            return
        lost, self.drafter = halves
        self._losses.append(Loss(lost.name, self.failure, self.drafter.name))
