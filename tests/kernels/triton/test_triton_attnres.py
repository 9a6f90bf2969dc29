"""The mixing kernel against fp64, its in-place addition, and its bit rule."""

from __future__ import annotations

import pytest
import torch
from k3_kernels.attnres import mix_triton
from k3_kernels.ops import error, mix_definition

from tests.kernels.triton.memory import poisoned

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TYPES = [torch.float32, torch.bfloat16] if DEVICE == "cuda" else [torch.float32]
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 1e-2}
SHAPES = [(1, 2, 23), (3, 1, 40), (4, 0, 23), (9, 2, 23)]


def make(sources, T, D, dtype):
    """The slab with a guard row in front, behind and beside what the kernel may touch."""
    random = torch.Generator().manual_seed(sources)
    slab, query, weight, added = (
        torch.randn(s, generator=random).to(DEVICE) for s in ((sources + 2, T + 2, D), (D,), (D,), (T, D))
    )
    return slab.to(dtype), query, weight.to(dtype), added.to(dtype)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("few", [0, 16])
@pytest.mark.parametrize(("sources", "T", "D"), SHAPES + ([(9, 8, 7168), (2, 300, 7168)] if DEVICE == "cuda" else []))
def test_mix_norm(sources, T, D, few, dtype):
    chunk = 512 if D > 100 else 16
    slab, query, weight, added = make(sources, T, D, dtype)
    want_slab = slab.clone()
    want_slab[sources, 1 : T + 1] += added
    inputs = want_slab[1 : sources + 1, 1 : T + 1].cpu(), query.cpu(), weight.cpu()
    with poisoned():
        found = mix_triton.mix_norm(
            slab[1 : sources + 1, 1 : T + 1], query, weight, 1e-5, 1e-3, added, few=few, few_sources=0, chunk=chunk
        )
    assert error(found.cpu(), mix_definition(*inputs, 1e-5, 1e-3)) <= TOLERANCE[dtype]
    assert torch.equal(slab, want_slab)
    again = mix_triton.mix_norm(
        slab[1 : sources + 1, 1 : T + 1], query, weight, 1e-5, 1e-3, few=few, few_sources=0, chunk=chunk
    )
    assert error(again, found) <= TOLERANCE[dtype]
    if T:
        alone = mix_triton.mix_norm(
            slab[1 : sources + 1, T : T + 1], query, weight, 1e-5, 1e-3, few=few, few_sources=0, chunk=chunk
        )
        assert torch.equal(alone[0], again[-1])
