"""KDA: gate vectors, extremes, drift. `test_kernel_kda_step.py` has the windows of decode."""

from __future__ import annotations

import math

import pytest
import torch
from k3_kernels import conv, kda
from k3_kernels.kda.reference import chunk, log_decay, recurrent
from k3_kernels.ops import error, kda_inputs

H, K, V = 3, 20, 12


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def unit(x: torch.Tensor) -> torch.Tensor:
    return x / x.norm(dim=-1, keepdim=True)


@pytest.mark.parametrize(
    ("a_log", "shifted", "expected"),
    [(0.0, 0.0, -2.5), (0.2912, 1.0, -3.9608307260), (1.0066, -2.0, -0.0209143995), (-0.4684, 3.0, -4.3369114682)],
)
def test_bounded_gate_vectors(a_log: float, shifted: float, expected: float):
    # Half of the sum comes from each addend, so that leaving one out shows.
    f, bias = torch.full((1, 1, 2), shifted / 2), torch.full((1, 2), shifted / 2)
    g = log_decay(f, torch.tensor([a_log]), bias, -5.0)
    assert g.flatten().tolist() == pytest.approx([expected] * 2, rel=2e-6)


def test_rates_are_per_head_and_the_unbounded_gate_is_softplus():
    f, bias = draw(4, H, K), draw(H, K, seed=1)
    rates = torch.tensor([-1.0, 0.5, 2.0])
    g = log_decay(f, rates, bias, None)
    for t, h, d in ((0, 0, 0), (3, 2, 19), (1, 1, 7)):
        s = float(f[t, h, d] + bias[h, d])
        assert float(g[t, h, d]) == pytest.approx(-math.exp(float(rates[h])) * math.log1p(math.exp(s)), rel=1e-5)
    assert bool((log_decay(f * 100, rates, bias, None) <= 0).all())
    assert bool((log_decay(f * 100, rates, bias, -5.0) >= -5).all())


@pytest.mark.parametrize("decay", [-5.0, -1e-6, 0.0, -300.0, -1e30])
@pytest.mark.parametrize("T", [1, 16, 17, 64, 130])
def test_chunk_at_the_extremes(decay: float, T: int):
    q, k, v = unit(draw(T, H, K)), unit(draw(T, H, K, seed=1)), draw(T, H, V, seed=2)
    g, beta = torch.full((T, H, K), decay), torch.sigmoid(draw(T, H, seed=3))
    S = draw(H, V, K, seed=4)
    found, expected = chunk(q, k, v, g, beta, S), recurrent(*(x.double() for x in (q, k, v, g, beta, S)))
    assert all(error(a, b) < 1e-5 for a, b in zip(found, expected, strict=True))


def test_mixed_decays_in_one_sub_chunk():
    """Channels that forget everything at once, beside tokens that keep everything."""
    T = 100
    q, k, v = unit(draw(T, H, K)), unit(draw(T, H, K, seed=1)), draw(T, H, V, seed=2)
    g = -torch.rand(T, H, K, generator=torch.Generator().manual_seed(5)) * 1e-3
    g[::7] = -1500.0
    beta, S = torch.sigmoid(draw(T, H, seed=3)), draw(H, V, K, seed=4)
    found, expected = chunk(q, k, v, g, beta, S), recurrent(*(x.double() for x in (q, k, v, g, beta, S)))
    assert all(error(a, b) < 1e-5 for a, b in zip(found, expected, strict=True))


def test_repeated_keys_do_not_blow_up_the_triangular_system():
    """The same key 64 times with beta near 1 and no decay: the worst case of the inverse."""
    T = 64
    k = unit(draw(1, H, K)).expand(T, H, K).contiguous()
    q, v = unit(draw(T, H, K, seed=1)), draw(T, H, V, seed=2)
    g, beta, S = torch.zeros(T, H, K), torch.full((T, H), 0.999), draw(H, V, K, seed=4)
    found, expected = chunk(q, k, v, g, beta, S), recurrent(*(x.double() for x in (q, k, v, g, beta, S)))
    assert all(error(a, b) < 1e-5 for a, b in zip(found, expected, strict=True))


def test_drift_over_many_chunks():
    T = 4096
    q, k, v = unit(draw(T, 1, 8)), unit(draw(T, 1, 8, seed=1)), draw(T, 1, 6, seed=2)
    g = -torch.rand(T, 1, 8, generator=torch.Generator().manual_seed(5)) * 0.01
    beta, S = torch.sigmoid(draw(T, 1, seed=3)), torch.zeros(1, 6, 8)
    exact = recurrent(*(x.double() for x in (q, k, v, g, beta, S)))
    for found in (chunk(q, k, v, g, beta, S), recurrent(q, k, v, g, beta, S)):
        assert all(error(a, b) < 1e-5 for a, b in zip(found, exact, strict=True))


@pytest.mark.parametrize("sizes", [[1, 2, 63, 64, 65], [64, 131], [195]])
def test_state_carries_over_chunk_calls(sizes: list[int]):
    T = sum(sizes)
    arguments = kda_inputs(T, torch.float32, torch.Generator().manual_seed(0))
    rows, fixed, S = arguments[:5], arguments[5:8], arguments[8]
    whole, last = kda.prefill(*rows, *fixed, S)
    parts = []
    for pieces in zip(*(x.split(sizes) for x in rows), strict=True):
        out, S = kda.prefill(*pieces, *fixed, S)
        parts.append(out)
    assert error(torch.cat(parts), whole) < 1e-5
    assert error(S, last) < 1e-5


@pytest.mark.parametrize("n", range(6))
def test_conv_window_moves_by_what_was_accepted(n: int):
    window, x = draw(2, 3, 7), draw(2, 5, 7, seed=1)
    moved = conv.advance_window(window, x, n)
    for layer in range(2):
        everything = torch.cat((window[layer], x[layer, :n]))
        assert torch.equal(moved[layer], everything[-3:])
