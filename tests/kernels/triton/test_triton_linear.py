"""Products of a few rows: against fp64, and a row's bits whatever stands beside it; interpreted in fp32 elsewhere."""

from __future__ import annotations

import pytest
import torch
from k3_kernels import linear
from k3_kernels.ops import error

few_triton = pytest.importorskip("k3_kernels.linear.few_triton")
CUDA = torch.cuda.is_available()
HOPPER = CUDA and torch.cuda.get_device_capability()[0] == 9
pytestmark = pytest.mark.skipif(CUDA and not HOPPER, reason="compiled, the kernel is for Hopper")
TOLERANCE = 5e-3 if CUDA else 2e-6
SHAPES = [(8, 200, 136), (1, 64, 8), (5, 9, 1000), (3, 300, 24)]


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape).to("cuda" if CUDA else "cpu", torch.bfloat16 if CUDA else torch.float32)


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize(("rows", "outputs", "inputs"), SHAPES + [(16, 7168, 1536)] * CUDA)
def test_close_to_fp64(rows: int, outputs: int, inputs: int, add: bool):
    x, weight, more = draw(rows, inputs), draw(outputs, inputs), draw(rows, outputs)
    want = x.double() @ weight.double().t() + (more.double() if add else 0)
    assert error(few_triton.few(x, weight, more.clone() if add else None), want) < TOLERANCE


def test_every_element_is_written(monkeypatch: pytest.MonkeyPatch):
    """Many tiles a program, too: 300 rows are five tiles, and four programs run where programs are interpreted."""
    x, weight = draw(3, 40), draw(300, 40)
    want = few_triton.few(x, weight)
    monkeypatch.setattr(few_triton.torch, "empty", lambda *shape, **more: torch.full(shape, float("nan"), **more))
    assert torch.equal(few_triton.few(x, weight), want)


def test_a_row_does_not_see_the_others():
    x, weight = draw(8, 1536 if CUDA else 152), draw(700, 1536 if CUDA else 152)
    whole = few_triton.few(x, weight)
    order = torch.tensor([3, 1, 7, 0, 2, 6, 5, 4], device=x.device)
    assert torch.equal(few_triton.few(x[order], weight), whole[order])
    alone = torch.full_like(x, float("nan"))
    alone[5] = x[5]
    assert torch.equal(few_triton.few(alone, weight)[5], whole[5])
    assert torch.equal(few_triton.few(x[5:6], weight)[0], whole[5])


def test_rows_of_a_wider_matrix():
    wide, weight = draw(8, 4096), draw(300, 512)
    part = wide[:, 1024:1536]
    assert torch.equal(few_triton.few(part, weight), few_triton.few(part.contiguous(), weight))


@pytest.mark.skipif(not HOPPER, reason="dispatch takes the kernel on Hopper only")
def test_what_the_kernel_takes():
    wide, weight = draw(8, 4096), draw(300, 512)
    assert linear.choice(wide[:, 1024:1536], weight).kernel
    assert not linear.choice(wide[:, 1:513], weight).kernel
    assert not linear.choice(wide[:, 1024:1536].float(), weight.float()).kernel
    assert not linear.choice(draw(17, 512), weight).kernel
