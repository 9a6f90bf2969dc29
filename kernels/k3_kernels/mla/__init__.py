"""Multi-head latent attention."""

from k3_kernels.mla.reference import decode, prefill

__all__ = ["decode", "prefill"]
