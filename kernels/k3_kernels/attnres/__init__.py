"""Block attention residuals."""

from k3_kernels.attnres.reference import mix, mix_norm

__all__ = ["mix", "mix_norm"]
