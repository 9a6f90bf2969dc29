"""Muon (momentum, orthogonalised by Newton-Schulz) for the matrices, AdamW for everything else."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor, nn

NS = (3.4445, -4.7750, 2.0315)


def orthogonalise(g: Tensor, steps: int = 5) -> Tensor:
    """g [..., M, N] -> the nearest semi-orthogonal matrix, roughly; bf16 inside."""
    x = g.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        a = x @ x.mT
        x = NS[0] * x + (NS[1] * a + NS[2] * a @ a) @ x
    return (x.mT if tall else x).to(g.dtype)


def is_matrix(name: str, p: nn.Parameter) -> bool:
    """Matrices inside the body; not the embedding, the head, the router, convolutions or single rows."""
    special = ("embed_tokens", "lm_head", ".gate.weight", "conv1d", "res_proj", "b_proj.weight")
    return p.ndim >= 2 and (not any(s in name for s in special) or "_b_proj" in name)


class Muon:
    """All matrices of one shape are updated together. Update size follows AdamW's: 0.2 sqrt(max side)."""

    def __init__(self, params: list[nn.Parameter], momentum: float = 0.95, decay: float = 0.05) -> None:
        self.momentum, self.decay = momentum, decay
        shapes: defaultdict[tuple[int, ...], list[nn.Parameter]] = defaultdict(list)
        for p in params:
            shapes[tuple(p.shape)].append(p)
        self.groups = list(shapes.values())
        self.buffers = [torch.zeros(len(g), *g[0].shape, device=g[0].device) for g in self.groups]

    @torch.no_grad()
    def step(self, lr: float) -> None:
        for group, buffer in zip(self.groups, self.buffers, strict=True):
            grads = torch.stack([p.grad for p in group])  # type: ignore[misc]
            buffer.lerp_(grads, 1 - self.momentum)
            update = orthogonalise(grads.lerp_(buffer, self.momentum))
            update *= -lr * 0.2 * max(update.shape[-2:]) ** 0.5
            params = list(group)
            torch._foreach_mul_(params, 1 - lr * self.decay)
            torch._foreach_add_(params, list(update.unbind(0)))


def split(model: nn.Module) -> tuple[Muon, torch.optim.AdamW]:
    matrices = [p for n, p in model.named_parameters() if is_matrix(n, p)]
    others = [p for n, p in model.named_parameters() if not is_matrix(n, p)]
    fused = others[0].is_cuda
    return Muon(matrices), torch.optim.AdamW(others, lr=0.0, betas=(0.9, 0.95), weight_decay=0.0, fused=fused)
