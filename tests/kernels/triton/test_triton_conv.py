"""The short convolution against a direct sum, on rows cut out of wider ones."""

from __future__ import annotations

import pytest
import torch
from k3_kernels.conv import conv_triton, reference
from k3_kernels.ops import conv_definition, error

from tests.kernels.triton.memory import poisoned

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TYPES = [torch.float32, torch.bfloat16] if DEVICE == "cuda" else [torch.float32]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 5e-3}


@pytest.fixture(autouse=True)
def poison():
    with poisoned():
        yield


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("T", [0, 1, 2, 3, 31, 33, 70])
def test_short_conv(T: int, width: int, dtype: torch.dtype):
    random = torch.Generator().manual_seed(T)
    C = 150
    wide = torch.full((T + 2, C + 9), float("nan"))
    wide[1 : T + 1, 3 : 3 + C] = torch.randn(T, C, generator=random)
    x = wide.to(DEVICE, dtype)[1 : T + 1, 3 : 3 + C]
    window = torch.randn(width - 1, C, generator=random).to(DEVICE, dtype)
    weight = torch.randn(width, C, generator=random).to(DEVICE).mT
    before = window.clone()
    found, after = conv_triton.short_conv(x, window, weight)
    want, kept = conv_definition(x.cpu(), window.cpu(), weight.cpu())
    assert error(found.cpu(), want) <= TOLERANCE[dtype]
    assert torch.equal(after, kept.to(after))
    assert torch.equal(after, torch.cat((window, x))[T:])
    assert torch.equal(window, before)
    assert error(found, reference.short_conv(x, window, weight)[0]) <= TOLERANCE[dtype]
