"""RMS norms as the network calls them: the device's kernels where they take the arguments."""

from __future__ import annotations

import torch
from torch import Tensor

from k3_kernels import select
from k3_kernels.norm import reference

WIDEST = 32768


def choice(x: Tensor) -> select.Choice:
    """What the norms run with for rows like x [..., D], and why."""
    refused = None
    if x.dtype not in (torch.bfloat16, torch.float32):
        refused = f"{x.dtype}: the kernel takes bfloat16 and float32"
    elif x.shape[-1] > WIDEST or x.stride(-1) != 1:
        refused = f"rows of {x.shape[-1]}, step {x.stride(-1)}: the kernel takes up to {WIDEST} contiguous columns"
    return select.choose(x.device, refused)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension.

    x [..., D] and weight [D] of one dtype (fp32 or bf16). Statistics are fp32; in bf16 the normalised value is rounded
    before the weight multiplies it, as the published model does. Returns a new tensor like x.
    """
    if choice(x).kernel:
        from k3_kernels.norm import rms_triton

        return rms_triton.rms_norm(x, weight, eps)
    return reference.rms_norm(x, weight, eps)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm(x) * sigmoid(gate)`, norm first, everything fp32, rounded once.

    x, gate [T, H, V] (fp32 or bf16), weight [V] fp32 shared by the heads. Returns gate's dtype [T, H, V].
    """
    if choice(x).kernel and choice(gate).kernel:
        from k3_kernels.norm import rms_triton

        return rms_triton.gated_rms_norm(x, gate, weight, eps)
    return reference.gated_rms_norm(x, gate, weight, eps)
