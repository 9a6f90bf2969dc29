"""KDA prefill on a GPU, the part that knows nothing of the state and runs for all chunks in parallel: gate, norms, the
two triangular matrices of a chunk, the inverse of one of them.

Decays are powers of two, in log2 until they multiply. With |lower bound| <= 5 (`inside`) a pair's decay is the product
of a row and a column factor, 2^(G_t + SHIFT) and 2^(-G_s - SHIFT), G the running sum in the chunk: over 32 tokens both
stay inside what fp32 and bf16 can hold, and no anchor depends on the data. Without such a bound (`inside_exact`) every
pair's decay is the exponential of the sum between the two tokens, never positive.

Both write, for chunk c of head h in line c H + h, C tokens each: k_start = k e^(decay since the chunk began), q_start
the same of q, k_end = k e^(decay to the chunk's end), beta, solve = beta A and mix = B, both below the diagonal, the
diagonal of B (itself); and the decay of the whole chunk.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
L2_EPS = tl.constexpr(1e-6)
LOG2E = tl.constexpr(1.4426950408889634)
SHIFT = tl.constexpr(115.0)
"""Half of the largest sum of log2 decays of a chunk: 32 x 5 nats are 231 in log2; exponents of fp32 reach 126."""
GONE = tl.constexpr(-150.0)
"""log2 of a decay that leaves nothing of an fp32; smaller ones are raised to it, so that sums keep their digits."""


@triton.jit
def _exp2(x):
    """2^x; what is below the smallest normal number is 0, which saves three instructions an element."""
    if INTERPRETED:
        y = tl.exp2(x)
    else:
        y = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    return y


@triton.jit
def _inverse_of_more(x):
    """1 / (1 + x), x >= 0 or infinite, to the last digit."""
    y = 1.0 + x
    if INTERPRETED:
        y = 1.0 / y
    else:
        y = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [y], tl.float32, True, 1)
    return y


@triton.jit
def _sigmoid(x, rate):
    """sigmoid(rate x)."""
    return _inverse_of_more(_exp2(x * (rate * -LOG2E)))


@triton.jit
def _log2_decay(f, bias, rate, lower_bound, BOUNDED: tl.constexpr):
    """log2 of the decay; 0 where f is -inf, as behind the last token."""
    x = f + bias
    if BOUNDED:
        g = _sigmoid(x, rate) * (lower_bound * LOG2E)
    else:
        # softplus; log(1 + y) with the digits that 1 + y loses put back.
        y = tl.exp2(tl.abs(x) * -LOG2E)
        above = 1.0 + y
        small = tl.where(above == 1.0, y, tl.log2(above) / LOG2E * (y / tl.where(above == 1.0, 1.0, above - 1.0)))
        g = tl.maximum((tl.maximum(x, 0.0) + small) * rate * -LOG2E, GONE)
    return g


@triton.jit
def _unit(x, divisor: tl.constexpr):
    """Rows of [C, K] with l2 norm divisor^-1/2."""
    return x * tl.rsqrt((tl.sum(x * x, 1) + L2_EPS) * divisor)[:, None]


@triton.jit
def _store_squares(A, B, b, T, first, line, head, b_row, solve, mix, beta, itself, C: tl.constexpr):
    """beta, beta A and B below the diagonal, B on it; what is above may be anything, even infinite."""
    row = tl.arange(0, C)
    t = first + row
    rate = tl.load(b + t.to(tl.int64) * b_row + head, mask=t < T, other=-float("inf")).to(tl.float32)
    rate = _sigmoid(rate, 1.0)
    tl.store(beta + line * C + row, rate)
    square = line.to(tl.int64) * C * C + row[:, None] * C + row[None, :]
    later = row[:, None] > row[None, :]
    tl.store(itself + line * C + row, tl.sum(tl.where(row[:, None] == row[None, :], B, 0.0), 1))
    tl.store(mix + square, tl.where(later, B, 0.0).to(mix.dtype.element_ty))
    tl.store(solve + square, tl.where(later, A * rate[:, None], 0.0).to(solve.dtype.element_ty))


@triton.jit(do_not_specialize=["T", "first"])
def inside(
    q, k, f, b, A_log, dt_bias, lower_bound, T, first, H, q_row, k_row, f_row, b_row,
    k_start, q_start, k_end, solve, mix, decay, beta, itself,
    K: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One chunk of one head. Tiles are [C / 4, 4, K]: the four tokens of the middle dimension are a thread's own, so
    that most of a running sum is plain additions."""
    head = tl.program_id(0) % H
    chunk = tl.program_id(0) // H
    line = tl.program_id(0)
    kind: tl.constexpr = k_start.dtype.element_ty
    token = 4 * tl.arange(0, C // 4)[:, None, None] + tl.arange(0, 4)[None, :, None]
    channel = tl.arange(0, K)
    d = channel[None, None, :]
    live = first + chunk * C + token < T
    t = (first + chunk * C + token).to(tl.int64)
    at = head * K + d
    tile = line.to(tl.int64) * C * K + token * K + d
    slope = tl.exp(tl.load(A_log + head)) * -LOG2E
    scale = lower_bound * LOG2E

    bias = tl.load(dt_bias + head * K + channel) * slope
    x = tl.load(f + t * f_row + at, mask=live, other=-float("inf")).to(tl.float32)
    G = tl.cumsum(_inverse_of_more(_exp2(x * slope + bias[None, None, :])), 1)
    four = tl.max(G, 1)
    through = tl.cumsum(four, 0)
    last = tl.max(through, 0) * scale
    tl.store(decay + line * K + channel, _exp2(last))
    shifted = (G + (through - four)[:, None, :]) * scale + SHIFT
    up = _exp2(shifted)
    back = _exp2(tl.full((), -SHIFT, tl.float32))

    x = tl.load(k + t * k_row + at, mask=live, other=0.0).to(tl.float32)
    x *= tl.rsqrt(tl.sum(x * x, 2) + L2_EPS)[:, :, None]
    columns = x * _exp2(-shifted)
    tl.store(k_end + tile, (columns * _exp2(last + SHIFT)[None, None, :]).to(kind))
    columns = tl.trans(tl.reshape(columns.to(kind), (C, K)))
    rows = x * up
    tl.store(k_start + tile, (rows * back).to(kind))
    A = tl.dot(tl.reshape(rows.to(kind), (C, K)), columns, input_precision=PRECISION)

    x = tl.load(q + t * q_row + at, mask=live, other=0.0).to(tl.float32)
    rows = x * tl.rsqrt((tl.sum(x * x, 2) + L2_EPS) * K)[:, :, None] * up
    tl.store(q_start + tile, (rows * back).to(kind))
    B = tl.dot(tl.reshape(rows.to(kind), (C, K)), columns, input_precision=PRECISION)
    # Where a later token is the column, the product of factors may be infinite: chosen away, never multiplied.
    _store_squares(A, B, b, T, first + chunk * C, line, head, b_row, solve, mix, beta, itself, C)


@triton.jit(do_not_specialize=["T", "first"])
def inside_exact(
    q, k, f, b, A_log, dt_bias, lower_bound, T, first, H, q_row, k_row, f_row, b_row,
    k_start, q_start, k_end, solve, mix, decay, beta, itself,
    K: tl.constexpr, C: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """One chunk of one head, column by column of A and B."""
    head = tl.program_id(0) % H
    chunk = tl.program_id(0) // H
    line = tl.program_id(0)
    kind: tl.constexpr = k_start.dtype.element_ty
    row = tl.arange(0, C)
    d = tl.arange(0, K)
    t = first + chunk * C + row
    inside = (t < T)[:, None]
    t = t.to(tl.int64)
    at = head * K + d
    tile = line.to(tl.int64) * C * K + row[:, None] * K + d[None, :]
    rate = tl.exp(tl.load(A_log + head))
    bias = tl.load(dt_bias + at)
    kn = _unit(tl.load(k + t[:, None] * k_row + at[None, :], mask=inside, other=0.0).to(tl.float32), 1)
    qn = _unit(tl.load(q + t[:, None] * q_row + at[None, :], mask=inside, other=0.0).to(tl.float32), K)

    x = tl.load(f + t[:, None] * f_row + at[None, :], mask=inside, other=-float("inf")).to(tl.float32)
    G = tl.cumsum(_log2_decay(x, bias[None, :], rate, lower_bound, BOUNDED), 0)
    up = _exp2(G)
    tl.store(decay + line * K + d, _exp2(tl.min(G, 0)))
    tl.store(k_start + tile, (kn * up).to(kind))
    tl.store(q_start + tile, (qn * up).to(kind))
    # The gate of the row behind each row, summed from the end: nothing is ever subtracted.
    follows = (row[:, None] + 1 < C) & (t[:, None] + 1 < T)
    x = tl.load(f + (t[:, None] + 1) * f_row + at[None, :], mask=follows, other=-float("inf")).to(tl.float32)
    to_end = tl.cumsum(_log2_decay(x, bias[None, :], rate, lower_bound, BOUNDED), 0, reverse=True)
    tl.store(k_end + tile, (kn * _exp2(to_end)).to(kind))
    A = tl.zeros((C, C), tl.float32)
    B = tl.zeros((C, C), tl.float32)
    # Row t of `between`: log decay of the tokens behind j up to t.
    between = tl.zeros((C, K), tl.float32)
    for i in range(C):
        j = C - 1 - i
        s = (first + chunk * C + j).to(tl.int64)
        f_next = tl.load(f + (s + 1) * f_row + at, mask=(j + 1 < C) & (s + 1 < T), other=-float("inf")).to(tl.float32)
        g_next = _log2_decay(f_next, bias, rate, lower_bound, BOUNDED)
        between += tl.where((row[:, None] > j) & inside, g_next[None, :], 0.0)
        key = tl.load(k + s * k_row + at, mask=s < T, other=0.0).to(tl.float32)
        key *= tl.rsqrt(tl.sum(key * key, 0) + L2_EPS)
        weighted = _exp2(between) * key[None, :]
        column = row[None, :] == j
        A += tl.where(column, tl.sum(kn * weighted, 1)[:, None], 0.0)
        B += tl.where(column, tl.sum(qn * weighted, 1)[:, None], 0.0)
    _store_squares(A, B, b, T, first + chunk * C, line, head, b_row, solve, mix, beta, itself, C)


@triton.jit
def invert(solve, result, low, C: tl.constexpr):
    """(I + N)^-1 - I for one chunk of one head, N strictly lower triangular [C, C], C = 32, in the same place.

    In 16 bits low gets what rounding took: with one key again and again, entries are near -1 and act on whole values.

    Inverses of diagonal blocks of 2, 4, 8, ... come from the inverses of their halves. Rows of both are products of
    contractions, no entry exceeds 1: fp16 factors keep 11 bits. A Neumann series would cancel terms of 10^3 and more.
    """
    kind: tl.constexpr = solve.dtype.element_ty
    row = tl.arange(0, C)[:, None]
    column = tl.arange(0, C)[None, :]
    at = tl.program_id(0).to(tl.int64) * C * C + row * C + column
    N = tl.load(solve + at)
    X = tl.where(row // 2 == column // 2, -N.to(tl.float32), 0.0) + tl.where(row == column, 1.0, 0.0)
    for level in tl.static_range(1, 5):
        between = (row >> (level + 1) == column >> (level + 1)) & (row >> level > column >> level)
        half = X.to(kind)
        Y = tl.dot(tl.where(between, N, 0.0), half, input_precision="tf32x3")
        X -= tl.dot(half, Y.to(kind), input_precision="tf32x3")
    X = tl.where(row > column, X, 0.0)
    high = X.to(result.dtype.element_ty)
    tl.store(result + at, high)
    if result.dtype.element_ty != tl.float32:
        tl.store(low + at, (X - high.to(tl.float32)).to(high.dtype))
