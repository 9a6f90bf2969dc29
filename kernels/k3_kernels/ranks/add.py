"""Sums of ranks as a world calls them: one launch on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from k3_kernels import select
from k3_kernels.ranks import reference


def choice(parts: Tensor) -> select.Choice:
    """What `add` runs with for such parts, and why."""
    fine = parts.dtype in (torch.bfloat16, torch.float32) and parts.is_contiguous()
    return select.choose(parts.device, None if fine else "the kernel takes contiguous bfloat16 and float32")


def add(parts: Tensor) -> Tensor:
    """parts [R, ...] (fp32 or bf16) -> their sum over dim 0, first to last, in fp32, rounded once to the parts' type.

    Kernel and reference give the same bits.
    """
    if parts.shape[0] == 2:
        return parts[0] + parts[1]  # torch computes one addition in fp32 and rounds it once
    if choice(parts).kernel:
        from k3_kernels.ranks import add_triton

        return add_triton.add(parts)
    return reference.add(parts)
