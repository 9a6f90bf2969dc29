"""Rows of a KDA step on a GPU: their inputs, what the recurrence takes, the output norm, log and convolution window.

Pieces of `step_triton`. A tile has one row a warp and four channels a thread. Rows are counted along a timeline, the
accepted ones and then the live ones, or by slot: the row of position p is in slot p mod W.
"""

from __future__ import annotations

import triton
import triton.language as tl

ROWS = tl.constexpr(8)  # prepared at once


@triton.jit
def _slot(row, W):
    """row mod W for 0 <= row < 3 W."""
    row = tl.where(row >= W, row - W, row)
    return tl.where(row >= W, row - W, row)


@triton.jit
def _row(s, accepted, first, W, conv, conv_row, log, C, x, x_row):
    """Addresses of the convolution inputs of the timeline's rows s: window in front, then log, then projections."""
    slot = _slot(first + tl.maximum(s, 0), W)
    logged = tl.where(s < accepted, log + slot * C, x + slot * x_row)
    return tl.where(s < 0, conv + (s + 3) * conv_row, logged)[:, None]


@triton.jit
def _inputs(
    base, total, accepted, first, W, conv, conv_row, log_x, C, x, x_row, log_f, f, f_row, log_b, b, b_row, H, h,
    q_at, k_at, v_at, K: tl.constexpr
):  # fmt: skip
    """What rows base and on are made of: the four convolution inputs of q, k and v, oldest first, then f and b.

    Rows behind the last hold anything, and nothing made of them is stored.
    """
    t = base + tl.arange(0, ROWS)
    inside = (t < total)[:, None]
    slot = _slot(first + t, W)
    p0 = _row(t - 3, accepted, first, W, conv, conv_row, log_x, C, x, x_row)
    p1 = _row(t - 2, accepted, first, W, conv, conv_row, log_x, C, x, x_row)
    p2 = _row(t - 1, accepted, first, W, conv, conv_row, log_x, C, x, x_row)
    p3 = _row(t, accepted, first, W, conv, conv_row, log_x, C, x, x_row)
    f_line = tl.where(t < accepted, log_f + slot * H * K, f + slot * f_row)
    b_line = tl.where(t < accepted, log_b + slot * H, b + slot * b_row)
    return (
        tl.load(p0 + q_at, mask=inside),
        tl.load(p1 + q_at, mask=inside),
        tl.load(p2 + q_at, mask=inside),
        tl.load(p3 + q_at, mask=inside),
        tl.load(p0 + k_at, mask=inside),
        tl.load(p1 + k_at, mask=inside),
        tl.load(p2 + k_at, mask=inside),
        tl.load(p3 + k_at, mask=inside),
        tl.load(p0 + v_at, mask=inside),
        tl.load(p1 + v_at, mask=inside),
        tl.load(p2 + v_at, mask=inside),
        tl.load(p3 + v_at, mask=inside),
        tl.load(f_line[:, None] + q_at, mask=inside),
        tl.load(b_line + h, mask=t < total),
    )


@triton.jit
def _taps(weight, C, channel):
    """The four taps of channels [1, WIDTH], oldest row first."""
    at = weight + channel
    return tl.load(at), tl.load(at + C), tl.load(at + 2 * C), tl.load(at + 3 * C)


@triton.jit
def _convolved(x0, x1, x2, x3, taps):
    """SiLU of the convolution, rounded like the input, as fp32 [ROWS, WIDTH]."""
    w0, w1, w2, w3 = taps
    total = x0.to(tl.float32) * w0 + x1.to(tl.float32) * w1 + x2.to(tl.float32) * w2 + x3.to(tl.float32) * w3
    y = total / (1 + tl.exp(-total))
    return y.to(x3.dtype).to(tl.float32)


@triton.jit
def _log_decay(f, rate, BOUND: tl.constexpr, bound):
    if BOUND:
        return bound / (1 + tl.exp(-rate * f))
    # softplus = max(f, 0) + log(1 + y), y = exp(-|f|); a series where 1 + y would swallow y.
    y = tl.exp(-tl.abs(f))
    return -rate * (tl.maximum(f, 0) + tl.where(y < 1e-3, y * (1 - y * (0.5 - y / 3)), tl.log(1 + y)))


@triton.jit
def _live(here, n, W, SLOTS: tl.constexpr):
    """Slots, the window's row in each, and which are live. here: slot of row 0."""
    slot = tl.arange(0, SLOTS)
    i = _slot(slot + W - here, W)
    return slot, i, (i < n) & (slot < W)


@triton.jit
def _gate(h, here, n, W, gate, gate_row, SLOTS: tl.constexpr, V: tl.constexpr):
    """One head's output gate logits by slot."""
    slot, _, live = _live(here, n, W, SLOTS)
    at = (slot * gate_row)[:, None] + (h * V + tl.arange(0, V))[None, :]
    return tl.load(gate + at, mask=live[:, None], other=0)


@triton.jit
def _finish(h, here, n, W, outputs, logits, weight, out, eps, H, SLOTS: tl.constexpr, V: tl.constexpr):
    """Gated RMS norm of one head's rows [W, V], by slot; zeros where no row is live."""
    v = tl.arange(0, V)[None, :]
    slot, i, live = _live(here, n, W, SLOTS)
    both = live[:, None]
    o = tl.load(outputs + (i * V)[:, None] + v, mask=both, other=0)
    scale = 1 / tl.sqrt(tl.sum(o * o, 1) / V + eps)
    y = o * scale[:, None] * weight[None, :] / (1 + tl.exp(-logits.to(tl.float32)))
    y = tl.where(both, y, 0).to(out.dtype.element_ty)
    tl.store(out + (slot * H * V)[:, None] + h * V + v, y, mask=(slot < W)[:, None])


@triton.jit
def _keep(
    h, here, n, W, x, x_row, f, f_row, b, b_row, log_x, log_f, log_b, C, H, q_at, k_at, v_at, SLOTS: tl.constexpr,
    K: tl.constexpr
):  # fmt: skip
    """Copies one head's live rows into the log."""
    slot, _, live = _live(here, n, W, SLOTS)
    both = live[:, None]
    source = x + (slot * x_row)[:, None]
    q_row = tl.load(source + q_at, mask=both)
    k_row = tl.load(source + k_at, mask=both)
    v_row = tl.load(source + v_at, mask=both)
    f_line = tl.load(f + (slot * f_row)[:, None] + q_at, mask=both)
    beta = tl.load(b + slot * b_row + h, mask=live)
    target = log_x + (slot * C)[:, None]
    tl.store(target + q_at, q_row, mask=both)
    tl.store(target + k_at, k_row, mask=both)
    tl.store(target + v_at, v_row, mask=both)
    tl.store(log_f + (slot * H * K)[:, None] + q_at, f_line, mask=both)
    tl.store(log_b + slot * H + h, beta, mask=live)


@triton.jit
def _window_rows(accepted, first, W, conv, conv_row, log_x, C, channel):
    """The three inputs the convolution window holds behind the accepted rows, [4, WIDTH]; the fourth is nothing."""
    j = tl.arange(0, 4)
    source = _row(accepted - 3 + j, accepted, first, W, conv, conv_row, log_x, C, log_x, C)
    return tl.load(source + channel, mask=(j < 3)[:, None], other=0)


@triton.jit
def _move_window(accepted, conv, conv_row, channel, rows):
    j = tl.arange(0, 4)
    tl.store(conv + (j * conv_row)[:, None] + channel, rows, mask=((j < 3) & (accepted > 0))[:, None])
