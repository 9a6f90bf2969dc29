"""A few rows times a matrix on Hopper: 64 rows of the matrix at a time, brought in by the copy engine, are the first
operand of the matrix instruction; the few rows are the second one. No sum is split over programs.

A launch begins while the kernel before it still runs, and waits before it touches anything.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from k3_kernels.select import dependent

BN, BK, STAGES, PROGRAMS = 64, 128, 5, 2
"""Rows and columns of a tile of the matrix, tiles on their way, programs of a processor where there are many tiles."""


@triton.jit
def _store(
    total, first, add, add_t, out, N, T: tl.constexpr, R: tl.constexpr, BN: tl.constexpr, ADD: tl.constexpr
):  # fmt: skip
    t = tl.arange(0, R)
    n = first + tl.arange(0, BN)
    inside = (t < T)[None, :] & (n < N)[:, None]
    if ADD:
        total += tl.load(add + t[None, :] * add_t + n[:, None], mask=inside, other=0.0).to(tl.float32)
    tl.store(out + t[None, :] * N + n[:, None], total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _few(
    rows, matrix, add, add_t, out, N, K, T: tl.constexpr, R: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    STAGES: tl.constexpr, ADD: tl.constexpr, ONE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """out [T, N] = rows [R, K] times matrix [N, K] transposed (+ add). ONE: every program has one tile."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    if ONE:
        first = tl.program_id(0) * BN
        total = tl.zeros((BN, R), tl.float32)
        for k in tl.range(0, K, BK, num_stages=STAGES):
            total = tl.dot(matrix.load([first, k]), rows.load([0, k]).T, total)
        _store(total, first, add, add_t, out, N, T, R, BN, ADD)
    else:
        steps = tl.cdiv(K, BK)
        for tile in tl.range(tl.program_id(0), tl.cdiv(N, BN), tl.num_programs(0), flatten=True, num_stages=STAGES):
            total = tl.zeros((BN, R), tl.float32)
            for s in range(steps):
                total = tl.dot(matrix.load([tile * BN, s * BK]), rows.load([0, s * BK]).T, total)
            _store(total, tile * BN, add, add_t, out, N, T, R, BN, ADD)


@cache
def _processors(device: torch.device) -> int:
    """Two where programs are interpreted."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def few(x: Tensor, weight: Tensor, add: Tensor | None = None) -> Tensor:
    """The kernel's form of `k3_kernels.linear.few`."""
    T, K = x.shape
    N = weight.shape[0]
    out = torch.empty(T, N, dtype=x.dtype, device=x.device)
    if T:
        R, tiles, programs = 16, triton.cdiv(N, BN), PROGRAMS * _processors(x.device)
        early = dependent(x.device)
        _few[(min(tiles, programs),)](
            TensorDescriptor(x, [T, K], [x.stride(0), 1], [R, BK]),
            TensorDescriptor.from_tensor(weight, [BN, BK]),
            out if add is None else add, 0 if add is None else add.stride(0), out, N, K,
            T, R, BN, BK, STAGES, add is not None, tiles <= programs, early, num_warps=4, launch_pdl=early,
        )  # fmt: skip
    return out
