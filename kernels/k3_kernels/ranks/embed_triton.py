"""A rank's part of an embedding in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def _embed(ids, table, out, first, N, D, B: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * B + tl.arange(0, B)
    row = tl.load(ids + t) - first
    mine = (row >= 0) & (row < N)
    x = tl.load(table + row * D + column, mask=(column < D) & mine, other=0.0)
    tl.store(out + t * D + column, x, mask=column < D)


def embed(ids: Tensor, table: Tensor, first: int) -> Tensor:
    """The kernel's form of `k3_kernels.ranks.embed`."""
    T, (N, D) = ids.numel(), table.shape
    out = torch.empty(T, D, dtype=table.dtype, device=table.device)
    if T:
        _embed[(T, triton.cdiv(D, BLOCK))](ids, table, out, first, N, D, BLOCK, num_warps=4)
    return out
