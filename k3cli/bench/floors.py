"""What a step must move and compute, counted from the configuration: the denominator of every efficiency.

Bytes: weights that are read once, experts as many as uniform routing touches on average, state read and written, the
latents behind. Operations: products only, two for a multiply and an add.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from k3cli.model.config import ModelConfig
from k3cli.model.sizing import state_size, weigh


@dataclass(frozen=True)
class Work:
    """Bytes that have to move through device memory and operations that have to be done."""

    bytes: float
    flops: float

    def floor(self, bandwidth: float, rate: float) -> float:
        """Seconds no implementation beats: the slower of the two at measured ceilings."""
        return max(self.bytes / bandwidth, self.flops / rate)


def touched(config: ModelConfig, rows: int) -> float:
    """Experts of one layer that `rows` tokens use on average when each draws its top_k at random."""
    moe = config.moe
    if moe is None:
        return 0.0
    return moe.experts * (1 - (1 - moe.top_k / moe.experts) ** rows)


def parts(config: ModelConfig, dtype: torch.dtype, rows: int, depth: int, *, prefill: bool = False) -> dict[str, Work]:
    """Work of one step of `rows` tokens behind `depth` evaluated ones, by component.

    A prefill expands keys and values of everything behind; a decode or verify step works on latents as they are.
    """
    found = {name: Work(*work) for name, work in _weights(config, dtype, rows, prefill)}
    state = state_size(config, dtype)
    kda, mla, n_mla = config.kda, config.mla, len(config.mla_layers)
    if config.kda_layers:
        # Decay, prediction, update and read-out of a K x V state: three products a token and head.
        flops = 6 * rows * len(config.kda_layers) * kda.heads * kda.head_dim**2
        found["KDA state"] = Work(2 * (state.recurrent + state.conv), flops)
    if n_mla:
        seen = depth + rows
        pairs = rows * depth + rows * (rows + 1) // 2
        per_pair = mla.nope_dim + mla.pe_dim + mla.v_dim if prefill else 2 * mla.kv_rank + mla.pe_dim
        flops = 2 * n_mla * mla.heads * pairs * per_pair
        if prefill:
            flops += 2 * n_mla * mla.heads * seen * (mla.nope_dim + mla.v_dim) * mla.kv_rank
        found["MLA attention over latents"] = Work(seen * state.row, flops)
    return found


def total(work: dict[str, Work]) -> Work:
    return Work(sum(w.bytes for w in work.values()), sum(w.flops for w in work.values()))


def _weights(
    config: ModelConfig, dtype: torch.dtype, rows: int, prefill: bool
) -> Iterator[tuple[str, tuple[float, float]]]:
    for entry in weigh(config, dtype):
        size: float = entry.loaded
        if entry.name == "embedding":
            yield entry.name, (rows * config.hidden * dtype.itemsize, 0.0)
            continue
        if entry.name == "routed experts":
            moe = config.moe
            assert moe is not None
            layers = sum(config.moe_layers)
            per_token = 6 * (moe.latent or config.hidden) * moe.intermediate * moe.top_k
            yield entry.name, (size / moe.experts * touched(config, rows), float(layers * rows * per_token))
            continue
        if entry.name == "MLA attention":
            # Loaded twice (whole and as absorbed halves), read once.
            mla = config.mla
            size -= len(config.mla_layers) * mla.heads * (mla.nope_dim + mla.v_dim) * mla.kv_rank * dtype.itemsize
        item = 4 if entry.name in ("router", "norms and mixing") else dtype.itemsize
        scored = 1 if entry.name == "head" and prefill else rows  # of a prefill, the last row is asked for
        yield entry.name, (size, 2 * size / item * scored)
