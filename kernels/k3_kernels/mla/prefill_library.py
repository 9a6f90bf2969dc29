"""Prefill through the library's attention (cuDNN, by torch): expanded per block of keys, results merged.

What the library takes: bf16 on a CUDA device of capability 9.0 or newer, head widths that are multiples of 8.
"""

from __future__ import annotations

import torch
from torch import Tensor

from k3_kernels.mla.merge_triton import merge, share
from k3_kernels.mla.scratch import BLOCK


def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Library attention of q [T, H, D] over k [n, H, D], v [n, H, V]: (out [T, H, V], natural log-sum-exp [H, T])."""
    heads_first = [x.transpose(0, 1).unsqueeze(0) for x in (q, k, v)]
    found = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *heads_first, None, True, 0.0, causal, False, scale=scale
    )
    return found[0][0].transpose(0, 1), found[1].reshape(q.shape[1], q.shape[0])


def expand(pages: Tensor, table: Tensor, w_kv_b: Tensor, N: int, first: int, stop: int) -> tuple[Tensor, Tensor]:
    """Keys [n, H, N + P] and values [n, H, V] of positions first to stop - 1, written where attention reads them."""
    H, width, R = w_kv_b.shape
    size, row = pages.shape[1:]
    ids = table[first // size : -(-stop // size)].long()
    latent = pages.index_select(0, ids).view(-1, row)[first % size :][: stop - first]
    keys = latent.new_empty(len(latent), H, N + row - R)
    values = latent.new_empty(len(latent), H, width - N)
    heads = latent[:, :R].expand(H, -1, -1)
    torch.bmm(heads, w_kv_b[:, :N].transpose(1, 2), out=keys[..., :N].transpose(0, 1))
    torch.bmm(heads, w_kv_b[:, N:].transpose(1, 2), out=values.transpose(0, 1))
    share(latent[:, R:], keys)
    return keys, values


def prefill(q: Tensor, pages: Tensor, table: Tensor, w_kv_b: Tensor, start: int, scale: float) -> Tensor:
    """As the reference: blocks of BLOCK keys from position 0, the chunk's own keys last and causal.

    The bits depend on start and T. Workspace: `scratch.prefill_scratch`.
    """
    T, H, width = q.shape
    N = width - (pages.shape[2] - w_kv_b.shape[2])
    V = w_kv_b.shape[1] - N
    blocks = [(first, min(first + BLOCK, start), False) for first in range(0, start, BLOCK)]
    blocks.append((start, start + T, True))
    total: Tensor | None = None
    lse: Tensor | None = None
    for first, stop, causal in blocks:
        keys, values = expand(pages, table, w_kv_b, N, first, stop)
        part, part_lse = attention(q, keys, values, causal, scale)
        del keys, values  # not two blocks at a time
        if total is None or lse is None:
            total, lse = part, part_lse.contiguous()
            continue
        out = total
        if stop == start + T:
            out = q.new_empty(T, H, V)
        elif total.dtype != torch.float32:
            out = torch.empty(T, H, V, device=q.device, dtype=torch.float32)
        merge(total, lse, part, part_lse, out)
        total = out
        del part, part_lse, out
    assert total is not None
    return total
