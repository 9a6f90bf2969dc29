"""The router at K3's shape (896 experts, width 7168, top-16), beside the same steps in torch."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from k3_kernels import moe
from k3_kernels.bench.harness import Case, sets_for
from k3_kernels.moe import reference

E, D = 896, 7168
SETTINGS: dict[str, Any] = {"top_k": 16, "groups": 1, "top_groups": 1, "renormalize": True, "scale": 2.446}


def cases() -> list[Case]:
    found = []
    for T, kind, target in ((8, torch.float32, 9.0), (8, torch.bfloat16, 7.0), (8192, torch.float32, None)):
        moved = E * D * kind.itemsize + T * D * 2
        sets = []
        for _ in range(min(sets_for(moved), 12)):
            x = torch.randn(T, D, dtype=torch.bfloat16, device="cuda")
            sets.append((x, torch.randn(E, D, device="cuda").mul_(D**-0.5).to(kind), torch.zeros(E, device="cuda")))
        runs, peer = ([partial(f, *s, **SETTINGS) for s in sets] for f in (moe.route, reference.route))
        shape = f"{T} rows, gate {str(kind)[6:]}"
        found.append(Case("moe.route", shape, runs, moved, 2 * T * E * D, peer, "torch", target_us=target))
    return found
