"""Reading refs, turns and roots: who is there, and what each needs. Takes no lock and writes nothing."""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from k3_sessions.blobs import TEMP_PREFIX, Blobs, path_of
from k3_sessions.errors import BadName, Damaged, SessionMissing, StoreError, os_errors
from k3_sessions.objects import Blob
from k3_sessions.records import REPAIR, Page, Ref, Root, TurnRecord, read_ref, read_root, read_turn
from k3_sessions.types import Array, Session, Turn

MAX_NAME = 100
_EXTRA = set("._-+=@")


def check_name(name: str, what: str = "session name") -> str:
    """The name in its one spelling (NFC). `what` it names, for the refusal. Raises BadName."""
    spelled = unicodedata.normalize("NFC", name)
    good = all(c.isalnum() or c in _EXTRA for c in spelled) and spelled[:1].isalnum()
    if not good or len(spelled) > MAX_NAME:
        raise BadName(
            f"{what} {name[:MAX_NAME]!r}",
            f"at most {MAX_NAME} letters, digits and {' '.join(sorted(_EXTRA))}, beginning with a letter or digit",
        )
    return spelled


def file_id(name: str) -> str:
    """Generated file name of a session: no session name ever becomes part of a path."""
    return hashlib.sha256(name.encode()).hexdigest()[:32]


@dataclass
class Need:
    """Objects a session keeps, by use; all but the hints it cannot do without. Values are stored bytes."""

    pages: dict[str, int] = field(default_factory=dict)
    checkpoints: dict[str, int] = field(default_factory=dict)
    hints: dict[str, int] = field(default_factory=dict)
    other: dict[str, int] = field(default_factory=dict)

    def all(self) -> dict[str, int]:
        return {**self.hints, **self.pages, **self.checkpoints, **self.other}


