"""Drafts from a DSpark model: it reads the target's residual stream at the tokens that were kept.

Its newest context rows are kept beside a turn's state, as hints (`keep`, `recall`). Without them, after a resume, it
knows only what has been evaluated since, the prompt at least: a few drafts are lost by it, and never a token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from k3cli.engine.drafting.drafter import NOTHING, Draft
from k3cli.engine.sampling import draw
from k3cli.errors import K3Error
from k3cli.model.dspark.network import DraftCache

if TYPE_CHECKING:
    from k3cli.engine.sampling import Sampling
    from k3cli.model.dspark.network import DraftModel

KEPT_ROWS, KEPT_BYTES = 256, 8 << 20
"""Context rows that are kept with a turn, newest first, and what they may weigh."""
QUEUE = 64
"""Rows that may wait until they are needed."""
LEAST = 0.04
"""A draft less likely than this to be accepted is not worth a row on any machine, nor the time of drawing it."""


class DSparkDrafter:
    """A drafter over a loaded draft model; see `drafter.Drafter` for the calls."""

    name = "dspark"
    needs_hidden = True

    def __init__(self, model: DraftModel, cache: DraftCache | None = None, end: int = 0) -> None:
        """end: position behind the last row of `cache`."""
        self.model = model
        self._cache = model.new_cache() if cache is None else cache
        self._end = end
        self._queue: list[Tensor] = []  # taps of the rows before `_end` that are not in the cache yet
        self._queued = 0  # rows of them
        self._sampling: Sampling | None = None

    @property
    def context_rows(self) -> int:
        """Tokens of the context it has seen; after a resume fewer than the timeline has."""
        return self._cache.count + self._queued

    def begin(self, context: Sequence[int], sampling: Sampling) -> None:
        self._sampling = sampling
        if self._end > len(context):  # another, shorter history
            self._cache, self._end, self._queue, self._queued = self.model.new_cache(), 0, [], 0

    def propose(self, context: Sequence[int], position: int, k: int) -> Draft:
        """Drawn with the target's own noise at each position, so that sampled drafts agree with it more often."""
        sampling = self._sampling
        if sampling is None:
            return NOTHING
        self._flush()

        def pick(logits: Tensor, at: int) -> int:
            try:
                return draw(logits.unsqueeze(0), [at], sampling)[0]
            except K3Error:  # its words are about the target
                raise ValueError("the draft model's logits are not finite") from None

        ids, confidence = self.model.draft(self._cache, context[position], position, k, pick, LEAST)
        return Draft(ids, confidence or None)

    def observe(self, accepted: Sequence[int], position: int, hidden: Any) -> None:
        """Rows that show nothing (hidden None) leave a gap in the context."""
        if position != self._end:
            self._flush()
        if hidden is not None:
            assert hidden.shape[0] == len(accepted), (hidden.shape, len(accepted))
            # Many rows at once cost hardly more than one, and may not be needed for a while.
            self._queue.append(hidden.clone())
            self._queued += len(accepted)
        else:
            self._flush()
        self._end = position + len(accepted)
        if self._queued >= QUEUE:
            self._flush()

    def keep(self, position: int) -> dict[str, Tensor]:
        """The newest rows before `position`, for who goes on from there: [layers, up to KEPT_ROWS, width].

        {} when its context does not reach there. The rows do not change afterwards.
        """
        self._flush()
        rows = self._cache.last(min(KEPT_ROWS, KEPT_BYTES // self._row_bytes))
        return {self._hint: rows} if self.model.digest and rows.shape[1] and self._end == position else {}

    def recall(self, kept: Mapping[str, Any], position: int) -> None:
        """Goes on from kept rows (float32, or bfloat16 bits as uint16); those of another draft are passed over."""
        found = kept.get(self._hint)
        if found is None or not self.model.digest:
            return
        rows = torch.from_numpy(np.array(found))
        if rows.dtype == torch.uint16 and self.model.dtype == torch.bfloat16:
            rows = rows.view(torch.bfloat16)
        width = self.model.width
        if rows.dtype == self.model.dtype and rows.ndim == 3 and rows.shape[::2] == (self.model.config.layers, width):
            self._cache, self._end = DraftCache(rows.to(self.model.device), rows.shape[1]), position
            self._queue, self._queued = [], 0

    @property
    def _hint(self) -> str:
        return f"draft.{self.model.digest[:32]}"

    @property
    def _row_bytes(self) -> int:
        return self.model.config.layers * self.model.width * self.model.dtype.itemsize

    def _flush(self) -> None:
        if self._queue:
            rows, self._queue, self._queued = torch.cat(self._queue), [], 0
            self.model.extend(self._cache, rows, self._end - len(rows))

    def fork(self) -> DSparkDrafter:
        child = DSparkDrafter(self.model, self._cache.fork(), self._end)
        child._sampling, child._queue, child._queued = self._sampling, list(self._queue), self._queued
        return child
