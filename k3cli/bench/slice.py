"""A few consecutive layers of a real configuration with random weights, made on the device they run on.

Everything per layer has its true width and type; only the depth is cut. Whatever is said of the whole model from a
slice is derived and labelled so.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection
from pathlib import Path

import torch
from k3_kernels.moe import Experts

from k3cli.errors import FitError, UsageError
from k3cli.model.assemble import assemble
from k3cli.model.blocks import MoeWeights, Weights
from k3cli.model.config import ModelConfig
from k3cli.model.fit import check_fit
from k3cli.model.network import K3Model
from k3cli.model.placement import available_memory, choose_dtype, weights_memory
from k3cli.model.world import World


def slice_config(config: ModelConfig, layers: int) -> ModelConfig:
    """The first `layers` consecutive layers behind the dense ones whose kinds are nearest to the whole model's mix.

    Raises UsageError when the model has fewer layers.
    """
    if not 1 <= layers <= len(config.layers):
        raise UsageError(f"--slice {layers}", f"1 to {len(config.layers)}, the model's layers")
    first = config.moe_layers.index(True) if any(config.moe_layers) else 0
    share = len(config.mla_layers) / len(config.layers)
    starts = range(min(first, len(config.layers) - layers), len(config.layers) - layers + 1)

    def distance(start: int) -> float:
        return abs(config.layers[start : start + layers].count("mla") / layers - share)

    start = min(starts, key=lambda at: (round(distance(at), 9), at))
    return dataclasses.replace(
        config,
        layers=config.layers[start : start + layers],
        moe_layers=config.moe_layers[start : start + layers],
    )


def random_model(config: ModelConfig, device: torch.device, dtype: torch.dtype, window: int, seed: int = 0) -> K3Model:
    """A model of `config` with random weights scaled to keep activations of order one. FitError when it can't fit."""
    need, free = weights_memory(config, dtype, device=device.type), available_memory(device)
    if free is not None and need > free:
        raise FitError(
            f"the slice takes {need / 1e9:.1f} GB on {device}, {free / 1e9:.1f} GB are free", "room", "fewer layers"
        )
    weights = Weights(config, device, dtype)
    _fill_all(weights, device, seed)
    return K3Model(config, weights, device, dtype, window)


def random_part(model: Path, layers: int, dtype: str, window: int, world: World) -> K3Model:
    """One rank's part of such a slice of a model (folder, or config.json of any name); every rank makes the same call.

    What all ranks hold is the same on all of them. FitError, on all ranks, when it can't fit on one.
    """
    rank, size, place = world.rank, world.size, world.device

    def prepare() -> tuple[ModelConfig, torch.dtype]:
        config = slice_config(ModelConfig.from_path(model), layers)
        return config, choose_dtype(dtype, place, config)[0]

    def make() -> Weights:
        weights = Weights(config, place, kind, rank, size)
        whole = Weights(config, torch.device("meta"), kind).sinks()
        split = {name for name, sink in weights.sinks().items() if sink.shape != whole[name].shape}
        _fill_all(weights, place, 0, rank, split)
        return weights

    config, kind = world.together(prepare)
    check_fit(config, kind, place, world)
    return assemble(config, world.together(make), kind, window, world)


def _fill_all(weights: Weights, device: torch.device, seed: int, rank: int = 0, split: Collection[str] = ()) -> None:
    """Tensors named in `split` and experts differ from rank to rank, the others are the same everywhere."""
    same = torch.Generator(device=device).manual_seed(seed)
    own = torch.Generator(device=device).manual_seed(seed + 1 + rank)
    done: set[int] = set()
    for layer in weights.layers:  # all experts at once: thousands of sinks are views of four tensors
        if isinstance(layer.mlp, MoeWeights):
            _fill_experts(layer.mlp.experts, own)
            done |= {stack.untyped_storage().data_ptr() for stack in layer.mlp.experts if stack is not None}
    for name, sink in weights.sinks().items():
        if sink.untyped_storage().data_ptr() not in done:
            _fill(name, sink, own if name in split else same)
    weights.finish()


def _fill_experts(experts: Experts, random: torch.Generator) -> None:
    """Packed: any codes, whose root mean square is about 2.9, and scales that bring products to order one."""
    for stack, scale in ((experts.w13, experts.w13_scale), (experts.w2, experts.w2_scale)):
        if scale is None:
            _fill("dense", stack, random)
            continue
        stack.random_(0, 256, generator=random)
        power = round(math.log2(1 / (2.9 * math.sqrt(32 * scale.shape[-1]))))
        scale.random_(126 + power, 129 + power, generator=random)


def _fill(name: str, sink: torch.Tensor, random: torch.Generator) -> None:
    inputs = sink.shape[-1]
    if name.endswith("A_log"):
        sink.normal_(0.3, 0.4, generator=random)
    elif name.endswith("dt_bias"):
        sink.normal_(-2.0, 1.0, generator=random)
    elif name.endswith("_conv1d.weight"):
        sink.normal_(0.0, 0.5, generator=random)
    elif name.endswith("e_score_correction_bias"):
        sink.normal_(0.0, 0.05, generator=random)
    elif "norm" in name:
        sink.normal_(1.0, 0.1, generator=random)
    elif name.endswith("embed_tokens.weight"):
        sink.normal_(0.0, 1.0, generator=random)
    else:
        sink.normal_(0.0, 1 / math.sqrt(inputs), generator=random)
        if name.endswith(".gate.weight"):  # fp32 memory for a bf16 tensor of the checkpoint
            sink.copy_(sink.bfloat16())
