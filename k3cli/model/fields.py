"""The named fields of a state: which there are, and how they cross to the store's arrays and back."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from k3_sessions.types import Array, FieldSpec, RestoredState, StateLayout, StreamedState
from torch import Tensor

from k3cli.errors import DamagedError
from k3cli.model.config import ModelConfig

CONV_FIELDS = ("conv_q", "conv_k", "conv_v")
DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


def state_layout(config: ModelConfig, dtype: torch.dtype) -> StateLayout:
    """The fields of the state of a model that computes in `dtype`; a kind of layer that is absent has no fields."""
    name = DTYPE_NAMES[dtype]
    kda, mla = config.kda, config.mla
    fields: list[FieldSpec] = []
    if config.kda_layers:
        shape = (kda.heads, kda.head_dim, kda.head_dim)
        fields.append(FieldSpec("recurrent", "checkpoint", config.kda_layers, shape, "float32"))
        window = (kda.conv_width - 1, kda.width)
        fields += [FieldSpec(field, "checkpoint", config.kda_layers, window, name) for field in CONV_FIELDS]
    if config.mla_layers:
        fields.append(FieldSpec("kv_latent", "page", config.mla_layers, (mla.kv_rank,), name))
        fields.append(FieldSpec("k_pe", "page", config.mla_layers, (mla.pe_dim,), name))
    return StateLayout(tuple(fields))


def checkpoint_parts(restored: RestoredState) -> Iterator[tuple[str, int, Array]]:
    """Name, first layer and array of each part of the checkpoint; whole fields where they were not read in parts."""
    if isinstance(restored, StreamedState):
        yield from restored.checkpoint_parts()
        return
    for name, array in restored.checkpoint().items():
        yield name, 0, array


def checked(array: Array, field: FieldSpec, extra: tuple[int, ...], layers: int | None = None) -> Tensor:
    """A stored field as a host tensor that shares the array's memory where it can; shape and type checked.

    layers: how many of the field's layers it holds; None: all. Raises DamagedError.
    """
    shape = (len(field.layers) if layers is None else layers, *extra, *field.shape)
    kind = np.dtype("<u2") if field.dtype == "bfloat16" else np.dtype("<f4")
    if array.shape != shape or array.dtype != kind:
        raise DamagedError(
            f"stored field {field.name} has shape {list(array.shape)} and type {array.dtype}",
            f"{list(shape)} and {kind}",
        )
    if not array.flags.writeable or not array.flags.aligned:
        array = array.copy()
    host = torch.from_numpy(array)
    return host.view(torch.bfloat16) if field.dtype == "bfloat16" else host


def to_host(tensor: Tensor) -> Array:
    """A C-contiguous host copy; bf16 as its uint16 bits."""
    host = tensor.detach().to("cpu", copy=True).contiguous()
    if host.dtype == torch.bfloat16:
        host = host.view(torch.uint16)
    array: Array = host.numpy()
    return array
