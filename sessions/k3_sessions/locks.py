"""The store's locks: kernel locks on files, so that they end with the process that holds them.

Order, wherever several are held: session, then store, then refs.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import orjson

from k3_sessions.catalog import check_name, file_id
from k3_sessions.common import now
from k3_sessions.config import StoreConfig
from k3_sessions.disk import FileSystem
from k3_sessions.errors import (
    BadName,
    Damaged,
    FormatUnsupported,
    SessionExists,
    SessionLocked,
    SessionMissing,
    StoreBusy,
    os_errors,
)

_REFUSALS = (BadName, Damaged, FormatUnsupported, SessionExists, SessionLocked, SessionMissing, StoreBusy)
"""Errors after which nothing unfinished is on disk: nothing was begun, or (import) what was written is gone again."""


class Locks:
    """Taking and giving back the locks of one open store."""

    def __init__(self, fs: FileSystem, config: StoreConfig) -> None:
        self.fs = fs
        self.config = config
        self.crashed = False  # whether a process was seen to have died while it wrote a session, or left it unfinished
        self._reserved: dict[str, Any] = {}  # locks that the next writers of these sessions take over

    @contextmanager
    def _lock(self, path: str, *, shared: bool, wait: float, what: str) -> Iterator[None]:
        with os_errors("locking the session store"):
            lock = self.fs.lock(path, shared=shared, wait=wait)
        if lock is None:
            raise StoreBusy(f"{what} for more than {wait:g} s", do="try again")
        try:
            yield
        finally:
            self.fs.unlock(lock)

    @contextmanager
    def using(self) -> Iterator[None]:
        """Nothing is removed from the objects directory while this is held."""
        with self._lock("locks/store", shared=True, wait=self.config.lock_wait_seconds, what="the store was locked"):
            yield

    @contextmanager
    def alone(self, wait: float | None = None) -> Iterator[None]:
        """No commit or restore is under way while this is held: needed to remove objects."""
        wait = self.config.lock_wait_seconds if wait is None else wait
        with self._lock("locks/store", shared=False, wait=wait, what="other processes used the store"):
            yield

    @contextmanager
    def changing_refs(self, wait: float | None = None) -> Iterator[None]:
        """One process at a time reads a ref, changes it and writes it back."""
        wait = self.config.lock_wait_seconds if wait is None else wait
        with self._lock("locks/refs", shared=False, wait=wait, what="refs were locked"):
            yield

    def lock_session(self, name: str) -> Any:
        """The writer's lock of a session. Raises SessionLocked, naming who holds it, within a second.

        A writer empties its note when it ends well: a note without a holder tells of one that died.
        """
        if name in self._reserved:
            return self._reserved.pop(name)
        path = f"locks/{file_id(name)}"
        note = orjson.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": now(), "session": name})
        with os_errors(f"locking session {name}"):
            earlier = self.fs.info(path)
            lock = self.fs.lock(path, shared=False, wait=0.2, note=note)
            if lock is not None:
                self.crashed = self.crashed or (earlier is not None and earlier.size > 0)
                return lock
            holder: dict[str, Any] = {}
            # Nothing readable there: the holder has only just taken the lock, or just let go.
            with suppress(orjson.JSONDecodeError, FileNotFoundError):
                holder = orjson.loads(self.fs.read(path))
            stored = self.fs.info(f"refs/{file_id(name)}") is not None
        pid, host = holder.get("pid"), holder.get("host")
        who = f"process {pid} on {host} since {holder.get('since')}" if pid else "another process"
        way_out = f"work on a fork: `k3 fork {name}`" if stored else "choose another name: nothing of it is stored yet"
        raise SessionLocked(
            f"session {name} is being written by {who}",
            f"wait for it, or {way_out}",
            pid=pid,
            host=host,
        )

    def unlock_session(self, name: str, lock: Any, *, clean: bool) -> None:
        """Give a session back. clean: nothing unfinished stays behind on disk.

        One that is not there (never committed, removed, renamed, asked for by a wrong name) leaves no lock file.
        """
        try:
            if clean:
                with suppress(OSError):  # neither the note nor an empty file harms anyone: `gc` removes them
                    self.fs.note(lock, b"")
                    if self.fs.info(f"refs/{file_id(name)}") is None:
                        self.fs.remove(f"locks/{file_id(name)}")
        finally:
            self.fs.unlock(lock)

    @contextmanager
    def reserving(self, *names: str) -> Iterator[None]:
        """The writer's locks of sessions for whoever needs long to get ready to write: in the block, the first writer
        of such a session through this store gets its lock and keeps it beyond; what else changes the session (a fork
        that makes it) leaves the lock where it is. The others are given back at the end.

        Raises SessionLocked, BadName.
        """
        wanted = sorted({check_name(name) for name in names})
        try:
            for name in wanted:
                self._reserved[name] = self.lock_session(name)
            yield
        finally:
            for name in wanted:
                lock = self._reserved.pop(name, None)
                if lock is not None:
                    # The note of a writer that died goes on telling of it, and of what was left unfinished here.
                    self.unlock_session(name, lock, clean=not self.crashed)

    @contextmanager
    def owning(self, *names: str) -> Iterator[None]:
        """The writer's locks of sessions that nobody else may write meanwhile."""
        locks: list[tuple[str, Any]] = []
        clean = False
        try:
            for name in sorted(set(names) - self._reserved.keys()):
                locks.append((name, self.lock_session(name)))
            yield
            clean = True
        except _REFUSALS:
            clean = True
            raise
        finally:
            for name, lock in locks:
                self.unlock_session(name, lock, clean=clean)
            self.crashed = self.crashed or not clean
