"""The short convolution on the device: one launch, every input read from memory once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3_kernels.conv.reference import advance_window

TOKENS, CHANNELS = 16, 256


@triton.jit
def _short_conv(
    x, x_t, window, window_t, weight, weight_c, weight_j, y, T, C,
    WIDTH: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Grid (T / BT, C / BC). Rows in front of the first are the window's; shifted loads of a tile hit the L1."""
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = (t < T)[:, None] & (c < C)[None, :]
    total = tl.zeros((BT, BC), tl.float32)
    for j in tl.static_range(WIDTH):
        row = t - (WIDTH - 1) + j
        now = tl.load(x + row.to(tl.int64)[:, None] * x_t + c[None, :], mask=inside & (row >= 0)[:, None], other=0.0)
        # Nothing is read by the tiles behind the first.
        before = window + (row + WIDTH - 1)[:, None] * window_t + c[None, :]
        old = tl.load(before, mask=inside & (row < 0)[:, None], other=0.0)
        w = tl.load(weight + c * weight_c + j * weight_j, mask=c < C, other=0.0)
        total += tl.where((row >= 0)[:, None], now, old).to(tl.float32) * w[None, :]
    total = total / (1 + tl.exp(-total))
    tl.store(y + t.to(tl.int64)[:, None] * C + c[None, :], total.to(y.dtype.element_ty), mask=inside)


def short_conv(x: Tensor, window: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The kernel's form of `k3_kernels.conv.short_conv`; channels of x and of the window contiguous."""
    T, C = x.shape
    y = torch.empty(T, C, dtype=x.dtype, device=x.device)
    if y.numel():
        _short_conv[(triton.cdiv(T, TOKENS), triton.cdiv(C, CHANNELS))](
            x, x.stride(0), window, window.stride(0), weight, *weight.stride(), y, T, C,
            WIDTH=weight.shape[1], BT=TOKENS, BC=CHANNELS, num_warps=4,
        )  # fmt: skip
    return y, advance_window(window, x, T)
