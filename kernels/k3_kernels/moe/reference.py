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
WORKSPACE = 256 << 20
"""Bytes of dequantised expert weights held at one time."""
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

    def matrices(self, chosen: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(w13 [n, 2F, L], w2 [n, L, F]) of the chosen experts (int64 [n]) in `dtype`: fresh tensors."""
        w13, w2 = self.w13.index_select(0, chosen), self.w2.index_select(0, chosen)
        if self.w13_scale is None or self.w2_scale is None:
            return w13.to(dtype), w2.to(dtype)
        return (
            dequantize_mxfp4(w13, self.w13_scale.index_select(0, chosen), dtype),
            dequantize_mxfp4(w2, self.w2_scale.index_select(0, chosen), dtype),
        )

    def dense(self, dtype: torch.dtype) -> Experts:
        """All experts in `dtype`."""
        return Experts(*self.matrices(torch.arange(len(self.w13), device=self.w13.device), dtype))

    def one_by_one(self, chosen: Tensor, dtype: torch.dtype) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """As `matrices`, expert by expert; of dense ones in this very `dtype` views. Reads `chosen` on the host."""
        if self.w13_scale is None and self.w13.dtype == dtype:
            numbers = chosen.tolist()
            return [self.w13[e] for e in numbers], [self.w2[e] for e in numbers]
        w13, w2 = self.matrices(chosen, dtype)
        return w13.unbind(), w2.unbind()

    def at_once(self, dtype: torch.dtype) -> int:
        """How many experts to dequantise together: as many as stay within WORKSPACE bytes."""
        columns = self.w2.shape[2] * (1 if self.w2_scale is None else 2)
        return max(1, WORKSPACE // (3 * self.w2.shape[1] * columns * dtype.itemsize))


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
    """MXFP4 to float: packed uint8 [..., in/2], scale uint8 [..., in/32] (value 2^(s-127)). Returns [..., in].

    Every value is exact in fp32; in bf16 too unless the scale leaves the normal range.
    """
    words = _pairs(packed.device).index_select(0, packed.reshape(-1).int())
    multiplier = _powers(packed.device).index_select(0, scale.reshape(-1).int())
    values = words.view(torch.float32).view(-1, MX_GROUP).mul_(multiplier.unsqueeze(-1))
    return values.view(*packed.shape[:-1], 2 * packed.shape[-1]).to(dtype)


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

    x [T, D] (any float dtype), gate [E, D] fp32 (or x's dtype), bias [E] fp32. The bias takes part in the choice only;
    a group's rank is the sum of its two best biased scores and only `top_groups` groups may be chosen from.
    Returns (expert ids [T, k] int64, weights [T, k] fp32 = score (/ their sum + 1e-20) * scale), best choice first.
    """
    scores = torch.sigmoid(F.linear(x.float(), gate.float()))
    choice = scores + bias
    if groups > 1:
        grouped = choice.view(x.shape[0], groups, -1)
        rank = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1)
        allowed = torch.zeros_like(rank, dtype=torch.bool).scatter_(1, rank.topk(top_groups, dim=-1).indices, True)
        choice = grouped.masked_fill(~allowed.unsqueeze(-1), float("-inf")).view_as(choice)
    ids = choice.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]  # of equal ones, the lower id
    weights = scores.gather(1, ids)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return ids, weights * scale


