"""RMS norms."""

from k3_kernels.norm.reference import gated_rms_norm, rms_norm

__all__ = ["gated_rms_norm", "rms_norm"]
