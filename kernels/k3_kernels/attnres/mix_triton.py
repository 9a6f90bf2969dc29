"""Mixing over depth and the RMS norm behind it.

Many tokens: one program a token reads its sources (up to 16 rows) once and keeps them in registers, as they came, from
the scores to the sum; two reductions go across the program.

Few tokens with more than six sources: a program would be alone on its processor and bound by its instructions, so the
width is cut into chunks.
`_gram` multiplies a chunk of the sources with itself and with the query; those products are all that scores, squares
and the square of the mix are made of. `_apply` adds them up over the chunks, in order, and mixes its own chunk.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

FEW, FEW_SOURCES, CHUNK, WIDTH = 16, 6, 512, 64


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
    EARLY: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BD)
    inside = column < D
    q = tl.load(query + column, mask=inside, other=0.0)
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    at = sources + t * stride_t + column
    xs = ()
    for m in tl.static_range(M):
        x = tl.load(at + m * stride_m, mask=inside, other=0.0)
        if ADD and m == M - 1:
            x = (x.to(tl.float32) + tl.load(added + t * D + column, mask=inside, other=0.0).to(tl.float32)).to(x.dtype)
            tl.store(at + m * stride_m, x, mask=inside)
        xs = xs + (x,)
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


@triton.jit
def _gram(
    sources,
    stride_m,
    stride_t,
    query,
    added,
    grams,
    M: tl.constexpr,
    D: tl.constexpr,
    CHUNK: tl.constexpr,
    ADD: tl.constexpr,
    EARLY: tl.constexpr,
):
    """grams[t, chunk] [16, 16]: products of sources over a chunk, and in column 15 those with the query."""
    t = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1)
    column = c * CHUNK + tl.arange(0, CHUNK)
    row = tl.arange(0, 16)
    inside = column < D
    q = tl.load(query + column, mask=inside, other=0.0)
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    at = sources + row[:, None].to(tl.int64) * stride_m + t * stride_t + column[None, :]
    x = tl.load(at, mask=(row < M)[:, None] & inside[None, :], other=0.0)
    if ADD:
        extra = tl.load(added + t * D + column, mask=inside, other=0.0).to(tl.float32)
        last = (row == M - 1)[:, None]
        x = tl.where(last, (x.to(tl.float32) + extra[None, :]).to(x.dtype), x)
        tl.store(at, x, mask=last & inside[None, :])
    full = x.to(tl.float32)
    gram = tl.dot(x, tl.trans(x), input_precision="ieee")
    score = tl.sum(full * q[None, :], 1)
    gram = tl.where((row == 15)[None, :], score[:, None], gram)
    to = grams + (t * tl.num_programs(1) + c) * 256 + row[:, None] * 16 + row[None, :]
    tl.store(to, gram)


@triton.jit
def _apply(
    sources,
    stride_m,
    stride_t,
    grams,
    weight,
    out,
    mix_eps,
    norm_eps,
    M: tl.constexpr,
    D: tl.constexpr,
    CHUNKS: tl.constexpr,
    WIDTH: tl.constexpr,
    EARLY: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    row = tl.arange(0, 16)
    inside = column < D
    w = tl.load(weight + column, mask=inside, other=0.0)
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    at = sources + row[:, None].to(tl.int64) * stride_m + t * stride_t + column[None, :]
    x = tl.load(at, mask=(row < M)[:, None] & inside[None, :], other=0.0).to(tl.float32)
    gram = tl.zeros((16, 16), tl.float32)
    for c in tl.static_range(CHUNKS):
        gram += tl.load(grams + (t * CHUNKS + c) * 256 + row[:, None] * 16 + row[None, :])
    square = tl.sum(tl.where(row[:, None] == row[None, :], gram, 0.0), 1)
    score = tl.sum(tl.where((row == 15)[None, :], gram, 0.0), 1)
    score = tl.where(row < M, score * tl.rsqrt(square / D + mix_eps), float("-inf"))
    share = tl.exp(score - tl.max(score, 0))
    share = share / tl.sum(share, 0)
    power = tl.sum(tl.sum(gram * share[None, :], 1) * share, 0)  # of the mix; column 15 has no share
    found = tl.sum(x * share[:, None], 0).to(out.dtype.element_ty).to(tl.float32)
    found = (found * tl.rsqrt(power / D + norm_eps)).to(out.dtype.element_ty).to(tl.float32) * w.to(tl.float32)
    tl.store(out + t * D + column, found.to(out.dtype.element_ty), mask=inside)


@cache
def _dependent(device: torch.device) -> bool:
    """Whether a kernel may start before the one before has ended. It fetches weights, waits, and only then lets the
    next one start: kernels that wait for kernels that wait fill the processors (24 us instead of 5 for 8 rows)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def mix_norm(
    sources: Tensor,
    query: Tensor,
    weight: Tensor | None,
    mix_eps: float,
    norm_eps: float,
    add: Tensor | None = None,
    *,
    few: int = FEW,
    few_sources: int = FEW_SOURCES,
    chunk: int = CHUNK,
    width: int = WIDTH,
    warps: int = 16,
) -> Tensor:
    """The kernel's form of `k3_kernels.attnres.mix_norm`, without the norm when there is no weight."""
    M, T, D = sources.shape
    out = torch.empty(T, D, dtype=sources.dtype, device=sources.device)
    early = T <= few and _dependent(sources.device)
    ahead = {"launch_pdl": True} if early else {}
    if 0 < T <= few and few_sources < M < 16 and weight is not None:
        chunks = triton.cdiv(D, chunk)
        grams = torch.empty(T, chunks, 16, 16, dtype=torch.float32, device=sources.device)
        _gram[(T, chunks)](
            sources, sources.stride(0), sources.stride(1), query, out if add is None else add, grams,
            M, D, chunk, add is not None, early, num_warps=4, **ahead,
        )  # fmt: skip
        _apply[(T, triton.cdiv(D, width))](
            sources, sources.stride(0), sources.stride(1), grams, weight, out, mix_eps, norm_eps,
            M, D, chunks, width, early, num_warps=1, **ahead,
        )  # fmt: skip
    elif T:
        BD = max(8, triton.next_power_of_2(D))
        _mix[(T,)](
            sources, sources.stride(0), sources.stride(1), query, out if weight is None else weight,
            out if add is None else add, out, mix_eps, norm_eps,
            M, triton.next_power_of_2(M), D, BD, add is not None, weight is not None, early,
            num_warps=max(1, min(warps, BD // 256)), **ahead,
        )  # fmt: skip
    return out
