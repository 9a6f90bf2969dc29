"""RMS norms."""

from k3_kernels.norm.norms import choice, gated_rms_norm, rms_norm

__all__ = ["choice", "gated_rms_norm", "rms_norm"]
