"""The small records of the store as Python values: roots, turns and refs, with their byte forms."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import orjson

from k3_sessions import codec
from k3_sessions.errors import Damaged, FormatUnsupported
from k3_sessions.identity import identity_json, layout_from_json, layout_json
from k3_sessions.objects import MAJOR, Blob, Kind, Object, Parts, pack, unpack
from k3_sessions.types import Array, Identity, StateLayout

REPAIR = "run `k3 verify`, then `k3 repair`"


@dataclass(frozen=True)
class Root:
    """What never changes along a session and its forks."""

    identity: Identity
    layout: StateLayout
    fixed: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        return {"identity": identity_json(self.identity), "layout": layout_json(self.layout), "fixed": self.fixed}

    def pack(self) -> Parts:
        return pack(Kind.ROOT, self.to_json(), (), level=1)


@dataclass(frozen=True)
class Page:
    """An MLA page object: rows [start, stop) inside one hash block, every page field, every layer."""

    start: int
    stop: int
    blob: Blob


@dataclass(frozen=True)
class TurnRecord:
    """A turn as stored. `pages` replace the parent's pages from position `pages_from` on.

    root_copy: in a session's first turn, what the root object says, so that the loss of that one file loses nothing.
    hints: see hints.py; the object may be gone.
    """

    parent: str | None
    root: str
    start: int
    tokens: Array
    position: int
    prefix: str
    created: str
    meta: Mapping[str, Any]
    pages_from: int
    pages: tuple[Page, ...]
    checkpoint: tuple[Blob, ...]
    root_copy: Mapping[str, Any] | None = None
    hints: Blob | None = None
    id: str = ""
    size: int = 0

    @property
    def total(self) -> int:
        return self.start + len(self.tokens)

    def boundary(self) -> tuple[Blob, ...]:
        """What goes when no session keeps this boundary any more."""
        return self.checkpoint if self.hints is None else (*self.checkpoint, self.hints)

    def pack(self, level: int) -> Parts:
        meta: dict[str, Any] = {
            "parent": self.parent,
            "root": self.root,
            "start": self.start,
            "position": self.position,
            "prefix": self.prefix,
            "created": self.created,
            "meta": self.meta,
            "pages_from": self.pages_from,
            "pages": [[p.start, p.stop, *p.blob.to_json()] for p in self.pages],
            "checkpoint": [b.to_json() for b in self.checkpoint],
        }
        blobs = [*(p.blob for p in self.pages), *self.checkpoint]
        if any(b.check for b in blobs):
            meta["checks"] = [b.check for b in blobs]
        if self.root_copy is not None:
            meta["root_copy"] = self.root_copy
        if self.hints is not None:
            meta["hints"] = [*self.hints.to_json(), self.hints.check]
        return pack(Kind.TURN, meta, [("tokens", "uint32", self.tokens)], level)


class Kept(NamedTuple):
    """A turn whose checkpoint and pages a session needs; `prefix` digests the tokens before `position`."""

    turn: str
    position: int
    prefix: str


@dataclass(frozen=True)
class Ref:
    """A session's ref: where its head is and which joint boundaries it holds, oldest first.

    `lost`: turns whose boundary was damaged, so that a repair gave it up; nothing is stored where there is none.
    `unknown` carries keys of a newer minor version through a rewrite.
    """

    name: str
    root: str
    tree: str
    created: str
    updated: str
    head: str
    keep: tuple[Kept, ...]
    marks: Mapping[str, str] = field(default_factory=dict)
    meta: Mapping[str, Any] = field(default_factory=dict)
    origin: tuple[str, str] | None = None
    pinned: bool = False
    evicted: str = ""
    lost: tuple[str, ...] = ()
    unknown: Mapping[str, Any] = field(default_factory=dict)

    def pack(self) -> bytes:
        """One line of JSON; "sha256" is the digest of the line without that key."""
        body = {
            **self.unknown,
            **{f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in ("unknown", "lost")},
            **({"lost": list(self.lost)} if self.lost else {}),
        }
        return seal({**body, "keep": [list(kept) for kept in self.keep], "k3": "ref"})


SEALED_MINOR = 0
"""Sealed lines have not changed since 1.0, and say so: the lowest version that can read them."""


def seal(body: Mapping[str, Any]) -> bytes:
    """JSON line with version and checksum."""
    return _sealed({**body, "version": f"{MAJOR}.{SEALED_MINOR}"})


def _sealed(plain: Mapping[str, Any]) -> bytes:
    digest = hashlib.sha256(orjson.dumps(plain, option=orjson.OPT_SORT_KEYS)).hexdigest()
    return orjson.dumps({**plain, "sha256": digest}, option=orjson.OPT_SORT_KEYS) + b"\n"


def unseal(data: bytes, kind: str, where: str) -> dict[str, Any]:
    """Checked content of a sealed line. Raises Damaged or FormatUnsupported."""

    def damaged(what: str) -> Damaged:
        # an exported file is no part of the store: nothing there to verify or to repair
        do = "copy the file again" if kind == "export" else REPAIR
        return Damaged(f"{where} {what}", f"a k3 {kind} file", do, object=where)

    try:
        body = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise damaged("is not readable JSON") from error
    if not isinstance(body, dict) or body.get("k3") != kind or not isinstance(body.get("version"), str):
        raise damaged("holds something else")
    if body["version"].split(".")[0] != str(MAJOR):
        raise FormatUnsupported(
            f"{where} has format {body['version']}", f"{MAJOR}.x", "use the version of k3 that wrote it, or a newer one"
        )
    # Written again and compared byte for byte: a changed byte that means the same JSON is damage too.
    if _sealed({key: value for key, value in body.items() if key != "sha256"}) != data:
        raise damaged("does not match its checksum")
    body.pop("sha256")
    return {key: value for key, value in body.items() if key not in ("k3", "version")}


def read_ref(data: bytes, where: str) -> Ref:
    body = unseal(data, "ref", where)
    known = {f.name for f in dataclasses.fields(Ref)} - {"unknown"}
    try:
        values = {"lost": (), **{name: body[name] for name in known if name in body or name != "lost"}}
        values["lost"] = tuple(str(turn) for turn in values["lost"])
        values["keep"] = tuple(Kept(str(turn), int(position), str(prefix)) for turn, position, prefix in values["keep"])
        values["origin"] = tuple(values["origin"]) if values["origin"] else None
    except (KeyError, TypeError, ValueError) as error:
        raise Damaged(f"{where} lacks or garbles {error}", "a whole ref", REPAIR, object=where) from error
    return Ref(**values, unknown={key: value for key, value in body.items() if key not in known})


def read_root(data: Any, where: str) -> Root:
    found = unpack(data, Kind.ROOT, where, known=())
    with _well_formed(where):
        return _root(found.meta)


def _root(meta: Mapping[str, Any]) -> Root:
    return Root(Identity(**meta["identity"]), layout_from_json(meta["layout"]), dict(meta["fixed"]))


def copied_root(turn: TurnRecord) -> Root | None:
    """The root whose copy a first turn holds, if it is the very one the turn names."""
    if turn.root_copy is None:
        return None
    try:
        root = _root(turn.root_copy)
        data = b"".join(root.pack())
    except (KeyError, TypeError, ValueError):
        return None
    return root if hashlib.sha256(data).hexdigest() == turn.root else None


def read_turn(data: Any, key: str, where: str) -> TurnRecord:
    found = unpack(data, Kind.TURN, where, known=("tokens",))
    with _well_formed(where):
        meta = found.meta
        # Turns of 1.0 and 1.1 have no checks: their objects are read by sha256.
        checks = iter(meta.get("checks") or [""] * (len(meta["pages"]) + len(meta["checkpoint"])))
        return TurnRecord(
            parent=meta["parent"],
            root=meta["root"],
            start=int(meta["start"]),
            tokens=_tokens(found),
            position=int(meta["position"]),
            prefix=meta["prefix"],
            created=meta["created"],
            meta=dict(meta["meta"]),
            pages_from=int(meta["pages_from"]),
            pages=tuple(Page(int(a), int(b), Blob(i, int(n), _check(checks))) for a, b, i, n in meta["pages"]),
            checkpoint=tuple(Blob(i, int(n), _check(checks)) for i, n in meta["checkpoint"]),
            root_copy=dict(meta["root_copy"]) if "root_copy" in meta else None,
            hints=_hints(meta["hints"]) if "hints" in meta else None,
            id=key,
            size=len(data),
        )


def _hints(found: Any) -> Blob:
    key, size, check = found
    return Blob(str(key), int(size), _check(iter((check,))))


def _check(checks: Iterator[Any]) -> str:
    found = next(checks, None)
    if not isinstance(found, str) or len(found) not in (0, 32):
        raise ValueError(f"check {found!r}")
    return found


def _tokens(found: Object) -> Array:
    section = found.sections["tokens"]
    if len(section.dims) != 1 or section.dtype != "uint32":
        raise ValueError(f"tokens are {section.dtype} {list(section.dims)}")
    tokens = section.new()
    section.read(tokens)
    tokens.flags.writeable = False
    return tokens


class _well_formed:  # noqa: N801
    """Turns what goes wrong while reading a record's fields into Damaged."""

    def __init__(self, where: str) -> None:
        self.where = where

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, (KeyError, TypeError, ValueError, codec.BadFrames)):
            raise Damaged(
                f"{self.where} is not well formed ({type(error).__name__}: {error})", object=self.where, do=REPAIR
            ) from error
