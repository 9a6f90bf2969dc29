"""Random checkpoints of any configuration in the public layout: what tests and speed measurements run on."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from k3cli.model.checkpoint import INDEX, PREFIX, expected_tensors
from k3cli.model.config import ModelConfig

PADDING = 3
"""Zeros behind A_log, as the public K3 checkpoint has them."""


def write_random_checkpoint(folder: Path, raw_config: Mapping[str, Any], *, seed: int = 0, shards: int = 3) -> Path:
    """Writes config.json, an index and `shards` safetensors files into `folder`; equal seeds give equal bytes.

    Weights are scaled so that activations stay of order one. Returns the folder. Raises ModelError for a config the
    network does not have.
    """
    from safetensors.torch import save_file

    config = ModelConfig.from_dict(raw_config)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw_config, indent=1))
    random = torch.Generator().manual_seed(seed)
    prefix = PREFIX if config.nested else ""
    tensors: dict[str, Tensor] = {}
    for name, want in expected_tensors(config).items():
        shape = want.shapes[0] if want.shapes else (want.least or 0,)
        tensors[prefix + name] = _tensor(name, shape, want.dtypes[0], random)
    per_shard = -(-len(tensors) // shards)
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:06d}.safetensors"
        part = {name: tensors[name] for name in names[i * per_shard : (i + 1) * per_shard]}
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index))
    return folder


def _tensor(name: str, shape: tuple[int, ...], dtype: str, random: torch.Generator) -> Tensor:
    kind = {"BF16": torch.bfloat16, "F32": torch.float32, "U8": torch.uint8}[dtype]

    def normal(scale: float, mean: float = 0.0) -> Tensor:
        return (torch.randn(shape, generator=random) * scale + mean).to(kind)

    if name.endswith("weight_packed"):
        return torch.randint(0, 256, shape, generator=random, dtype=kind)
    if name.endswith("weight_scale"):
        # Random E2M1 codes have a root mean square of about 2.9; the scale brings that to 1/sqrt(inputs).
        power = round(math.log2(1 / (2.9 * math.sqrt(32 * shape[-1]))))
        return torch.randint(126 + power, 129 + power, shape, generator=random, dtype=kind)
    if name.endswith("A_log"):
        return torch.cat(
            ((torch.randn(shape, generator=random) * 0.4 + 0.3).to(kind), torch.zeros(PADDING, dtype=kind))
        )
    if name.endswith("dt_bias"):
        return normal(1.0, -2.0)
    if name.endswith("_conv1d.weight"):
        return normal(0.5)
    if name.endswith("e_score_correction_bias"):
        return normal(0.05)
    if "norm" in name:
        return normal(0.1, 1.0)
    if name.endswith("embed_tokens.weight"):
        return normal(1.0)
    return normal(1 / math.sqrt(shape[-1]))
