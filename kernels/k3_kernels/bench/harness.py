"""Timing of operators on a CUDA device: captured graphs, cold L2, medians, peer and kernel in one run.

A case owns several sets of inputs, together larger than the L2, and the graph walks through all of them: no replay
finds its inputs in the cache. Bytes and operations are counted by the case, from its shapes; ceilings are measured.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

BUDGET_S = 3.0
"""Seconds after which a measurement of at least five replays ends."""
COLD_BYTES = 256 << 20
"""Distinct bytes one replay walks through; the L2 of a Hopper GPU holds 50 to 60 MB."""


@dataclass(frozen=True)
class Case:
    """One measured call. runs: the kernel on each of its input sets; peer: the same for the competitor, or empty.

    bytes, flops: what one call must move and compute; target_us: what was aimed at, None without one.
    """

    op: str
    shape: str
    runs: Sequence[Callable[[], object]]
    bytes: int
    flops: int
    peer: Sequence[Callable[[], object]] = ()
    peer_name: str = ""
    target_us: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call. samples: one mean per replay."""

    samples: tuple[float, ...] = field(repr=False)

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def spread(self) -> float:
        """Half the distance between the tenth and the ninetieth percentile."""
        ordered = sorted(self.samples)
        return (ordered[int(0.9 * (len(ordered) - 1))] - ordered[int(0.1 * (len(ordered) - 1))]) / 2


def sets_for(bytes_of_one: int) -> int:
    """How many input sets a case needs so that one walk is cold, at least two."""
    return max(2, -(-COLD_BYTES // max(bytes_of_one, 1)))


def time_runs(runs: Sequence[Callable[[], object]], *, replays: int = 30, graph: bool = True) -> Timing:
    """Times a walk over all runs; graph=False for callables that can't be captured (their launch gaps count)."""
    for run in runs[:2]:
        run()
    torch.cuda.synchronize()

    def walk() -> None:
        for run in runs:
            run()

    replay = walk
    if graph:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            walk()
        replay = captured.replay
    replay()
    samples: list[float] = []
    started = time.perf_counter()
    for _ in range(replays):
        if len(samples) >= 5 and time.perf_counter() - started > BUDGET_S:
            break
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        replay()
        end.record()
        end.synchronize()
        samples.append(begin.elapsed_time(end) * 1e3 / len(runs))
    return Timing(tuple(samples))


def copy_rate() -> float:
    """Measured device copy, bytes read plus written per second: the better of a memory copy and a copying kernel.

    Launched as users launch them, not from a captured graph, where a memory copy gave 2.75 TB/s on an H200.
    """
    source = torch.rand(512 << 20, device="cuda")
    target = torch.empty_like(source)
    copies = (lambda: target.copy_(source), lambda: torch.mul(source, 1.0, out=target))
    took = min(time_runs([copy], replays=10, graph=False).median for copy in copies)
    return 2 * source.nbytes / took * 1e6


def matrix_rate() -> float:
    """Measured bf16 product of random 8192 x 8192 matrices, operations per second."""
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    took = time_runs([lambda: a @ b], replays=10).median
    return 2 * 8192**3 / took * 1e6
