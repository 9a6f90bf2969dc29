"""RMS norms on the device: one launch, a program for a row or for a few short ones."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from k3_kernels.select import dependent

FEW = 16
"""Rows of a step, whose kernels begin before the one in front has ended."""


@triton.jit
def _rms_norm(x, stride, weight, out, eps, D: tl.constexpr, BD: tl.constexpr, EARLY: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BD)
    inside = column < D
    w = tl.load(weight + column, mask=inside, other=0.0)
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    full = tl.load(x + t * stride + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(full * full, 0) / D + eps)
    kind = out.dtype.element_ty
    found = (full * scale).to(kind).to(tl.float32) * w.to(tl.float32)
    tl.store(out + t * D + column, found.to(kind), mask=inside)


@triton.jit
def _gated_rms_norm(
    x, x_t, x_h, gate, gate_t, gate_h, weight, out, eps, H, V: tl.constexpr, BH: tl.constexpr, BV: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        gdc_launch_dependents()
    t = tl.program_id(1).to(tl.int64)
    h = tl.program_id(0) * BH + tl.arange(0, BH)
    v = tl.arange(0, BV)
    inside = (h < H)[:, None] & (v < V)[None, :]
    full = tl.load(x + t * x_t + h[:, None] * x_h + v[None, :], mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gate + t * gate_t + h[:, None] * gate_h + v[None, :], mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight + v, mask=v < V, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(full * full, 1) / V + eps)
    found = full * scale[:, None] * w[None, :] / (1 + tl.exp(-g))
    to = out + (t * H + h[:, None]) * V + v[None, :]
    tl.store(to, found.to(out.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The kernel's form of `k3_kernels.norm.rms_norm` for [..., D] with D contiguous."""
    D = x.shape[-1]
    rows = x if x.dim() == 2 else x.reshape(-1, D)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        BD = triton.next_power_of_2(D)
        early = rows.shape[0] <= FEW and dependent(x.device)
        _rms_norm[(rows.shape[0],)](
            rows, rows.stride(0), weight, out, eps, D, BD, early, num_warps=max(1, min(16, BD // 512)),
            **({"launch_pdl": True} if early else {}),
        )  # fmt: skip
    return out


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The kernel's form of `k3_kernels.norm.gated_rms_norm`."""
    T, H, V = x.shape
    out = torch.empty(T, H, V, dtype=gate.dtype, device=gate.device)
    if out.numel():
        _gated_rms_norm[(triton.cdiv(H, 8), T)](
            x, x.stride(0), x.stride(1), gate, gate.stride(0), gate.stride(1), weight, out, eps,
            H, V, 8, triton.next_power_of_2(V), dependent(x.device), num_warps=4,
        )  # fmt: skip
    return out
