"""Block attention residuals: a learned softmax over earlier block outputs instead of one residual sum (Kimi K3)."""

from __future__ import annotations

import torch
from torch import Tensor

from k3_kernels.norm.reference import rms_norm


def mix(sources: Tensor, query: Tensor, eps: float) -> Tensor:
    """Weights the sources of each token by a softmax over depth and adds them up.

    sources [n, T, D] (fp32 or bf16): the block snapshots in order, then the running prefix; a view of a larger slab is
    fine as long as D is contiguous. query [D] fp32 = norm weight times projection vector.
    score_i = query . (source_i / sqrt(mean(source_i^2) + eps)); the values are the un-normalised sources.
    Scores, softmax and sum are fp32. Returns a new [T, D] in the dtype of sources.
    """
    full = sources.float()
    inverse = torch.rsqrt(full.square().mean(-1) + eps)
    weights = torch.softmax(torch.matmul(full, query) * inverse, dim=0)
    return (weights.unsqueeze(-1) * full).sum(0).to(sources.dtype)


def mix_norm(
    sources: Tensor, query: Tensor, weight: Tensor, mix_eps: float, norm_eps: float, add: Tensor | None = None
) -> Tensor:
    """`rms_norm(mix(sources))`: every mixing site of the network is followed by an RMS norm with `weight` [D].

    add [T, D]: first added to the last source, in place (the running prefix takes a sublayer's output).
    """
    if add is not None:
        sources[-1] += add
    return rms_norm(mix(sources, query, mix_eps), weight, norm_eps)
