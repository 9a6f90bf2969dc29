"""The target's whole tables of tokens for a draft, where the target is cut over ranks and holds parts of them."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from k3cli.errors import FitError, ModelError
from k3cli.model.checkpoint import PREFIX, open_checkpoint
from k3cli.model.config import ModelConfig

TABLES = ("model.embed_tokens.weight", "lm_head.weight")


def whole_tables(path: Path, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(embed, head), [V, D] in `dtype`, read from the checkpoint in folder `path`.

    head lies on `device`. embed stays in main memory: a draft looks up two of its rows at a time. Raises ModelError,
    and FitError when the device has no room for the head.
    """
    found: list[Tensor] = []
    places = {entry.name: shard.path for shard in open_checkpoint(path, config).shards for entry in shard.entries}
    for name in TABLES:
        file = places[name]
        try:
            with safe_open(file, framework="pt") as stored:
                names = set(stored.keys())
                found.append(stored.get_tensor(name if name in names else PREFIX + name).to(dtype))
        except (SafetensorError, OSError) as problem:
            raise ModelError(f"{file} cannot be read ({problem})", "a safetensors file") from None
    embed, head = found
    try:
        return embed, head.to(device)
    except torch.OutOfMemoryError:
        raise FitError(
            f"a draft model needs the whole output table, {head.nbytes / 1e9:.2f} GB, on {device}",
            "room for it on the first GPU",
            "draft without a model (--spec suffix), or use more GPUs",
        ) from None
