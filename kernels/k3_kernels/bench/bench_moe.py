"""Experts at K3's shape: 896 MXFP4 experts of 3584 x 3072, 16 for each token, SiTU.

No public kernel for these shapes can be called from here; vLLM's Marlin on an H200 is published at 163 / 267 / 875 us
for 1 / 2 / 8 tokens and 43 ms for 8,192 (ai-dynamo/aiconfigurator, measured tables).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from k3_kernels import moe
from k3_kernels.activation import Situ
from k3_kernels.bench.harness import Case

E, K, L, F = 896, 16, 3584, 3072
EXPERT_BYTES = 3 * L * F // 2 + 3 * L * F // 32
ACT = Situ(4.0, 25.0)
WINDOW = ((1, 105.0), (2, 190.0), (8, 640.0))
GROUPED = ((512, None), (2048, None), (8192, 22_000.0))


def experts(count: int = E) -> moe.Experts:
    """Random packed experts on the device, scales around 2^-6: outputs of order one."""

    def draw(low: int, high: int, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.uint8, device="cuda").random_(low, high)

    return moe.Experts(
        draw(0, 256, count, 2 * F, L // 2),
        draw(0, 256, count, L, F // 2),
        draw(119, 122, count, 2 * F, L // 32),
        draw(119, 122, count, L, F // 32),
    )


def choices(T: int, count: int = E) -> tuple[Tensor, Tensor]:
    """(ids [T, K], weights [T, K]) with every expert equally likely."""
    ids = torch.rand(T, count, device="cuda").topk(K, dim=-1).indices
    weights = torch.rand(T, K, device="cuda")
    return ids, weights / weights.sum(-1, keepdim=True) * 2.4


def window_cases(stack: moe.Experts, run: Callable[..., Tensor] = moe.experts_window) -> list[Case]:
    """A window of W = 8 rows with 1, 2 and 8 live ones; every run draws its own experts."""
    found = []
    cursor = torch.tensor([16, 0, 0, 0], device="cuda")
    for n, target in WINDOW:
        runs, distinct = [], 0
        for _ in range(6):
            ids, weights = choices(8)
            distinct += ids[:n].unique().numel()
            z = torch.randn(8, L, dtype=torch.bfloat16, device="cuda")
            runs.append(partial(run, z, ids, weights, stack, ACT, cursor, n))
        mean = distinct / len(runs)
        note = f"{mean:.1f} distinct experts"
        moved = int(mean * EXPERT_BYTES)
        found.append(
            Case(
                "moe.experts_window", f"{n} of 8 rows", runs, moved, 2 * n * K * 3 * L * F, target_us=target, note=note
            )
        )
    return found


def grouped_cases(stack: moe.Experts, run: Callable[..., Tensor] = moe.experts_grouped) -> list[Case]:
    """Chunks of a prefill."""
    found = []
    for T, target in GROUPED:
        ids, weights = choices(T)
        used = ids.unique().numel()
        z = torch.randn(T, L, dtype=torch.bfloat16, device="cuda")
        runs = [partial(run, z, ids, weights, stack, ACT)]
        moved = used * EXPERT_BYTES + 2 * T * L * 2
        found.append(Case("moe.experts_grouped", f"{T} tokens", runs, moved, 2 * T * K * 3 * L * F, target_us=target))
    return found


def cases() -> list[Case]:
    stack = experts()
    return window_cases(stack) + grouped_cases(stack)
