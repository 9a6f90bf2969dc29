"""Mixing over depth as the network calls it: the device's kernel where it takes the arguments."""

from __future__ import annotations

import torch
from torch import Tensor

from k3_kernels import select
from k3_kernels.attnres import reference

MOST_SOURCES, WIDEST = 16, 8192


def choice(sources: Tensor) -> select.Choice:
    """What `mix_norm` runs with for sources like these, and why."""
    n, _, D = sources.shape
    refused = None
    if sources.dtype not in (torch.bfloat16, torch.float32):
        refused = f"{sources.dtype}: the kernel takes bfloat16 and float32"
    elif n > MOST_SOURCES or D > WIDEST:
        refused = f"{n} sources of {D}: the kernel takes up to {MOST_SOURCES} of {WIDEST}"
    return select.choose(sources.device, refused)


def mix_norm(
    sources: Tensor, query: Tensor, weight: Tensor, mix_eps: float, norm_eps: float, add: Tensor | None = None
) -> Tensor:
    """A learned softmax over earlier block outputs, and the RMS norm behind it.

    sources [n, T, D] (fp32 or bf16): the block snapshots in order, then the running prefix; a view of a larger slab is
    fine as long as D is contiguous. query [D] fp32, weight [D] in the dtype of sources. add [T, D] or None: first added
    to the last source, in place and rounded there.
    score_i = query . (source_i / sqrt(mean(source_i^2) + mix_eps)); softmax over i, weighted sum of the sources, all
    fp32; rounded, then `rms_norm` with weight and norm_eps. Returns a new [T, D]. A token's bits depend on its own
    rows alone.
    """
    if choice(sources).kernel:
        from k3_kernels.attnres import mix_triton

        return mix_triton.mix_norm(sources, query, weight, mix_eps, norm_eps, add)
    return reference.mix_norm(sources, query, weight, mix_eps, norm_eps, add)
