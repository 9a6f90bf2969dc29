"""Products of a few rows on Hopper: against fp64, and a row's bits whatever stands beside it."""

from __future__ import annotations

import pytest
import torch
from k3_kernels import linear
from k3_kernels.ops import error

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
pytestmark = pytest.mark.skipif(not HOPPER, reason="the kernel is for Hopper")


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda").bfloat16()


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(8, 200, 136), (1, 64, 8), (16, 7168, 1536), (5, 9, 1000)])
def test_close_to_fp64(rows: int, outputs: int, inputs: int, add: bool):
    x, weight, more = draw(rows, inputs), draw(outputs, inputs), draw(rows, outputs)
    assert linear.choice(x, weight).kernel
    want = x.double() @ weight.double().t() + (more.double() if add else 0)
    assert error(linear.few(x, weight, more.clone() if add else None), want) < 5e-3


def test_a_row_does_not_see_the_others():
    x, weight = draw(8, 1536), draw(700, 1536)
    whole = linear.few(x, weight)
    order = torch.tensor([3, 1, 7, 0, 2, 6, 5, 4], device="cuda")
    assert torch.equal(linear.few(x[order], weight), whole[order])
    alone = torch.full_like(x, float("nan"))
    alone[5] = x[5]
    assert torch.equal(linear.few(alone, weight)[5], whole[5])


def test_rows_of_a_wider_matrix():
    wide, weight = draw(8, 4096), draw(300, 512)
    part = wide[:, 1024:1536]
    assert linear.choice(part, weight).kernel
    assert torch.equal(linear.few(part, weight), linear.few(part.contiguous(), weight))
    assert not linear.choice(wide[:, 1:513], weight).kernel
