"""The parallel plan: which rank of a tensor-parallel world holds which slice of every tensor.

One place says it; the loader, sizing and tests read it here. Attention is split by heads, gated MLPs by columns and
rows, routed experts by intermediate width in groups of 32 columns (by expert where the width doesn't divide), embedding
and head by vocabulary (rows of zeros pad the last rank). MLA latents, the router, both latent projections of the
experts, norms and mixing queries are on every rank: a mixture layer then needs one reduction, of the routed latent and
the shared output side by side, before the latent's norm; an attention layer needs one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd
from typing import Literal

from k3cli.errors import UsageError
from k3cli.model.config import ModelConfig

Axis = Literal["rows", "columns", "all"]
GROUP = 32
"""Columns that share one MXFP4 scale; a cut inside a group is impossible."""


@dataclass(frozen=True)
class Part:
    """What one rank holds of a tensor: elements [start, stop) along `axis`; axis None: everything.

    start = stop: the rank holds nothing. Offsets count the tensor's own elements, packed bytes and scales included.
    """

    axis: int | None
    start: int = 0
    stop: int = 0

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the part of a tensor of shape `whole`."""
        if self.axis is None:
            return whole
        return (*whole[: self.axis], self.stop - self.start, *whole[self.axis + 1 :])


RULES: dict[Axis, tuple[str, ...]] = {
    "rows": (
        *("embed_tokens.weight", "lm_head.weight"),
        *(f"self_attn.{name}_proj.weight" for name in ("q", "k", "v", "g", "q_b", "kv_b", "f_b", "g_b", "b")),
        *("_conv1d.weight", "A_log", "dt_bias"),
        *("mlp.gate_proj.weight", "mlp.up_proj.weight"),
        *("shared_experts.gate_proj.weight", "shared_experts.up_proj.weight"),
    ),
    "columns": ("self_attn.o_proj.weight", "mlp.down_proj.weight", "shared_experts.down_proj.weight"),
}
"""Endings of names, by the axis they are cut along; whatever ends otherwise is on every rank."""
PADDED = ("embed_tokens.weight", "lm_head.weight")


def worlds(config: ModelConfig, most: int = 64) -> tuple[int, ...]:
    """World sizes this model can be split into, ascending."""
    common = config.intermediate if not all(config.moe_layers) else 0
    if config.kda_layers:
        common = gcd(common, config.kda.heads)
    if config.mla_layers:
        common = gcd(common, config.mla.heads)
    if config.moe is not None:
        common = gcd(common, config.moe.experts)
        common = gcd(common, config.moe.shared)
    return tuple(size for size in range(1, most + 1) if common % size == 0)


def check_world(config: ModelConfig, world: int) -> None:
    """UsageError, with the sizes that work, when the model can't be split into `world` equal parts."""
    valid = worlds(config)
    if world not in valid:
        raise UsageError(f"{world} GPUs", f"a number that divides heads and experts: {', '.join(map(str, valid))}")


def experts_by_width(config: ModelConfig, world: int) -> bool:
    """Whether every rank holds a slice of every routed expert, rather than whole experts."""
    assert config.moe is not None
    return config.moe.intermediate % (world * GROUP) == 0


