"""Writing turns: the one writer of a session, and what a commit does, in order.

1 objects   pages, checkpoint groups and hints not on disk yet: temp file, write, fsync, rename
2           their directories are synced
3 turn      the same way, pointing at the objects and at its parent
4 ref       replaced atomically, its directory synced: from here on the turn is saved
5 thinning  checkpoints no session keeps any more are removed
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import numpy as np

from k3_sessions import hints, room, upkeep
from k3_sessions.blobs import Batch
from k3_sessions.committing import NewState, Waiting, page_row_bytes, write_ref, write_state, write_turns
from k3_sessions.common import check_json, new_tree, now
from k3_sessions.errors import BadDraft, IOFailure, SessionChanged, SessionMissing
from k3_sessions.identity import PrefixDigest, check_identity, identity_digest
from k3_sessions.opened import OpenStore
from k3_sessions.records import Kept, Page, Ref, Root, TurnRecord
from k3_sessions.state_objects import (
    check_checkpoint,
    groups_of,
)
from k3_sessions.types import Array, CommitReport, Identity, StateLayout, StateSource, Turn, TurnDraft

TURN_OVERHEAD = 64 * 1024
"""Bytes a commit may need beside state and token ids, for the room check."""


class SessionWriter:
    """Holds the session's lock until `close`. Use from one thread at a time.

    A commit that fails for want of room or by an I/O error keeps its turn: the next commit stores it too (without a
    checkpoint of its own), and `flush` tries again at once. Do not hand the same draft over twice.
    """

    def __init__(
        self,
        store: OpenStore,
        name: str,
        lock: Any,
        ref: Ref | None,
        identity: Identity,
        layout: StateLayout,
        fixed: Mapping[str, Any],
        meta: Mapping[str, Any],
    ) -> None:
        self.name = name
        self.accepted = 0  # turns ever handed over, on disk or not: those that a commit did not refuse
        self._store = store
        self._identity = identity
        self._layout = layout
        self._seed = identity_digest(identity)
        self._meta = meta
        self._waiting: list[Waiting] = []
        self._attempt: tuple[TurnRecord, ...] = ()
        self._exact = 0  # page rows before this position are known to be the ones on disk
        self._root = Root(identity, layout, fixed)
        self._path: list[TurnRecord] = []
        self._left_at = ref.head if ref is not None else ""  # head this writer last saw or wrote in the ref
        if ref is not None:
            self._root = store.catalog.root(ref.root)
            check_identity(self._root.identity, identity, f"session {name}")
            self._path = store.catalog.path(ref.head)
        self._lock: Any = lock

    # The lock

    def close(self) -> None:
        """Release the session. Turns that could not be stored are lost with the process that holds them."""
        if self._lock is not None:
            self._store.unlock_session(self.name, self._lock, clean=not self._waiting)
            self._lock = None

    def __enter__(self) -> SessionWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # What is there

    @property
    def head(self) -> Turn | None:
        """The turn on disk that the next commit goes on from."""
        return self._store.catalog.public(self._path[-1], self._store.catalog.kept()) if self._path else None

    @property
    def unsaved(self) -> int:
        """Turns handed over that are not on disk."""
        return len(self._waiting)

    def _end(self) -> tuple[int, int]:
        """Tokens and position at the end of everything handed over."""
        tokens = (self._path[-1].total if self._path else 0) + sum(len(w.tokens) for w in self._waiting)
        if self._waiting:
            return tokens, self._waiting[-1].draft.position
        return tokens, self._path[-1].position if self._path else 0

    def set_head(self, turn_id: str) -> None:
        """Go on from an earlier turn of this session; turns handed over but not stored are forgotten.

        Nothing is written: the next commit replaces the ref once, so a crash leaves the session with all its turns or
        with the new branch. That commit must say what the live state was restored from. Raises SessionMissing.
        """
        numbers = {turn.id: number for number, turn in enumerate(self._path)}
        if turn_id not in numbers:
            raise SessionMissing(
                f"session {self.name} has no turn {turn_id[:10]}", do=f"`k3 log {self.name}` lists them"
            )
        self._adopt_attempt()
        self._path = self._path[: numbers[turn_id] + 1]
        self._exact, self._waiting = 0, []

    def _current_ref(self) -> Ref:
        ref = self._store.catalog.ref(self.name)
        if ref.head != self._left_at:
            raise SessionChanged(f"session {self.name} has another head than its writer left", do="open it again")
        return ref

    # Committing

    def commit(self, draft: TurnDraft, source: StateSource) -> CommitReport:
        """Store a turn and the state after it; returns when both are durable.

        Raises BadDraft (nothing is kept of it); StoreFull, StoreReadOnly, IOFailure, StoreBusy (the turn is kept in
        memory, see the class; exhausted memory is an IOFailure); SessionChanged.
        """
        if self._lock is None:
            raise BadDraft(f"session {self.name} was closed", do="open a writer")
        tokens = self._check(draft)
        with _short_of_memory():
            try:
                checkpoint, beside = check_checkpoint(self._layout, source.checkpoint()), hints.taken(source)
            except MemoryError:
                self._keep(draft, tokens)
                raise
            self._keep(draft, tokens)
            return self._store_waiting(source, checkpoint, beside)

    def _keep(self, draft: TurnDraft, tokens: Array) -> None:
        self._waiting.append(Waiting(draft, tokens, now()))
        self.accepted += 1

    def flush(self, source: StateSource) -> CommitReport | None:
        """Try again to store what earlier commits could not; `source` is the state after the last of them."""
        if not self._waiting:
            return None
        with _short_of_memory():
            checkpoint = check_checkpoint(self._layout, source.checkpoint())
            return self._store_waiting(source, checkpoint, hints.taken(source))

    def _check(self, draft: TurnDraft) -> Array:
        total, position = self._end()
        try:
            tokens = np.asarray(draft.tokens, dtype=np.int64).reshape(-1)
        except (TypeError, ValueError, OverflowError) as error:
            raise BadDraft(f"token ids that are not integers ({error})") from error
        if tokens.size and (tokens.min() < 0 or tokens.max() >= 2**32):
            raise BadDraft(f"token ids from {tokens.min()} to {tokens.max()}", "0 to 2^32-1")
        if not position <= draft.position <= total + len(tokens):
            raise BadDraft(f"a turn at position {draft.position}", f"{position} to {total + len(tokens)}")
        check_json(draft.meta, "the turn's meta data")
        return tokens.astype("<u4")

    def _store_waiting(
        self, source: StateSource, checkpoint: Mapping[str, Array], beside: Mapping[str, Array]
    ) -> CommitReport:
        began = time.perf_counter()
        store = self._store
        self._adopt_attempt()
        if not self._waiting:
            assert self._path
            return CommitReport(self.head, 0, 0, 0, time.perf_counter() - began, stored=0)  # type: ignore[arg-type]
        waiting = tuple(self._waiting)
        position = waiting[-1].draft.position
        tokens = np.concatenate([self._store.catalog.tokens(self._path), *(w.tokens for w in waiting)])
        digest = PrefixDigest(self._seed, tokens)
        parent_pages = store.catalog.pages(self._path)
        with store.using():
            inherited, exact = self._inherited(waiting, parent_pages, digest)
        groups = groups_of(self._layout)
        new_rows = position - min(exact, position)
        raw = (
            new_rows * page_row_bytes(self._layout)
            + sum(group.raw_bytes for group in groups)
            + 4 * sum(len(w.tokens) for w in waiting)
        )
        weight = sum(array.nbytes for array in beside.values())
        evicted, fit = room.make(store, raw + TURN_OVERHEAD, self.name, weight)
        left_out = () if fit or not beside else ("the turn is stored without its hints: there is no room for them",)

        with store.using():
            batch = Batch()
            new = NewState(source, checkpoint, position, digest, self._seed)
            state = write_state(store, self._layout, new, inherited, exact, batch)
            at = (position, digest.at(position))
            kept, more, failed = hints.put(store, beside if fit else {}, self._seed, at, batch)
            blob, _ = store.blobs.put(self._root.pack(), batch)
            store.blobs.settle(batch)
            parent, root = (self._path[-1] if self._path else None), (blob.id, self._root)
            records = write_turns(store, parent, waiting, digest, parent_pages, state, kept, root, batch)
            store.blobs.settle(batch)
            self._attempt = records
            with store.changing_refs():
                dropped = self._point_ref_at(records)
        self._stored(records)
        thinned, notices = upkeep.drop_checkpoints(store, dropped)
        return CommitReport(
            turn=store.catalog.public(records[-1], {records[-1].id}),
            bytes_written=batch.written,
            bytes_pages=state.page_bytes,
            bytes_checkpoint=state.checkpoint_bytes + more,
            seconds=time.perf_counter() - began,
            thinned=thinned,
            notices=(*left_out, *failed, *notices),
            stored=len(records),
            evicted=evicted,
        )

    def _adopt_attempt(self) -> None:
        """After a failure at the very end of a commit the ref may name the new turn all the same: then it is stored."""
        if not self._attempt:
            return
        ref = self._store.catalog.find(self.name)
        if ref is not None and ref.head == self._attempt[-1].id:
            with self._store.changing_refs():
                self._store.save_ref(ref)
            self._stored(self._attempt)
        self._attempt = ()

    def _stored(self, records: Sequence[TurnRecord]) -> None:
        self._path += records
        self._left_at = records[-1].id
        del self._waiting[: len(records)]
        self._exact = records[-1].position
        self._attempt = ()

    def _inherited(
        self, waiting: Sequence[Waiting], parent: list[Page], digest: PrefixDigest
    ) -> tuple[list[Page], int]:
        """Pages that may already hold this state's rows, and the position up to which they are known to."""
        given = [w.draft.restored for w in waiting if w.draft.restored is not None]
        if not given:
            return parent, self._exact
        plan = given[-1]
        if plan.turn is None:
            return parent, 0
        if plan.turn in {turn.id for turn in self._path}:
            return parent, max(plan.boundary, 0)
        path = self._store.catalog.path(plan.turn)
        origin = path[-1]
        check_identity(self._store.catalog.root(origin.root).identity, self._identity, f"turn {origin.id[:10]}")
        if (
            plan.boundary != origin.position
            or plan.boundary > len(digest.ids)
            or digest.at(plan.boundary) != origin.prefix
        ):
            raise BadDraft(f"state restored from turn {origin.id[:10]}", "a turn whose tokens begin this session")
        return self._store.catalog.pages(path), plan.boundary

    def _point_ref_at(self, records: Sequence[TurnRecord]) -> list[TurnRecord]:
        """Replace the ref, or write the first one; returns the turns whose joint boundary this session gives up."""
        if self._path:
            return write_ref(self._store, self._current_ref(), [*self._path, *records])
        if self._store.catalog.find(self.name) is not None:
            raise SessionChanged(f"session {self.name} appeared while it was being created", do="open it again")
        head, stamp = records[-1], now()
        kept = (Kept(head.id, head.position, head.prefix),)
        self._store.save_ref(Ref(self.name, head.root, new_tree(), stamp, stamp, head.id, kept, meta=self._meta))
        return []


@contextmanager
def _short_of_memory() -> Iterator[None]:
    """Exhausted memory is trouble like a full disk: the turn waits, and the conversation goes on."""
    try:
        yield
    except MemoryError as error:
        raise IOFailure(
            f"storing a turn: memory ran out ({error})", do="free some; the next turn's save tries again"
        ) from error
