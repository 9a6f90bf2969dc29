"""Activation vectors, MXFP4 bytes, routing and attention corner cases."""

from __future__ import annotations

import pytest
import torch
from k3_kernels import attnres, mla, moe, norm
from k3_kernels.activation import Situ, Swiglu
from k3_kernels.moe import reference
from k3_kernels.ops import error, experts_inputs

EIGHT = (torch.tensor([16, 0, 0, 0]), 8)


@pytest.mark.parametrize(
    ("gate", "up", "expected"),
    [
        (1, -2, -1.4293511316),
        (3, -4, -9.5986542737),
        (0.5, 0.25, 0.0774021063),
        (-1, 1, -0.2633346626),
        (10, 100, 98.5907815539),
        (-8, 30, -0.0269509509),
    ],
)
def test_situ_vectors(gate: float, up: float, expected: float):
    act = Situ(4.0, 25.0)
    assert float(act(torch.tensor([float(gate)]), torch.tensor([float(up)]))) == pytest.approx(expected, rel=2e-6)
    half = act(torch.tensor([gate], dtype=torch.bfloat16), torch.tensor([up], dtype=torch.bfloat16))
    assert float(half) == pytest.approx(expected, rel=2**-8)


def test_swiglu():
    assert float(Swiglu()(torch.tensor([2.0]), torch.tensor([3.0]))) == pytest.approx(5.2847825, rel=1e-6)


def test_mxfp4_nibbles_scales_and_order():
    packed = torch.zeros(1, 32, dtype=torch.uint8)
    packed[0, :8] = torch.tensor([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE])
    packed[0, 16] = 0x0F
    scale = torch.tensor([[127, 120]], dtype=torch.uint8)
    values = moe.dequantize_mxfp4(packed, scale, torch.float32)[0]
    magnitudes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert values[:16].tolist() == magnitudes + [-x for x in magnitudes]
    assert values[32].item() == -6 * 2.0**-7
    assert values[33].item() == 0
    assert torch.signbit(values[8])


def test_mxfp4_extreme_scales():
    packed = torch.full((1, 16), 0x22, dtype=torch.uint8)
    for scale in (0, 1, 126, 254):
        value = moe.dequantize_mxfp4(packed, torch.tensor([[scale]], dtype=torch.uint8), torch.float32)[0, 0]
        assert value.item() == 2.0 ** (scale - 127)
    assert moe.dequantize_mxfp4(packed, torch.tensor([[255]], dtype=torch.uint8), torch.float32).isnan().all()


def route(x, gate, bias, **changes):
    settings = {"top_k": 2, "groups": 1, "top_groups": 1, "renormalize": True, "scale": 1.0} | changes
    return moe.route(x, gate, bias, **settings)


def test_bias_chooses_but_does_not_weigh():
    scores = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    ids, weights = route(torch.eye(1), scores.t(), torch.tensor([10.0, 0.0, 0.0, 0.0]), scale=2.0)
    assert ids.tolist() == [[0, 3]]
    s = torch.sigmoid(torch.tensor([0.0, 3.0]))
    torch.testing.assert_close(weights[0], 2 * s / s.sum())
    _, raw = route(torch.eye(1), scores.t(), torch.zeros(4), renormalize=False)
    torch.testing.assert_close(raw[0], torch.sigmoid(torch.tensor([3.0, 2.0])))


def test_groups_limit_the_choice():
    """Group 0 has the best expert, group 1 the best two together; with one group allowed the pair wins."""
    scores = torch.tensor([[3.0, -9.0, 2.5, 2.4, -9.0, -9.0]])
    ids, _ = route(torch.eye(1), scores.t(), torch.zeros(6), groups=3, top_groups=1)
    assert sorted(ids[0].tolist()) == [2, 3]
    ids, _ = route(torch.eye(1), scores.t(), torch.zeros(6), groups=3, top_groups=2)
    assert sorted(ids[0].tolist()) == [0, 2]


def test_negative_biased_scores_do_not_let_forbidden_groups_in():
    ids, _ = route(torch.eye(1), torch.tensor([[1.0, 0.9, 0.1, 0.0]]).t(), torch.full((4,), -5.0), groups=2)
    assert sorted(ids[0].tolist()) == [0, 1]


@pytest.mark.parametrize("limit", [1, 100_000])
def test_workspace_limit_changes_no_bit(monkeypatch: pytest.MonkeyPatch, limit: int):
    arguments = experts_inputs(8, torch.float32, torch.Generator().manual_seed(0))
    expected = moe.experts_grouped(*arguments), moe.experts_window(*arguments, *EIGHT)
    monkeypatch.setattr(reference, "WORKSPACE", limit)
    found = moe.experts_grouped(*arguments), moe.experts_window(*arguments, *EIGHT)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_window_rows_do_not_depend_on_each_other():
    arguments = experts_inputs(8, torch.float32, torch.Generator().manual_seed(0))
    together = moe.experts_window(*arguments, *EIGHT)
    for row in range(8):
        alone = moe.experts_window(*arguments, torch.tensor([16 + row, 0, 0, 0]), 1)
        assert torch.equal(alone[row], together[row])
        assert not alone[:row].any()


def test_dense_experts():
    z, ids, weights, packed, act = experts_inputs(9, torch.float32, torch.Generator().manual_seed(0))
    w13, w2 = packed.matrices(torch.arange(7), torch.float32)
    expected = moe.experts_grouped(z, ids, weights, packed, act)
    assert torch.equal(moe.experts_grouped(z, ids, weights, moe.Experts(w13, w2), act), expected)
    dense = packed.dense(torch.float32)
    assert torch.equal(dense.w13, w13)
    assert torch.equal(dense.w2, w2)
    window = z[:8], ids[:8], weights[:8]
    alike = [moe.experts_window(*window, experts, act, *EIGHT) for experts in (packed, dense)]
    assert torch.equal(*alike)
    half = moe.Experts(w13.bfloat16(), w2.bfloat16())  # every MXFP4 value is a bf16 value
    assert torch.equal(moe.experts_grouped(z, ids, weights, half, act), expected)


def test_attention_survives_huge_scores():
    q = torch.full((1, 1, 4), 1e4)
    latent = torch.full((2, 2, 4), 1e4)
    latent[1, 0] = -1e4
    table = torch.tensor([1, 0], dtype=torch.int32)
    out = mla.prefill(q, latent, table, torch.ones(1, 5, 2), 2, 1.0)
    assert torch.isfinite(out).all()
    assert error(out, torch.full_like(out, 2e4)) < 1e-6


def test_mix_of_one_source_is_that_source():
    x = torch.randn(1, 5, 7)
    assert torch.equal(attnres.mix(x, torch.randn(7), 1e-5), x[0])


def test_norm_of_zeros_is_zero():
    assert not norm.rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-5).any()
    assert not norm.gated_rms_norm(torch.zeros(2, 1, 8), torch.ones(2, 1, 8), torch.ones(8), 1e-5).any()
