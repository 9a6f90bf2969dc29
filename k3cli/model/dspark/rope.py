"""Rotation by position, plain and stretched by YaRN."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from k3cli.model.dspark.config import Rope


@dataclass(frozen=True)
class RopeTable:
    """frequencies [dim / 2], fp64, radians a position; see `Rope` for the others."""

    frequencies: Tensor
    interleaved: bool
    amplitude: float


def table(rope: Rope, device: torch.device) -> RopeTable:
    """YaRN blends each frequency with itself / factor, the more the fewer turns it makes over the original context."""
    half = rope.dim // 2
    plain = rope.theta ** (-torch.arange(half, dtype=torch.float64) * 2 / rope.dim)
    if rope.factor > 1:

        def bound(turns: float) -> float:
            return rope.dim * math.log(rope.original / (2 * math.pi * turns)) / (2 * math.log(rope.theta))

        low, high = max(math.floor(bound(rope.beta_fast)), 0), min(math.ceil(bound(rope.beta_slow)), rope.dim - 1)
        ramp = ((torch.arange(half) - low) / max(high - low, 0.001)).clamp(0, 1).double()
        plain = plain * (1 - ramp) + plain / rope.factor * ramp
    return RopeTable(plain.to(device), rope.interleaved, rope.amplitude)


def rotate(x: Tensor, positions: Tensor, rope: RopeTable) -> Tensor:
    """x [..., dim] turned by positions, which broadcast over its leading dimensions. Angles in fp64, the rest fp32."""
    angles = positions.unsqueeze(-1).double() * rope.frequencies
    cos, sin = ((f(angles) * rope.amplitude).float() for f in (torch.cos, torch.sin))
    wide = x.float()
    if rope.interleaved:
        a, b = wide.unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2).to(x.dtype)
    a, b = wide.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)