def experts_grouped(z: Tensor, ids: Tensor, weights: Tensor, experts: Experts, act: Activation) -> Tensor:
    """`sum_e w_e f_e(z)` for many tokens: rows are sorted by expert, so that each expert is one matrix product.

    z [T, L], ids [T, k] int64, weights [T, k] fp32. The weights multiply the experts' outputs; products and sums are
    fp32, in the order of ids. Returns [T, L] in z's dtype.
    """
    T, k = ids.shape
    if T == 0:
        return torch.empty_like(z)
    flat, order = torch.sort(ids.flatten(), stable=True)
    used, counts = torch.unique_consecutive(flat, return_counts=True)
    inputs = z.index_select(0, order // k)
    hidden = z.new_empty(T * k, experts.w13.shape[1])
    outputs = z.new_empty(T * k, z.shape[1])
    first, batch = 0, experts.at_once(z.dtype)
    for chosen, sizes in zip(used.split(batch), counts.split(batch), strict=True):
        w13, w2 = experts.one_by_one(chosen, z.dtype)
        spans: list[tuple[int, int]] = []
        for count in sizes.tolist():
            spans.append((first, first + count))
            first += count
        for (lo, hi), w in zip(spans, w13, strict=True):
            torch.mm(inputs[lo:hi], w.t(), out=hidden[lo:hi])
        begin, end = spans[0][0], spans[-1][1]
        gate, up = hidden[begin:end].chunk(2, dim=-1)
        inner = act(gate, up)
        for (lo, hi), w in zip(spans, w2, strict=True):
            torch.mm(inner[lo - begin : hi - begin], w.t(), out=outputs[lo:hi])
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(T * k, device=order.device)
    picked = outputs.index_select(0, inverse).view(T, k, -1)
    return torch.bmm(weights.unsqueeze(1), picked.float()).squeeze(1).to(z.dtype)


def experts_window(
    z: Tensor,
    ids: Tensor,
    weights: Tensor,
    experts: Experts,
    act: Activation,
    cursor: Tensor,
    n: int,
) -> Tensor:
    """The same for a decode window of W rows of which n count: those of the positions cursor[0] + 0 .. n-1, each in
    slot `position mod W`.

    z [W, L], ids [W, k] int64, weights [W, k] fp32, cursor int64 [4] on z's device; idle slots may hold anything.
    Bits of a row do not depend on the other rows. On a CPU every expert that some row chose takes all W rows, a product
    of one shape, and each row sums its own k results in its own order; elsewhere, where that would have to wait for the
    device, each row goes through its own experts alone. Returns [W, L] in z's dtype, idle rows are zero.
    """
    W = ids.shape[0]
    assert 0 <= n <= W, (n, W)
    slots = (cursor[0] + torch.arange(n, device=cursor.device)) % W
    if z.device.type != "cpu":
        return _rows_on_device(z, ids, weights, experts, act, slots)
    total = torch.zeros_like(z)
    if n == 0:
        return total
    used, local = torch.unique(ids.index_select(0, slots), return_inverse=True)
    outputs = z.new_empty(used.numel(), W, z.shape[1])
    first = 0
    for chosen in used.split(experts.at_once(z.dtype)):
        w13, w2 = experts.one_by_one(chosen, z.dtype)
        hidden = z.new_empty(chosen.numel(), W, experts.w13.shape[1])
        for h, w in zip(hidden.unbind(), w13, strict=True):
            torch.mm(z, w.t(), out=h)
        gate, up = hidden.chunk(2, dim=-1)
        inner = act(gate, up)
        last = first + chosen.numel()
        for out, x, w in zip(outputs[first:last].unbind(), inner.unbind(), w2, strict=True):
            torch.mm(x, w.t(), out=out)
        first = last
    # [n, k, L] at once, then row by row: a product of several rows would be free to sum a row's results in another way.
    picked = outputs[local, slots.unsqueeze(-1)].float().mT
    for row, results in zip(slots.tolist(), picked, strict=True):
        total[row] = torch.mv(results, weights[row])
    return total


def _rows_on_device(
    z: Tensor, ids: Tensor, weights: Tensor, experts: Experts, act: Activation, slots: Tensor
) -> Tensor:
    """Row by row with indices that stay on the device, so that a graph can capture it."""
    total = torch.zeros_like(z)
    for slot in slots.unsqueeze(-1):  # [1] each
        mine = experts.matrices(ids.index_select(0, slot)[0], z.dtype)
        row = _row(z.index_select(0, slot)[0], weights.index_select(0, slot)[0], *mine, act)
        total.index_copy_(0, slot, row.unsqueeze(0))
    return total


def _row(z: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, act: Activation) -> Tensor:
    """One token [L] through its own experts (w13 [k, 2F, L], w2 [k, L, F]) -> [L] in z's dtype."""
    gate, up = torch.mv(w13.flatten(0, 1), z).view(w13.shape[0], -1).chunk(2, dim=-1)
    outputs = torch.bmm(w2, act(gate, up).unsqueeze(-1)).squeeze(-1)
    return torch.mv(outputs.float().t(), weights).to(z.dtype)
