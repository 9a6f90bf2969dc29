"""Mixing over depth and the RMS norm behind it, one program a token.

The sources of a token (up to 16 rows) are read once and stay in registers, as they came, from the scores to the sum.
Two reductions go across the program: all scores and squares at once, then the square of the mix.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _statistics(x, query, BD: tl.constexpr):
    """Sums of squares and of products with the query over eight neighbours: [BD/8, 2]."""
    full = x.to(tl.float32)
    square = tl.sum(tl.reshape(full * full, (BD // 8, 8)), 1)
    score = tl.sum(tl.reshape(full * query, (BD // 8, 8)), 1)
    return tl.join(square, score)


@triton.jit
def _joined(parts, COUNT: tl.constexpr):
    """COUNT equal tensors (a power of two) as one with a last dimension for each bit of their number, highest first."""
    if COUNT == 1:
        return parts[0]
    else:
        half = ()
        for i in tl.static_range(COUNT // 2):
            half = half + (tl.join(parts[i], parts[i + COUNT // 2]),)
        return _joined(half, COUNT // 2)


@triton.jit
def _mix(
    sources,
    stride_m,
    stride_t,
    query,
    weight,
    added,
    out,
    mix_eps,
    norm_eps,
    M: tl.constexpr,
    MP: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    ADD: tl.constexpr,
    NORM: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BD)
    inside = column < D
    at = sources + t * stride_t + column
    xs = ()
    for m in tl.static_range(M):
        x = tl.load(at + m * stride_m, mask=inside, other=0.0)
        if ADD and m == M - 1:
            x = (x.to(tl.float32) + tl.load(added + t * D + column, mask=inside, other=0.0).to(tl.float32)).to(x.dtype)
            tl.store(at + m * stride_m, x, mask=inside)
        xs = xs + (x,)
    q = tl.load(query + column, mask=inside, other=0.0)
    parts = ()
    for m in tl.static_range(MP):
        if m < M:
            parts = parts + (_statistics(xs[m], q, BD),)
        else:
            parts = parts + (tl.zeros((BD // 8, 2), tl.float32),)
    total = tl.reshape(tl.sum(_joined(parts, MP), 0), (2, MP))
    square, score = tl.split(tl.permute(total, (1, 0)))
    index = tl.arange(0, MP)
    score = tl.where(index < M, score * tl.rsqrt(square / D + mix_eps), float("-inf"))
    share = tl.exp(score - tl.max(score, 0))
    share = share / tl.sum(share, 0)
    mixed = tl.zeros((BD,), tl.float32)
    for m in tl.static_range(M):
        mixed += tl.sum(tl.where(index == m, share, 0.0), 0) * xs[m].to(tl.float32)
    found = mixed.to(out.dtype.element_ty)
    if NORM:
        full = found.to(tl.float32)
        scale = tl.rsqrt(tl.sum(full * full, 0) / D + norm_eps)
        w = tl.load(weight + column, mask=inside, other=0.0)
        found = ((full * scale).to(out.dtype.element_ty).to(tl.float32) * w.to(tl.float32)).to(out.dtype.element_ty)
    tl.store(out + t * D + column, found, mask=inside)


def mix_norm(
    sources: Tensor,
    query: Tensor,
    weight: Tensor | None,
    mix_eps: float,
    norm_eps: float,
    add: Tensor | None = None,
    *,
    warps: int = 16,
) -> Tensor:
    """The kernel's form of `k3_kernels.attnres.mix_norm`, without the norm when there is no weight."""
    M, T, D = sources.shape
    out = torch.empty(T, D, dtype=sources.dtype, device=sources.device)
    if T:
        BD = max(8, triton.next_power_of_2(D))
        _mix[(T,)](
            sources, sources.stride(0), sources.stride(1), query, out if weight is None else weight,
            out if add is None else add, out, mix_eps, norm_eps,
            M, triton.next_power_of_2(M), D, BD, add is not None, weight is not None,
            num_warps=max(1, min(warps, BD // 256)),
        )  # fmt: skip
    return out
