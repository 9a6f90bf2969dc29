"""State of one sequence: recurrent state and conv windows of all KDA layers, latent pages of all MLA layers.

Everything a fork shares is never written again: full pages, the recurrent tensor and the conv windows are replaced, not
changed. Only the tail page is private; rows at and behind `position` are scratch and invisible.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from k3_sessions.types import Array, FieldSpec, RestoredState, StateLayout
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


class Committed(NamedTuple):
    """One consistent moment of a state; replaced as a whole.

    recurrent [n_kda, H, V, K] fp32, conv [n_kda, w-1, 3 H K] inputs of q, k, v side by side, pages: full latent pages
    [n_mla, hash_block, R + P].
    """

    position: int
    recurrent: Tensor
    conv: Tensor
    pages: tuple[Tensor, ...]


class State:
    """Mutable state of one timeline; not safe for use by two threads."""

    def __init__(self, config: ModelConfig, layout: StateLayout, device: torch.device, dtype: torch.dtype) -> None:
        self.config = config
        self.layout = layout
        self.page = layout.hash_block
        kda = config.kda
        n_kda, n_mla = len(config.kda_layers), len(config.mla_layers)
        self.now = Committed(
            position=0,
            recurrent=torch.zeros(n_kda, kda.heads, kda.head_dim, kda.head_dim, device=device),
            conv=torch.zeros(n_kda, kda.conv_width - 1, 3 * kda.width, dtype=dtype, device=device),
            pages=(),
        )
        self.tail = torch.zeros(n_mla, self.page, config.mla.row, dtype=dtype, device=device)

    @property
    def position(self) -> int:
        """Tokens evaluated into this state."""
        return self.now.position

    def fork(self) -> State:
        """An independent state at the same position; full pages are shared, the tail page is copied."""
        twin = object.__new__(State)
        twin.config, twin.layout, twin.page = self.config, self.layout, self.page
        twin.now = self.now
        twin.tail = self.tail.clone()
        return twin

    def advance(self, recurrent: Tensor, conv: Tensor, latents: Tensor) -> None:
        """Moves on by latents.shape[1] tokens; latents [n_mla, n, R + P]. One assignment makes it visible."""
        position, _, _, pages = self.now
        n = latents.shape[1]
        tail, done, filled = self.tail, 0, position % self.page
        full: list[Tensor] = []
        while done < n:
            step = min(n - done, self.page - filled)
            tail[:, filled : filled + step] = latents[:, done : done + step]
            done, filled = done + step, filled + step
            if filled == self.page:
                full.append(tail)
                tail, filled = torch.zeros_like(tail), 0
        self.tail = tail
        self.now = Committed(position + n, recurrent, conv, (*pages, *full))

    def checkpoint(self) -> dict[str, Array]:
        """Host copies of the checkpoint fields at `position`, each [n_kda, *shape]; bf16 as uint16 bits."""
        now = self.now
        parts = now.conv.split(self.config.kda.width, dim=-1)
        found = dict(zip(("recurrent", *CONV_FIELDS), (now.recurrent, *parts), strict=True))
        return {field.name: to_host(found[field.name]) for field in self.layout.fields if field.scope == "checkpoint"}

    def page_rows(self, name: str, start: int, stop: int) -> Array:
        """Host copy of rows [start, stop) of a page field: [n_mla, stop - start, *shape]."""
        if not 0 <= start <= stop <= self.position:
            raise ValueError(f"rows {start} to {stop} of a state at position {self.position}")
        columns = self._columns(name)
        parts = [self.tail[:, :0, columns]]
        row = start
        while row < stop:
            index, first = divmod(row, self.page)
            page = self.now.pages[index] if index < len(self.now.pages) else self.tail
            last = min(self.page, first + stop - row)
            parts.append(page[:, first:last, columns])
            row += last - first
        return to_host(torch.cat(parts, 1))

    def load(self, restored: RestoredState) -> None:
        """Takes over stored state. Everything is checked and copied before this state changes.

        Raises DamagedError when a field is missing, unknown, or of another shape or type; the state is then as before.
        """
        position = restored.position
        if position < 0:
            raise DamagedError(f"stored position {position}", "zero or more")
        arrays = restored.checkpoint()
        fields = {field.name: field for field in self.layout.fields}
        wanted = {name for name, field in fields.items() if field.scope == "checkpoint"}
        if set(arrays) != wanted:
            raise DamagedError(f"stored checkpoint fields {sorted(arrays)}", f"{sorted(wanted)}")
        recurrent, conv = self.now.recurrent, self.now.conv
        if wanted:
            recurrent = self._tensor(arrays, fields["recurrent"], ())
            conv = torch.cat([self._tensor(arrays, fields[name], ()) for name in CONV_FIELDS], -1)
        pages: list[Tensor] = []
        for start in range(0, position + 1, self.page):
            stop = min(start + self.page, position)
            page = torch.zeros_like(self.tail)
            for name, field in fields.items():
                if field.scope == "page" and stop > start:
                    rows = {name: restored.page_rows(name, start, stop)}
                    page[:, : stop - start, self._columns(name)] = self._tensor(rows, field, (stop - start,))
            pages.append(page)
        self.tail = pages.pop()
        self.now = Committed(position, recurrent, conv, tuple(pages))

    def _columns(self, name: str) -> slice:
        rank, row = self.config.mla.kv_rank, self.config.mla.row
        spans = {"kv_latent": slice(0, rank), "k_pe": slice(rank, row)}
        if name not in spans:
            raise ValueError(f"{name} is no page field")
        return spans[name]

    def _tensor(self, arrays: Mapping[str, Array], field: FieldSpec, extra: tuple[int, ...]) -> Tensor:
        """A fresh device tensor of one stored field, shape and type checked."""
        array = arrays[field.name]
        shape = (len(field.layers), *extra, *field.shape)
        kind = np.dtype("<u2") if field.dtype == "bfloat16" else np.dtype("<f4")
        if array.shape != shape or array.dtype != kind:
            raise DamagedError(
                f"stored field {field.name} has shape {list(array.shape)} and type {array.dtype}",
                f"{list(shape)} and {kind}",
            )
        # A copy of our own: freshly allocated tensors are aligned alike, so that resumed bits equal live ones.
        fresh = torch.empty(shape, dtype=torch.uint16 if field.dtype == "bfloat16" else torch.float32)
        fresh.numpy()[...] = array
        typed = fresh.view(torch.bfloat16) if field.dtype == "bfloat16" else fresh
        return typed.to(self.tail.device)


def to_host(tensor: Tensor) -> Array:
    """A C-contiguous host copy; bf16 as its uint16 bits."""
    host = tensor.detach().to("cpu", copy=True).contiguous()
    if host.dtype == torch.bfloat16:
        host = host.view(torch.uint16)
    array: Array = host.numpy()
    return array
