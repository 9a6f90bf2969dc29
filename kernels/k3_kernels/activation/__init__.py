"""Gated activations: SiTU and SwiGLU."""

from k3_kernels.activation.reference import Activation, Situ, Swiglu

__all__ = ["Activation", "Situ", "Swiglu"]
