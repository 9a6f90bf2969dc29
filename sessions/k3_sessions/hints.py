"""Hints: what a turn keeps beside its checkpoint that is no state. They help to go on sooner, never to go on right.

The store knows nothing of what they mean: named arrays, in one object that is kept as long as the turn's boundary is.
Where they are missing, all goes on without them; versions before 1.3 do not know of them, and their `gc` removes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from k3_sessions import codec
from k3_sessions.blobs import Batch, Blobs, path_of
from k3_sessions.catalog import check_name
from k3_sessions.errors import BadDraft, Damaged, StoreError
from k3_sessions.identity import identity_digest
from k3_sessions.objects import PREFIX, SECTION_DTYPES, Blob, Kind, Parts, header_end, pack, parse
from k3_sessions.opened import OpenStore
from k3_sessions.records import REPAIR, TurnRecord
from k3_sessions.restoring import check_root
from k3_sessions.source import EndsEarly
from k3_sessions.types import Array, Identity, RestorePlan, StateLayout

HINT_BYTES = 16 * 1024 * 1024
"""Raw bytes that the hints of one turn may have: as much as a small part of a checkpoint."""
_NAMES = {kind: name for name, kind in SECTION_DTYPES.items()}


def taken(source: Any) -> dict[str, Array]:
    """The hints a state source has, C-contiguous; {} for one that knows of none, or has no memory for them.

    Raises BadDraft.
    """
    try:
        arrays: Mapping[str, Array] = source.hints() if hasattr(source, "hints") else {}
    except MemoryError:
        return {}
    for name, array in arrays.items():
        check_name(name, "hint")
        if not isinstance(array, np.ndarray) or array.dtype not in _NAMES:
            found = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
            raise BadDraft(f"hint {name} is {found}", ", ".join(str(kind) for kind in _NAMES))
    size = sum(array.nbytes for array in arrays.values())
    if size > HINT_BYTES:
        raise BadDraft(f"{size} bytes of hints", f"at most {HINT_BYTES}")
    return {name: np.ascontiguousarray(arrays[name]) for name in sorted(arrays)}


def put(
    store: OpenStore, arrays: Mapping[str, Array], seed: bytes, at: tuple[int, str], batch: Batch
) -> tuple[Blob | None, int, tuple[str, ...]]:
    """Store hints durably but for `objects/`, which is synced with `batch`; returns the bytes written, and notices.

    A turn does not wait for what it does not need: whatever goes wrong here leaves it without hints.
    """
    if not arrays:
        return None, 0, ()
    apart = Batch()
    try:
        blob, size = store.blobs.put(pack_hints(arrays, seed, at, store.config.zstd_level), apart)
        apart.folders.discard("objects")
        store.blobs.settle(apart)
    except (StoreError, MemoryError) as error:
        return None, 0, (f"the turn is stored without its hints: {error or 'memory ran out'}",)
    batch.folders.add("objects")
    batch.written += apart.written
    return blob, size, ()


def pack_hints(arrays: Mapping[str, Array], seed: bytes, at: tuple[int, str], level: int) -> Parts:
    """Object of the hints at position `at[0]`, whose tokens `at[1]` digests."""
    return pack(Kind.HINTS, _claims(seed, at), [(name, _NAMES[a.dtype], a) for name, a in arrays.items()], level)


def _claims(seed: bytes, at: tuple[int, str]) -> dict[str, Any]:
    return {"identity": seed.hex(), "position": at[0], "prefix": at[1]}


def read_hints(blobs: Blobs, blob: Blob, seed: bytes, turn: TurnRecord) -> dict[str, Array]:
    """The hints of a turn, hashed and compared with what they claim to describe. Raises Damaged, FormatUnsupported."""
    where, out = path_of(blob.id), {}
    with blobs.passing(blob) as source:
        head = source.peek(min(blob.size, header_end(source.peek(min(blob.size, PREFIX.size)))))
        found = parse(head, blob.size, Kind.HINTS, where)
        for key, value in _claims(seed, (turn.position, turn.prefix)).items():
            if found.meta.get(key) != value:
                raise Damaged(f"{where} says {key} {found.meta.get(key)}", f"{value}", REPAIR, object=where)
        try:
            for name, section in found.sections.items():
                out[name] = section.new()
                source.skip_to(section.at)
                section.read(out[name], source)
        except (codec.BadFrames, EndsEarly) as error:
            raise Damaged(f"{where}: {error}", do=REPAIR, object=where) from error
    return out


def restore(store: OpenStore, plan: RestorePlan, identity: Identity, layout: StateLayout) -> dict[str, Array]:
    """See Store.hints."""
    if plan.turn is None:
        return {}
    with store.using():
        turn = store.catalog.turn(plan.turn)
        root = store.catalog.root(turn.root)
        check_root(root, identity, layout, f"turn {turn.id[:10]}")
        blob = store.catalog.hints(turn)
        if blob is None:
            return {}
        try:
            return read_hints(store.blobs, blob, identity_digest(root.identity), turn)
        except Damaged:
            if store.catalog.hints(turn) is None:  # another process let go of this boundary meanwhile
                return {}
            raise
