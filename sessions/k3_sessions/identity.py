"""Digests of what stored state depends on, and their JSON forms."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import orjson

from k3_sessions.errors import FormatUnsupported, IdentityMismatch
from k3_sessions.types import DTYPES, HASH_BLOCK, Array, FieldSpec, Identity, StateLayout

SORTED = orjson.OPT_SORT_KEYS


def layout_json(layout: StateLayout) -> dict[str, Any]:
    return {
        "version": layout.version,
        "hash_block": layout.hash_block,
        "fields": [
            {"name": f.name, "scope": f.scope, "layers": list(f.layers), "shape": list(f.shape), "dtype": f.dtype}
            for f in layout.fields
        ],
    }


def layout_from_json(value: Mapping[str, Any]) -> StateLayout:
    fields = tuple(
        FieldSpec(f["name"], f["scope"], tuple(f["layers"]), tuple(f["shape"]), f["dtype"]) for f in value["fields"]
    )
    return StateLayout(fields, version=value["version"], hash_block=value["hash_block"])


def check_layout(layout: StateLayout) -> None:
    """Raises FormatUnsupported for a layout the store cannot hold: the caller's bug or a newer caller."""
    names = [f.name for f in layout.fields]
    problem = ""
    if layout.hash_block != HASH_BLOCK:
        problem = f"hash block of {layout.hash_block} tokens (this store uses {HASH_BLOCK})"
    elif len(set(names)) != len(names):
        problem = "a field name used twice"
    for f in layout.fields:
        if f.dtype not in DTYPES:
            problem = f"field {f.name} has dtype {f.dtype} (known: {', '.join(DTYPES)})"
        elif f.scope not in ("checkpoint", "page"):
            problem = f"field {f.name} has scope {f.scope!r}"
        elif list(f.layers) != sorted(set(f.layers)):
            problem = f"field {f.name} lists its layers out of order"
    if problem:
        raise FormatUnsupported(f"state layout with {problem}", do="use a matching version of the store")


def layout_digest(layout: StateLayout) -> str:
    """The value of `Identity.layout` for a model with this layout."""
    return "sha256:" + hashlib.sha256(orjson.dumps(layout_json(layout), option=SORTED)).hexdigest()


def identity_json(identity: Identity) -> dict[str, str]:
    return dataclasses.asdict(identity)


def identity_digest(identity: Identity) -> bytes:
    """Seed of the prefix chain: 32 bytes."""
    return hashlib.sha256(b"k3 identity 1\n" + orjson.dumps(identity_json(identity), option=SORTED)).digest()


def check_identity(stored: Identity, live: Identity, what: str) -> None:
    """Raises IdentityMismatch naming every field in which `stored` and `live` differ."""
    names = tuple(f.name for f in dataclasses.fields(Identity) if getattr(stored, f.name) != getattr(live, f.name))
    if not names:
        return
    raise IdentityMismatch(
        f"{what} was made with " + ", ".join(f"{n} {getattr(stored, n)}" for n in names),
        ", ".join(f"{n} {getattr(live, n)}" for n in names) + " (the loaded model)",
        "load the model it was made with, or evaluate its transcript again with `k3 replay --into`",
        fields=names,
    )


def chain(seed: bytes, ids: Array, block: int = HASH_BLOCK) -> list[bytes]:
    """Chain hash of each whole block of `ids` (int64 or uint32 [n]): H_i = sha256(H_{i-1} + ids as u32 LE)."""
    data = np.ascontiguousarray(ids, dtype="<u4").tobytes()
    hashes: list[bytes] = []
    current = seed
    for at in range(0, len(data) - 4 * block + 1, 4 * block):
        current = hashlib.sha256(current + data[at : at + 4 * block]).digest()
        hashes.append(current)
    return hashes


class PrefixDigest:
    """Digest of every prefix of one token sequence; the chain over whole blocks is computed once."""

    def __init__(self, seed: bytes, ids: Array) -> None:
        self.ids = np.ascontiguousarray(ids, dtype="<u4")
        self.blocks = chain(seed, self.ids)
        self._seed = seed

    def at(self, position: int) -> str:
        """Hex digest that describes ids [0, position) exactly."""
        whole, rest = divmod(position, HASH_BLOCK)
        before = self.blocks[whole - 1] if whole else self._seed
        if not rest:
            return before.hex()
        return hashlib.sha256(before + self.ids[position - rest : position].tobytes()).hexdigest()
