"""RMS norms (Zhang and Sennrich 2019) and the gated output norm of KDA (Kimi Linear, arXiv 2510.26692)."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension.

    x [..., D] and weight [D] of one dtype (fp32 or bf16). Statistics are fp32; in bf16 the normalised value is rounded
    before the weight multiplies it, as the published model does. Returns a new tensor like x.
    """
    full = x.float()
    scale = torch.rsqrt(full.square().mean(-1, keepdim=True) + eps)
    return (full * scale).to(x.dtype) * weight


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm(x) * sigmoid(gate)`, norm first, everything fp32, rounded once.

    x, gate [T, H, V] (fp32 or bf16), weight [V] fp32 shared by the heads. Returns gate's dtype [T, H, V].
    """
    full = x.float()
    scale = torch.rsqrt(full.square().mean(-1, keepdim=True) + eps)
    return (full * scale * weight * torch.sigmoid(gate.float())).to(gate.dtype)
