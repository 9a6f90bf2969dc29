"""Norms and activations: kernels against the references, on rows cut out of wider ones."""

from __future__ import annotations

import pytest
import torch
from k3_kernels.activation import Situ, Swiglu, math_triton
from k3_kernels.norm import reference, rms_triton
from k3_kernels.ops import error, gated_definition

from tests.kernels.triton.memory import poisoned

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TYPES = [torch.float32, torch.bfloat16] if DEVICE == "cuda" else [torch.float32]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3}


def draw(dtype, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(DEVICE, dtype)


@pytest.fixture(autouse=True)
def poison():
    with poisoned():
        yield


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(0, 24), (3, 23), (2, 5, 24), (2, 1500)])
def test_rms_norm(dtype, shape):
    wide = draw(dtype, *shape[:-1], shape[-1] + 9)
    x = wide[..., 2 : 2 + shape[-1]] if len(shape) == 2 else wide[..., : shape[-1]].contiguous()
    weight = draw(dtype, shape[-1])
    found = rms_triton.rms_norm(x, weight, 1e-5)
    full = x.double()
    want = full / (full.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    assert error(found, want) <= TOLERANCE[dtype]
    # The rounding points are the reference's: only the order of the sum of squares differs.
    assert error(found, reference.rms_norm(x, weight, 1e-5)) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("T", "H", "V"), [(0, 3, 12), (2, 3, 12), (2, 11, 20)])
def test_gated_rms_norm(dtype, T, H, V):
    x = draw(dtype, T, H, V)
    gate = draw(dtype, T, H * V + 7)[:, 3 : 3 + H * V].unflatten(1, (H, V))
    weight = draw(torch.float32, V)
    found = rms_triton.gated_rms_norm(x, gate, weight, 1e-5)
    assert error(found, gated_definition(x, gate, weight, 1e-5)) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("act", [Situ(4.0, 25.0), Swiglu()])
def test_activation(dtype, act):
    gate, up = (draw(dtype, 3, 2 * 1030) * 6).chunk(2, -1)
    gate[0, :5] = torch.tensor([0.0, 1e-6, -1e-3, 60.0, -90.0])
    found = math_triton.gated_rows(act, gate, up)
    want = act.reference(gate.double().cpu(), up.double().cpu()) if dtype == torch.float32 else act.reference(gate, up)
    assert error(found.cpu(), want.cpu()) <= TOLERANCE[dtype]
    small = found[0, 1:3].double().cpu() / want[0, 1:3].double().cpu() - 1
    assert small.abs().max() < 2 * TOLERANCE[dtype]  # relative near zero, too
