"""What a model of a given configuration weighs: weights by component, state by position, work space of a step.

Arithmetic on shapes: nothing is loaded or allocated. Bytes throughout; GB means 10^9 bytes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import k3_kernels.kda
import k3_kernels.mla
import torch

from k3cli.model.blocks import Alloc, LayerWeights, Sinks
from k3cli.model.checkpoint import KEPT_FP32
from k3cli.model.config import ModelConfig
from k3cli.model.parallel import allocated, experts_by_width

COMPONENTS = (
    "routed experts",
    "KDA attention",
    "MLA attention",
    "shared experts",
    "expert latents",
    "router",
    "dense MLP",
    "norms and mixing",
    "embedding",
    "head",
)


@dataclass(frozen=True)
class Weighed:
    """One component. disk: bytes in a checkpoint, loaded: bytes in memory, ranks: bytes allocated on each rank."""

    name: str
    disk: int
    loaded: int
    ranks: tuple[int, ...]


@lru_cache(maxsize=64)
def weigh(config: ModelConfig, dtype: torch.dtype, world: int = 1) -> tuple[Weighed, ...]:
    """Weights by component, those the model has, for compute type `dtype` split over `world` ranks."""
    disk: Counter[str] = Counter()
    loaded: Counter[str] = Counter()
    ranks: list[Counter[str]] = [Counter() for _ in range(world)]
    stored = torch.bfloat16.itemsize if config.stored_dtype == "bfloat16" else torch.float32.itemsize
    for count, kind, name, shape, itemsize in _tensors(config, dtype, world):
        what = _component(kind, name)
        size = itemsize
        if not name.endswith(("weight_packed", "weight_scale")) and ".experts." not in name:
            size = 4 if name.endswith(KEPT_FP32) else stored
        disk[what] += count * math.prod(shape) * size
        # Absorbed decoding keeps the two halves of kv_b apart as well.
        copies = 2 if name.endswith("kv_b_proj.weight") else 1
        loaded[what] += count * copies * math.prod(shape) * itemsize
        for rank in range(world):
            held = allocated(config, name, shape, rank, world)
            ranks[rank][what] += count * copies * math.prod(held) * itemsize
    return tuple(Weighed(c, disk[c], loaded[c], tuple(rank[c] for rank in ranks)) for c in COMPONENTS if loaded[c])


def _tensors(
    config: ModelConfig, dtype: torch.dtype, world: int
) -> Iterator[tuple[int, str, str, tuple[int, ...], int]]:
    """(how often, layer kind, name, shape, bytes per element); layers of one kind are looked at once, and so are
    experts where every rank holds as much of each."""
    alloc = Alloc(torch.device("meta"), dtype)
    width, item = config.hidden, dtype.itemsize
    yield 1, "", "model.embed_tokens.weight", (config.vocab, width), item
    yield 1, "", "lm_head.weight", (config.vocab, width), item
    yield 1, "", "model.norm.weight", (width,), item
    if config.attn_res_block is not None:
        for name in ("norm", "proj"):
            yield 1, "", f"model.output_attn_res_{name}.weight", (width,), 4
    alike = config.moe.experts if config.moe and (world == 1 or experts_by_width(config, world)) else 1
    kinds = Counter(zip(config.layers, config.moe_layers, strict=True))
    for (kind, mixture), count in kinds.items():
        index = next(
            i for i, pair in enumerate(zip(config.layers, config.moe_layers, strict=True)) if pair == (kind, mixture)
        )
        sinks: Sinks = LayerWeights(config, index, alloc).sinks()
        for name, sink in sinks.items():
            expert = ".experts." in name
            if not expert or alike == 1 or ".experts.0." in name:
                often = count * (alike if expert else 1)
                yield often, kind, f"model.layers.{index}.{name}", tuple(sink.shape), sink.itemsize


def _component(kind: str, name: str) -> str:
    if "embed_tokens" in name:
        return "embedding"
    if "lm_head" in name:
        return "head"
    if ".self_attn." in name:
        return "KDA attention" if kind == "kda" else "MLA attention"
    if ".block_sparse_moe." in name:
        for word, what in (
            (".experts.", "routed experts"),
            (".shared_experts.", "shared experts"),
            (".gate.", "router"),
        ):
            if word in name:
                return what
        return "expert latents"
    return "dense MLP" if ".mlp." in name else "norms and mixing"


@dataclass(frozen=True)
class StateSize:
    """Bytes of one sequence's state.

    recurrent: of all KDA layers; conv: their convolution windows; row: MLA latents of one token, all MLA layers.
    """

    recurrent: int
    conv: int
    row: int

    @property
    def checkpoint(self) -> int:
        """One KDA checkpoint: recurrent state and convolution windows."""
        return self.recurrent + self.conv

    def session(self, tokens: int) -> int:
        """MLA pages of `tokens` positions and one checkpoint."""
        return tokens * self.row + self.checkpoint


def state_size(
    config: ModelConfig, dtype: torch.dtype, recurrent: torch.dtype = torch.float32, world: int = 1
) -> StateSize:
    """State of a sequence on one rank: KDA heads are split, latents are on every rank. Only MLA layers have latents."""
    n_kda, n_mla, kda = len(config.kda_layers), len(config.mla_layers), config.kda
    heads = kda.heads // world
    return StateSize(
        recurrent=n_kda * heads * kda.head_dim**2 * recurrent.itemsize,
        conv=n_kda * (kda.conv_width - 1) * 3 * heads * kda.head_dim * dtype.itemsize,
        row=n_mla * config.mla.row * dtype.itemsize,
    )


def workspace(config: ModelConfig, dtype: torch.dtype, rows: int, world: int = 1, context: int | None = None) -> int:
    """Bytes a chunk of `rows` tokens behind up to `context` others (None: the limit) needs beside weights and state, on
    one rank: residual streams, the widest sublayer with what its kernels take, logits, and what recorded steps keep.
    """
    width, item = config.hidden, dtype.itemsize
    blocks = 0 if config.attn_res_block is None else -(-len(config.layers) // config.attn_res_block)
    residual = rows * (blocks + 4) * width * item
    widest = 3 * rows * (config.intermediate // world) * item
    kept = min(rows, 8) * (config.vocab // world) * (item + 4)
    if config.kda_layers:
        widest = max(widest, _kda(config, dtype, rows, world))
    if config.mla_layers:
        mla, heads = config.mla, config.mla.heads // world
        widest = max(widest, _mla(config, dtype, rows, world, context))
        kept += k3_kernels.mla.decode_scratch(min(rows, 8), 8, heads, mla.kv_rank, mla.pe_dim, dtype)
    if config.moe is not None:
        moe = config.moe
        inner = moe.latent or width
        each = inner + (1 if dtype == torch.bfloat16 else 3) * moe.intermediate // world
        both = 2 * moe.shared // world + 3 * inner + moe.top_k * each
        widest = max(widest, rows * (both * item + 12 * moe.top_k + 4 * moe.experts))
    return residual + widest + kept


def _kda(config: ModelConfig, dtype: torch.dtype, rows: int, world: int) -> int:
    """Projections, convolved ones, gate and output of a layer, while the chunk form runs."""
    kda, item = config.kda, dtype.itemsize
    heads, width = kda.heads // world, kda.width // world
    given = (9 * width + 2 * kda.head_dim + heads) * item
    if dtype != torch.bfloat16:  # the reference's, which has fp32 copies of the convolution's input and sums instead
        return rows * (given + 3 * 3 * width * 4)
    return rows * given + k3_kernels.kda.prefill_scratch(rows, heads, kda.head_dim, kda.head_dim, dtype)


def _mla(config: ModelConfig, dtype: torch.dtype, rows: int, world: int, context: int | None) -> int:
    """Projections, queries, latents and output of a layer, while keys and values are expanded block by block."""
    mla, heads = config.mla, config.mla.heads // world
    query = heads * (mla.nope_dim + mla.pe_dim)
    gate = heads * mla.v_dim if mla.output_gate else 0
    given = (mla.q_rank or 0) + query + 2 * mla.row + gate + heads * mla.v_dim
    if dtype != torch.bfloat16:  # the reference's, page by page
        return rows * (given * dtype.itemsize + heads * (3 * (query // heads + mla.v_dim) * dtype.itemsize))
    start = max(0, (config.context_limit if context is None else context) - rows)
    return rows * given * dtype.itemsize + k3_kernels.mla.prefill_scratch(
        rows, start, heads, mla.nope_dim, mla.pe_dim, mla.kv_rank, mla.v_dim, dtype
    )
