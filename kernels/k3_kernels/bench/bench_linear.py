"""Products of a decode window at K3's shapes, whole and as one of two ranks has them, beside the library's."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F

from k3_kernels import linear
from k3_kernels.bench.harness import Case, sets_for

ROWS = 8
SHAPES = {"KDA in": (49376, 7168), "KDA out": (7168, 12288), "MoE in": (15872, 7168), "latents up": (7168, 3584)}
HALVES = {"KDA in": (24752, 7168), "KDA out": (7168, 6144), "MoE in": (9728, 7168)}


def cases() -> list[Case]:
    found = []
    for shapes, half in ((SHAPES, ""), (HALVES, ", one of two ranks")):
        for name, (N, K) in shapes.items():
            moved = 2 * (N * K + ROWS * (N + K))
            sets = []
            for _ in range(min(sets_for(moved), 8)):
                weight = torch.randn(N, K, dtype=torch.bfloat16, device="cuda").mul_(K**-0.5)
                sets.append((torch.randn(ROWS, K, dtype=torch.bfloat16, device="cuda"), weight))
            runs, peer = ([partial(f, *s) for s in sets] for f in (linear.few, F.linear))
            shape = f"{ROWS} rows, {name} {N} x {K}{half}"
            found.append(Case("linear.few", shape, runs, moved, 2 * ROWS * N * K, peer, "cuBLAS"))
    return found
