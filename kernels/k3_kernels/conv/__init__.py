"""Short causal convolution."""

from k3_kernels.conv.reference import advance_window, taps
from k3_kernels.conv.short import choice, short_conv

__all__ = ["advance_window", "choice", "short_conv", "taps"]
