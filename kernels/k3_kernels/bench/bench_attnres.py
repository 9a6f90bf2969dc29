"""Mixing over depth with the norm behind it, at K3's width; public kernels on a Hopper GPU are at 3.7 to 5.7 us."""

from __future__ import annotations

from functools import partial

import torch

from k3_kernels import attnres
from k3_kernels.bench.harness import Case, sets_for

D = 7168
SHAPES = ((9, 1, 3.0), (4, 1, 3.0), (9, 8, 3.0), (9, 8192, None))


def cases() -> list[Case]:
    found = []
    for sources, T, target in SHAPES:
        moved = (sources + 3) * T * D * 2 + D * 6
        runs = []
        for _ in range(min(sets_for(moved), 500)):
            slab = torch.randn(sources, T, D, dtype=torch.bfloat16, device="cuda")
            query, weight = torch.randn(D, device="cuda"), torch.ones(D, dtype=torch.bfloat16, device="cuda")
            added = torch.zeros(T, D, dtype=torch.bfloat16, device="cuda")
            runs.append(partial(attnres.mix_norm, slab, query, weight, 1e-5, 1e-5, added))
        shape = f"{sources} sources, {T} rows"
        found.append(Case("attnres.mix_norm", shape, runs, moved, 6 * sources * T * D, target_us=target))
    return found
