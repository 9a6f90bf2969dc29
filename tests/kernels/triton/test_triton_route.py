"""The router's kernels: scores against fp64, choices against the reference's rule, ties, and the bit rule."""

from __future__ import annotations

import pytest
import torch
from k3_kernels.moe import reference, route_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TYPES = [torch.float32, torch.bfloat16] if DEVICE == "cuda" else [torch.float32]
SHAPES = [(0, 7, 70, 2), (3, 7, 70, 2), (9, 37, 70, 5), (21, 37, 70, 5), (2, 300, 70, 7)]


def make(T, E, D, dtype):
    random = torch.Generator().manual_seed(T)
    x, gate, bias = (torch.randn(s, generator=random) for s in ((T, D), (E, D), (E,)))
    return x.to(dtype).to(DEVICE), (gate / D**0.5).to(DEVICE), (bias * 0.1).to(DEVICE)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("gate_dtype", TYPES)
@pytest.mark.parametrize(
    ("T", "E", "D", "k"), SHAPES + ([(8, 896, 7168, 16), (1000, 896, 7168, 16)] if DEVICE == "cuda" else [])
)
def test_route(T, E, D, k, dtype, gate_dtype):
    x, gate, bias = make(T, E, D, dtype)
    if gate_dtype == torch.bfloat16 and dtype == torch.float32:
        pytest.skip("a gate narrower than its rows is nobody's")
    gate = gate.to(gate_dtype)
    ids, weights = route_triton.route(x, gate, bias, k, True, 2.5)
    scores = torch.sigmoid(x.double() @ gate.double().t())
    choice = scores + bias.double()
    best = choice.topk(k, -1).values
    # What was chosen is as good as what fp64 chooses, in the right order, without repetition.
    assert (choice.gather(1, ids) - best).abs().max() < 1e-5 if T else True
    assert all(len(set(row)) == k for row in ids.tolist())
    want = scores.gather(1, ids)
    want = want / want.sum(-1, keepdim=True) * 2.5
    assert torch.allclose(weights.double(), want, rtol=1e-5, atol=1e-7)
    raw = route_triton.route(x, gate, bias, k, False, 1.0)
    assert torch.equal(raw[0], ids)
    if 0 < T <= 8:
        alone = route_triton.route(x[T - 1 :].expand(T, -1).contiguous(), gate, bias, k, True, 2.5)
        assert torch.equal(alone[0][0], ids[T - 1])
        assert torch.equal(alone[1][0], weights[T - 1])


@pytest.mark.parametrize("E", [40, 300])  # one warp; four, which find equal ones apart
def test_ties_go_to_the_lower_id(E):
    x = torch.ones(2, 16, device=DEVICE)
    gate = torch.zeros(E, 16, device=DEVICE)
    gate[[5, 30]] = 1.0
    bias = torch.zeros(E, device=DEVICE)
    bias[[0, 7]] = -3.0
    found = route_triton.route(x, gate, bias, 6, True, 1.0)
    settings = {"top_k": 6, "groups": 1, "top_groups": 1, "renormalize": True, "scale": 1.0}
    want = reference.route(x, gate, bias, **settings)
    assert found[0].tolist() == want[0].tolist() == [[5, 30, 1, 2, 3, 4]] * 2
    torch.testing.assert_close(found[1], want[1])
