"""KDA prefill on a GPU: what can be done for all chunks at once (prefill_inside_triton), then the walk of the state
from chunk to chunk. Chunks have 32 tokens.

`_walk` carries tiles of the state, in registers, along the chunks. With few heads that would leave most of the chip
idle: then the tokens are cut into segments. What a segment does to a state is affine, S -> S P + Q, so `_walk` first
finds (P, Q) of all segments but the last at the same time, `_join` applies them one behind the other, and `_walk` runs
again, all segments together, from the right states.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from k3_kernels.kda.prefill_inside_triton import inside, inside_exact, invert

CHUNK = 32
WORKSPACE = 768 << 20
"""Bytes of scratch memory of a call; longer calls are made of several."""
RESIDENT = 256
"""Programs of the walk that should run at once: segments are cut until there are about that many."""


@triton.jit(do_not_specialize=["first", "n", "each"])
def _walk(
    k_start, q_start, k_end, solve, mix, decay, beta, v, o, start, end, first, n, each, H,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BV: tl.constexpr,
    OUTPUT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Rows [tile BV, (tile + 1) BV) of one head's state through the chunks of one segment.

    With OUTPUT: from start [segments, H, V, K], writes o, and the last segment writes end [H, V, K]. Without: rows
    below V begin at zero, the K rows behind them at the identity and see no values; all segments write their
    end [segments, H, V + K, K]. k_start to mix, v and o are tensor descriptors: of [chunks H C, K], of
    [chunks H C, C] and of [T, H V].
    """
    tile = tl.program_id(0)
    head = tl.program_id(1)
    segment = tl.program_id(2)
    row = tile * BV + tl.arange(0, BV)
    c = tl.arange(0, C)
    d = tl.arange(0, K)
    kind: tl.constexpr = k_start.dtype
    if OUTPUT:
        S = tl.load(start + ((segment * H + head) * V + row[:, None]) * K + d[None, :])
    else:
        S = tl.where(row[:, None] - V == d[None, :], 1.0, 0.0)
    valued = tile * BV < V
    channel = head * V + tl.where(valued, tile * BV, 0)
    for chunk in tl.range(segment * each, tl.minimum(segment * each + each, n), num_stages=STAGES):
        at = chunk * H + head
        keys = k_start.load([at * C, 0])
        solved = solve.load([at * C, 0])
        ends = k_end.load([at * C, 0])
        values = tl.where(valued, v.load([first + chunk * C, channel]).to(tl.float32), 0.0)
        fade = tl.load(decay + at * K + d)
        rate = tl.load(beta + at * C + c)
        held = S.to(kind)
        rest = tl.trans(values) - tl.dot(held, tl.trans(keys), input_precision=PRECISION)
        rest *= rate[None, :]
        # The unit diagonal of the inverse stays outside of the product: most of u is never rounded.
        u = tl.dot(rest.to(kind), tl.trans(solved), rest, input_precision=PRECISION)
        near = u.to(kind)
        if OUTPUT:
            out = tl.dot(held, tl.trans(q_start.load([at * C, 0])), input_precision=PRECISION)
            out = tl.dot(near, tl.trans(mix.load([at * C, 0])), out, input_precision=PRECISION)
            o.store([first + chunk * C, channel], tl.trans(out).to(o.dtype))
        S = tl.dot(near, ends, S * fade[None, :], input_precision=PRECISION)
        if SPLIT:
            S = tl.dot((u - near.to(tl.float32)).to(kind), ends, S, input_precision=PRECISION)
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
    """[T, H, D] whose heads lie one behind the other, at addresses that are multiples of 16 bytes; tokens may be slices
    of something wider."""
    aligned = x.stride(0) * x.itemsize % 16 == 0 and x.data_ptr() % 16 == 0
    whole = x.stride(2) == 1 and x.stride(1) == x.shape[2]
    return x if aligned and whole else x.clone(memory_format=torch.contiguous_format)


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
    tiles = torch.empty(3, n * H * CHUNK, K, dtype=kind, device=device)
    squares = torch.empty(2, n * H * CHUNK, CHUNK, dtype=kind, device=device)
    decay = torch.empty(n * H, K, dtype=torch.float32, device=device)
    beta = torch.empty(n * H, CHUNK, dtype=torch.float32, device=device)
    precision = "tf32x3" if kind == torch.float32 else "tf32"
    # Until it is inverted, the system is kept as fp16 when activations have 16 bits.
    system = squares[0] if kind == torch.float32 else squares[0].view(torch.float16)
    bound = 0.0 if lower_bound is None else lower_bound
    given = (q, k, f, b, A_log, dt_bias, bound, stop, first, H, q.stride(0), k.stride(0), f.stride(0), b.stride(0))
    found = (*tiles, system, squares[1], decay, beta)
    if lower_bound is not None and -5 <= lower_bound <= 0:
        D = min(K, tuning.get("channels", 128))
        options = {"num_warps": tuning.get("inside_warps", 4), "maxnreg": tuning.get("registers")}
        inside[(n * H,)](*given, *found, K=K, C=CHUNK, D=D, PRECISION=precision, **options)
    else:
        inside_exact[(n * H,)](*given, *found, K=K, C=CHUNK, BOUNDED=lower_bound is not None, num_warps=4)
    invert[(n * H,)](system, squares[0], C=CHUNK, num_warps=1)
    BV = min(V, K, tuning.get("rows", 64))
    settings = {
        "K": K, "V": V, "C": CHUNK, "BV": BV, "PRECISION": precision, "SPLIT": tuning.get("split", True),
        "STAGES": tuning.get("stages", 3) if kind != torch.float32 else 1, "num_warps": tuning.get("warps", 4),
    }  # fmt: skip
    tokens = [TensorDescriptor.from_tensor(x.flatten(1), [CHUNK, BV]) for x in (v, o)]
    shared = (
        *(TensorDescriptor.from_tensor(x, [CHUNK, K]) for x in tiles),
        *(TensorDescriptor.from_tensor(x, [CHUNK, CHUNK]) for x in squares),
        decay,
        beta,
        *tokens,
    )
    if segments < 1:
        segments = max(1, min(RESIDENT // (H * (V // BV)), n // 16))
    each = triton.cdiv(n, segments)
    segments = triton.cdiv(n, each)
    new = torch.empty_like(state)
    if segments > 1:
        start = torch.empty(segments, H, V, K, dtype=torch.float32, device=device)
        start[0] = state
        affine = torch.empty(segments - 1, H, V + K, K, dtype=torch.float32, device=device)
        _walk[((V + K) // BV, H, segments - 1)](*shared, start, affine, first, n, each, H, OUTPUT=False, **settings)
        _join[(V // 16, H)](affine, start, segments, H, K=K, V=V, BV=16, num_warps=8)
        state = start
    _walk[(V // BV, H, segments)](*shared, state, new, first, n, each, H, OUTPUT=True, **settings)
    return new
