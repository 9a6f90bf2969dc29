"""Rows of a KDA step on Hopper, in Gluon: their inputs, and what the recurrence takes, a row a warp and four channels a
thread. As `step_rows_triton`, with sums and products written out so that no compilation rounds in another way, and the
approximate functions of the hardware, which cost an instruction where the libraries' take five.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

L2_EPS = gl.constexpr(1e-6)


@gluon.jit
def _slot(row, W):
    """row mod W for 0 <= row < 3 W."""
    row = gl.where(row >= W, row - W, row)
    return gl.where(row >= W, row - W, row)


@gluon.jit
def _row(s, slot, accepted, conv, conv_row, log, C, x, x_row):
    """Addresses of the convolution inputs of the timeline's rows s: window in front, then log, then projections. slot:
    of rows s that are not in front."""
    logged = gl.where(s < accepted, log + slot * C, x + slot * x_row)
    return gl.where(s < 0, conv + (s + 3) * conv_row, logged)[:, None]


@gluon.jit
def _before(slot, W):
    return gl.where(slot == 0, W, slot) - 1


@gluon.jit
def _inputs(
    t, total, accepted, first, W, conv, conv_row, log_x, x, x_row, log_f, f, f_row, log_b, b, b_row, h,
    H: gl.constexpr, K: gl.constexpr, V: gl.constexpr, R: gl.constexpr, LIVE: gl.constexpr,
):  # fmt: skip
    """What rows t are made of: the four convolution inputs of q, k and v, oldest first, then f and b.

    Rows behind the last hold anything, and nothing made of them is used; so do queries of accepted rows.
    """
    HK: gl.constexpr = H * K
    C: gl.constexpr = 2 * HK + H * V
    d = h * K + gl.arange(0, K, gl.SliceLayout(0, R))[None, :]
    inside = (t < total)[:, None]
    asked = inside & (t >= accepted)[:, None]
    slot = _slot(first + t, W)
    p3 = _row(t, slot, accepted, conv, conv_row, log_x, C, x, x_row) + d
    two = _before(slot, W)
    p2 = _row(t - 1, two, accepted, conv, conv_row, log_x, C, x, x_row) + d
    one = _before(two, W)
    p1 = _row(t - 2, one, accepted, conv, conv_row, log_x, C, x, x_row) + d
    p0 = _row(t - 3, _before(one, W), accepted, conv, conv_row, log_x, C, x, x_row) + d
    f_line = gl.where(t < accepted, log_f + slot * HK, f + slot * f_row)[:, None]
    b_line = gl.where(t < accepted, log_b + slot * H, b + slot * b_row)
    k_rows = _four(p0 + HK, p1 + HK, p2 + HK, p3 + HK, inside)
    v_rows = _four(p0 + 2 * HK, p1 + 2 * HK, p2 + 2 * HK, p3 + 2 * HK, inside)
    q_rows = _four(p0, p1, p2, p3, asked) if LIVE else k_rows
    return k_rows, v_rows, q_rows, gl.load(f_line + d, mask=inside), gl.load(b_line + h, mask=t < total)


@gluon.jit
def _four(p0, p1, p2, p3, mask):
    return gl.load(p0, mask=mask), gl.load(p1, mask=mask), gl.load(p2, mask=mask), gl.load(p3, mask=mask)


@gluon.jit
def _taps(at, C: gl.constexpr):
    """The four taps of channels, oldest row first."""
    return gl.load(at), gl.load(at + C), gl.load(at + 2 * C), gl.load(at + 3 * C)


@gluon.jit
def _exp(x):
    """e to the x: within 2 units in the last place of a float32 for x near 0, within |x| / 16e6 further out."""
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x * 1.4426950408889634], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _sigmoid(x):
    return gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [1 + _exp(-x)], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _rsqrt(x):
    return gl.inline_asm_elementwise(
        "rsqrt.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _times(a, b):
    """a b, rounded: for the first of a sum of products. Each of the others is fused with the sum so far; of the first
    two it would be left to the compiler which one is, and it has chosen otherwise in different places."""
    return gl.inline_asm_elementwise("mul.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _squares(x, first):
    """Sums of squares along the second dimension. first: which channels are the first of a thread's."""
    return gl.sum(gl.where(first, _times(x, x), x * x), 1)


@gluon.jit
def _rounded(x, kind: gl.constexpr):
    """fp32 x to what `kind` can hold, as fp32."""
    if kind == gl.bfloat16:
        # Two at a time, which is an instruction of full rate; one at a time isn't.
        return gl.inline_asm_elementwise(
            "{ .reg .b32 both; cvt.rn.bf16x2.f32 both, $3, $2; shl.b32 $0, both, 16; and.b32 $1, both, 0xffff0000; }",
            "=r,=r,r,r", [x], dtype=gl.float32, is_pure=True, pack=2,
        )  # fmt: skip
    return x.to(kind).to(gl.float32)


@gluon.jit
def _convolved(rows, taps):
    """SiLU of the convolution, rounded like the input, as fp32 [ROWS, WIDTH]."""
    x0, x1, x2, x3 = rows
    w0, w1, w2, w3 = taps
    # Written as fused products, so that nothing is left to the compiler: rows are prepared in more than one place.
    total = x0.to(gl.float32) * w0
    total = gl.fma(x1.to(gl.float32), w1, total)
    total = gl.fma(x2.to(gl.float32), w2, total)
    total = gl.fma(x3.to(gl.float32), w3, total)
    return _rounded(total * _sigmoid(total), x3.dtype)


@gluon.jit
def _log_decay(f, rate, BOUND: gl.constexpr, bound):
    if BOUND:
        return bound * _sigmoid(rate * f)
    # softplus = max(f, 0) + log(1 + y), y = exp(-|f|); a series where 1 + y would swallow y.
    y = _exp(-gl.abs(f))
    return -rate * (gl.maximum(f, 0.0) + gl.where(y < 1e-3, y * (1 - y * (0.5 - y / 3)), gl.log(1 + y)))
