"""Multi-head latent attention without positions: one latent row per token, expanded for prefill, absorbed for decode.

Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1; Kimi Linear drops the rotation. A latent row is the normalised
latent c [R] followed by the shared key part k_pe [P]. Rows live in pages: `pages` [G, page, R + P] is one layer of a
pool (a strided view, rows contiguous), `table` int32 [max_pages] names the pages of one sequence in order, so that
position p is row p % page of page table[p // page]. Softmax and merges are fp32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

GROUP = 16
"""Full pages that decode takes at once, at multiples of this many pages: scores and partial sums stay small at any
context, and a thousand pages don't cost a thousand rounds of small products."""


def append(rows: Tensor, pages: Tensor, table: Tensor, cursor: Tensor, n: int) -> None:
    """Writes the n live rows of a window into `pages`, in place.

    rows [W, R + P]; cursor int64 [4], its first entry is the position of the window's first row; row i of the window
    sits in slot (position + i) mod W. Rows behind the committed position are scratch: rejected ones need no undo.
    """
    positions = cursor[0] + torch.arange(n, device=cursor.device)
    _write(rows[positions % rows.shape[0]], pages, table, positions)


def store(rows: Tensor, pages: Tensor, table: Tensor, start: int) -> None:
    """Writes the rows [T, R + P] of a prefilled chunk at positions start and on into `pages`, in place."""
    _write(rows, pages, table, torch.arange(start, start + rows.shape[0], device=rows.device))


