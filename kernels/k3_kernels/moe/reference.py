"""Mixture of experts: router, MXFP4 weights, experts over many tokens and over a decode window.

Sources: DeepSeek-V3 (arXiv 2412.19437), section 2.1.2, for the router; OCP Microscaling Formats v1.0 for MXFP4.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from k3_kernels.activation.reference import Activation

MX_GROUP = 32
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class Experts(NamedTuple):
    """Stacked expert weights, [out, in] each: w13 = gate rows then up rows [E, 2F, L], w2 [E, L, F].

    Packed: uint8 with two columns a byte (low nibble first) and E8M0 scales uint8 per 32 columns. Dense: float, no
    scales.
    """

    w13: Tensor
    w2: Tensor
    w13_scale: Tensor | None = None
    w2_scale: Tensor | None = None

    def matrices(self, expert: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(w13, w2) of one expert in `dtype`."""
        if self.w13_scale is None or self.w2_scale is None:
            return self.w13[expert].to(dtype), self.w2[expert].to(dtype)
        return (
            dequantize_mxfp4(self.w13[expert], self.w13_scale[expert], dtype),
            dequantize_mxfp4(self.w2[expert], self.w2_scale[expert], dtype),
        )


@cache
def _pairs(device: torch.device) -> Tensor:
    """Both values of every byte, [256] float64 words that each hold two float32 (low nibble first)."""
    values = torch.tensor(E2M1 + tuple(-x for x in E2M1), dtype=torch.float32)
    codes = torch.arange(256)
    table = torch.stack((values[codes & 15], values[codes >> 4]), -1)
    return table.contiguous().view(torch.float64).flatten().to(device)


@cache
def _powers(device: torch.device) -> Tensor:
    """E8M0: [256] fp32, 2^(s - 127); 255 means not a number."""
    return torch.tensor([2.0 ** (s - 127) for s in range(255)] + [float("nan")], dtype=torch.float32).to(device)


def dequantize_mxfp4(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """MXFP4 to float: packed uint8 [out, in/2], scale uint8 [out, in/32] (value 2^(s-127)). Returns [out, in].

    Every value is exact in fp32; in bf16 too unless the scale leaves the normal range.
    """
    rows, half = packed.shape
    words = _pairs(packed.device).index_select(0, packed.reshape(-1).int())
    values = words.view(torch.float32).view(rows, scale.shape[1], MX_GROUP)
    multiplier = _powers(packed.device).index_select(0, scale.reshape(-1).int())
    return values.mul_(multiplier.view(rows, -1, 1)).view(rows, 2 * half).to(dtype)


def route(
    x: Tensor,
    gate: Tensor,
    bias: Tensor,
    *,
    top_k: int,
    groups: int,
    top_groups: int,
    renormalize: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Sigmoid router with a selection bias and group-limited top-k, in fp32.

    x [T, D] (any float dtype), gate [E, D] fp32, bias [E] fp32. The bias takes part in the choice only; a group's rank
    is the sum of its two best biased scores and only `top_groups` groups may be chosen from.
    Returns (expert ids [T, k] int64, weights [T, k] fp32 = score (/ their sum + 1e-20) * scale), best choice first.
    """
    scores = torch.sigmoid(F.linear(x.float(), gate))
    choice = scores + bias
    if groups > 1:
        grouped = choice.view(x.shape[0], groups, -1)
        rank = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1)
        allowed = torch.zeros_like(rank, dtype=torch.bool).scatter_(1, rank.topk(top_groups, dim=-1).indices, True)
        choice = grouped.masked_fill(~allowed.unsqueeze(-1), float("-inf")).view_as(choice)
    ids = choice.topk(top_k, dim=-1).indices
    weights = scores.gather(1, ids)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return ids, weights * scale


def _expert(z: Tensor, w13: Tensor, w2: Tensor, act: Activation) -> Tensor:
    gate, up = F.linear(z, w13).chunk(2, dim=-1)
    return F.linear(act(gate, up), w2)


def experts_grouped(z: Tensor, ids: Tensor, weights: Tensor, experts: Experts, act: Activation) -> Tensor:
    """`sum_e w_e f_e(z)` for many tokens: the tokens of one expert are gathered and go through it together.

    z [T, L], ids [T, k] int64, weights [T, k] fp32. Products with the weights and their sums are fp32, in the order of
    expert ids. Returns [T, L] in z's dtype.
    """
    total = torch.zeros(z.shape, dtype=torch.float32, device=z.device)
    k = ids.shape[1]
    flat, order = torch.sort(ids.flatten(), stable=True)
    token = order // k
    weight = weights.flatten()[order].unsqueeze(-1)
    counts = torch.bincount(flat, minlength=experts.w13.shape[0]).tolist()
    first = 0
    for expert, count in enumerate(counts):
        if not count:
            continue
        picked = token[first : first + count]
        result = _expert(z[picked], *experts.matrices(expert, z.dtype), act)
        total.index_add_(0, picked, result.float() * weight[first : first + count])
        first += count
    return total.to(z.dtype)


def experts_window(
    z: Tensor, ids: Tensor, weights: Tensor, experts: Experts, act: Activation, rows: Sequence[int]
) -> Tensor:
    """The same for a decode window of W rows of which only `rows` count.

    Each expert chosen by a counting row runs over all W rows, so shapes don't depend on who chose it, and a row adds
    its experts up in the order of its own choice: its bits don't depend on the other rows. Returns [W, L] in z's
    dtype, rows that don't count are zero.
    """
    chosen = ids.tolist()
    results: dict[int, Tensor] = {}
    for row in rows:
        for expert in chosen[row]:
            if expert not in results:
                results[expert] = _expert(z, *experts.matrices(expert, z.dtype), act)
    total = torch.zeros(z.shape, dtype=torch.float32, device=z.device)
    for row in rows:
        picked = torch.stack([results[expert][row] for expert in chosen[row]]).float()
        picked *= weights[row].unsqueeze(-1)
        for part in picked:
            total[row] += part
    return total.to(z.dtype)
