"""Experts over many tokens for Hopper, MXFP4 and bf16: tokens sorted by expert, tiles of one expert, two products.

Rows are copied into the order of the pairs (token, expert), so that a tile's rows lie one behind the other and the copy
engine can fetch them; `product_hopper_triton` multiplies them. Tiles are of a few heights, each a launch of its own:
what an expert has left over goes into the smallest that holds it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from k3_kernels.activation.math_triton import constants
from k3_kernels.activation.reference import Activation
from k3_kernels.moe.decode_hopper_triton import processors, views
from k3_kernels.moe.product_hopper_triton import product
from k3_kernels.moe.reference import Experts
from k3_kernels.moe.tiles import tiles


class Class(NamedTuple):
    """A height of tiles and how its product runs.

    near, far: tokens, as one or two widths of a product; groups: warp groups; span: times 128 columns a stage of the
    ring has; stages: of the ring.
    """

    near: int
    far: int
    groups: int
    span: int
    stages: int


CLASSES = (Class(128, 32, 3, 1, 4), Class(64, 32, 3, 2, 3), Class(64, 0, 4, 2, 3), Class(16, 0, 4, 2, 5))
"""Most tokens first."""


@gluon.jit
def _sorted_rows(z, z_row, order, to, K: gl.constexpr, L: gl.constexpr, X: gl.constexpr):
    """to[p] = the row of pair order[p], columns as the decoder yields them (`place`).

    A thread moves 32 values, word i of four groups of 128 columns: 16 bytes a load and a store, the order made in
    registers.
    """
    p = gl.program_id(0).to(gl.int64)
    block = gl.program_id(1) * 32 + gl.arange(0, 32, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, X))))
    group = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, X))))
    word = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, X))))
    value = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, X))))
    block = block.expand_dims(1).expand_dims(2).expand_dims(3)
    at = block * 128 + group.expand_dims(0).expand_dims(2).expand_dims(3) * 32
    at = at + word.expand_dims(0).expand_dims(1).expand_dims(3) * 8 + value.expand_dims(0).expand_dims(1).expand_dims(2)
    x = gl.load(z + gl.load(order + p) // K * z_row + at, mask=block < L // 128)
    x = x.reshape([32, 4, 4, 2, 4]).permute(0, 4, 2, 1, 3).reshape([32, 4, 4, 8])
    gl.store(to + p * L + at, gl.convert_layout(x, X), mask=block < L // 128)


_LANES = [[0, 0, 1, 0], [0, 0, 2, 0], [1, 0, 0, 0], [2, 0, 0, 0], [4, 0, 0, 0]]
MOVED = gl.DistributedLinearLayout(
    [[0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 0, 4], [0, 1, 0, 0], [0, 2, 0, 0]],
    _LANES, [[8, 0, 0, 0], [16, 0, 0, 0]], [], [32, 4, 4, 8],
)  # fmt: skip
"""[blocks of 128 columns, 4, words, 8]: a thread has all but words and blocks."""


@triton.jit
def _sum(parts, place, weights, out, K: tl.constexpr, L: tl.constexpr, BL: tl.constexpr):
    """out[t] = the k outputs of a token, weighted, in the order of its ids."""
    t = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BL + tl.arange(0, BL)
    total = tl.zeros((BL,), tl.float32)
    for j in tl.static_range(K):
        at = tl.load(place + t * K + j).to(tl.int64)
        part = tl.load(parts + at * L + column, mask=column < L, other=0.0)
        total += tl.load(weights + t * K + j) * part.to(tl.float32)
    tl.store(out + t * L + column, total.to(out.dtype.element_ty), mask=column < L)


def experts_grouped(
    z: Tensor,
    ids: Tensor,
    weights: Tensor,
    experts: Experts,
    act: Activation,
    *,
    classes: tuple[Class, ...] = CLASSES,
) -> Tensor:
    """The form of `k3_kernels.moe.experts_grouped` for Hopper; `classes` is for benchmarks."""
    T, k = ids.shape
    E, L, F = experts.w13.shape[0], z.shape[1], experts.w13.shape[1] // 2
    assert experts.w13_scale is not None
    assert experts.w2_scale is not None
    out = z.new_empty(T, L)
    if T == 0:
        return out
    if L % 256 or F % 256:
        classes = tuple(kind._replace(span=1) for kind in classes)
    order, table, bounds = tiles(ids, E, tuple(kind.near + kind.far for kind in classes))
    rows, inner = z.new_empty(T * k, L), z.new_empty(T * k, F)
    _sorted_rows[(T * k, triton.cdiv(L, 4096))](z, z.stride(0), order, rows, k, L, MOVED, num_warps=4)
    w13, w2 = views(experts)
    beta, linear_beta = constants(act)
    _products(classes, rows, w13, experts.w13_scale, table, bounds, inner, True, 2 * F, L, beta, linear_beta)
    _products(classes, inner, w2, experts.w2_scale, table, bounds, rows, False, L, F, 0.0, 0.0)
    place = torch.empty(T * k, dtype=torch.int32, device=z.device)
    place[order] = torch.arange(T * k, dtype=torch.int32, device=z.device)
    _sum[(triton.cdiv(L, 512), T)](rows, place, weights, out, k, L, 512, num_warps=4)
    return out


def _products(
    classes: tuple[Class, ...],
    tokens: Tensor,
    words: Tensor,
    scales: Tensor,
    table: Tensor,
    bounds: Tensor,
    to: Tensor,
    gated: bool,
    out: int,
    width: int,
    beta: float,
    linear_beta: float,
) -> None:
    wide = gl.NVMMASharedLayout(128, 16, 2)
    for i, kind in enumerate(classes):
        packed = gl.NVMMASharedLayout(64 * kind.span, 32, 2)
        product[(processors(tokens.device),)](
            TensorDescriptor.from_tensor(tokens, [kind.near, 64], wide),
            TensorDescriptor.from_tensor(tokens, [kind.far or 16, 64], wide),
            TensorDescriptor.from_tensor(words, [32, 16 * kind.span], packed), scales, table, bounds, to,
            gated, out, width, beta, linear_beta, i, *kind, num_warps=4,
        )  # fmt: skip
