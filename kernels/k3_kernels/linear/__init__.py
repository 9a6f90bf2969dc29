"""Products of a few rows with a matrix, as in a decode step: bound by the matrix' bytes."""

from k3_kernels.linear.few import choice, few

__all__ = ["choice", "few"]
