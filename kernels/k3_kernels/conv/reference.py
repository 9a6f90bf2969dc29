"""Short causal depthwise convolution with SiLU, and its window (the last inputs before the convolution)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def taps(x: Tensor, window: Tensor, weight: Tensor) -> Tensor:
    """`sum_j weight[:, j] * x[t - (w-1) + j]` in fp32, before the activation; arguments as in `short_conv`."""
    rows = x.shape[0]
    extended = torch.cat((window, x)).float()
    kernel = weight.t().contiguous()
    total = extended[:rows] * kernel[0]
    for j in range(1, kernel.shape[0]):
        total += extended[j : j + rows] * kernel[j]
    return total


def short_conv(x: Tensor, window: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The definition of `k3_kernels.conv.short_conv`."""
    y = F.silu(taps(x, window, weight)).to(x.dtype)
    return y, advance_window(window, x, x.shape[0])


def advance_window(window: Tensor, x: Tensor, n: int) -> Tensor:
    """The window after the first n rows of x: window [..., w-1, C], x [..., >= n, C]. Returns a new tensor."""
    keep = window.shape[-2]
    if n >= keep:
        return x[..., n - keep : n, :].clone(memory_format=torch.contiguous_format)
    return torch.cat((window, x[..., :n, :]), dim=-2)[..., n : n + keep, :].contiguous()
