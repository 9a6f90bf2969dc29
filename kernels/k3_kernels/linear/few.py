"""Products of a few rows: the device's kernel where it takes them, torch's elsewhere."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from k3_kernels import select

MOST_ROWS = 16


def choice(x: Tensor, weight: Tensor) -> select.Choice:
    """What `few` runs with for such arguments, and why."""
    refused = None
    if x.dtype != torch.bfloat16 or weight.dtype != torch.bfloat16:
        refused = f"{x.dtype} and {weight.dtype}: the kernel takes bfloat16"
    elif not x.is_cuda or torch.cuda.get_device_capability(x.device)[0] != 9:
        refused = "the kernel is for Hopper"
    elif x.shape[0] > MOST_ROWS:
        refused = f"{x.shape[0]} rows: the kernel takes up to {MOST_ROWS}"
    elif x.stride(1) != 1 or x.stride(0) % 8 or weight.shape[1] % 8 or not weight.is_contiguous():
        refused = "the copy engine takes rows that begin at multiples of 16 bytes"
    elif x.data_ptr() % 16 or weight.data_ptr() % 16:
        refused = "the copy engine takes memory that begins at multiples of 16 bytes"
    return select.choose(x.device, refused)


def few(x: Tensor, weight: Tensor, add: Tensor | None = None) -> Tensor:
    """x [T, K] times weight [N, K] transposed, plus add [T, N], nobody's afterwards, if given: [T, N] of x's dtype.

    Rounded once; fp32 sums over K in one order, the same for each row whatever the others are and wherever it stands.
    """
    if choice(x, weight).kernel:
        from k3_kernels.linear import few_triton

        return few_triton.few(x, weight, add)
    return F.linear(x, weight) if add is None else add.addmm_(x, weight.t())