class Catalog:
    """Refs are read afresh each time; turns and roots never change, so they are kept once read."""

    def __init__(self, blobs: Blobs) -> None:
        self._blobs = blobs
        self._fs = blobs.fs
        self._turns: dict[str, TurnRecord] = {}
        self._roots: dict[str, Root] = {}

    def find(self, name: str) -> Ref | None:
        """The session's ref or None. Raises Damaged or FormatUnsupported for one that cannot be read."""
        path = f"refs/{file_id(check_name(name))}"
        with os_errors(f"reading session {name}"):
            found = self._fs.info(path)
            if found is None:
                return None
            if found.kind != "file":
                raise Damaged(f"{path} is not a regular file", "a session's ref", REPAIR, object=path)
            data = self._fs.read(path)
        ref = read_ref(data, path)
        if ref.name != check_name(name):
            raise Damaged(f"{path} is the ref of session {ref.name}", f"that of {name}", REPAIR, object=path)
        return ref

    def ref(self, name: str) -> Ref:
        found = self.find(name)
        if found is None:
            raise SessionMissing(f"no session named {name}", do="`k3 ls` lists the sessions")
        return found

    def refs(self) -> tuple[list[Ref], list[Session]]:
        """Every readable ref by name, and one entry with `error` set for each that is not."""
        good, faults = self.refs_and_faults()
        return good, [Session(name=f"?{path[5:13]}", error=str(error)) for path, error in faults]

    def refs_and_faults(self) -> tuple[list[Ref], list[tuple[str, StoreError]]]:
        """Every readable ref by name, and the path of each other file among them with what is wrong."""
        good: list[Ref] = []
        faults: list[tuple[str, StoreError]] = []
        with os_errors("listing the sessions"):
            names = self._fs.names("refs")
        for file in names:
            if file.startswith(TEMP_PREFIX):
                continue
            path = f"refs/{file}"
            try:
                info = self._fs.info(path)
                if info is not None and info.kind != "file":
                    raise Damaged(f"{path} is not a regular file", "a session's ref", REPAIR, object=path)
                with os_errors("reading a session"):
                    data = self._fs.read(path)
                ref = read_ref(data, path)
                if file_id(ref.name) != file:
                    raise Damaged(f"{path} is the ref of session {ref.name}", "another", REPAIR, object=path)
                good.append(ref)
            except StoreError as error:
                if self._fs.info(path) is not None:
                    faults.append((path, error))
        return sorted(good, key=lambda ref: ref.name), faults

    def turn(self, key: str) -> TurnRecord:
        """A turn by its full id. Raises Damaged."""
        found = self._turns.get(key)
        if found is None:
            found = read_turn(self._blobs.get(key), key, path_of(key))
            self._turns[key] = found
        return found

    def root(self, key: str) -> Root:
        found = self._roots.get(key)
        if found is None:
            found = self._roots[key] = read_root(self._blobs.get(key), path_of(key))
        return found

    def learn(self, key: str, root: Root) -> None:
        """Use this as root `key`, whose file cannot be read."""
        self._roots[key] = root

    def forget(self, ids: Iterable[str]) -> None:
        """Drop what is remembered about objects, so that they are read again."""
        for key in ids:
            self._turns.pop(key, None)
            self._roots.pop(key, None)

    def path(self, key: str) -> list[TurnRecord]:
        """Turns from the first to `key`. Raises Damaged if the chain is broken anywhere."""
        turns = [self.turn(key)]
        while (parent := turns[-1].parent) is not None:
            child = turns[-1]
            turns.append(self.turn(parent))
            if turns[-1].total != child.start or turns[-1].root != child.root or turns[-1].position > child.position:
                raise Damaged(f"turn {child.id[:10]} does not continue its parent", do=REPAIR, object=path_of(child.id))
        if turns[-1].start != 0:
            raise Damaged(f"turn {turns[-1].id[:10]} has no parent", do=REPAIR, object=path_of(turns[-1].id))
        return turns[::-1]

    def pages(self, path: Sequence[TurnRecord]) -> list[Page]:
        """The MLA pages of the last turn of `path`, in order and without gaps, from position 0."""
        pages: list[Page] = []
        for turn in path:
            while pages and pages[-1].stop > turn.pages_from:
                pages.pop()
            pages += turn.pages
        end = 0
        for page in pages:
            if page.start != end or page.stop <= page.start:
                raise Damaged(f"turn {path[-1].id[:10]} has a gap at {end}", do=REPAIR, object=path_of(path[-1].id))
            end = page.stop
        if path and path[-1].checkpoint and end != path[-1].position:
            raise Damaged(f"turn {path[-1].id[:10]} has pages to {end}", do=REPAIR, object=path_of(path[-1].id))
        return pages

    @staticmethod
    def tokens(path: Sequence[TurnRecord]) -> Array:
        """All token ids of a path, uint32 [n]."""
        return np.concatenate([turn.tokens for turn in path]) if path else np.empty(0, dtype="<u4")

    def kept(self) -> dict[str, list[str]]:
        """Turn id -> names of the sessions that keep its joint boundary."""
        kept: dict[str, list[str]] = {}
        for ref in self.refs()[0]:
            for entry in ref.keep:
                kept.setdefault(entry.turn, []).append(ref.name)
        return kept

    def lost(self) -> set[str]:
        """Ids of turns whose joint boundary was damaged and is gone from a session for that."""
        return {turn for ref in self.refs()[0] for turn in ref.lost}

    def need(self, ref: Ref) -> Need:
        """What `ref` needs to stay whole. Raises Damaged if that cannot be told."""
        need = Need()
        path = self.path(ref.head)
        need.other[ref.root] = self.root_size(ref.root)
        index = {turn.id: number for number, turn in enumerate(path)}
        for turn in path:
            need.other[turn.id] = turn.size
        marked = [self.path(turn) for turn in ref.marks.values() if turn not in index]
        for entry in ref.keep:
            branch = path[: index[entry.turn] + 1] if entry.turn in index else self.path(entry.turn)
            need.pages.update((page.blob.id, page.blob.size) for page in self.pages(branch))
            need.checkpoints.update((blob.id, blob.size) for blob in branch[-1].checkpoint)
            if (hints := self.hints(branch[-1])) is not None:
                need.hints[hints.id] = hints.size
            need.other.update((turn.id, turn.size) for turn in branch)
        for branch in marked:
            need.other.update((turn.id, turn.size) for turn in branch)
        return need

    def hints(self, turn: TurnRecord) -> Blob | None:
        """The turn's hints, unless it has none or they are gone, which is no damage."""
        found = turn.hints
        with os_errors("reading the session store"):
            return None if found is None or self._fs.info(path_of(found.id)) is None else found

    def root_size(self, key: str) -> int:
        found = self._fs.info(path_of(key))
        return found.size if found else 0

    def session(self, ref: Ref) -> Session:
        """Public view of a ref."""
        root = self.root(ref.root)
        return Session(
            name=ref.name,
            head=ref.head,
            tree=ref.tree,
            created=ref.created,
            updated=ref.updated,
            identity=root.identity,
            layout=root.layout,
            fixed=root.fixed,
            meta=ref.meta,
            marks=ref.marks,
            origin=ref.origin,
            pinned=ref.pinned,
            evicted=ref.evicted,
        )

    @staticmethod
    def public(turn: TurnRecord, kept: Iterable[str]) -> Turn:
        """Public view of a turn; `kept` holds the ids of turns with a live joint boundary."""
        return Turn(
            id=turn.id,
            parent=turn.parent,
            start=turn.start,
            tokens=tuple(turn.tokens.tolist()),
            position=turn.position,
            created=turn.created,
            meta=turn.meta,
            has_checkpoint=bool(turn.checkpoint) and turn.id in kept,
            bytes_pages=sum(page.blob.size for page in turn.pages),
            bytes_checkpoint=sum(blob.size for blob in turn.boundary()),
        )
