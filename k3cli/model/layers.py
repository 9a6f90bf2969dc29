"""The layers of the network, from ids to logits: what a prefill and a step have in common (`passes` has the rest)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from k3_kernels import attnres, moe, ranks
from k3_kernels.activation import Activation, Situ, Swiglu
from k3_kernels.norm import rms_norm
from torch import Tensor

from k3cli.model.blocks import KdaWeights, MlaWeights, MlpWeights, MoeWeights, Weights
from k3cli.model.config import ModelConfig
from k3cli.model.marks import marked
from k3cli.model.passes import Pass
from k3cli.model.world import World

ROUTE, SHARED = 0, 1
"""What runs beside a step's main row of kernels: the router, and the shared experts."""


class Layers:
    """All layers with their weights; nothing of a sequence. config, weights, world: see `network.K3Model`.

    taps: 0-based layers, ascending, behind which the residual stream is handed out.
    """

    def __init__(self, config: ModelConfig, weights: Weights, world: World | None) -> None:
        self.taps: tuple[int, ...] = ()
        self._config, self._weights, self._world = config, weights, world
        self._act: Activation = Swiglu() if config.situ is None else Situ(*config.situ)
        self._scale = (config.mla.nope_dim + config.mla.pe_dim) ** -0.5
        # Layers counted by kind.
        kinds = (config.kda_layers, config.mla_layers)
        self._place = {layer: place for kind in kinds for place, layer in enumerate(kind)}

    def logits(self, ids: Tensor, now: Pass) -> tuple[Tensor, Tensor | None]:
        """(fp32 logits [T, V], taps [T, taps D] if there are any)."""
        seen: list[Tensor] = []
        hidden = self.hidden(ids, now, seen)
        with marked("head"):
            return self.head(hidden), torch.cat(seen, -1) if seen else None

    def head(self, hidden: Tensor) -> Tensor:
        """fp32 logits [T, V]."""
        logits = F.linear(hidden, self._weights.head)
        if self._world is None:
            return logits.float()
        return self._world.gather(logits, 1)[:, : self._config.vocab].float()

    def _embed(self, ids: Tensor) -> Tensor:
        table = self._weights.embed
        if self._world is None:
            return F.embedding(ids, table)
        return self._sum(ranks.embed(ids, table, self._weights.first))

    def _sum(self, part: Tensor) -> Tensor:
        """The sum of every rank's part."""
        return part if self._world is None else self._world.sum(part)

    def hidden(self, ids: Tensor, now: Pass, seen: list[Tensor]) -> Tensor:
        """Embedding to final norm: [T] -> [T, D]. seen: takes the residual stream behind each tapped layer."""
        block = self._config.attn_res_block
        x = self._embed(ids)
        return self._plain(x, now, seen) if block is None else self._mixed(x, now, block, seen)

    def _plain(self, x: Tensor, now: Pass, seen: list[Tensor]) -> Tensor:
        eps = self._config.norm_eps
        for i, layer in enumerate(self._weights.layers):
            x = x + self._attention(i, rms_norm(x, layer.attn_norm, eps), now)
            x = x + self._mlp(i, rms_norm(x, layer.mlp_norm, eps), now)
            if i in self.taps:
                seen.append(x)
        return rms_norm(x, self._weights.norm, eps)

    def _mixed(self, x: Tensor, now: Pass, block: int, seen: list[Tensor]) -> Tensor:
        """Attention residuals: `slab` holds the snapshots and behind them the running prefix."""
        eps = self._config.norm_eps
        count = -(-len(self._weights.layers) // block)
        slab = torch.empty(count + 1, *x.shape, dtype=x.dtype, device=x.device)
        slab[0] = x
        top = 0
        more: Tensor | None = None  # what the last sublayer adds to the prefix, added by the mix behind it
        for i, layer in enumerate(self._weights.layers):
            assert layer.attn_mix is not None
            assert layer.mlp_mix is not None
            with marked("mix"):
                if top:
                    h = attnres.mix_norm(slab[: top + 1], layer.attn_mix.query, layer.attn_norm, eps, eps, more)
                else:
                    h = rms_norm(slab[0], layer.attn_norm, eps)
            if i - 1 in self.taps:  # whole only now that the last sublayer's part was added
                seen.append(slab[top].clone())
            fresh = i % block == 0
            if fresh:  # the raw prefix becomes a snapshot and a new prefix starts from nothing
                top += 1
            more = self._attention(i, h, now)
            with marked("mix"):
                if fresh:
                    slab[top], more = more, None
                h = attnres.mix_norm(slab[: top + 1], layer.mlp_mix.query, layer.mlp_norm, eps, eps, more)
            more = self._mlp(i, h, now)
        assert self._weights.mix is not None
        with marked("mix"):
            x = attnres.mix_norm(slab[: top + 1], self._weights.mix.query, self._weights.norm, eps, eps, more)
        if len(self._weights.layers) - 1 in self.taps:
            seen.append(slab[top].clone())
        return x

    def _attention(self, index: int, x: Tensor, now: Pass) -> Tensor:
        weights, place = self._weights.layers[index].attention, self._place[index]
        with marked("kda" if isinstance(weights, KdaWeights) else "mla"):
            projected = now.linear(x, weights.proj)
            if isinstance(weights, KdaWeights):
                part = self._kda(weights, projected, now, place)
            else:
                part = self._mla(weights, projected, now, place)
            return self._sum(part)

    def _kda(self, w: KdaWeights, projected: Tensor, now: Pass, place: int) -> Tensor:
        """projected [T, q | k | v | gate | ...] -> this rank's part of [T, D]."""
        cfg = self._config.kda
        shape = (projected.shape[0], cfg.heads, cfg.head_dim)
        qkv, gate, f_a, b = projected.split([3 * cfg.width, w.gate_width, cfg.head_dim, cfg.heads], dim=-1)
        gate = (gate if w.g_b is None else now.linear(gate, w.g_b)).view(shape)
        f = now.linear(f_a, w.f_b).view(shape)
        return now.linear(now.kda(place, w, qkv, f, b, gate), w.o_proj)

    def _mla(self, w: MlaWeights, projected: Tensor, now: Pass, place: int) -> Tensor:
        """projected [T, q | latent | ...] -> this rank's part of [T, D]."""
        cfg, T = self._config.mla, projected.shape[0]
        parts = projected.split(list(w.parts.values()), dim=-1)
        q, latent = parts[0], parts[1]
        if w.q_norm is not None and w.q_b is not None:
            q = now.linear(rms_norm(q, w.q_norm, cfg.latent_norm_eps), w.q_b)
        q = q.reshape(T, cfg.heads, cfg.nope_dim + cfg.pe_dim)
        c, k_pe = latent.split([cfg.kv_rank, cfg.pe_dim], dim=-1)
        row = torch.cat((rms_norm(c, w.kv_norm, cfg.latent_norm_eps), k_pe), -1)
        out = now.mla(place, w, q, row, self._scale).reshape(T, cfg.heads * cfg.v_dim)
        if cfg.output_gate:
            out = out * torch.sigmoid(parts[2])
        return now.linear(out, w.o_proj)

    def _mlp(self, index: int, x: Tensor, now: Pass) -> Tensor:
        """x [T, D] normed -> [T, D]."""
        w = self._weights.layers[index].mlp
        if isinstance(w, MlpWeights):
            with marked("mlp"):
                gate, up = now.linear(x, w.gate_up).chunk(2, dim=-1)
                return self._sum(now.linear(self._act(gate, up), w.down))
        with marked("moe"):
            return self._moe(w, x, now)

    def _moe(self, w: MoeWeights, x: Tensor, now: Pass) -> Tensor:
        cfg = self._config.moe
        assert cfg is not None
        with _beside(now, ROUTE):
            ids, weights = moe.route(
                x,
                w.gate,
                w.bias,
                top_k=cfg.top_k,
                groups=cfg.groups,
                top_groups=cfg.top_groups,
                renormalize=cfg.renormalize,
                scale=cfg.scale,
            )
        inner = cfg.latent or 0
        projected = x if w.proj is None else now.linear(x, w.proj)
        z = projected[:, :inner] if inner else x
        shared = None
        if now.aside is not None:
            with now.aside.run(SHARED):
                shared = self._shared(w, projected[:, inner:], now)
        _join(now, ROUTE)
        if w.places is not None:
            ids = w.places[ids]
            weights = weights * (ids < len(w.owned))  # experts of zeros: several of a row may be the same one
        routed = now.experts(z, ids, weights, w.ready, self._act)
        _join(now, SHARED)
        if now.aside is None:
            shared = self._shared(w, projected[:, inner:], now)
        if self._world is not None:
            routed, shared = self._world.sum_both(routed, shared) if shared is not None else (self._sum(routed), None)
        if w.latent_norm is not None:
            routed = rms_norm(routed, w.latent_norm, self._config.norm_eps)
        if w.latent_up is not None:
            return now.linear(routed, w.latent_up, shared)
        return routed if shared is None else shared + routed

    def _shared(self, w: MoeWeights, x: Tensor, now: Pass) -> Tensor | None:
        """What the shared experts put out [T, D] of x [T, gate | up], if there are any."""
        if w.shared_down is None:
            return None
        gate, up = x.chunk(2, dim=-1)
        return now.linear(self._act(gate, up), w.shared_down)


def _beside(now: Pass, number: int) -> AbstractContextManager[None]:
    """What is launched inside may run beside what is launched behind it, until `_join`."""
    return nullcontext() if now.aside is None else now.aside.run(number)


def _join(now: Pass, number: int) -> None:
    if now.aside is not None:
        now.aside.join(number)
