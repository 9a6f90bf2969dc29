"""KDA prefill on a GPU: what can be done for all chunks at once, then the walk of the state from chunk to chunk.

Chunks have 32 tokens. `_inside` knows nothing of the state and runs for all chunks in parallel: gate, norms, the two
triangular matrices of a chunk, the inverse of one of them. `_walk` carries tiles of the state, in registers, along the
chunks. With few heads the walk would leave most of the chip idle: then the tokens are cut into segments. What a
segment does to a state is affine, S -> S P + Q, so `_walk` first finds (P, Q) of all segments but the last at the same
time, `_join` applies them one behind the other, and `_walk` runs again, all segments together, from the right states.

Decays are powers of two, in log2 until they multiply. A pair's decay is the product of a row and a column factor,
2^(G_t + SHIFT) and 2^(-G_s - SHIFT), G the running sum in the chunk: with |lower bound| <= 5 both stay inside what fp32
and bf16 can hold over 32 tokens, and no anchor depends on the data. Without such a bound every pair's decay is
the exponential of the sum between the two tokens, never positive.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 32
L2_EPS = tl.constexpr(1e-6)
LOG2E = tl.constexpr(1.4426950408889634)
SHIFT = tl.constexpr(115.0)
"""Half of the largest sum of log2 decays of a chunk: 32 x 5 nats are 231 in log2; exponents of fp32 reach 126."""
GONE = tl.constexpr(-150.0)
"""log2 of a decay that leaves nothing of an fp32; smaller ones are raised to it, so that sums keep their digits."""

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
WORKSPACE = 768 << 20
"""Bytes of scratch memory of a call; longer calls are made of several."""
RESIDENT = 256
"""Programs of the walk that should run at once: segments are cut until there are about that many."""


@triton.jit
def _exp2(x):
    """2^x; what is below the smallest normal number is 0, which saves three instructions an element."""
    if INTERPRETED:
        y = tl.exp2(x)
    else:
        y = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    return y


@triton.jit
def _sigmoid(x, rate):
    """sigmoid(rate x), to the last digit or two."""
    y = 1.0 + _exp2(x * (rate * -LOG2E))
    if INTERPRETED:
        y = 1.0 / y
    else:
        y = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [y], tl.float32, True, 1)
    return y


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
def _inverse(N, C: tl.constexpr, KIND: tl.constexpr):
    """(I + N)^-1, N strictly lower triangular [C, C], C = 32: inverses of diagonal blocks of 2, 4, 8, ... from the
    inverses of their halves. Rows of both are products of contractions, no entry exceeds 1: fp16 factors (KIND) keep
    11 bits. A Neumann series would cancel terms of size 10^3 and more."""
    row = tl.arange(0, C)[:, None]
    column = tl.arange(0, C)[None, :]
    X = tl.where(row == column, 1.0, tl.where((row // 2 == column // 2) & (row > column), -N, 0.0))
    for level in tl.static_range(1, 5):
        between = (row >> (level + 1) == column >> (level + 1)) & (row >> level > column >> level)
        half = X.to(KIND)
        Y = tl.dot(tl.where(between, N, 0.0).to(KIND), half, input_precision="tf32x3")
        X -= tl.dot(half, Y.to(KIND), input_precision="tf32x3")
    return X


@triton.jit(do_not_specialize=["T", "first", "n"])
def _inside(
    q, k, f, b, A_log, dt_bias, lower_bound, T, first, n, H,
    q_row, k_row, f_row, b_row,
    k_start, q_start, k_end, solve, mix, decay,
    K: tl.constexpr, C: tl.constexpr, BOUNDED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One chunk of one head. Writes, C tokens each: k_start = k e^(decay since the chunk began), q_start the same of
    q, k_end = k e^(decay to the chunk's end), solve = (I + beta A)^-1 diag(beta), mix = B; and the chunk's decay."""
    head = tl.program_id(0) % H
    chunk = tl.program_id(0) // H
    row = tl.arange(0, C)
    d = tl.arange(0, K)
    t = first + chunk * C + row
    live = t < T
    t = t.to(tl.int64)
    at = head * K + d
    inside = live[:, None]
    rate = tl.exp(tl.load(A_log + head))
    bias = tl.load(dt_bias + at)

    x = tl.load(f + t[:, None] * f_row + at[None, :], mask=inside, other=-float("inf")).to(tl.float32)
    G = tl.cumsum(_log2_decay(x, bias[None, :], rate, lower_bound, BOUNDED), 0)
    last = tl.min(G, 0)
    tl.store(decay + (chunk * H + head) * K + d, _exp2(last))

    kind: tl.constexpr = k_start.dtype.element_ty
    half: tl.constexpr = tl.float32 if kind == tl.float32 else tl.float16
    tile = (chunk * H + head).to(tl.int64) * C * K + row[:, None] * K + d[None, :]
    square = (chunk * H + head).to(tl.int64) * C * C + row[:, None] * C + row[None, :]
    kn = _unit(tl.load(k + t[:, None] * k_row + at[None, :], mask=inside, other=0.0).to(tl.float32), 1)
    qn = tl.load(q + t[:, None] * q_row + at[None, :], mask=inside, other=0.0).to(tl.float32)
    qn = _unit(qn, K)
    causal = row[:, None] >= row[None, :]
    if BOUNDED:
        shifted = G + SHIFT
        up = _exp2(shifted)
        down = _exp2(-shifted)
        columns = kn * down
        tl.store(k_end + tile, (columns * _exp2(last + SHIFT)[None, :]).to(kind))
        back = _exp2(tl.full((), -SHIFT, tl.float32))
        rows = kn * up
        tl.store(k_start + tile, (rows * back).to(kind))
        columns_t = tl.trans(columns.to(kind))
        A = tl.dot(rows.to(kind), columns_t, input_precision=PRECISION)
        rows = qn * up
        tl.store(q_start + tile, (rows * back).to(kind))
        B = tl.dot(rows.to(kind), columns_t, input_precision=PRECISION)
    else:
        up = _exp2(G)
        tl.store(k_start + tile, (kn * up).to(kind))
        tl.store(q_start + tile, (qn * up).to(kind))
        # The gate of the row behind each row, summed from the end: nothing is ever subtracted.
        follows = (row[:, None] + 1 < C) & (t[:, None] + 1 < T)
        x = tl.load(f + (t[:, None] + 1) * f_row + at[None, :], mask=follows, other=-float("inf")).to(tl.float32)
        g = _log2_decay(x, bias[None, :], rate, lower_bound, BOUNDED)
        tl.store(k_end + tile, (kn * _exp2(tl.cumsum(g, 0, reverse=True))).to(kind))
        A = tl.zeros((C, C), tl.float32)
        B = tl.zeros((C, C), tl.float32)
        between = tl.zeros((C, K), tl.float32)
        for i in range(C):
            j = C - 1 - i
            s = (first + chunk * C + j).to(tl.int64)
            # Row t of `between`: log decay of the tokens behind j up to t.
            f_next = tl.load(f + (s + 1) * f_row + at, mask=(j + 1 < C) & (s + 1 < T), other=-float("inf")).to(
                tl.float32
            )
            g_row = _log2_decay(f_next, bias, rate, lower_bound, BOUNDED)
            between += tl.where((row[:, None] > j) & inside, g_row[None, :], 0.0)
            key = tl.load(k + s * k_row + at, mask=s < T, other=0.0).to(tl.float32)
            key *= tl.rsqrt(tl.sum(key * key, 0) + L2_EPS)
            weighted = _exp2(between) * key[None, :]
            column = row[None, :] == j
            A += tl.where(column, tl.sum(kn * weighted, 1)[:, None], 0.0)
            B += tl.where(column, tl.sum(qn * weighted, 1)[:, None], 0.0)
    beta = _sigmoid(tl.load(b + t * b_row + head, mask=live, other=-float("inf")).to(tl.float32), 1.0)
    # Where a later token is the column, the product of factors may be infinite: chosen away, never multiplied.
    tl.store(mix + square, tl.where(causal, B, 0.0).to(kind))
    X = _inverse(tl.where(row[:, None] > row[None, :], A * beta[:, None], 0.0), C, half)
    beta_t = tl.sum(tl.where(row[:, None] == row[None, :], beta[:, None], 0.0), 0)
    tl.store(solve + square, (X * beta_t[None, :]).to(kind))


