"""The store's face: open it, look at sessions, write turns, restore state, fork, rename, remove, mark."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from k3_sessions import checking, hints, marker, portable, prefix, repairing, restoring, room, upkeep
from k3_sessions.blobs import Blobs, write_file
from k3_sessions.catalog import Catalog, check_name, file_id
from k3_sessions.common import check_json, now
from k3_sessions.config import StoreConfig
from k3_sessions.errors import (
    BadDraft,
    BadName,
    NetworkFilesystem,
    SessionExists,
    SessionMissing,
    StoreError,
    os_errors,
)
from k3_sessions.fs import NETWORK_TYPES, FileSystem, RealFS
from k3_sessions.identity import check_layout, layout_digest
from k3_sessions.locks import Locks
from k3_sessions.records import Kept, Ref, TurnRecord
from k3_sessions.streaming import Stream
from k3_sessions.types import Array, Identity, RestoredState, RestorePlan, Session, StateLayout, Turn
from k3_sessions.writer import SessionWriter

T = TypeVar("T")
MIN_ID = 6
"""Fewest digits of a turn id that select a turn."""


class Store(Locks):
    """One store under one root. Methods may be called from several threads; a SessionWriter from one at a time."""

    def __init__(self, fs: FileSystem, config: StoreConfig) -> None:
        super().__init__(fs, config)
        self.blobs = Blobs(fs)
        self.catalog = Catalog(self.blobs)
        self.workers = config.threads or min(16, os.cpu_count() or 1)
        self.postponed: list[TurnRecord] = []  # thinned, but another process was using the store
        self.swept = False  # whether leftovers of crashed processes were collected
        self.format_fault = ""  # what is wrong with the FORMAT file of a store opened to be mended
        self._pool: ThreadPoolExecutor | None = None

    @classmethod
    def open(
        cls,
        root: str | os.PathLike[str],
        *,
        fs: FileSystem | None = None,
        config: StoreConfig | None = None,
        mend: bool = False,
    ) -> Store:
        """Open the store at `root`, creating an empty one where there is nothing.

        mend: also open one whose FORMAT file is damaged or gone, for `repair`, which then writes it again.
        Raises FormatUnsupported (another major version, or a folder with other things in it), NetworkFilesystem,
        StoreReadOnly, IOFailure.
        """
        config = config or StoreConfig()
        with os_errors(f"opening the session store {root}"):
            fs = fs or RealFS(root)
            kind = fs.type_name()
            if kind in NETWORK_TYPES and not config.force_network_fs:
                raise NetworkFilesystem(
                    f"{fs.where} is on {kind}",
                    "a local file system, because locks and renames must not depend on another machine",
                    "point K3_HOME at a local disk, or force it if nothing else will use the store",
                )
            fault = marker.check_format(fs, mend)
        store = cls(fs, config)
        store.format_fault = fault
        return store

    def write_format(self) -> None:
        """Write the FORMAT file of a store that was opened to be mended."""
        with os_errors("writing FORMAT"):
            marker.write_format(self.fs)
        self.format_fault = ""

    def pool(self) -> ThreadPoolExecutor:
        """Workers for encoding, hashing and disk; a few more than cores, since some wait for the disk."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.workers + 2, thread_name_prefix="k3-store")
        return self._pool

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Run a job on the workers. Raises MemoryError where the system gives no thread."""
        try:
            return self.pool().submit(job)
        except RuntimeError as error:
            raise MemoryError(f"a thread of the session store: {error}") from error

    def close(self) -> None:
        """End the worker threads. The store may be used again."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    # Looking

    def session(self, name: str) -> Session:
        """Raises SessionMissing, Damaged."""
        return self.catalog.session(self.catalog.ref(name))

    def sessions(self) -> list[Session]:
        """Every session; one that cannot be read has `error` set and hides no other."""
        refs, broken = self.catalog.refs()
        found: list[Session] = []
        for ref in refs:
            try:
                found.append(self.catalog.session(ref))
            except StoreError as error:
                found.append(
                    Session(name=ref.name, head=ref.head, tree=ref.tree, updated=ref.updated, error=str(error))
                )
        return found + broken

    def exists(self, name: str) -> bool:
        return self.catalog.find(name) is not None

    def turn(self, turn_id: str) -> Turn:
        """A turn by its full id."""
        return self.catalog.public(self._record(turn_id), self.catalog.kept())

    def _record(self, turn_id: str) -> TurnRecord:
        if not (len(turn_id) == 64 and set(turn_id) <= set("0123456789abcdef")):
            raise BadName(f"turn id {turn_id[:70]!r}", "64 hexadecimal digits")
        return self.catalog.turn(turn_id)

    def log(self, name: str) -> list[Turn]:
        """Turns of a session from the first to its head."""
        return self.lineage(self.catalog.ref(name).head)

    def lineage(self, turn_id: str) -> list[Turn]:
        """Turns from the first to this one, whatever session they belong to."""
        kept = self.catalog.kept()
        return [self.catalog.public(turn, kept) for turn in self.catalog.path(self._record(turn_id).id)]

    def tokens(self, turn_id: str) -> Array:
        """All token ids from the start of the session to the end of this turn, pending ones included: int64 [n]."""
        return self.catalog.tokens(self.catalog.path(self._record(turn_id).id)).astype(np.int64)

    def find_turn(self, name: str, selector: str) -> Turn:
        """A turn of a session by mark, by number (0 is the first, -1 the head), or by the first digits of its id.

        Raises BadName, SessionMissing.
        """
        ref = self.catalog.ref(name)
        kept = self.catalog.kept()
        if selector in ref.marks:
            return self.catalog.public(self.catalog.turn(ref.marks[selector]), kept)
        path = self.catalog.path(ref.head)
        number = selector.removeprefix("-")
        if number.isdigit() and len(number) < MIN_ID:
            at = int(selector)
            if not -len(path) <= at < len(path):
                raise SessionMissing(f"session {name} has no turn {selector}", f"0 to {len(path) - 1}")
            return self.catalog.public(path[at], kept)
        hits = [turn for turn in path if turn.id.startswith(selector)] if len(selector) >= MIN_ID else []
        if len(hits) != 1:
            raise SessionMissing(
                f"session {name} has {'several turns' if hits else 'no turn'} {selector!r}",
                f"a mark, a number, or at least {MIN_ID} digits of a turn id",
                f"`k3 log {name}` lists them",
            )
        return self.catalog.public(hits[0], kept)

    # Writing turns, reading state

    def writer(
        self,
        name: str,
        *,
        create: bool,
        identity: Identity,
        layout: StateLayout,
        fixed: Mapping[str, Any] | None = None,
        meta: Mapping[str, Any] | None = None,
    ) -> SessionWriter:
        """The one writer of a session; close it, or use it as a context manager.

        create: the session must not exist yet; it appears with its first commit. `fixed` (never changes, inherited by
        forks) and `meta` are for new sessions. Else it must exist and have been made with `identity` and `layout`.
        Raises SessionExists, SessionMissing, SessionLocked, IdentityMismatch, Damaged, BadName, BadDraft.
        """
        name = check_name(name)
        check_layout(layout)
        if identity.layout != layout_digest(layout):
            raise BadDraft(f"identity names layout {identity.layout}", layout_digest(layout))
        check_json(fixed or {}, "the session's fixed data")
        check_json(meta or {}, "the session's meta data")
        lock = self.lock_session(name)
        try:
            ref = self.catalog.find(name)
            if create and ref is not None:
                raise SessionExists(f"session {name} exists", do="resume it, or choose another name")
            if not create and ref is None:
                raise SessionMissing(f"no session named {name}", do="`k3 ls` lists the sessions")
            upkeep.sweep_leftovers(self)
            return SessionWriter(self, name, lock, ref, identity, layout, dict(fixed or {}), dict(meta or {}))
        except BaseException:
            self.unlock_session(name, lock, clean=True)
            raise

    def plan(self, turn_id: str, identity: Identity, layout: StateLayout, *, upto: int | None = None) -> RestorePlan:
        """How to reach position `upto` (default: all this turn evaluated) of the branch that ends in `turn_id`.

        Reads no state; objects that are missing, of the wrong size, or that failed a read before are gone around, and
        `damaged` tells of them.
        Raises IdentityMismatch, Damaged (the turns themselves), BadDraft (`upto` outside the turn's history).
        """
        return restoring.plan(self, self._record(turn_id), identity, layout, upto)

    def restore(self, plan: RestorePlan, identity: Identity, layout: StateLayout) -> RestoredState:
        """Read, hash and decompress everything `plan` names; nothing is returned unless all of it is right.

        A plan without a turn gives a state at position 0 with no arrays: start from a new one.
        Raises IdentityMismatch, Damaged (plan again: the object will be gone around), SessionChanged.
        """
        return restoring.restore(self, plan, identity, layout)

    @contextmanager
    def stream(self, plan: RestorePlan, identity: Identity, layout: StateLayout) -> Iterator[RestoredState]:
        """`restore` for a caller that copies the state elsewhere: read piece by piece while it is copied.

        Takes `staging_bytes` of memory beyond what a read object needs, whatever the size of the state. See Stream for
        the order in which it may be asked. Each piece is checked before it is handed out, but not before those in front
        of it are: what was copied must not be used before the block has ended without an error.
        Raises what `restore` does, wherever in the block a piece is asked for.
        """
        if plan.turn is None:
            yield restoring.State(0, {}, {})
            return
        with restoring.reading(self, plan, identity, layout) as pieces:
            stream = Stream(self, layout, plan.boundary, pieces)
            try:
                yield stream
            finally:
                stream.close()

    def hints(self, plan: RestorePlan, identity: Identity, layout: StateLayout) -> Mapping[str, Array]:
        """What was kept beside the checkpoint that `plan` starts from; {} where nothing was, or is any more.

        Raises IdentityMismatch; Damaged for what is there and not as written: all goes on without it.
        """
        return hints.restore(self, plan, identity, layout)

    def find_prefix(self, identity: Identity, layout: StateLayout, ids: Sequence[int] | Array) -> RestorePlan | None:
        """The longest stored joint boundary whose tokens are exactly the first of `ids`, whoever stored it.

        `target` is the boundary, `matched` how far whole hash blocks of `ids` are known. None: no block matches.
        """
        return prefix.find(self, identity, layout, np.asarray(ids, dtype=np.int64))

    # Refs

    def save_ref(self, ref: Ref) -> None:
        """Write a ref durably; the caller holds `changing_refs`."""
        with os_errors(f"writing session {ref.name}"):
            write_file(self.fs, f"refs/{file_id(ref.name)}", [ref.pack()])
            self.fs.sync_dir("refs")

    def _change(self, name: str, **changes: Any) -> Ref:
        with self.changing_refs():
            ref = replace(self.catalog.ref(name), updated=now(), **changes)
            self.save_ref(ref)
        return ref

    def fork(self, name: str, new: str, *, at: str | None = None) -> Session:
        """A new session that shares the turns of `name` up to turn `at` (default its head). Writes one small file.

        Raises SessionExists, SessionMissing, SessionLocked (somebody is just creating `new`).
        """
        new = check_name(new)
        with self.owning(new), self.using(), self.changing_refs():
            source = self.catalog.ref(name)
            if self.exists(new):
                raise SessionExists(f"session {new} exists", do="choose another name for the fork")
            head = source.head if at is None else self._record(at).id
            keep = self._kept_up_to(source, head)
            stamp = now()
            ref = replace(
                source,
                name=new,
                head=head,
                keep=keep,
                created=stamp,
                updated=stamp,
                marks={},
                origin=(source.name, head),
                pinned=False,
                unknown={},
            )
            self.save_ref(ref)
        return self.catalog.session(ref)

    def _kept_up_to(self, ref: Ref, head: str) -> tuple[Kept, ...]:
        """Boundaries of `ref` at or before its turn `head`. Reads only the turns after `head`."""
        later: set[str] = set()
        current: str | None = ref.head
        while current != head:
            if current is None:
                raise SessionMissing(
                    f"session {ref.name} has no turn {head[:10]}", do=f"`k3 log {ref.name}` lists them"
                )
            later.add(current)
            current = self.catalog.turn(current).parent
        return tuple(entry for entry in ref.keep if entry.turn not in later)

    def rename(self, name: str, new: str) -> Session:
        """Give a session another name. A crash half-way leaves it under both names, each whole."""
        new = check_name(new)
        with self.owning(check_name(name), new), self.changing_refs():
            ref = self.catalog.ref(name)
            if self.exists(new):
                raise SessionExists(f"session {new} exists", do="choose another name")
            ref = replace(ref, name=new, updated=now())
            self.save_ref(ref)
            self.drop_ref(name)
        return self.catalog.session(ref)

    def drop_ref(self, name: str) -> None:
        """Remove a ref; the caller holds the session's lock, whose file goes with it, and `changing_refs`."""
        with os_errors(f"removing session {name}"):
            self.fs.remove(f"refs/{file_id(check_name(name))}")
            self.fs.sync_dir("refs")

    def remove(self, name: str) -> upkeep.RemoveReport:
        """Delete a session and, at once, every object nothing else needs. Raises SessionLocked while it is written."""
        return upkeep.remove(self, check_name(name))

    def mark(self, name: str, turn_id: str, label: str) -> Session:
        """Name a turn; its checkpoint, if it still has one, is never thinned or evicted. Labels move if used again."""
        if (label := check_name(label, "mark")).removeprefix("-").isdigit():
            raise BadName(f"mark {label!r}", "a name that is not a number")
        with self.changing_refs():
            ref = self.catalog.ref(name)
            if turn_id not in {turn.id for turn in self.catalog.path(ref.head)}:
                raise SessionMissing(f"session {name} has no turn {turn_id[:10]}", do=f"`k3 log {name}` lists them")
            ref = replace(ref, marks={**ref.marks, label: turn_id}, updated=now())
            self.save_ref(ref)
        return self.catalog.session(ref)

    def unmark(self, name: str, label: str) -> Session:
        """Forget a mark. Raises BadName if there is none."""
        with self.changing_refs():
            ref = self.catalog.ref(name)
            if label not in ref.marks:
                marks = ", ".join(sorted(ref.marks))
                raise BadName(
                    f"session {name} has no mark {label!r}",
                    f"one of {marks}" if marks else None,
                    None if marks else f"it has none; `k3 mark {name} LABEL` sets one",
                )
            ref = replace(ref, marks={key: turn for key, turn in ref.marks.items() if key != label}, updated=now())
            self.save_ref(ref)
        return self.catalog.session(ref)

    def set_meta(self, name: str, meta: Mapping[str, Any]) -> Session:
        """Replace the session's free meta data."""
        check_json(meta, "the session's meta data")
        return self.catalog.session(self._change(name, meta=dict(meta)))

    def pin(self, name: str, pinned: bool = True) -> Session:
        """A pinned session is never evicted to make room."""
        return self.catalog.session(self._change(name, pinned=pinned))

    # Room and upkeep

    def gc(self, *, dry_run: bool = False) -> upkeep.GcReport:
        """Remove what no session needs and leftovers of crashes; a dry run reports exactly the same."""
        return upkeep.gc(self, dry_run=dry_run)

    def usage(self) -> room.Usage:
        """Bytes per session and per tree, MLA and KDA apart, shared and own; totals, quota and free space."""
        return room.usage(self)

    def verify(self, names: Sequence[str] | None = None) -> checking.VerifyReport:
        """Check every object the sessions (default: all) need, through the reader a restore uses. Changes nothing."""
        return checking.verify(self, names)

    def repair(self, *, dry_run: bool = False) -> repairing.RepairReport:
        """Move damaged files into quarantine and let each session fall back to what is good. Deletes nothing."""
        return repairing.repair(self, dry_run=dry_run)

    def export(self, name: str, file: str | os.PathLike[str]) -> portable.ExportReport:
        """Write a session, with everything it needs, into one new file. Raises BadName if the file exists."""
        return portable.export(self, name, file)

    def import_(self, file: str | os.PathLike[str], name: str | None = None) -> portable.ImportReport:
        """Add the session of an exported file, every object hashed again; `name` defaults to the one it had.

        Raises SessionExists, Damaged, FormatUnsupported, StoreFull; a failed import leaves nothing.
        """
        return portable.import_(self, file, name)
