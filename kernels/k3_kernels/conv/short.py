"""The short convolution as the network calls it: the device's kernel where it takes the arguments."""

from __future__ import annotations

from torch import Tensor

from k3_kernels import select
from k3_kernels.conv import reference


def choice(x: Tensor, window: Tensor) -> select.Choice:
    """What the convolution runs with for these rows, and why."""
    refused = None
    if x.stride(-1) != 1 or window.stride(-1) != 1:
        refused = "the kernel takes channels that lie one behind the other"
    return select.choose(x.device, refused)


def short_conv(x: Tensor, window: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """SiLU of the causal depthwise convolution of T rows that continue a sequence.

    x [T, C] (fp32 or bf16), window [w-1, C] the inputs just before x (zeros at a start), weight [C, w] fp32 whose last
    column multiplies the current row. fp32 accumulation and SiLU, rounded once. Any T >= 0.
    Returns (y [T, C] like x, the next window [w-1, C]); writes nothing in place.
    """
    if choice(x, window).kernel:
        from k3_kernels.conv import conv_triton

        return conv_triton.short_conv(x, window, weight)
    return reference.short_conv(x, window, weight)
