"""Pairs (token, expert) sorted by expert and cut into tiles of one expert, without waiting for the device."""

from __future__ import annotations

import torch
from torch import Tensor


def tiles(ids: Tensor, experts: int, heights: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """(order int64 [pairs]: pairs sorted by expert; tiles int32 [n, 3]: expert, first and end of its sorted pairs, by
    class; bounds int32 [classes + 1]: where tiles of a class begin).

    An expert's pairs are cut into tiles of heights[0]; a tile is of the last class whose height holds it. Nothing
    waits for the device: n is bounded from the shapes alone, tiles behind bounds[-1] are nobody's.
    """
    ordered, order = torch.sort(ids.flatten().int(), stable=True)
    number = torch.arange(experts + 1, device=ids.device, dtype=torch.int32)
    begin = torch.searchsorted(ordered, number)
    each = (begin.diff() + heights[0] - 1) // heights[0]
    last = each.cumsum(0)
    tile = torch.arange(min(ids.numel(), experts) + ids.numel() // heights[0], device=ids.device)
    found = torch.searchsorted(last, tile, right=True)
    known = found.clamp(max=experts - 1)
    first = begin[known] + (tile - last[known] + each[known]) * heights[0]
    end = torch.minimum(first + heights[0], begin[known + 1])
    kind = torch.zeros_like(first)
    for height in heights[1:]:
        kind += end - first <= height
    kind = torch.where(found < experts, kind, len(heights))
    kind, by_class = torch.sort(kind, stable=True)
    table = torch.stack((known, first, end), 1)[by_class].int()
    classes = torch.arange(len(heights) + 1, device=ids.device)
    return order, table, torch.searchsorted(kind, classes).int()
