"""Before the first turn: what steps and drafts do once (kernels compiled, steps recorded) is done, and what they take
is measured, so that no turn pays for the one or has to find out the other.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from k3cli.engine.sampling import Sampling, draw
from k3cli.errors import FitError

if TYPE_CHECKING:
    from k3cli.model.dspark.network import DraftModel

FIRST, TIMED = 2, 2
"""Steps of a number of rows before the timed ones (the first runs plainly, the second records), and timed ones."""


def time_steps(model: Any, rows: int) -> dict[int, float]:
    """Seconds of a step of 1, 2, ... `rows` rows at position 0, on a state that is dropped. {} without room for one."""
    found: dict[int, float] = {}
    try:
        state = model.new_state()
        for n in range(1, rows + 1):
            ids = torch.zeros(n, dtype=torch.long)
            for run in range(FIRST + TIMED):
                began = time.perf_counter()
                logits, _ = model.verify(ids, state)
                float(logits[0, 0])  # waits for the device
                seconds = time.perf_counter() - began
                if run >= FIRST:
                    found[n] = min(seconds, found.get(n, seconds))
    except FitError:
        return {}
    return found


def time_draft(draft: DraftModel) -> float:
    """Seconds of a whole draft behind a few rows of context; 0 for one that fails, which the first turn will tell."""
    cfg = draft.config
    try:
        cache = draft.new_cache()
        taps = torch.zeros(8, len(cfg.taps) * cfg.hidden, dtype=draft.dtype, device=draft.device)
        draft.extend(cache, taps, 0)
        sampling, seconds = Sampling(seed=0), 0.0
        for _ in range(2):
            began = time.perf_counter()
            draft.draft(cache, 0, 8, cfg.block, lambda logits, at: draw(logits.unsqueeze(0), [at], sampling)[0])
            seconds = time.perf_counter() - began
        return seconds
    except Exception:
        return 0.0
