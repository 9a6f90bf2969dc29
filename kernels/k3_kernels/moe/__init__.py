"""Mixture of experts with MXFP4 or dense weights."""

from k3_kernels.moe.experts import (
    experts_grouped,
    experts_window,
    grouped_choice,
    route,
    route_choice,
    window_choice,
)
from k3_kernels.moe.reference import Experts, dequantize_mxfp4

__all__ = [
    "Experts",
    "dequantize_mxfp4",
    "experts_grouped",
    "experts_window",
    "grouped_choice",
    "route",
    "route_choice",
    "window_choice",
]
