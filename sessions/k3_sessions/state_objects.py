"""State objects: MLA pages and KDA checkpoints between arrays and bytes, checked against what they claim."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from k3_sessions import codec
from k3_sessions.blobs import Blobs, path_of
from k3_sessions.errors import BadDraft, Damaged
from k3_sessions.objects import PREFIX, Blob, Kind, Parts, header_end, pack, parse
from k3_sessions.records import REPAIR, Page
from k3_sessions.source import EndsEarly
from k3_sessions.types import DTYPES, Array, FieldSpec, StateLayout

GROUP_BYTES = 16 * 1024 * 1024
"""Raw bytes from which a group of checkpoint layers becomes an object of its own, so that groups load in parallel."""


@dataclass(frozen=True)
class Group:
    """Checkpoint layers that share an object. `spans`: field name -> [first, last) along the field's layer axis."""

    number: int
    of: int
    spans: Mapping[str, tuple[int, int]]
    raw_bytes: int


def fields_of(layout: StateLayout, scope: str) -> list[FieldSpec]:
    return [f for f in layout.fields if f.scope == scope]


def row_bytes(spec: FieldSpec) -> int:
    """Bytes of one layer of a checkpoint field, or of one layer and token of a page field."""
    return DTYPES[spec.dtype].itemsize * int(np.prod(spec.shape, dtype=np.int64))


def groups_of(layout: StateLayout) -> list[Group]:
    """How this layout's checkpoint is cut. At least one group, even of nothing."""
    fields = fields_of(layout, "checkpoint")
    layers = sorted({layer for f in fields for layer in f.layers})
    cuts: list[list[int]] = [[]]
    size = 0
    for layer in layers:
        if size >= GROUP_BYTES:
            cuts.append([])
            size = 0
        cuts[-1].append(layer)
        size += sum(row_bytes(f) for f in fields if layer in f.layers)
    groups: list[Group] = []
    done = {f.name: 0 for f in fields}
    for number, members in enumerate(cuts):
        spans = {f.name: (done[f.name], done[f.name] + sum(layer in f.layers for layer in members)) for f in fields}
        done = {name: stop for name, (_, stop) in spans.items()}
        raw = sum((spans[f.name][1] - spans[f.name][0]) * row_bytes(f) for f in fields)
        groups.append(Group(number, len(cuts), spans, raw))
    return groups


def check_array(spec: FieldSpec, array: Array, leading: tuple[int, ...]) -> Array:
    """The array, C-contiguous. Raises BadDraft unless it is what the layout declares."""
    wanted = (*leading, *spec.shape)
    if not isinstance(array, np.ndarray) or array.shape != wanted or array.dtype != DTYPES[spec.dtype]:
        found = f"{array.dtype} {list(array.shape)}" if isinstance(array, np.ndarray) else type(array).__name__
        raise BadDraft(f"state field {spec.name} is {found}", f"{DTYPES[spec.dtype]} {list(wanted)}")
    return np.ascontiguousarray(array)


def check_checkpoint(layout: StateLayout, arrays: Mapping[str, Array]) -> dict[str, Array]:
    """All checkpoint fields, C-contiguous. Raises BadDraft for a missing, undeclared or misshapen one."""
    fields = fields_of(layout, "checkpoint")
    names = {f.name for f in fields}
    if set(arrays) != names:
        raise BadDraft(
            f"checkpoint with fields {', '.join(sorted(arrays)) or 'none'}", ", ".join(sorted(names)) or "no field"
        )
    return {f.name: check_array(f, arrays[f.name], (len(f.layers),)) for f in fields}


def pack_page(
    layout: StateLayout, arrays: Mapping[str, Array], seed: bytes, span: tuple[int, int], prefix: str, level: int
) -> Parts:
    """Object of rows [start, stop); `prefix` digests all tokens before `stop`."""
    meta = {"identity": seed.hex(), "start": span[0], "stop": span[1], "prefix": prefix}
    listed = [(f.name, f.dtype, arrays[f.name]) for f in fields_of(layout, "page")]
    return pack(Kind.PAGE, meta, listed, level)


def pack_group(
    layout: StateLayout, arrays: Mapping[str, Array], seed: bytes, group: Group, at: tuple[int, str], level: int
) -> Parts:
    """Object of one group of the checkpoint at position `at[0]`, whose tokens `at[1]` digests."""
    listed = [(f.name, f.dtype, arrays[f.name][slice(*group.spans[f.name])]) for f in fields_of(layout, "checkpoint")]
    return pack(Kind.CHECKPOINT, group_claims(group, seed, at), listed, level)


def read_state(
    blobs: Blobs,
    blob: Blob,
    kind: Kind,
    fields: Sequence[FieldSpec],
    claims: Mapping[str, Any],
    out: Mapping[str, Array] | None,
) -> None:
    """Read a state object: hash it, compare what it says about itself with `claims`, and decode its fields.

    out: arrays for the fields, C-contiguous, worthless after an error; None: nothing is decoded.
    Raises Damaged, FormatUnsupported.
    """
    where = path_of(blob.id)
    with blobs.passing(blob) as source:
        head = source.peek(min(blob.size, header_end(source.peek(min(blob.size, PREFIX.size)))))
        found = parse(head, blob.size, kind, where, known=[f.name for f in fields])
        for key, value in claims.items():
            if found.meta.get(key) != value:
                raise Damaged(f"{where} says {key} {found.meta.get(key)}", f"{value}", REPAIR, object=where)
        missing = [f.name for f in fields if f.name not in found.sections]
        if missing:
            raise Damaged(f"{where} lacks {', '.join(missing)}", "every declared state field", REPAIR, object=where)
        dtypes = {f.name: f.dtype for f in fields}
        for name, section in found.sections.items():
            if out is None:
                break
            if section.dtype != dtypes[name]:
                raise Damaged(f"{where} holds {name} as {section.dtype}", dtypes[name], REPAIR, object=where)
            try:
                source.skip_to(section.at)
                section.read(out[name], source)
            except (codec.BadFrames, EndsEarly) as error:
                raise Damaged(f"{where} field {name}: {error}", do=REPAIR, object=where) from error


def page_claims(page: Page, seed: bytes, prefix: str) -> dict[str, Any]:
    return {"identity": seed.hex(), "start": page.start, "stop": page.stop, "prefix": prefix}


def group_claims(group: Group, seed: bytes, at: tuple[int, str]) -> dict[str, Any]:
    spans = {name: list(span) for name, span in group.spans.items()}
    return {
        "identity": seed.hex(),
        "position": at[0],
        "prefix": at[1],
        "group": group.number,
        "groups": group.of,
        "spans": spans,
    }
