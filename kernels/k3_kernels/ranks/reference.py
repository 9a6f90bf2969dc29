"""The sum of the parts that ranks of a tensor-parallel world have computed."""

from __future__ import annotations

from torch import Tensor


def add(parts: Tensor) -> Tensor:
    """parts [R, ...] (fp32 or bf16) -> their sum over dim 0, first to last, in fp32, rounded once to their type."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part
    return total.to(parts.dtype)
