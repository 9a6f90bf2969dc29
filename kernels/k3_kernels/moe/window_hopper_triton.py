"""Experts over a decode window for Hopper, MXFP4 and bf16: four launches, each started before the one before has ended.

`_prepare` lists each chosen expert once and stores rows in the decoder's order, `stream` of `stream_hopper_triton` runs
for both matrices, `_combine` adds the k outputs of a row in the order of its ids.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from k3_kernels.activation.math_triton import constants
from k3_kernels.activation.reference import Activation
from k3_kernels.moe.decode_hopper_triton import place, processors, views
from k3_kernels.moe.hopper import padded_rows, rings
from k3_kernels.moe.reference import Experts
from k3_kernels.moe.stream_hopper_triton import stream
from k3_kernels.moe.window_triton import _combine


@triton.jit
def _prepare(
    z, z_row, ids, cursor, rows, used, member, count, n,
    W: tl.constexpr, K: tl.constexpr, L: tl.constexpr, R: tl.constexpr, BK: tl.constexpr, BL: tl.constexpr,
):  # fmt: skip
    """Programs 0 to n - 1: a row, columns as the decoder yields them. The last: each chosen expert once, with the
    pairs (row, choice) of the rows that chose it, in the order in which they come up."""
    gdc_wait()
    gdc_launch_dependents()
    i = tl.program_id(0)
    position = tl.load(cursor)
    if i < n:
        slot = (position + i) % W
        k = tl.arange(0, BL)
        x = tl.load(z + slot * z_row + k, mask=k < L)
        tl.store(rows + i * L + k, place(x, BL), mask=k < L)
    else:
        p = tl.arange(0, R * BK)
        row, choice = p // BK, p % BK
        valid = (row < n) & (choice < K)
        wanted = tl.load(ids + (position + row) % W * K + choice, mask=valid, other=-1)
        r, c = tl.arange(0, R), tl.arange(0, BK)
        known = (r < n)[:, None] & (c < K)[None, :]
        everyone = tl.load(ids + ((position + r) % W)[:, None] * K + c[None, :], mask=known, other=-2)
        same = wanted[:, None, None] == everyone[None, :, :]
        pair = r[:, None] * K + c[None, :]
        chosen = tl.max(tl.where(same, pair[None, :, :], -1), axis=2)
        earlier = tl.max(tl.where(r[None, :] < row[:, None], chosen, -1), axis=1)
        first = valid & (earlier < 0)
        rank = tl.cumsum(first.to(tl.int32), 0) - 1
        tl.store(used + rank, wanted.to(tl.int32), mask=first)
        tl.store(member + rank[:, None] * R + r[None, :], chosen, mask=first[:, None])
        tl.store(count, tl.sum(first.to(tl.int32), 0))


def experts_window(
    z: Tensor,
    ids: Tensor,
    weights: Tensor,
    experts: Experts,
    act: Activation,
    cursor: Tensor,
    n: int,
) -> Tensor:
    """The form of `k3_kernels.moe.experts_window` for Hopper, for calls that `hopper.window_takes`."""
    W, k = ids.shape
    L, F = z.shape[1], experts.w13.shape[1] // 2
    assert experts.w13_scale is not None
    assert experts.w2_scale is not None
    out = z.new_empty(W, L)
    R = padded_rows(W)
    pairs = max(n, 1) * k
    parts = torch.empty(pairs, L, dtype=torch.float32, device=z.device)
    if n:
        rows, inner = z.new_empty(R, L), z.new_empty(pairs * R, F)
        used = torch.empty(pairs, dtype=torch.int32, device=z.device)
        member = torch.empty(pairs, R, dtype=torch.int32, device=z.device)
        count = torch.empty(1, dtype=torch.int32, device=z.device)
        _prepare[(n + 1,)](
            z, z.stride(0), ids, cursor, rows, used, member, count, n,
            W, k, L, R, triton.next_power_of_2(k), triton.next_power_of_2(L), num_warps=8, launch_pdl=True,
        )  # fmt: skip
        up, down = rings(R, L, gated=True), rings(R, F, gated=False)
        assert up is not None
        assert down is not None
        beta, linear_beta = constants(act)
        wide, packed, narrow = (gl.NVMMASharedLayout(*x, 2) for x in ((128, 16), (128, 32), (0, 8)))
        w13, w2 = views(experts)
        s13 = experts.w13_scale.view(w13.shape[0], w13.shape[1] // 4)
        s2 = experts.w2_scale.view(w2.shape[0], w2.shape[1] // 4)
        stream[(processors(z.device),)](
            TensorDescriptor.from_tensor(rows, [R, 64], wide),
            TensorDescriptor.from_tensor(w13, [32, 32], packed),
            TensorDescriptor.from_tensor(s13, [32, 16], narrow),
            used, member, count, inner, n,
            True, 2 * F, L, beta, linear_beta, R, *up, num_warps=4, launch_pdl=True,
        )  # fmt: skip
        stream[(processors(z.device),)](
            TensorDescriptor.from_tensor(inner, [R, 64], wide),
            TensorDescriptor.from_tensor(w2, [32, 32], packed),
            TensorDescriptor.from_tensor(s2, [32, 16], narrow),
            used, member, count, parts, n,
            False, L, F, 0.0, 0.0, R, *down, num_warps=4, launch_pdl=True,
        )  # fmt: skip
    early = {"launch_pdl": True} if n else {}
    _combine[(triton.cdiv(L, 256), W)](parts, weights, cursor, out, n, W, k, L, 256, n > 0, num_warps=4, **early)
    return out
