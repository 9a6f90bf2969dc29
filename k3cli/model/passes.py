"""The two ways through the layers: a prefill of one chunk, and a step of W rows behind a cursor.

The network is the same on both; what differs is how a layer reads and writes the state, and how experts are run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from k3_kernels import conv, kda, linear, mla, moe
from k3_kernels.activation import Activation
from k3_kernels.kda import StepLog, StepWeights
from k3_kernels.norm import gated_rms_norm
from torch import Tensor

from k3cli.model.aside import Aside
from k3cli.model.blocks import KdaWeights, MlaWeights
from k3cli.model.pool import Pool


class Pass(Protocol):
    """`layer` counts the layers of one kind. Rows [T, ...] are those of a chunk, or the W slots of a window.

    aside: for what may run beside the main row of kernels; None where nothing does.
    """

    aside: Aside | None

    def kda(self, layer: int, w: KdaWeights, qkv: Tensor, f: Tensor, b: Tensor, gate: Tensor) -> Tensor:
        """qkv [T, 3 H K] before the convolution, f [T, H, K], b [T, H], gate [T, H, K] -> normed, gated [T, H K]."""
        ...

    def mla(self, layer: int, w: MlaWeights, q: Tensor, row: Tensor, scale: float) -> Tensor:
        """q [T, H, N + P], row [T, R + P] latents of the rows themselves -> [T, H, V]."""
        ...

    def experts(self, z: Tensor, ids: Tensor, weights: Tensor, experts: moe.Experts, act: Activation) -> Tensor:
        """z [T, L], ids and weights [T, k] -> [T, L]."""
        ...

    def linear(self, x: Tensor, weight: Tensor, add: Tensor | None = None) -> Tensor:
        """x [T, K], weight [N, K] -> [T, N], added to `add`, which is nobody's afterwards, if there is one."""
        ...


@dataclass
class Chunk:
    """A prefill of consecutive tokens from position `start` on. Latents go straight into the pages; the KDA state is
    read from slot `source` and written to slot `target`, so that a pass that fails has changed nothing."""

    pool: Pool
    table: Tensor
    start: int
    source: int
    target: int
    lower_bound: float | None
    eps: float
    aside: Aside | None = None

    def kda(self, layer: int, w: KdaWeights, qkv: Tensor, f: Tensor, b: Tensor, gate: Tensor) -> Tensor:
        y, window = conv.short_conv(qkv, self.pool.conv[self.source, layer], w.conv)
        q, k, v = (part.reshape(f.shape) for part in y.chunk(3, dim=-1))
        state = self.pool.recurrent[self.source, layer]
        o, state = kda.prefill(q, k, v, f, b, w.A_log, w.dt_bias, self.lower_bound, state)
        self.pool.conv[self.target, layer] = window
        self.pool.recurrent[self.target, layer] = state
        return gated_rms_norm(o, gate, w.o_norm, self.eps).flatten(1)

    def mla(self, layer: int, w: MlaWeights, q: Tensor, row: Tensor, scale: float) -> Tensor:
        pages = self.pool.pages[layer]
        mla.store(row, pages, self.table, self.start)
        return mla.prefill(q, pages, self.table, w.kv_b, self.start, scale)

    def experts(self, z: Tensor, ids: Tensor, weights: Tensor, experts: moe.Experts, act: Activation) -> Tensor:
        return moe.experts_grouped(z, ids, weights, experts, act)

    def linear(self, x: Tensor, weight: Tensor, add: Tensor | None = None) -> Tensor:
        return F.linear(x, weight) if add is None else add.addmm_(x, weight.t())


class KdaLayer(NamedTuple):
    """What a step needs of one KDA layer: views over all slots, and its part of the log."""

    weights: StepWeights
    recurrent: Tensor
    conv: Tensor
    log: StepLog


@dataclass
class Window:
    """A step of n live rows. Everything that varies from step to step is read from `table` and `cursor` on the device,
    so that a recorded graph of it stays good.

    cursor int64 [4]: position of the first row, accepted rows of the window before that are still to be replayed, slot
    of the KDA state, unused.
    """

    pool: Pool
    table: Tensor
    cursor: Tensor
    layers: list[KdaLayer]
    n: int
    aside: Aside | None = None

    def kda(self, layer: int, w: KdaWeights, qkv: Tensor, f: Tensor, b: Tensor, gate: Tensor) -> Tensor:
        return kda.step(qkv, f, b, gate, *self.layers[layer], self.cursor, self.n)

    def mla(self, layer: int, w: MlaWeights, q: Tensor, row: Tensor, scale: float) -> Tensor:
        pages = self.pool.pages[layer]
        mla.append(row, pages, self.table, self.cursor, self.n)
        return mla.decode(q, pages, self.table, w.w_uk, w.w_uv, self.cursor, scale, self.n)

    def experts(self, z: Tensor, ids: Tensor, weights: Tensor, experts: moe.Experts, act: Activation) -> Tensor:
        return moe.experts_window(z, ids, weights, experts, act, self.cursor, self.n)

    def linear(self, x: Tensor, weight: Tensor, add: Tensor | None = None) -> Tensor:
        return linear.few(x, weight, add)


def stacked(layers: list[KdaWeights], lower_bound: float | None, eps: float) -> StepWeights:
    """The small KDA weights of all layers as one tensor each, for a replay of all of them; the layers keep views."""
    whole: dict[str, Tensor] = {}
    for name in ("conv", "A_log", "dt_bias", "o_norm"):
        parts = [getattr(layer, name) for layer in layers]
        # Convolution weights are stored tap by tap, as the kernel reads them.
        whole[name] = torch.stack([part.mT for part in parts]).mT if name == "conv" else torch.stack(parts)
        for layer, part in zip(layers, whole[name], strict=True):
            setattr(layer, name, part)
    return StepWeights(**whole, lower_bound=lower_bound, norm_eps=eps)
