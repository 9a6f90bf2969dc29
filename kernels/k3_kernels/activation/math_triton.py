"""The gated activations inside Triton kernels; importing this module imports Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from k3_kernels.activation.reference import Activation, Situ
from k3_kernels.select import dependent


def constants(act: Activation) -> tuple[float, float]:
    """(beta, linear beta) as kernels take them: (0, 0) means SwiGLU."""
    return (act.beta, act.linear_beta) if isinstance(act, Situ) else (0.0, 0.0)


@triton.jit
def tanh(x):
    """fp32, relative error of a few 1e-7 everywhere: a series near zero, where the quotient would cancel."""
    y = x * x
    near = x * (1 + y * (-0.33333333 + y * (0.13333333 + y * (-0.053968254 + y * (0.021869488 - 0.0088632355 * y)))))
    decay = tl.exp(-2 * tl.abs(x))
    far = (1 - decay) / (1 + decay)
    far = tl.where(x < 0, -far, far)
    return tl.where(y < 0.0625, near, far)


@triton.jit
def gated(gate, up, BETA: tl.constexpr, LINEAR_BETA: tl.constexpr):
    """fp32 gate and up -> the activation of `constants`, fp32."""
    sigmoid = 1 / (1 + tl.exp(-gate))
    if BETA == 0:
        return gate * sigmoid * up
    else:
        return BETA * tanh(gate / BETA) * sigmoid * (LINEAR_BETA * tanh(up / LINEAR_BETA))


@triton.jit
def _gated_rows(
    gate, gate_row, up, up_row, out, F: tl.constexpr, BF: tl.constexpr, BETA: tl.constexpr, LINEAR_BETA: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        gdc_launch_dependents()
    t = tl.program_id(1).to(tl.int64)
    f = tl.program_id(0) * BF + tl.arange(0, BF)
    g = tl.load(gate + t * gate_row + f, mask=f < F, other=0.0).to(tl.float32)
    u = tl.load(up + t * up_row + f, mask=f < F, other=0.0).to(tl.float32)
    tl.store(out + t * F + f, gated(g, u, BETA, LINEAR_BETA).to(out.dtype.element_ty), mask=f < F)


def gated_rows(act: Activation, gate: Tensor, up: Tensor) -> Tensor:
    """act(gate, up) of rows [T, F], F contiguous, in one launch."""
    T, F = gate.shape
    out = torch.empty(T, F, dtype=gate.dtype, device=gate.device)
    if out.numel():
        beta, linear_beta = constants(act)
        _gated_rows[(triton.cdiv(F, 1024), T)](
            gate, gate.stride(0), up, up.stride(0), out, F, 1024, beta, linear_beta, dependent(gate.device), num_warps=4
        )  # fmt: skip
    return out