@triton.jit(do_not_specialize=["T", "first", "n", "each"])
def _walk(
    k_start, q_start, k_end, solve, mix, decay, v, o, start, end, T, first, n, each, H, v_row,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BV: tl.constexpr,
    OUTPUT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Rows [tile BV, (tile + 1) BV) of one head's state through the chunks of one segment.

    With OUTPUT: from start [segments, H, V, K], writes o, and the last segment writes end [H, V, K]. Without: rows
    below V begin at zero, the K rows behind them at the identity and see no values; all segments write their
    end [segments, H, V + K, K].
    """
    tile = tl.program_id(0)
    head = tl.program_id(1)
    segment = tl.program_id(2)
    row = tile * BV + tl.arange(0, BV)
    c = tl.arange(0, C)
    d = tl.arange(0, K)
    kind: tl.constexpr = k_start.dtype.element_ty
    if OUTPUT:
        S = tl.load(start + ((segment * H + head) * V + row[:, None]) * K + d[None, :])
    else:
        S = tl.where(row[:, None] - V == d[None, :], 1.0, 0.0)
    valued = row < V
    for chunk in tl.range(segment * each, tl.minimum(segment * each + each, n), num_stages=STAGES):
        base = (chunk * H + head).to(tl.int64)
        tiles = base * (C * K)
        squares = base * (C * C)
        t = first + chunk * C + c
        live = t < T
        t = t.to(tl.int64)
        keys = tl.load(k_start + tiles + d[:, None] + c[None, :] * K)
        if OUTPUT:
            queries = tl.load(q_start + tiles + d[:, None] + c[None, :] * K)
            mixed = tl.load(mix + squares + c[:, None] + c[None, :] * C)
        solved = tl.load(solve + squares + c[:, None] + c[None, :] * C)
        ends = tl.load(k_end + tiles + c[:, None] * K + d[None, :])
        fade = tl.load(decay + base * K + d)
        where = valued[:, None] & live[None, :]
        values = tl.load(v + t[None, :] * v_row + head * V + row[:, None], mask=where, other=0.0).to(tl.float32)
        held = S.to(kind)
        rest = values - tl.dot(held, keys, input_precision=PRECISION)
        u = tl.dot(rest.to(kind), solved, input_precision=PRECISION).to(kind)
        if OUTPUT:
            out = tl.dot(held, queries, input_precision=PRECISION)
            out = tl.dot(u, mixed, out, input_precision=PRECISION)
            tl.store(o + (t[None, :] * H + head) * V + row[:, None], out.to(o.dtype.element_ty), mask=where)
        S = tl.dot(u, ends, S * fade[None, :], input_precision=PRECISION)
    if OUTPUT:
        if segment == tl.num_programs(2) - 1:
            tl.store(end + (head * V + row[:, None]) * K + d[None, :], S)
    else:
        tl.store(end + ((segment * H + head) * (V + K) + row[:, None]) * K + d[None, :], S)


@triton.jit(do_not_specialize=["segments"])
def _join(affine, start, segments, H, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr):
    """start[0] is given; start[i + 1] = start[i] P_i + Q_i, with affine [segments - 1, H, V + K, K] = (Q, P)."""
    row = tl.program_id(0) * BV + tl.arange(0, BV)
    head = tl.program_id(1)
    d = tl.arange(0, K)
    S = tl.load(start + (head * V + row[:, None]) * K + d[None, :])
    for segment in range(segments - 1):
        base = affine + (segment * H + head) * (V + K) * K
        P = tl.load(base + (V + d[:, None]) * K + d[None, :])
        Q = tl.load(base + row[:, None] * K + d[None, :])
        S = tl.dot(S, P, Q, input_precision="tf32x3")
        tl.store(start + (((segment + 1) * H + head) * V + row[:, None]) * K + d[None, :], S)


def prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    f: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float | None,
    state: Tensor,
    *,
    segments: int = 0,
    **tuning: Any,
) -> tuple[Tensor, Tensor]:
    """`kda.prefill` for K and V powers of two, 16 to 128. segments: into how many a call is cut, 0 chooses."""
    T, H, K = q.shape
    V = v.shape[-1]
    kind = v.dtype
    q, k, v, f = (_rows(x.to(kind)) for x in (q, k, v, f))
    b = b if b.stride(-1) == 1 else b.contiguous()
    o = torch.empty(T, H, V, dtype=kind, device=v.device)
    new = state.contiguous()
    if T == 0:
        return o, state.clone()
    # Bytes of one chunk of all heads.
    unit = H * (kind.itemsize * CHUNK * (3 * K + 2 * CHUNK) + 4 * K)
    most = max(WORKSPACE // unit, 1) * CHUNK
    for first in range(0, T, most):
        new = _slab(q, k, v, f, b, A_log, dt_bias, lower_bound, new, o, first, min(T, first + most), segments, tuning)
    return o, new


def _rows(x: Tensor) -> Tensor:
    """[T, H, D] whose heads lie one behind the other; tokens may be slices of something wider."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def _slab(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    f: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float | None,
    state: Tensor,
    o: Tensor,
    first: int,
    stop: int,
    segments: int,
    tuning: dict[str, Any],
) -> Tensor:
    """Tokens [first, stop) into o; returns the state behind them."""
    H, V, K = state.shape
    kind, device = v.dtype, v.device
    n = triton.cdiv(stop - first, CHUNK)
    tiles = torch.empty(3, n, H, CHUNK, K, dtype=kind, device=device)
    squares = torch.empty(2, n, H, CHUNK, CHUNK, dtype=kind, device=device)
    decay = torch.empty(n, H, K, dtype=torch.float32, device=device)
    precision = "tf32x3" if kind == torch.float32 else "tf32"
    bounded = lower_bound is not None and lower_bound >= -5
    _inside[(n * H,)](
        q, k, f, b, A_log, dt_bias, 0.0 if lower_bound is None else lower_bound, stop, first, n, H,
        q.stride(0), k.stride(0), f.stride(0), b.stride(0), *tiles, *squares, decay,
        K=K, C=CHUNK, BOUNDED=bounded, PRECISION=precision, num_warps=tuning.get("inside_warps", 4),
    )  # fmt: skip
    BV = min(V, K, tuning.get("rows", 64))
    settings = {
        "K": K, "V": V, "C": CHUNK, "BV": BV, "PRECISION": precision,
        "STAGES": tuning.get("stages", 3) if kind != torch.float32 else 1, "num_warps": tuning.get("warps", 4),
    }  # fmt: skip
    shared = (*tiles, *squares, decay, v, o)
    if segments < 1:
        segments = max(1, min(RESIDENT // (H * (V // BV)), n // 16))
    each = triton.cdiv(n, segments)
    segments = triton.cdiv(n, each)
    new = torch.empty_like(state)
    if segments > 1:
        start = torch.empty(segments, H, V, K, dtype=torch.float32, device=device)
        start[0] = state
        affine = torch.empty(segments - 1, H, V + K, K, dtype=torch.float32, device=device)
        _walk[((V + K) // BV, H, segments - 1)](
            *shared, start, affine, stop, first, n, each, H, v.stride(0), OUTPUT=False, **settings
        )
        _join[(V // 16, H)](affine, start, segments, H, K=K, V=V, BV=16, num_warps=8)
        state = start
    _walk[(V // BV, H, segments)](*shared, state, new, stop, first, n, each, H, v.stride(0), OUTPUT=True, **settings)
    return new
