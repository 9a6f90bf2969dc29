"""The router on the device: one product with the gate, one selection.

bf16 rows times an fp32 gate run on the matrix units without losing a bit of any factor: the gate is split into three
bf16 numbers, which hold 24 bits together, and the sums are fp32. For a window, `_scores` reads the gate once, one warp
for 16 experts and a share of the columns; many rows use one library product. `_select` adds the parts of a score in a
fixed order and picks the best expert k times; equal scores go to the lower id. On a device a window's rows have eight
warps for that (`select_gluon_triton`).
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

WINDOW = 16
SHARE: int = 1024
"""Columns of the gate for one program of a window."""


@triton.jit
def _cut(w):
    """The upper eight bits of fp32 numbers as bf16, and what is left: 24 bits are three such cuts, none rounded."""
    bits = w.to(tl.int32, bitcast=True)
    upper = (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return upper, w - (bits & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _scores(
    x, gate, parts, T, D: tl.constexpr, E: tl.constexpr, R: tl.constexpr, SHARE: tl.constexpr, BK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """parts[share, t, e] = gate[e] . x[t] over the share's columns. EARLY: launched before the kernel before has ended,
    this program's share of the gate is brought into the L2 meanwhile."""
    e = tl.program_id(0) * 16 + tl.arange(0, 16)
    if EARLY:
        LINE: tl.constexpr = 1024 // gate.dtype.element_ty.primitive_bitwidth
        line = tl.program_id(1) * SHARE + tl.arange(0, SHARE // LINE) * LINE
        offset = tl.minimum(e, E - 1)[:, None] * D + tl.minimum(line, D - 1)[None, :]
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [gate + offset], tl.int32, is_pure=False, pack=1
        )
        gdc_wait()
        gdc_launch_dependents()
    t = tl.arange(0, R)
    k = tl.arange(0, BK)
    first = tl.program_id(1) * SHARE
    acc = tl.zeros((16, R), tl.float32)
    for start in range(first, min(first + SHARE, D), BK):
        column = start + k
        w = tl.load(gate + e[:, None] * D + column[None, :], mask=(e < E)[:, None] & (column < D)[None, :], other=0.0)
        b = tl.load(x + t[None, :] * D + column[:, None], mask=(t < T)[None, :] & (column < D)[:, None], other=0.0)
        if x.dtype.element_ty == tl.float32:
            acc = tl.dot(w.to(tl.float32), b, acc, input_precision="ieee")
        elif gate.dtype.element_ty == tl.float32:
            high, rest = _cut(w)
            middle, rest = _cut(rest)
            low, rest = _cut(rest)
            acc = tl.dot(low, b, acc)
            acc = tl.dot(middle, b, acc)
            acc = tl.dot(high, b, acc)
        else:
            acc = tl.dot(w, b, acc)
    to = parts + (tl.program_id(1) * T + t[None, :]) * E + e[:, None]
    tl.store(to, acc, mask=(t < T)[None, :] & (e < E)[:, None])


@triton.jit
def _logit(at, stride, inside, P: tl.constexpr):
    total = tl.load(at, mask=inside, other=0.0)
    for p in tl.static_range(1, P):
        total += tl.load(at + p * stride, mask=inside, other=0.0)
    return total


@triton.jit
def _select(
    parts,
    bias,
    ids,
    weights,
    stride_p,
    stride_t,
    scale,
    E: tl.constexpr,
    K: tl.constexpr,
    P: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    BE: tl.constexpr,
    BK: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BE)
    at = parts + t * stride_t
    score = 1 / (1 + tl.exp(-_logit(at + e, stride_p, e < E, P)))
    bits = (score + tl.load(bias + e, mask=e < E, other=0.0)).to(tl.int32, bitcast=True)
    key = tl.where(e < E, bits ^ ((bits >> 31) & 0x7FFFFFFF), -2147483648)  # orders like the float
    j = tl.arange(0, BK)
    found = tl.zeros((BK,), tl.int32)
    for i in range(K):
        best = tl.max(key, 0)
        expert = tl.min(tl.where(key == best, e, BE), 0)
        found = tl.where(j == i, expert, found)
        key = tl.where(e == expert, -2147483648, key)
    weight = 1 / (1 + tl.exp(-_logit(at + found, stride_p, j < K, P)))
    if RENORMALIZE:
        weight = weight / (tl.sum(tl.where(j < K, weight, 0.0), 0) + 1e-20)
    tl.store(ids + t * K + j, found.to(tl.int64), mask=j < K)
    tl.store(weights + t * K + j, weight * scale, mask=j < K)


@cache
def _dependent(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def route(x: Tensor, gate: Tensor, bias: Tensor, top_k: int, renormalize: bool, scale: float) -> tuple[Tensor, Tensor]:
    """The kernels' form of `k3_kernels.moe.route` without groups; x, gate and bias contiguous."""
    T, D = x.shape
    E = gate.shape[0]
    ids = torch.empty(T, top_k, dtype=torch.int64, device=x.device)
    weights = torch.empty(T, top_k, dtype=torch.float32, device=x.device)
    if T == 0:
        return ids, weights
    if T <= WINDOW:
        P = triton.cdiv(D, SHARE)
        parts = torch.empty(P, T, E, dtype=torch.float32, device=x.device)
        R = 8 if T <= 8 else 16
        early = _dependent(x.device)
        ahead = {"launch_pdl": True} if early else {}
        _scores[(triton.cdiv(E, 16), P)](
            x, gate, parts, T, D, E, R, SHARE, 64, early, num_warps=1, num_stages=3, **ahead
        )
        stride_p, stride_t = parts.stride(0), parts.stride(1)
    else:
        P, parts = _many(x, gate)
        stride_p, stride_t = E, parts.stride(0)
    BE, BK = triton.next_power_of_2(E), max(2, triton.next_power_of_2(top_k))
    if T <= WINDOW and x.is_cuda and BE >= 256:
        from k3_kernels.moe import select_gluon_triton

        select_gluon_triton.select[(T,)](
            parts, bias, ids, weights, stride_p, stride_t, scale, E, top_k, P, renormalize, BE, BK, early,
            num_warps=8, **ahead,
        )  # fmt: skip
    else:
        _select[(T,)](
            parts, bias, ids, weights, stride_p, stride_t, scale, E, top_k, P, renormalize, BE, BK, num_warps=1
        )
    return ids, weights


def _many(x: Tensor, gate: Tensor) -> tuple[int, Tensor]:
    """(P, logits [T, P E] in P parts) of many rows."""
    if x.dtype == torch.float32:
        return 1, torch.mm(x, gate.float().t())
    if gate.dtype == x.dtype:
        return 1, torch.mm(x, gate.t(), out_dtype=torch.float32)
    parts, rest = [], gate
    for _ in range(3):
        parts.append(rest.to(x.dtype))
        rest = rest - parts[-1].float()
    return 3, torch.mm(x, torch.cat(parts[::-1]).t(), out_dtype=torch.float32)
