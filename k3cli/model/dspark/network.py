"""The draft network: context rows from the target's taps, a non-causal block, Markov and confidence heads.

A draft's own state is a cache of key and value rows, one a layer and evaluated target token. Rows are appended only for
tokens that stay; nothing is ever cut back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from k3_kernels.norm import rms_norm
from torch import Tensor

from k3cli.model.dspark.config import DraftConfig
from k3cli.model.dspark.rope import rotate, table

Pick = Callable[[Tensor, int], int]
"""(float32 logits [V], absolute position) -> token id."""


@dataclass(frozen=True)
class DraftLayer:
    """Weights of one layer; the fields of the other kind of attention are None."""

    input_norm: Tensor
    post_norm: Tensor
    o_proj: Tensor
    gate_proj: Tensor
    up_proj: Tensor
    down_proj: Tensor
    q_a_proj: Tensor | None = None
    q_a_norm: Tensor | None = None
    q_b_proj: Tensor | None = None
    kv_a_proj: Tensor | None = None
    kv_a_norm: Tensor | None = None
    kv_b_proj: Tensor | None = None
    q_proj: Tensor | None = None
    k_proj: Tensor | None = None
    v_proj: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None


@dataclass(frozen=True)
class DraftWeights:
    """context_proj [D, taps D], norms [D], markov w1 and w2 [V, rank], confidence weight [1, D (+ rank)], bias [1]."""

    layers: tuple[DraftLayer, ...]
    context_proj: Tensor
    context_norm: Tensor
    final_norm: Tensor
    markov_w1: Tensor
    markov_w2: Tensor
    confidence: Tensor | None
    confidence_bias: Tensor | None


class DraftCache:
    """Key and value rows of the context of one timeline, all layers: [layers, rows, width], in order of position."""

    def __init__(self, rows: Tensor, count: int) -> None:
        self._rows = rows
        self.count = count

    def fork(self) -> DraftCache:
        """An independent cache; the rows written so far are shared until either side grows."""
        return DraftCache(self._rows[:, : self.count], self.count)

    def layer(self, index: int) -> Tensor:
        return self._rows[index, : self.count]

    def last(self, n: int) -> Tensor:
        """[layers, up to n, width]: the newest rows, which stay as they are."""
        return self._rows[:, max(0, self.count - n) : self.count]

    def append(self, rows: Tensor) -> None:
        """rows [layers, n, width]."""
        need = self.count + rows.shape[1]
        if need > self._rows.shape[1]:
            size = max(256, 2 * need)
            grown = self._rows.new_empty(self._rows.shape[0], size, self._rows.shape[2])
            grown[:, : self.count] = self._rows[:, : self.count]
            self._rows = grown
        self._rows[:, self.count : need] = rows
        self.count = need


class DraftModel:
    """A loaded draft on the target's device. embed and head are the target's own tables; embed may lie elsewhere."""

    def __init__(
        self, config: DraftConfig, weights: DraftWeights, embed: Tensor, head: Tensor, digest: str = ""
    ) -> None:
        """digest: hex, of the draft's files; "" when context rows are not to be kept for another process."""
        self.config, self.weights, self.embed, self.head, self.digest = config, weights, embed, head, digest
        self.dtype, self.device = weights.context_proj.dtype, weights.context_proj.device
        self._rope = table(config.rope, self.device)

    def new_cache(self) -> DraftCache:
        return DraftCache(torch.empty(self.config.layers, 0, self.width, dtype=self.dtype, device=self.device), 0)

    @property
    def width(self) -> int:
        """Numbers of a context row, of each layer."""
        cfg = self.config
        return cfg.kv_rank + cfg.pe_dim if cfg.kind == "mla" else 2 * cfg.kv_heads * cfg.v_dim

    @torch.no_grad()
    def extend(self, cache: DraftCache, taps: Tensor, position: int) -> None:
        """Appends the context rows of consecutive target tokens; taps [n, taps * D] of positions position, ..."""
        features = rms_norm(
            F.linear(taps.to(self.dtype), self.weights.context_proj), self.weights.context_norm, self.config.eps
        )
        positions = torch.arange(position, position + taps.shape[0], device=self.device)
        cache.append(torch.stack([self._keys(layer, features, positions) for layer in self.weights.layers]))

    @torch.no_grad()
    def block(self, cache: DraftCache, anchor: int, position: int) -> Tensor:
        """Hidden rows [block, D] behind the final norm of [anchor, mask, ...] at position, position + 1, ..."""
        cfg = self.config
        ids = torch.tensor([anchor] + [cfg.mask_id] * (cfg.block - 1), device=self.embed.device)
        positions = torch.arange(position, position + cfg.block, device=self.device)
        x = F.embedding(ids, self.embed).to(self.device, self.dtype)
        for index, layer in enumerate(self.weights.layers):
            normed = rms_norm(x, layer.input_norm, cfg.eps)
            rows = torch.cat((cache.layer(index), self._keys(layer, normed, positions)))
            x = x + self._attend(layer, normed, positions, rows)
            normed = rms_norm(x, layer.post_norm, cfg.eps)
            gated = F.silu(F.linear(normed, layer.gate_proj)) * F.linear(normed, layer.up_proj)
            x = x + F.linear(gated, layer.down_proj)
        return rms_norm(x, self.weights.final_norm, cfg.eps)

    @torch.no_grad()
    def draft(
        self, cache: DraftCache, anchor: int, position: int, k: int, pick: Pick, least: float = 0.0
    ) -> tuple[list[int], list[float]]:
        """Up to k tokens after `anchor`, which sits at `position` and has no context row yet.

        Returns (ids, confidence of each; empty without that head). Token i is picked for position + 1 + i. least: ends
        before a token that would be accepted with a lower chance than this, those before it included.
        """
        w, hidden = self.weights, self.block(cache, anchor, position)
        count = min(k, self.config.block)
        base = F.linear(hidden[:count].to(self.head.dtype), self.head).float()
        ids: list[int] = []
        confidence: list[float] = []
        token, whole = anchor, 1.0
        for i in range(count):
            memory = w.markov_w1[token]
            if w.confidence is not None and w.confidence_bias is not None:
                seen = torch.cat((hidden[i], memory)) if self.config.confidence_markov else hidden[i]
                score = F.linear(seen.float(), w.confidence.float(), w.confidence_bias.float())
                chance = float(torch.sigmoid(score))
                whole *= chance
                if i and whole < least:
                    break
                confidence.append(chance)
            token = pick(base[i] + F.linear(memory, w.markov_w2).float(), position + 1 + i)
            ids.append(token)
        return ids, confidence

    def _keys(self, layer: DraftLayer, x: Tensor, positions: Tensor) -> Tensor:
        """Cache rows [n, width] of x [n, D]: latent and rotated key part, or rotated keys and values of each head."""
        cfg = self.config
        if layer.kv_a_proj is not None and layer.kv_a_norm is not None:
            latent, pe = F.linear(x, layer.kv_a_proj).split([cfg.kv_rank, cfg.pe_dim], -1)
            return torch.cat((rms_norm(latent, layer.kv_a_norm, cfg.eps), rotate(pe, positions, self._rope)), -1)
        assert layer.k_proj is not None
        assert layer.v_proj is not None
        assert layer.k_norm is not None
        keys = F.linear(x, layer.k_proj).unflatten(-1, (cfg.kv_heads, cfg.v_dim))
        keys = rotate(rms_norm(keys, layer.k_norm, cfg.eps), positions[:, None], self._rope)
        return torch.cat((keys.flatten(1), F.linear(x, layer.v_proj)), -1)

    def _attend(self, layer: DraftLayer, x: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
        """Every row of x sees every cache row, those behind it too. [n, D] -> [n, D]."""
        cfg, n = self.config, x.shape[0]
        if layer.q_proj is not None and layer.q_norm is not None:
            q = F.linear(x, layer.q_proj).unflatten(-1, (cfg.heads, cfg.v_dim))
            q = rotate(rms_norm(q, layer.q_norm, cfg.eps), positions[:, None], self._rope)
            keys, values = rows.unflatten(-1, (2, cfg.kv_heads, cfg.v_dim)).unbind(1)
            grouped = q.view(n, cfg.kv_heads, -1, cfg.v_dim)
            scores = torch.einsum("ngrd,mgd->ngrm", grouped, keys).float() * cfg.scale
            out = torch.einsum("ngrm,mgd->ngrd", scores.softmax(-1).to(values.dtype), values)
            return F.linear(out.reshape(n, -1), layer.o_proj)
        assert layer.q_a_proj is not None
        assert layer.q_a_norm is not None
        assert layer.q_b_proj is not None
        assert layer.kv_b_proj is not None
        low = rms_norm(F.linear(x, layer.q_a_proj), layer.q_a_norm, cfg.eps)
        q_nope, q_pe = (
            F.linear(low, layer.q_b_proj).unflatten(-1, (cfg.heads, -1)).split([cfg.nope_dim, cfg.pe_dim], -1)
        )
        w_uk, w_uv = layer.kv_b_proj.view(cfg.heads, -1, cfg.kv_rank).split([cfg.nope_dim, cfg.v_dim], 1)
        latent, pe = rows.split([cfg.kv_rank, cfg.pe_dim], -1)
        absorbed = torch.einsum("nhd,hdr->nhr", q_nope, w_uk)
        turned = rotate(q_pe, positions[:, None], self._rope)
        scores = (torch.einsum("nhr,mr->nhm", absorbed, latent) + torch.einsum("nhp,mp->nhm", turned, pe)).float()
        mixed = torch.einsum("nhm,mr->nhr", (scores * cfg.scale).softmax(-1).to(latent.dtype), latent)
        return F.linear(torch.einsum("nhr,hvr->nhv", mixed, w_uv).reshape(n, -1), layer.o_proj)
