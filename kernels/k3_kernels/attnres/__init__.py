"""Block attention residuals."""

from k3_kernels.attnres.mix import choice, mix_norm
from k3_kernels.attnres.reference import mix

__all__ = ["choice", "mix", "mix_norm"]
