"""The store's face: open it, look at sessions, write turns, restore state, fork, rename, remove, mark."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from k3_sessions import branches, checking, hints, portable, prefix, repairing, restoring, room, upkeep
from k3_sessions.catalog import check_name
from k3_sessions.common import check_json
from k3_sessions.errors import BadDraft, SessionExists, SessionMissing, StoreError
from k3_sessions.identity import check_layout, layout_digest
from k3_sessions.opened import OpenStore
from k3_sessions.streaming import Stream
from k3_sessions.types import Array, Identity, RestoredState, RestorePlan, Session, StateLayout, Turn
from k3_sessions.writer import SessionWriter


class Store(OpenStore):
    """One store under one root. Methods may be called from several threads; a SessionWriter from one at a time."""

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
        return self.catalog.public(self.record(turn_id), self.catalog.kept())

    def log(self, name: str) -> list[Turn]:
        """Turns of a session from the first to its head."""
        return self.lineage(self.catalog.ref(name).head)

    def lineage(self, turn_id: str) -> list[Turn]:
        """Turns from the first to this one, whatever session they belong to."""
        kept = self.catalog.kept()
        return [self.catalog.public(turn, kept) for turn in self.catalog.path(self.record(turn_id).id)]

    def tokens(self, turn_id: str) -> Array:
        """All token ids from the start of the session to the end of this turn, pending ones included: int64 [n]."""
        return self.catalog.tokens(self.catalog.path(self.record(turn_id).id)).astype(np.int64)

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
        return restoring.plan(self, self.record(turn_id), identity, layout, upto)

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

    # Names

    def fork(self, name: str, new: str, *, at: str | None = None) -> Session:
        """A new session that shares the turns of `name` up to turn `at` (default its head). Writes one small file.

        Raises SessionExists, SessionMissing, SessionLocked (somebody is just creating `new`).
        """
        return branches.fork(self, name, new, at=at)

    def rename(self, name: str, new: str) -> Session:
        """Give a session another name. A crash half-way leaves it under both names, each whole."""
        return branches.rename(self, name, new)

    def remove(self, name: str) -> upkeep.RemoveReport:
        """Delete a session and, at once, every object nothing else needs. Raises SessionLocked while it is written."""
        return upkeep.remove(self, check_name(name))

    def mark(self, name: str, turn_id: str, label: str) -> Session:
        """Name a turn; its checkpoint, if it still has one, is never thinned or evicted. Labels move if used again."""
        return branches.mark(self, name, turn_id, label)

    def unmark(self, name: str, label: str) -> Session:
        """Forget a mark. Raises BadName if there is none."""
        return branches.unmark(self, name, label)

    def set_meta(self, name: str, meta: Mapping[str, Any]) -> Session:
        """Replace the session's free meta data."""
        check_json(meta, "the session's meta data")
        return branches.change(self, name, meta=dict(meta))

    def pin(self, name: str, pinned: bool = True) -> Session:
        """A pinned session is never evicted to make room."""
        return branches.change(self, name, pinned=pinned)

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