def held(config: ModelConfig, world: int) -> ModelConfig:
    """The configuration with the sizes of one rank: what `blocks` allocates and the network of a rank computes with.

    Vocabulary and number of experts stay whole: the router sees every expert, ids are those of the whole model.
    """
    if world == 1:
        return config
    moe = config.moe
    if moe is not None:
        width = moe.intermediate // (world if experts_by_width(config, world) else 1)
        moe = replace(moe, intermediate=width, shared=moe.shared // world)
    return replace(
        config,
        intermediate=config.intermediate // world,
        kda=replace(config.kda, heads=config.kda.heads // world),
        mla=replace(config.mla, heads=config.mla.heads // world),
        moe=moe,
    )


def owned_experts(config: ModelConfig, rank: int, world: int) -> range:
    """Numbers of the routed experts of which a rank holds anything."""
    assert config.moe is not None
    if world == 1 or experts_by_width(config, world):
        return range(config.moe.experts)
    each = config.moe.experts // world
    return range(rank * each, (rank + 1) * each)


def part(config: ModelConfig, name: str, shape: tuple[int, ...], rank: int, world: int) -> Part:
    """The slice of checkpoint tensor `name` (text prefix removed) of shape `shape` that `rank` of `world` holds."""
    if world == 1:
        return Part(None)
    if ".experts." in name:
        return _expert(config, name, shape, rank, world)
    rule = _rule(name)
    if rule == "all":
        return Part(None)
    axis = 1 if rule == "columns" else 0
    size = shape[axis]
    each = -(-size // world)
    assert size % world == 0 or name.endswith(PADDED), (name, shape, world)
    return Part(axis, min(rank * each, size), min((rank + 1) * each, size))


@dataclass(frozen=True)
class Holding:
    """What one rank computes: heads of either kind, ids, experts and columns; empty where a model has none.

    What is not named here (latents, router, norms, mixing) is on every rank.
    """

    kda_heads: range
    mla_heads: range
    ids: range
    dense_columns: range
    shared_columns: range
    experts: range
    expert_columns: range


def holding(config: ModelConfig, rank: int, world: int) -> Holding:
    """What `rank` of `world` holds by the plan."""

    def of(name: str, size: int, axis: int = 0) -> range:
        found = part(config, name, (size, size), rank, world)
        assert found.axis in (None, axis)
        return range(size) if found.axis is None else range(found.start, found.stop)

    moe, none = config.moe, range(0)
    experts = none if moe is None else owned_experts(config, rank, world)
    return Holding(
        kda_heads=of("self_attn.A_log", config.kda.heads) if config.kda_layers else none,
        mla_heads=of("self_attn.kv_b_proj.weight", config.mla.heads) if config.mla_layers else none,
        ids=of("lm_head.weight", config.vocab),
        dense_columns=none if all(config.moe_layers) else of("mlp.down_proj.weight", config.intermediate, 1),
        shared_columns=of("shared_experts.down_proj.weight", moe.shared, 1) if moe and moe.shared else none,
        experts=experts,
        expert_columns=of(f".experts.{experts.start}.w2.weight", moe.intermediate, 1) if moe else none,
    )


def allocated(config: ModelConfig, name: str, shape: tuple[int, ...], rank: int, world: int) -> tuple[int, ...]:
    """Shape of the memory that `rank` has for a tensor: its part, rows of zeros behind the last id included.

    Where whole experts have owners, the zeros that stand in for the others' count with expert 0's neighbour: each rank
    has memory for one more than it owns.
    """
    if name.endswith(PADDED):
        return (-(-shape[0] // world), *shape[1:])
    if ".experts." in name and world > 1 and not experts_by_width(config, world):
        assert config.moe is not None
        number, per_rank = int(name.split(".experts.")[1].split(".")[0]), config.moe.experts // world
        spare = (rank * per_rank - 1) % config.moe.experts
        return shape if number // per_rank == rank or number == spare else (0, *shape[1:])
    return part(config, name, shape, rank, world).shape(shape)


def handed_round(config: ModelConfig, name: str, world: int) -> bool:
    """Whether ranks read a tensor in shares and give each other what they hold of it: all of it, or columns.

    A row of K3 cut into columns is 48 to 12,288 bytes for each of two ranks: too short to be worth a read. Rows and
    whole experts lie in one piece, and each rank reads its own.
    """
    if world == 1:
        return False
    if ".experts." in name:
        return ".w2." in name and experts_by_width(config, world)
    return _rule(name) != "rows"


def _rule(name: str) -> Axis:
    return next((axis for axis, endings in RULES.items() if name.endswith(endings)), "all")


def _expert(config: ModelConfig, name: str, shape: tuple[int, ...], rank: int, world: int) -> Part:
    """w1 and w3 give up rows, w2 columns (packed: bytes of two, scales: one for 32), or whole experts have owners."""
    assert config.moe is not None
    if experts_by_width(config, world):
        axis = 1 if ".w2." in name else 0
        each = shape[axis] // world
        return Part(axis, rank * each, (rank + 1) * each)
    number = int(name.split(".experts.")[1].split(".")[0])
    per_rank = config.moe.experts // world
    return Part(None) if number // per_rank == rank else Part(0, 0, 0)
