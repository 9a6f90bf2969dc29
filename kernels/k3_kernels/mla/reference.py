"""Multi-head latent attention without positions: one latent row per token, expanded for prefill, absorbed for decode.

Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1; Kimi Linear drops the rotation. A latent row is the normalised
latent c [R] followed by the shared key part k_pe [P]. Softmax and merges are fp32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def prefill(q: Tensor, blocks: Sequence[Tensor], w_kv_b: Tensor, start: int, scale: float) -> Tensor:
    """Causal attention of T queries at positions start .. start + T - 1; K and V are expanded one key block at a time.

    q [T, H, N + P]; blocks: latent rows [n_i, R + P] that follow each other from position 0 and reach at least
    start + T - 1 (cut at fixed absolute positions by the caller: the merge order is the block order);
    w_kv_b [H, N + V, R] (key rows, then value rows); scale multiplies the scores. One dtype, fp32 or bf16.
    Returns [T, H, V] in q's dtype.
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


def decode(q: Tensor, pages: Sequence[Tensor], w_uk: Tensor, w_uv: Tensor, positions: Tensor, scale: float) -> Tensor:
    """Absorbed attention of W rows over pages of equal size, each row up to its own position.

    q [W, H, N + P]; pages: [page, R + P] each, from position 0; positions [W] int64, those that matter lie in the last
    page (what lies behind a row's position is masked, but must be finite); w_uk [H, N, R], w_uv [H, V, R].
    Every shape and every order of summation depends on len(pages) alone, hence on the row's absolute position alone.
    Returns [W, H, V] in q's dtype; rows whose position lies in an earlier page are meaningless.
    """
    W, H = q.shape[:2]
    N, R = w_uk.shape[1:]
    size, row = pages[0].shape
    n = len(pages)
    queries = q.float().transpose(0, 1)
    absorbed = torch.empty(H, W, row, dtype=torch.float32, device=q.device)
    absorbed[..., :R] = torch.bmm(queries[..., :N].contiguous(), w_uk.float())
    absorbed[..., R:] = queries[..., N:]
    absorbed = absorbed.mul_(scale).view(H * W, row)

    scores = torch.empty(n, H * W, size, dtype=torch.float32, device=q.device)
    for i, page in enumerate(pages):
        torch.mm(absorbed, page.float().t(), out=scores[i])
    columns = torch.arange((n - 1) * size, n * size, device=q.device)
    scores[-1].view(H, W, size).masked_fill_(columns > positions[:, None], float("-inf"))
    high = scores.amax(-1, keepdim=True).amax(0)
    scores.sub_(high).exp_()
    norm = scores.sum(-1, keepdim=True).sum(0)
    partial = torch.empty(n, H * W, R, dtype=torch.float32, device=q.device)
    for i, page in enumerate(pages):
        torch.mm(scores[i], page[:, :R].float(), out=partial[i])
    latent = (partial.sum(0) / norm).view(H, W, R)
    return torch.bmm(latent, w_uv.float().mT).transpose(0, 1).to(q.dtype)
