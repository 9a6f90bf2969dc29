"""Marks on the parts of a step, for who asks where its time goes."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch.profiler import record_function

MARK = "k3:"
"""In front of a part's name in a profile."""

_clock: Callable[[str], AbstractContextManager[object]] | None = None


def marked(part: str) -> AbstractContextManager[object]:
    """A profiler range or a measured one around `part`; nothing when nobody looks."""
    if _clock is not None:
        return _clock(part)
    return record_function(MARK + part) if torch.autograd._profiler_enabled() else nullcontext()


@contextmanager
def clocked() -> Iterator[dict[str, float]]:
    """{part: seconds} of the parts run inside, filled as they end.

    For a CPU, where a part's work is done when its code returns. (The profiler would do for one process; with gloo it
    leaves freed memory behind, and the next garbage collection ends the program: torch 2.13.)
    """
    global _clock
    spent: dict[str, float] = defaultdict(float)

    @contextmanager
    def clock(part: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        spent[part] += time.perf_counter() - begin

    before, _clock = _clock, clock
    try:
        yield spent
    finally:
        _clock = before
