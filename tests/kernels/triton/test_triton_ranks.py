"""Sums of ranks' parts: kernel and reference give the same bits, in the order of ranks."""

from __future__ import annotations

import pytest
import torch
from k3_kernels import ranks
from k3_kernels.ranks import add_triton, reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TYPES = [torch.float32, torch.bfloat16] if DEVICE == "cuda" else [torch.float32]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(3, 0), (3, 1), (2, 8, 40), (4, 3, 700), (8, 1030)])
def test_the_bits_of_the_reference(dtype: torch.dtype, shape: tuple[int, ...]):
    """Parts of very different sizes: another order would show."""
    scale = torch.logspace(-4, 4, shape[0]).flip(0).view(-1, *[1] * (len(shape) - 1))
    parts = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) * scale).to(DEVICE, dtype)
    want = reference.add(parts)
    assert want.shape == shape[1:]
    assert torch.equal(add_triton.add(parts), want)
    assert torch.equal(ranks.add(parts), want)
    if shape[0] > 2 and want.numel() > 100:
        assert not torch.equal(reference.add(parts.flip(0)), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_parts_are_one_addition_rounded_once(dtype: torch.dtype):
    parts = (torch.randn(2, 5000) * torch.tensor([[1.0], [300.0]])).to(DEVICE, dtype)
    want = (parts[0].double() + parts[1].double()).float().to(dtype)
    assert torch.equal(ranks.add(parts), want)
    assert torch.equal(reference.add(parts), want)
