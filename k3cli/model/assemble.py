"""From a rank's weights to its model: how large its pool may be, and the chunks that all worlds take."""

from __future__ import annotations

import torch
from k3_sessions.types import HASH_BLOCK

from k3cli.model.blocks import Weights
from k3cli.model.config import ModelConfig
from k3cli.model.network import K3Model
from k3cli.model.parallel import held
from k3cli.model.placement import prefill_chunk, rank_memory
from k3cli.model.pool import Geometry, granules_for
from k3cli.model.world import World


def assemble(config: ModelConfig, weights: Weights, dtype: torch.dtype, window: int, world: World) -> K3Model:
    """This rank's model. config: of the whole one. Every rank's pool has as many granules as the smallest has room for.

    Raises FitError, on all ranks.
    """
    mine, place = held(config, world.size), world.device
    # The whole model's chunks, so that every world takes a prompt in the same steps.
    whole = sum(sink.nbytes for sink in Weights(config, torch.device("meta"), dtype).sinks().values())
    chunk = prefill_chunk(whole, place.type)

    def room() -> int:
        return granules_for(mine, Geometry.of(mine, HASH_BLOCK, dtype), rank_memory(place, world.size), dtype, chunk)

    granules = min(world.all(world.together(room)))
    return K3Model(mine, weights, place, dtype, window, world, granules, chunk)
