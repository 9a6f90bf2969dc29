"""A KDA step that keeps a state behind every row of a window instead of a log: the design the step is compared with.

It shares the step's row preparation, token loop and output norm; the difference is what is measured: no replay, and W
states written. Its convolution window is never moved and nothing is logged, which favours it a little.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3_kernels.kda.step_reference import StepWeights
from k3_kernels.kda.step_rows_triton import ROWS, _convolved, _finish, _gate, _inputs, _log_decay, _slot, _taps
from k3_kernels.kda.step_triton import L2_EPS, PAD, _axes, _over_k, _tap_by_tap, tile


@triton.jit
def snapshot_kernel(
    x, f, b, gate, weight, A_log, dt_bias, norm, states, conv, cursor, scratch, outputs, out,
    x_row, f_row, b_row, gate_row, H, W, n, one, eps, bound,
    SLOTS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, RR: tl.constexpr, KA: tl.constexpr, RW: tl.constexpr,
    RL: tl.constexpr, KL: tl.constexpr, KI: tl.constexpr,
):  # fmt: skip
    """states [W, H, V, K]: read behind the last accepted row, written behind every live row."""
    LINE: tl.constexpr = 3 * K + V + PAD
    x_row *= 4
    f_row *= 4
    gate_row *= 4
    HK = H * K
    C = 2 * HK + H * V
    here = tl.load(cursor).to(tl.int32) % W
    rr, ka, rw, rl, kl, ki = _axes(RR, KA, RW, RL, KL, KI)
    rows = (rr * RW + rw) * RL + rl
    channels = (ka * KL + kl) * KI + ki
    wide = channels + (rw + rl) * 0
    tall = rr * (RW * RL) + (rw * RL + rl) * one + kl * 0
    lane = kl + rows * 0 == 0
    kk = tl.arange(0, K)
    vv = tl.arange(0, V)
    h = tl.program_id(0)
    lines = scratch + h * (W * LINE)
    at = states + h * V * K
    cell = rows * K + channels
    size = H * V * K
    q_at = h * K + kk[None, :]
    k_at = q_at + HK
    v_at = 2 * HK + h * V + vv[None, :]
    q_taps = _taps(weight, C, q_at)
    k_taps = _taps(weight, C, k_at)
    v_taps = _taps(weight, C, v_at)
    rate = tl.load(A_log + h)
    shift = tl.load(dt_bias + q_at)
    S = tl.load(at + _slot(here + W - 1, W) * size + cell)
    rate = tl.exp(rate)
    for base in range(0, n, ROWS):
        q0, q1, q2, q3, k0, k1, k2, k3, v0, v1, v2, v3, f_rows, b_rows = _inputs(
            base, n, 0, here, W, conv, C, x, C, x, x_row, f, f, f_row, b, b, b_row, H, h, q_at, k_at, v_at, K
        )  # fmt: skip
        q = _convolved(q0, q1, q2, q3, q_taps)
        key = _convolved(k0, k1, k2, k3, k_taps)
        value = _convolved(v0, v1, v2, v3, v_taps)
        q *= (1 / tl.sqrt(tl.sum(q * q, 1) + L2_EPS) * (1 / K**0.5))[:, None]
        key *= (1 / tl.sqrt(tl.sum(key * key, 1) + L2_EPS))[:, None]
        decay = tl.exp(_log_decay(f_rows.to(tl.float32) + shift, rate, True, bound))
        beta = 1 / (1 + tl.exp(-b_rows.to(tl.float32)))
        t = base + tl.arange(0, ROWS)
        inside = (t < n)[:, None]
        line = lines + (t * LINE)[:, None]
        tl.store(line + kk[None, :], key, mask=inside)
        tl.store(line + K + kk[None, :], decay, mask=inside)
        tl.store(line + 2 * K + kk[None, :], q, mask=inside)
        tl.store(line + 3 * K + vv[None, :], value, mask=inside)
        tl.store(lines + t * LINE + 3 * K + V, beta, mask=t < n)
    tl.debug_barrier()
    o_at = outputs + h * W * V
    key = tl.load(lines + wide)
    decay = tl.load(lines + K + wide)
    q = tl.load(lines + 2 * K + wide)
    for t in range(n):
        line = lines + t * LINE
        ahead = lines + tl.minimum(t + 1, n - 1) * LINE
        value = tl.load(line + 3 * K + tall)
        beta = tl.load(line + 3 * K + V)
        S *= decay
        decay = tl.load(ahead + K + wide)
        u = (value - _over_k(S * key)) * beta
        S += u * key
        key = tl.load(ahead + wide)
        tl.store(o_at + t * V + tall, _over_k(S * q) + kl * 0, mask=lane)
        q = tl.load(ahead + 2 * K + wide)
        tl.store(at + _slot(here + t, W) * size + cell, S)
    tl.debug_barrier()
    logits = _gate(h, here, n, W, gate, gate_row, SLOTS, V)
    _finish(h, here, n, W, o_at, logits, tl.load(norm + vv), out, eps, H, SLOTS, V)


def snapshot_step(
    x: Tensor, f: Tensor, b: Tensor, gate: Tensor, w: StepWeights, states: Tensor, conv: Tensor, cursor: Tensor, n: int
) -> Tensor:
    """As `kda.step`, with states [W, H, V, K] fp32 in place of state and log. conv [w-1, C] is only read."""
    W, H, K = f.shape
    V = gate.shape[-1]
    cut = tile(K, V)
    assert w.lower_bound is not None
    out = torch.empty(W, H * V, dtype=x.dtype, device=x.device)
    scratch = torch.empty(H * W * (3 * K + V + PAD.value), dtype=torch.float32, device=x.device)
    outputs = torch.empty(H * W * V, dtype=torch.float32, device=x.device)
    snapshot_kernel[(H,)](
        x, f, b, gate, _tap_by_tap(w.conv), w.A_log, w.dt_bias, w.o_norm, states, conv, cursor, scratch, outputs, out,
        x.stride(0) // 4, f.stride(0) // 4, b.stride(0), gate.stride(0) // 4, H, W, n, 1, w.norm_eps, w.lower_bound,
        SLOTS=8 if W <= 8 else 16, K=K, V=V, **cut.shape(K, V), num_warps=cut.warps,
    )  # fmt: skip
    return out
