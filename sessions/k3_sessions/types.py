"""What the store and its caller agree on: state fields, identity, turns, and how state crosses the boundary.

State crosses as named numpy arrays. bfloat16 has no numpy type: its arrays are uint16 bit patterns and the field says
`dtype="bfloat16"`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

HASH_BLOCK = 512
"""Tokens per hash block and per full MLA page; the grain at which prefixes are matched."""

DTYPES: Mapping[str, np.dtype[Any]] = {
    "float32": np.dtype("<f4"),
    "bfloat16": np.dtype("<u2"),
}
"""Storage type of each allowed `FieldSpec.dtype`, little-endian."""


@dataclass(frozen=True)
class FieldSpec:
    """One named field of the model state.

    scope "checkpoint": one array `[len(layers), *shape]` describes one exact position (KDA state, conv windows).
    scope "page": one array `[len(layers), tokens, *shape]` holds a row per token (MLA latents).
    `layers` are 0-based model layer indices, ascending.
    """

    name: str
    scope: Literal["checkpoint", "page"]
    layers: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class StateLayout:
    """Every field of the state, declared once by the model. `version` changes when the meaning of a field changes."""

    fields: tuple[FieldSpec, ...]
    version: int = 1
    hash_block: int = HASH_BLOCK


@dataclass(frozen=True)
class Identity:
    """What must be equal for stored state to be usable. Never paths, hosts, GPU counts, context sizes or free memory.

    `weights` and `tokenizer` are digests ("sha256:..."), `chat_format` a version string, `layout` the digest of the
    StateLayout, `compute` the dtype the model computes in ("float32", "bfloat16").
    """

    weights: str
    tokenizer: str
    chat_format: str
    layout: str
    compute: str


class StateSource(Protocol):
    """Live state the store copies from at a commit. Arrays must stay unchanged until `commit` returns."""

    def checkpoint(self) -> Mapping[str, Array]:
        """Every checkpoint field at `position`, each `[len(layers), *shape]`, C-contiguous."""
        ...

    def page_rows(self, name: str, start: int, stop: int) -> Array:
        """Rows of page field `name` for positions [start, stop): `[len(layers), stop - start, *shape]`, C-contiguous."""
        ...


class RestoredState(Protocol):
    """State read back from the store: everything was read and verified before this object exists."""

    position: int

    def checkpoint(self) -> Mapping[str, Array]: ...

    def page_rows(self, name: str, start: int, stop: int) -> Array: ...


@dataclass(frozen=True)
class TurnDraft:
    """One turn as the engine hands it over.

    tokens: ids added by this turn, prompt part and generated part, in order.
    position: tokens evaluated into the state since the start of the session (history included).
    Tokens past `position` are pending: sampled, not yet evaluated (usually one).
    meta: JSON for people and for replay (schedule, seed, sampling, events, text); opaque to the store.
    """

    tokens: Sequence[int]
    position: int
    meta: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Turn:
    """A stored turn. `id` is the hash of its bytes; `parent` is None for the first turn.

    start: number of tokens before this turn; total = start + len(tokens).
    has_checkpoint: False once thinning dropped the KDA checkpoint (resume then replays from an earlier joint boundary).
    """

    id: str
    parent: str | None
    start: int
    tokens: tuple[int, ...]
    position: int
    created: str
    meta: Mapping[str, Any]
    has_checkpoint: bool


@dataclass(frozen=True)
class CommitReport:
    """What one commit did. Byte counts are as stored, framing included."""

    turn: Turn
    bytes_written: int
    bytes_pages: int
    bytes_checkpoint: int
    seconds: float
    thinned: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()


@dataclass(frozen=True)
class RestorePlan:
    """How a position can be reached, known before anything is read.

    boundary: position of the joint boundary the state comes from (0: nothing, start empty).
    replay: token ids in [boundary, target) that must be evaluated again, with the recorded chunk schedule in the
    turns' meta. reused = boundary, replayed = len(replay).
    reason: one line when boundary < target ("checkpoint thinned", "object damaged: ..."), else "".
    """

    turn: str | None
    boundary: int
    target: int
    replay: tuple[int, ...]
    read_bytes: int
    reason: str = ""
