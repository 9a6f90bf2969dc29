"""Gated activations of the feed-forward layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Situ:
    """`beta tanh(g/beta) sigmoid(g) * linear_beta tanh(u/linear_beta)`: both factors are bounded (Kimi K3)."""

    beta: float
    linear_beta: float

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        """gate, up [..., F] of one dtype; computed in fp32, rounded once to that dtype. Returns a new tensor."""
        g, u = gate.float(), up.float()
        bounded = torch.tanh(g / self.beta).mul_(self.beta).mul_(torch.sigmoid(g))
        return bounded.mul_(torch.tanh(u / self.linear_beta).mul_(self.linear_beta)).to(gate.dtype)


@dataclass(frozen=True)
class Swiglu:
    """`silu(g) * u` (Shazeer 2020, "GLU variants")."""

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        """gate, up [..., F] of one dtype; computed in fp32, rounded once to that dtype. Returns a new tensor."""
        return (F.silu(gate.float()) * up.float()).to(gate.dtype)


Activation = Situ | Swiglu
