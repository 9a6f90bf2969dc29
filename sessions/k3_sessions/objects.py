"""The container of every object: 16 bytes of prefix, a JSON header, then the sections' frames one after another.

    0   8  magic
    8   1  major version     a reader refuses another major
    9   1  minor version     the lowest that can read this object; a reader accepts a higher one
    10  2  kind, u16 LE      1 root, 2 turn, 3 page, 4 checkpoint, 5 hints
    12  4  header bytes, u32 LE
    16  .  header, JSON in UTF-8 with sorted keys: {"meta": {...}, "sections": [...]}
    .   .  frames of each section, in order; the file ends with the last one

A section is {"name", "dtype", "dims", "frames": [[codec, bytes], ...]} and may say "optional": true. Readers skip
optional sections they do not know and refuse others. The object's name is the sha256 of all its bytes.
Minor version 1 brought plain frames (codec.py); objects without one still say 0. Minor version 2 brought checks in
turns (records.py), and 3 hints (hints.py): older readers may pass over both, so no object says 2 or 3.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any

import numpy as np
import orjson

from k3_sessions import codec
from k3_sessions.errors import Damaged, FormatUnsupported
from k3_sessions.source import Memory, Source
from k3_sessions.types import DTYPES, Array

MAGIC = b"K3OBJ\r\n\x1a"
MAJOR, MINOR = 1, 3
"""The newest format this code reads and writes."""
Parts = list[bytes | memoryview]
PREFIX = struct.Struct("<8sBBHI")

SECTION_DTYPES: Mapping[str, np.dtype[Any]] = {**DTYPES, "uint32": np.dtype("<u4")}


class Kind(IntEnum):
    """What an object holds."""

    ROOT = 1
    TURN = 2
    PAGE = 3
    CHECKPOINT = 4
    HINTS = 5


@dataclass(frozen=True)
class Blob:
    """Reference to an object: hex sha256 of its bytes, how many they are, and their hex XXH3-128 ("" if not known).

    The id names the object. The check is a quicker way to the same answer, for what is read often and large: a turn
    records it beside the id, so it is itself covered by the turn's sha256.
    """

    id: str
    size: int
    check: str = field(default="", compare=False)

    def to_json(self) -> list[Any]:
        return [self.id, self.size]


@dataclass(frozen=True)
class Section:
    """One array of an object. at: where its frames begin in the object."""

    name: str
    dtype: str
    dims: tuple[int, ...]
    frames: Sequence[Sequence[int]]
    at: int
    data: memoryview = field(default=memoryview(b""), repr=False)  # its frames, if the object is in memory

    @property
    def size(self) -> int:
        """Stored bytes."""
        return sum(stored for _, stored in self.frames)

    def new(self) -> Array:
        """Uninitialised array for `read`. Raises codec.BadFrames for dims that its frames cannot fill."""
        plain = any(number == codec.PLAIN for number, _ in self.frames)
        if math.prod(self.dims) > (self.size if plain else codec.FRAME_ITEMS * len(self.frames)):
            raise codec.BadFrames(f"{list(self.dims)} in {len(self.frames)} frames")
        return np.empty(self.dims, dtype=SECTION_DTYPES[self.dtype])

    def read(self, out: Array, source: Source | None = None) -> None:
        """Decode into `out`, C-contiguous, of exactly this section's dims and dtype. Raises codec.BadFrames, EndsEarly.

        source: where the frames come next; None for an object that is in memory.
        """
        if out.shape != self.dims or out.dtype != SECTION_DTYPES[self.dtype]:
            raise codec.BadFrames(f"{self.dtype} {list(self.dims)} for an array of {out.dtype} {list(out.shape)}")
        codec.decode(Memory(self.data) if source is None else source, self.frames, out)


@dataclass(frozen=True)
class Object:
    """A parsed object, its sections in their order. Parsing decodes no frame."""

    kind: Kind
    meta: Mapping[str, Any]
    sections: Mapping[str, Section]


def pack(kind: Kind, meta: Mapping[str, Any], arrays: Sequence[tuple[str, str, Array]], level: int) -> Parts:
    """Byte pieces of an object. `arrays`: (name, dtype, C-contiguous array) each. Equal input gives equal bytes.

    Pieces may be views of the arrays, which must stay unchanged until the pieces are written.
    """
    sections: list[dict[str, Any]] = []
    parts: Parts = []
    minor = 0
    for name, dtype, array in arrays:
        table, data = codec.encode(array, level)
        sections.append({"name": name, "dtype": dtype, "dims": list(array.shape), "frames": table})
        parts += data
        minor = max(minor, *(number == codec.PLAIN for number, _ in table), 0)
    header = orjson.dumps({"meta": meta, "sections": sections}, option=orjson.OPT_SORT_KEYS)
    return [PREFIX.pack(MAGIC, MAJOR, minor, kind, len(header)), header, *parts]


def unpack(data: Any, kind: Kind, where: str, known: Sequence[str] | None = None) -> Object:
    """Parse an object in memory, whose hash was already checked. Raises what `parse` does."""
    view = memoryview(data)
    found = parse(view, len(view), kind, where, known)
    sections = {
        name: replace(section, data=view[section.at : section.at + section.size])
        for name, section in found.sections.items()
    }
    return replace(found, sections=sections)


def header_end(head: memoryview) -> int:
    """Bytes from the start of an object to its first frame, from its first PREFIX.size bytes or all there are."""
    return PREFIX.size + (PREFIX.unpack_from(head)[4] if len(head) >= PREFIX.size else 0)


def parse(head: memoryview, total: int, kind: Kind, where: str, known: Sequence[str] | None = None) -> Object:
    """What an object of `total` bytes says about itself; `head` goes up to its first frame or further.

    where: names the file. known: section names the caller reads.
    Raises FormatUnsupported (other major, unknown section that is not optional) and Damaged (anything else).
    """

    def damaged(what: str) -> Damaged:
        return Damaged(f"{where} {what}", f"a {kind.name.lower()} object", "run `k3 verify`", object=where)

    if len(head) < PREFIX.size:
        raise damaged(f"has {total} bytes")
    magic, major, minor, number, size = PREFIX.unpack_from(head)
    if magic != MAGIC:
        raise damaged("does not begin like a stored object")
    if major != MAJOR:
        raise FormatUnsupported(
            f"{where} has format {major}.{minor}", f"{MAJOR}.x", "use the version of k3 that wrote it, or a newer one"
        )
    if number != kind:
        raise damaged(f"is of kind {number}")
    try:
        header = orjson.loads(head[PREFIX.size : PREFIX.size + size])
        meta, listed = dict(header["meta"]), list(header["sections"])
        sections: dict[str, Section] = {}
        at = PREFIX.size + size
        for entry in listed:
            frames = [(int(c), int(n)) for c, n in entry["frames"]]
            stored = sum(n for _, n in frames)
            name, dims = str(entry["name"]), tuple(int(d) for d in entry["dims"])
            if any(n < 0 for _, n in frames) or any(d < 0 for d in dims) or name in sections:
                raise ValueError(name)
            begin, at = at, at + stored
            unknown = (known is not None and name not in known) or entry["dtype"] not in SECTION_DTYPES
            if unknown and entry.get("optional") is True:
                continue
            if unknown:
                raise FormatUnsupported(
                    f"{where} has a section {name} ({entry['dtype']}) this version does not know",
                    ", ".join(known or SECTION_DTYPES),
                    "use the version of k3 that wrote it, or a newer one",
                )
            if minor > MINOR and any(number not in codec.CODECS for number, _ in frames):
                raise FormatUnsupported(
                    f"{where} has format {major}.{minor} and frames of a kind this version does not know",
                    f"{MAJOR}.{MINOR}",
                    "use the version of k3 that wrote it, or a newer one",
                )
            sections[name] = Section(name, entry["dtype"], dims, frames, begin)
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise damaged(f"has an unreadable header ({type(error).__name__}: {error})") from error
    if at != total:
        raise damaged(f"has {total} bytes where its header describes {at}")
    return Object(kind, meta, sections)
