"""The weights of each kind of sub-layer: allocation, and where every checkpoint tensor goes.

`sinks` maps checkpoint names (without the layer prefix) to views of the allocated tensors; `finish` derives what is
computed once from loaded weights. Projections that read the same input are rows of one matrix.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from k3_kernels.moe import Experts
from torch import Tensor

from k3cli.model.config import ModelConfig
from k3cli.model.parallel import held, owned_experts

Sinks = dict[str, Tensor]


class Alloc:
    """Allocates uninitialised weights; `full` ones stay fp32 whatever the compute dtype."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device = device
        self.dtype = dtype

    def __call__(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def full(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self.device)

    def stored(self, dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)


def rows(matrix: Tensor, sizes: dict[str, int]) -> Iterator[tuple[str, Tensor]]:
    """Consecutive row blocks of a fused matrix under their checkpoint names."""
    yield from zip((f"{name}.weight" for name in sizes), matrix.split(list(sizes.values())), strict=True)


class KdaWeights:
    """Projections [q|k|v|gate|f_a|b], convolution [3HK, w] fp32, decay parameters fp32, output norm and matrix."""

    def __init__(self, config: ModelConfig, alloc: Alloc) -> None:
        kda, D = config.kda, config.hidden
        self.full_rank = kda.full_rank_gate
        gate = {"g_proj": kda.width} if self.full_rank else {"g_a_proj": kda.head_dim}
        self.gate_width = sum(gate.values())
        qkv = {"q_proj": kda.width, "k_proj": kda.width, "v_proj": kda.width}
        self.parts = {**qkv, **gate, "f_a_proj": kda.head_dim, "b_proj": kda.heads}
        self.proj = alloc(sum(self.parts.values()), D)
        self.f_b = alloc(kda.width, kda.head_dim)
        self.g_b = None if self.full_rank else alloc(kda.width, kda.head_dim)
        self.conv = alloc.full(3 * kda.width, kda.conv_width)
        self.A_log = alloc.full(kda.heads)
        self.dt_bias = alloc.full(kda.heads, kda.head_dim)
        self.o_norm = alloc.full(kda.head_dim)
        self.o_proj = alloc(D, kda.width)

    def sinks(self) -> Sinks:
        found = dict(rows(self.proj, self.parts))
        found |= {"f_b_proj.weight": self.f_b, "o_proj.weight": self.o_proj, "o_norm.weight": self.o_norm}
        found |= {"A_log": self.A_log, "dt_bias": self.dt_bias}
        for name, part in zip("qkv", self.conv.chunk(3), strict=True):
            found[f"{name}_conv1d.weight"] = part
        if self.g_b is not None:
            found["g_b_proj.weight"] = self.g_b
        return found

    def finish(self) -> None:
        """Nothing is derived."""


class MlaWeights:
    """Input matrix [q_a or q | kv_a | gate], latent norms, q_b, kv_b per head (also split for the absorbed form)."""

    def __init__(self, config: ModelConfig, alloc: Alloc) -> None:
        mla, D = config.mla, config.hidden
        q_width = mla.heads * (mla.nope_dim + mla.pe_dim)
        query = {"q_proj": q_width} if mla.q_rank is None else {"q_a_proj": mla.q_rank}
        gate = {"g_proj": mla.heads * mla.v_dim} if mla.output_gate else {}
        self.parts = {**query, "kv_a_proj_with_mqa": mla.row, **gate}
        self.nope = mla.nope_dim
        self.proj = alloc(sum(self.parts.values()), D)
        self.q_norm = None if mla.q_rank is None else alloc(mla.q_rank)
        self.q_b = None if mla.q_rank is None else alloc(q_width, mla.q_rank)
        self.kv_norm = alloc(mla.kv_rank)
        self.kv_b = alloc(mla.heads, mla.nope_dim + mla.v_dim, mla.kv_rank)
        self.o_proj = alloc(D, mla.heads * mla.v_dim)

    def sinks(self) -> Sinks:
        found = dict(rows(self.proj, self.parts))
        found |= {"kv_a_layernorm.weight": self.kv_norm, "kv_b_proj.weight": self.kv_b.flatten(0, 1)}
        found["o_proj.weight"] = self.o_proj
        if self.q_norm is not None and self.q_b is not None:
            found |= {"q_a_layernorm.weight": self.q_norm, "q_b_proj.weight": self.q_b}
        return found

    def finish(self) -> None:
        self.w_uk = self.kv_b[:, : self.nope].contiguous()
        self.w_uv = self.kv_b[:, self.nope :].contiguous()


class MlpWeights:
    """A dense gated MLP: [gate|up] and down."""

    def __init__(self, config: ModelConfig, alloc: Alloc) -> None:
        self.width = config.intermediate
        self.gate_up = alloc(2 * self.width, config.hidden)
        self.down = alloc(config.hidden, self.width)

    def sinks(self) -> Sinks:
        found = dict(rows(self.gate_up, {"gate_proj": self.width, "up_proj": self.width}))
        return found | {"down_proj.weight": self.down}

    def finish(self) -> None:
        """Nothing is derived."""


DENSE = 256 << 20
"""Bytes that all experts may take dequantised to be kept so on a CPU, beside the stored ones."""


def dense_bytes(config: ModelConfig, dtype: torch.dtype, count: int) -> int:
    """What `count` experts of every layer take on a CPU beside those stored, where they are kept dequantised; else 0.

    With it k3-nano's step takes a tenth less, and one of eight rows a fifth.
    """
    moe = config.moe
    if moe is None or not moe.packed:
        return 0
    size = sum(config.moe_layers) * count * 3 * moe.intermediate * (moe.latent or config.hidden) * dtype.itemsize
    return size if size <= DENSE else 0


class MoeWeights:
    """Router fp32 or, where that is exact, narrower; input matrix [latent down | shared gate | shared up], experts as
    stored, latent norm and up. `ready`: the experts to compute with, as stored or, of small models on a CPU, in the
    compute dtype (`dense_bytes`).

    owned: numbers of the experts held here, None: all. Where some are missing, one expert of zeros stands in for them,
    and `places` int64 [E] says where the expert of each number lies.
    """

    def __init__(self, config: ModelConfig, alloc: Alloc, owned: range | None = None) -> None:
        moe, D = config.moe, config.hidden
        assert moe is not None
        self.owned = range(moe.experts) if owned is None else owned
        self.places: Tensor | None = None
        self.count = len(self.owned) + (len(self.owned) < moe.experts)
        self.dtype = alloc.dtype
        inner, F = moe.latent or D, moe.intermediate
        self.gate = alloc.full(moe.experts, D)
        self.bias = alloc.full(moe.experts)
        latent = {} if moe.latent is None else {"routed_expert_down_proj": moe.latent}
        shared = {"shared_experts.gate_proj": moe.shared, "shared_experts.up_proj": moe.shared} if moe.shared else {}
        self.parts = {**latent, **shared}
        self.proj = alloc(sum(self.parts.values()), D) if self.parts else None
        self.shared_down = alloc(D, moe.shared) if moe.shared else None
        self.latent_norm = alloc(moe.latent) if moe.latent and moe.latent_norm else None
        self.latent_up = alloc(D, moe.latent) if moe.latent else None
        if moe.packed:
            byte = torch.uint8
            self.experts = Experts(
                alloc.stored(byte, self.count, 2 * F, inner // 2),
                alloc.stored(byte, self.count, inner, F // 2),
                alloc.stored(byte, self.count, 2 * F, inner // 32),
                alloc.stored(byte, self.count, inner, F // 32),
            )
        else:
            kind = getattr(torch, config.stored_dtype)
            self.experts = Experts(
                alloc.stored(kind, self.count, 2 * F, inner), alloc.stored(kind, self.count, inner, F)
            )
        self.ready = self.experts
        self._dense = alloc.device.type == "cpu" and dense_bytes(config, alloc.dtype, self.count) > 0

    def sinks(self) -> Sinks:
        found: Sinks = {"gate.weight": self.gate, "gate.e_score_correction_bias": self.bias}
        if self.proj is not None:
            found |= dict(rows(self.proj, self.parts))
        if self.shared_down is not None:
            found["shared_experts.down_proj.weight"] = self.shared_down
        if self.latent_norm is not None:
            found["routed_expert_norm.weight"] = self.latent_norm
        if self.latent_up is not None:
            found["routed_expert_up_proj.weight"] = self.latent_up
        w13, w2, w13_scale, w2_scale = self.experts
        if w13_scale is None or w2_scale is None:
            stacks = [("weight", w13, w2)]
        else:
            stacks = [("weight_packed", w13, w2), ("weight_scale", w13_scale, w2_scale)]
        for suffix, both, down in stacks:
            for place, e in enumerate(self.owned):
                w1, w3 = both[place].chunk(2)
                found |= {f"experts.{e}.w{i}.{suffix}": w for i, w in ((1, w1), (2, down[place]), (3, w3))}
        return found

    def finish(self) -> None:
        """A gate that the compute dtype holds exactly, as K3's bf16 one, is kept in it: half the bytes a token. Makes
        `places` and `ready`."""
        narrow = self.gate.to(self.dtype)
        if torch.equal(narrow.float(), self.gate):
            self.gate = narrow
        experts = self.gate.shape[0]
        if len(self.owned) < experts:
            for stack in self.experts:
                if stack is not None:
                    stack[-1].zero_()
            places = [e - self.owned.start if e in self.owned else self.count - 1 for e in range(experts)]
            self.places = torch.tensor(places, device=self.gate.device)
        if self._dense:
            self.ready = self.experts.dense(self.dtype)


class MixSite:
    """One attention-residual site: norm and projection, joined into the query [D] fp32."""

    def __init__(self, config: ModelConfig, alloc: Alloc) -> None:
        self._norm = alloc.full(config.hidden)
        self._proj = alloc.full(config.hidden)

    def sinks(self, name: str) -> Sinks:
        return {f"{name}_norm.weight": self._norm, f"{name}_proj.weight": self._proj}

    def finish(self) -> None:
        self.query = self._norm * self._proj


class LayerWeights:
    """One layer: attention, feed-forward, their norms and mixing sites."""

    def __init__(self, config: ModelConfig, index: int, alloc: Alloc, owned: range | None = None) -> None:
        self.attention = KdaWeights(config, alloc) if config.layers[index] == "kda" else MlaWeights(config, alloc)
        self.is_moe = config.moe_layers[index]
        self.mlp = MoeWeights(config, alloc, owned) if self.is_moe else MlpWeights(config, alloc)
        self.attn_norm = alloc(config.hidden)
        self.mlp_norm = alloc(config.hidden)
        mixing = config.attn_res_block is not None
        self.attn_mix = MixSite(config, alloc) if mixing else None
        self.mlp_mix = MixSite(config, alloc) if mixing else None

    def sinks(self) -> Sinks:
        found: Sinks = {"input_layernorm.weight": self.attn_norm, "post_attention_layernorm.weight": self.mlp_norm}
        found |= {f"self_attn.{name}": sink for name, sink in self.attention.sinks().items()}
        block = "block_sparse_moe" if self.is_moe else "mlp"
        found |= {f"{block}.{name}": sink for name, sink in self.mlp.sinks().items()}
        if self.attn_mix is not None and self.mlp_mix is not None:
            found |= self.attn_mix.sinks("self_attention_res") | self.mlp_mix.sinks("mlp_res")
        return found

    def finish(self) -> None:
        for part in (self.attention, self.mlp, self.attn_mix, self.mlp_mix):
            if part is not None:
                part.finish()


class Weights:
    """All weights of the text model, or what `rank` of `world` holds of them (`parallel`).

    embed, head [V / world rounded up, D]: rows of the ids from `first` on; rows behind the last id are zeros.
    """

    def __init__(
        self, config: ModelConfig, device: torch.device, dtype: torch.dtype, rank: int = 0, world: int = 1
    ) -> None:
        """config: of the whole model."""
        alloc, mine = Alloc(device, dtype), held(config, world)
        rows = -(-config.vocab // world)
        self.first = rank * rows
        self._ids = max(0, min(rows, config.vocab - self.first))
        self.embed = alloc(rows, config.hidden)
        self.head = alloc(rows, config.hidden)
        self.norm = alloc(config.hidden)
        self.mix = MixSite(config, alloc) if config.attn_res_block is not None else None
        owned = None if config.moe is None else owned_experts(config, rank, world)
        self.layers = [LayerWeights(mine, i, alloc, owned) for i in range(len(config.layers))]

    def sinks(self) -> Sinks:
        """Destination of every checkpoint tensor that is held here, names without the `language_model.` prefix."""
        found: Sinks = {"model.embed_tokens.weight": self.embed[: self._ids], "model.norm.weight": self.norm}
        found["lm_head.weight"] = self.head[: self._ids]
        if self.mix is not None:
            found |= {f"model.{name}": sink for name, sink in self.mix.sinks("output_attn_res").items()}
        for i, layer in enumerate(self.layers):
            found |= {f"model.layers.{i}.{name}": sink for name, sink in layer.sinks().items()}
        return found

    def finish(self) -> None:
        self.embed[self._ids :].zero_()
        self.head[self._ids :].zero_()
        if self.mix is not None:
            self.mix.finish()
        for layer in self.layers:
            layer.finish()
