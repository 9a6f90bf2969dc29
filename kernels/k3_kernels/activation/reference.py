"""Gated activations of the feed-forward layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from k3_kernels import select


@dataclass(frozen=True)
class Situ:
    """`beta tanh(g/beta) sigmoid(g) * linear_beta tanh(u/linear_beta)`: both factors are bounded (Kimi K3)."""

    beta: float
    linear_beta: float

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        """gate, up [..., F] of one dtype; computed in fp32, rounded once to that dtype. Returns a new tensor."""
        return _run(self, gate, up)

    def reference(self, gate: Tensor, up: Tensor) -> Tensor:
        """The same in plain torch."""
        g, u = gate.float(), up.float()
        bounded = torch.tanh(g / self.beta).mul_(self.beta).mul_(torch.sigmoid(g))
        return bounded.mul_(torch.tanh(u / self.linear_beta).mul_(self.linear_beta)).to(gate.dtype)


@dataclass(frozen=True)
class Swiglu:
    """`silu(g) * u` (Shazeer 2020, "GLU variants")."""

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        """gate, up [..., F] of one dtype; computed in fp32, rounded once to that dtype. Returns a new tensor."""
        return _run(self, gate, up)

    def reference(self, gate: Tensor, up: Tensor) -> Tensor:
        """The same in plain torch."""
        return (F.silu(gate.float()) * up.float()).to(gate.dtype)


Activation = Situ | Swiglu


def choice(gate: Tensor) -> select.Choice:
    """What an activation runs with for arguments like gate [T, F], and why."""
    refused = None
    if gate.dim() != 2 or gate.stride(-1) != 1:
        refused = "the kernel takes rows with contiguous columns"
    elif gate.dtype not in (torch.bfloat16, torch.float32):
        refused = f"{gate.dtype}: the kernel takes bfloat16 and float32"
    return select.choose(gate.device, refused)


def _run(act: Activation, gate: Tensor, up: Tensor) -> Tensor:
    if choice(gate).kernel and up.stride(-1) == 1:
        from k3_kernels.activation import math_triton

        return math_triton.gated_rows(act, gate, up)
    return act.reference(gate, up)