def _write(rows: Tensor, pages: Tensor, table: Tensor, positions: Tensor) -> None:
    size = pages.shape[1]
    pages[table[positions // size].long(), positions % size] = rows


def prefill(q: Tensor, pages: Tensor, table: Tensor, w_kv_b: Tensor, start: int, scale: float) -> Tensor:
    """Causal attention of T queries at positions start .. start + T - 1; their own rows are already in the pages.

    q [T, H, N + P]; w_kv_b [H, N + V, R] (key rows, then value rows); scale multiplies the scores. One dtype, fp32 or
    bf16. Keys and values are expanded one block at a time. Returns [T, H, V] in q's dtype. The bits depend on start
    and T: the caller cuts at fixed absolute positions.
    """
    size, end = pages.shape[1], start + q.shape[0]
    ids = table[: -(-end // size)].tolist()
    blocks = [pages[page, : end - i * size] for i, page in enumerate(ids)]
    return prefill_blocks(q, blocks, w_kv_b, start, scale)


def prefill_blocks(q: Tensor, blocks: Sequence[Tensor], w_kv_b: Tensor, start: int, scale: float) -> Tensor:
    """The same over blocks of latent rows [n_i, R + P] that follow each other from position 0.

    They reach at least start + T - 1 and are cut at fixed absolute positions: the merge order is the block order.
    """
    T, H, width = q.shape
    R = w_kv_b.shape[-1]
    P = blocks[0].shape[-1] - R if blocks else 0
    N = width - P
    V = w_kv_b.shape[1] - N
    queries = q.float().transpose(0, 1).contiguous() * scale
    out = torch.zeros(H, T, V, dtype=torch.float32, device=q.device)
    top = torch.full((H, T, 1), float("-inf"), device=q.device)
    norm = torch.zeros(H, T, 1, device=q.device)
    first = 0
    for block in blocks:
        n = block.shape[0]
        lo = max(0, first - start)  # earlier queries see nothing of this block
        if lo >= T:
            break
        latent = block.float()
        expanded = torch.matmul(latent[:, :R], w_kv_b.float().mT).to(q.dtype).float()
        values = expanded[..., N:]
        scores = torch.matmul(queries[:, lo:, :N], expanded[..., :N].mT)
        scores += torch.matmul(queries[:, lo:, N:], latent[:, R:].mT)
        if first + n - 1 > start + lo:
            keys = torch.arange(first, first + n, device=q.device)
            rows = torch.arange(start + lo, start + T, device=q.device)
            scores.masked_fill_(keys > rows[:, None], float("-inf"))
        high = torch.maximum(top[:, lo:], scores.amax(-1, keepdim=True))
        scores.sub_(high).exp_()
        shrink = (top[:, lo:] - high).exp_()
        norm[:, lo:] = norm[:, lo:] * shrink + scores.sum(-1, keepdim=True)
        out[:, lo:] = out[:, lo:] * shrink + torch.matmul(scores, values)
        top[:, lo:] = high
        first += n
    return (out / norm).transpose(0, 1).to(q.dtype)


def decode(
    q: Tensor, pages: Tensor, table: Tensor, w_uk: Tensor, w_uv: Tensor, cursor: Tensor, scale: float, n: int
) -> Tensor:
    """Absorbed attention of a window's n live rows: the row at position p attends the keys up to p.

    q [W, H, N + P], the row of position p in slot p mod W; w_uk [H, N, R], w_uv [H, V, R]; cursor int64 [4], its first
    entry is the position of the first live row. The latents of all live rows are already in the pages; what lies behind
    them and what idle slots hold is never used and may be NaN. scale multiplies the scores.
    Every shape and every order of summation depends on W and a row's own position alone: full pages in groups at fixed
    boundaries, then the row's own page up to the row. Reads cursor and table on the host.
    Returns [W, H, V] in q's dtype; idle rows are zero.
    """
    W, H = q.shape[:2]
    N, R = w_uk.shape[1:]
    queries = q.float().transpose(0, 1)
    absorbed = torch.empty(H, W, pages.shape[-1], dtype=torch.float32, device=q.device)
    absorbed[..., :R] = torch.bmm(queries[..., :N].contiguous(), w_uk.float())
    absorbed[..., R:] = queries[..., N:]
    absorbed.mul_(scale)
    start, size = int(cursor[0]), pages.shape[1]
    latent = torch.zeros(H, W, R, dtype=torch.float32, device=q.device)
    for own in range(start // size, (start + n - 1) // size + 1):
        # A window that crosses a page: each row reads what it would read alone.
        here = range(max(start, own * size), min(start + n, (own + 1) * size))
        sums = [_Sums(absorbed[:, p % W].contiguous(), R) for p in here]
        ids = table[: own + 1].tolist()
        for first in range(0, own, GROUP):
            keys = _group(pages, ids[first : min(first + GROUP, own)]).float()
            for row in sums:
                row.add(keys)
        last = pages[ids[own]].float()
        for p, row in zip(here, sums, strict=True):
            row.add(last[None, : p % size + 1])
            latent[:, p % W] = row.out / row.norm
    return torch.bmm(latent, w_uv.float().mT).transpose(0, 1).to(q.dtype)


def _group(pages: Tensor, ids: list[int]) -> Tensor:
    """Whole pages [len(ids), page, R + P]; a view where they lie side by side."""
    side_by_side = ids == list(range(ids[0], ids[0] + len(ids)))
    return pages[ids[0] : ids[0] + len(ids)] if side_by_side else pages[ids]


class _Sums:
    """Running softmax of one absorbed query row [H, R + P]: out [H, R], norm [H, 1], not yet divided."""

    def __init__(self, row: Tensor, R: int) -> None:
        self.row, self.R = row, R
        self.top: Tensor | None = None
        self.out = self.norm = row  # until the first keys

    def add(self, keys: Tensor) -> None:
        """keys [pages, rows, R + P] fp32, all of them visible."""
        scores = torch.bmm(self.row.expand(keys.shape[0], -1, -1), keys.mT)
        high = scores.amax((0, 2)).unsqueeze(-1)
        if self.top is not None:
            high = torch.maximum(self.top, high)
        scores.sub_(high).exp_()
        norm = scores.sum((0, 2)).unsqueeze(-1)
        out = torch.bmm(scores, keys[..., : self.R]).sum(0)
        if self.top is not None:
            shrink = (self.top - high).exp_()
            norm += self.norm * shrink
            out += self.out * shrink
        self.top, self.norm, self.out = high, norm, out
