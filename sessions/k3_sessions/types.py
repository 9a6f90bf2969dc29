"""What the store and its caller agree on: state fields, identity, turns, and how state crosses the boundary.

State crosses as named numpy arrays. bfloat16 has no numpy type: its arrays are uint16 bit patterns and the field says
`dtype="bfloat16"`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

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
    """Live state the store copies from at a commit. Arrays must stay unchanged until `commit` returns.

    A source may also have `hints()`, a `Mapping[str, Array]` of float32, uint32 or uint16 arrays that are no state:
    see hints.py.
    """

    def checkpoint(self) -> Mapping[str, Array]:
        """Every checkpoint field at `position`, each `[len(layers), *shape]`, C-contiguous."""
        ...

    def page_rows(self, name: str, start: int, stop: int) -> Array:
        """Rows [start, stop) of page field `name`: `[len(layers), stop - start, *shape]`, C-contiguous."""
        ...


class RestoredState(Protocol):
    """State read back from the store: everything was read and verified before this object exists."""

    position: int

    def checkpoint(self) -> Mapping[str, Array]: ...

    def page_rows(self, name: str, start: int, stop: int) -> Array: ...


@runtime_checkable
class StreamedState(RestoredState, Protocol):
    """State that is read while it is copied, from front to back: the checkpoint, then rows in order. See Stream."""

    def checkpoint_parts(self) -> Iterator[tuple[str, int, Array]]:
        """Every checkpoint field in parts: name, index of its first layer, `[layers, *shape]`."""
        ...


@dataclass(frozen=True)
class TurnDraft:
    """One turn as the engine hands it over.

    tokens: ids added by this turn, prompt part and generated part, in order.
    position: tokens evaluated into the state since the start of the session (history included).
    Tokens past `position` are pending: sampled, not yet evaluated (usually one).
    meta: JSON for people and for replay (schedule, seed, sampling, events, text); opaque to the store.
    restored: the plan the live state was restored from, on the first commit after a restore; page rows before its
    boundary are then known to be the stored ones. None: the state continues from this writer's last commit, or was
    computed from nothing (every row is then compared with what is stored).
    """

    tokens: Sequence[int]
    position: int
    meta: Mapping[str, Any] = field(default_factory=dict)
    restored: RestorePlan | None = None


@dataclass(frozen=True)
class Turn:
    """A stored turn. `id` is the hash of its bytes; `parent` is None for the first turn.

    start: number of tokens before this turn; total = start + len(tokens).
    created: UTC, ISO 8601.
    has_checkpoint: False once thinning dropped the KDA checkpoint (resume then replays from an earlier joint boundary).
    bytes_pages, bytes_checkpoint: stored bytes of the objects this turn itself wrote or listed.
    """

    id: str
    parent: str | None
    start: int
    tokens: tuple[int, ...]
    position: int
    created: str
    meta: Mapping[str, Any]
    has_checkpoint: bool
    bytes_pages: int = 0
    bytes_checkpoint: int = 0

    @property
    def total(self) -> int:
        """Tokens from the start of the session to the end of this turn, pending ones included."""
        return self.start + len(self.tokens)


@dataclass(frozen=True)
class Session:
    """A named branch as its ref describes it.

    head: id of the newest turn, None only while a session has no turn. tree: id shared by a session and all its forks.
    fixed: JSON given at creation (tools, thinking, effort, system, model reference); never changes, forks inherit it.
    meta: JSON people may change (title). marks: label -> turn id. origin: (session, turn) a fork was made from.
    pinned: never evicted. evicted: when its state was dropped to make room, "" if it was not (turns are never dropped).
    error: why this session cannot be read, "" if it can; the other fields are then empty.
    """

    name: str
    head: str | None = None
    tree: str = ""
    created: str = ""
    updated: str = ""
    identity: Identity | None = None
    layout: StateLayout | None = None
    fixed: Mapping[str, Any] = field(default_factory=dict)
    meta: Mapping[str, Any] = field(default_factory=dict)
    marks: Mapping[str, str] = field(default_factory=dict)
    origin: tuple[str, str] | None = None
    pinned: bool = False
    evicted: str = ""
    error: str = ""


@dataclass(frozen=True)
class CommitReport:
    """What one commit did. Byte counts are as stored, framing included; objects already on disk count as zero.

    turn: the newest turn stored. stored: how many turns (more than one after a commit that had failed).
    thinned: ids of turns whose checkpoint was dropped. evicted: sessions whose state was dropped to make room.
    """

    turn: Turn
    bytes_written: int
    bytes_pages: int
    bytes_checkpoint: int
    seconds: float
    thinned: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()
    stored: int = 1
    evicted: tuple[str, ...] = ()


@dataclass(frozen=True)
class RestorePlan:
    """How a position can be reached, known before anything is read.

    turn: the turn whose joint boundary the state comes from, None when there is none (start empty).
    boundary: position of that boundary (0 when turn is None). target: the position asked for.
    replay: token ids in [boundary, target) that must be evaluated again, with the recorded chunk schedule in the
    turns' meta. reused = boundary, replayed = len(replay).
    read_bytes: stored bytes that `restore` will read.
    reason: one line when boundary < target ("checkpoint thinned", "object damaged: ..."), else "".
    damaged: what is wrong with the newest boundary up to `target` that a session keeps, where that is why an earlier
    one was chosen; "" if none was passed over. Thinning and eviction are no damage.
    matched: for `find_prefix`, how many leading ids equal stored ones in whole hash blocks; it may exceed `boundary`
    when no checkpoint exists further on. Else equal to target.
    """

    turn: str | None
    boundary: int
    target: int
    replay: tuple[int, ...]
    read_bytes: int
    reason: str = ""
    matched: int = 0
    damaged: str = ""
