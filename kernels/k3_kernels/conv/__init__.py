"""Short causal convolution."""

from k3_kernels.conv.reference import advance_window, short_conv, taps

__all__ = ["advance_window", "short_conv", "taps"]
