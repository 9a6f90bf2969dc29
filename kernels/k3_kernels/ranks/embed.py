"""A rank's part of an embedding that is cut by ids: its own rows, zeros for the others'."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from k3_kernels import select


def embed_choice(table: Tensor) -> select.Choice:
    """What `embed` runs with for such a table, and why."""
    fine = table.dtype in (torch.bfloat16, torch.float32) and table.is_contiguous()
    return select.choose(table.device, None if fine else "the kernel takes contiguous bfloat16 and float32")


def embed(ids: Tensor, table: Tensor, first: int) -> Tensor:
    """ids int64 [T] of the whole model, table [N, D] of the ids from `first` on -> [T, D]; zeros for other ids."""
    if embed_choice(table).kernel:
        from k3_kernels.ranks import embed_triton

        return embed_triton.embed(ids, table, first)
    local = ids - first
    row = local.remainder(table.shape[0])
    return F.embedding(row, table).masked_fill_((row != local).unsqueeze(-1), 0)
