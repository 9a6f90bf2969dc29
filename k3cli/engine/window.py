"""One verify step of a timeline: the rows evaluated together, and how many of them count."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from k3cli.engine.drafting.speculator import DecodeStats, Speculator
    from k3cli.engine.snapshot import ModelLike, StateLike


@dataclass
class Window:
    """Rows that were evaluated together behind the committed state, and how many of them count so far.

    ids: the pending token and the drafts behind it. start: position of the first. logits float32 [len(ids), V]; log:
    what `commit` takes. seconds: what the step cost, without the draft.
    """

    ids: list[int]
    start: int
    logits: Tensor
    log: Any
    draft_seconds: float
    seconds: float
    used: int = 0

    @classmethod
    def open(cls, model: ModelLike, state: StateLike, ids: list[int], draft_seconds: float) -> Window:
        """Evaluates the pending token and drafts behind it; the state stays as it is."""
        began = time.perf_counter()
        # Over ranks a step can be begun without waiting for it: whoever draws waits, with its own work behind it.
        verify = getattr(model, "begin", model.verify)
        logits, log = verify(torch.tensor(ids, dtype=torch.long), state)
        return cls(ids, state.position, logits, log, draft_seconds, time.perf_counter() - began)

    def next_row(self) -> Tensor:
        """Logits [V] of the first row that does not count yet, which does from here on."""
        row = self.logits[self.used]
        self.used += 1
        return row

    def fits(self, tokens: Sequence[int]) -> bool:
        """Whether the next row is that of the next token to evaluate."""
        return self.used < len(self.ids) and self.ids[self.used] == tokens[self.start + self.used]

    def account(
        self, tokens: Sequence[int], commit_seconds: float, stats: DecodeStats, speculator: Speculator | None
    ) -> None:
        """Report a window that is over. tokens: all of the timeline, with those drawn from the window."""
        rows, used = len(self.ids), self.used
        after = tokens[self.start + used : self.start + used + 1]
        # Behind the last row kept, a draft that was drawn is right even if its row is not wanted any more.
        hits = used - 1 + (after == self.ids[used : used + 1] != [])
        tested = min(rows - 1, used) if after else hits
        stats.note(rows, used, tested, hits)
        stats.draft_seconds += self.draft_seconds
        stats.verify_seconds += self.seconds
        stats.commit_seconds += commit_seconds
        if speculator is None:
            return
        if speculator.idle:
            speculator.policy.doze(used)
            return
        began = time.perf_counter()
        speculator.account(rows, used, tested, hits, self.draft_seconds, self.seconds + commit_seconds)
        if not speculator.asleep:
            taps = getattr(self.log, "taps", None)
            speculator.observe(self.ids[:used], self.start, None if taps is None else taps[:used])
        spent = time.perf_counter() - began
        stats.draft_seconds += spent
        speculator.policy.spend(spent)
