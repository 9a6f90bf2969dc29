"""What the machine can do, measured: bytes per second of a large copy, operations per second of a large product."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def ceilings(device: torch.device, dtype: torch.dtype, world: int = 1) -> tuple[float, float]:
    """(bytes per second, read and written together; operations per second in `dtype`), on random data.

    world: ranks that share the work. GPUs have their own memory each: what the first one does, times all. A CPU's ranks
    share it.
    """
    if device.type == "cuda":
        from k3_kernels.bench.harness import copy_rate, matrix_rate

        with torch.cuda.device(device):
            return world * copy_rate(), world * matrix_rate()
    source = torch.rand(64 << 20)
    target = torch.empty_like(source)
    size = 1024
    a, b = (torch.randn(size, size).to(dtype) for _ in range(2))
    copied = _fastest(lambda: target.copy_(source))
    return 2 * source.nbytes / copied, 2 * size**3 / _fastest(lambda: a @ b)


def _fastest(work: Callable[[], object]) -> float:
    work()
    found = []
    for _ in range(5):
        began = time.perf_counter()
        work()
        found.append(time.perf_counter() - began)
    return min(found)
