"""Sums of ranks' parts: kernel and reference give the same bits, in the order of ranks."""

from __future__ import annotations

import pytest
import torch
from k3_kernels import ranks
from k3_kernels.ranks import add_triton, embed_triton, reference
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TYPES = [torch.float32, torch.bfloat16] if DEVICE == "cuda" else [torch.float32]


def draw(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Parts whose last but one takes away a first of about 10^6: what was added between is rounded to multiples of up
    to 1/8, what comes before or behind is not. So another order, or a sum by halves, is seen in bf16 too."""
    parts = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    parts[0] *= 1e6
    if shape[0] > 2:
        parts[-2] = -parts[0]
    return parts.to(DEVICE)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(3, 0), (3, 1), (2, 8, 40), (4, 3, 700), (8, 1030)])
def test_the_bits_of_the_reference(dtype: torch.dtype, shape: tuple[int, ...]):
    parts = draw(shape, dtype)
    want = reference.add(parts)
    assert want.shape == shape[1:]
    assert torch.equal(add_triton.add(parts), want)
    assert torch.equal(ranks.add(parts), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(4, 3, 700), (8, 1030)])
def test_these_parts_tell_orders_apart(dtype: torch.dtype, shape: tuple[int, ...]):
    """What the test above compares is another sum from last to first, by halves, and rounded after every part."""
    parts = draw(shape, dtype)
    want = reference.add(parts)
    half = shape[0] // 2
    halves = sum(x.float() for x in parts[:half]) + sum(x.float() for x in parts[half:])
    for other in (reference.add(parts.flip(0)), halves.to(dtype)):
        assert (other != want).float().mean() > 0.5
    if dtype == torch.bfloat16:
        assert not torch.equal(sum(parts), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_parts_are_one_addition_rounded_once(dtype: torch.dtype):
    parts = (torch.randn(2, 5000) * torch.tensor([[1.0], [300.0]])).to(DEVICE, dtype)
    want = (parts[0].double() + parts[1].double()).float().to(dtype)
    assert torch.equal(ranks.add(parts), want)
    assert torch.equal(reference.add(parts), want)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("count", "width"), [(0, 5), (1, 5), (9, 1030)])
def test_rows_of_a_part_of_an_embedding(dtype: torch.dtype, count: int, width: int):
    """Ids before and behind the part, its first and its last."""
    table = torch.randn(7, width).to(DEVICE, dtype)
    ids = torch.tensor([13, 0, 20, 14, 19, 40, 12, 21, 7], device=DEVICE)[:count]
    want = torch.zeros(count, width).to(DEVICE, dtype)
    for at, i in enumerate(ids.tolist()):
        if 14 <= i < 21:
            want[at] = table[i - 14]
    assert torch.equal(embed_triton.embed(ids, table, 14), want)
    assert torch.equal(ranks.embed(ids, table, 14), want)
