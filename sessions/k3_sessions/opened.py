"""An open store as this package's own modules use it: files, locks, objects, refs, workers. `store.py` is its face."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self, TypeVar

from k3_sessions import marker
from k3_sessions.blobs import Blobs, write_file
from k3_sessions.catalog import Catalog, check_name, file_id
from k3_sessions.config import StoreConfig
from k3_sessions.disk import NETWORK_TYPES, FileSystem
from k3_sessions.errors import BadName, NetworkFilesystem, os_errors
from k3_sessions.fs import RealFS
from k3_sessions.locks import Locks
from k3_sessions.records import Ref, TurnRecord

T = TypeVar("T")


class OpenStore(Locks):
    """One root, its format checked. Methods may be called from several threads."""

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
    ) -> Self:
        """Open the store at `root`, creating an empty one where there is nothing.

        mend: also open one whose FORMAT file is damaged or gone, for `repair`, which then writes it again.
        Raises BadName (a folder of other things), FormatUnsupported (another major version, no FORMAT),
        NetworkFilesystem, StoreReadOnly, IOFailure.
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

    def record(self, turn_id: str) -> TurnRecord:
        """A turn by its full id. Raises BadName for what is none, and what `Catalog.turn` does."""
        if not (len(turn_id) == 64 and set(turn_id) <= set("0123456789abcdef")):
            raise BadName(f"turn id {turn_id[:70]!r}", "64 hexadecimal digits")
        return self.catalog.turn(turn_id)

    def save_ref(self, ref: Ref) -> None:
        """Write a ref durably; the caller holds `changing_refs`."""
        with os_errors(f"writing session {ref.name}"):
            write_file(self.fs, f"refs/{file_id(ref.name)}", [ref.pack()])
            self.fs.sync_dir("refs")

    def drop_ref(self, name: str) -> None:
        """Remove a ref; the caller holds the session's lock, whose file goes with it, and `changing_refs`."""
        with os_errors(f"removing session {name}"):
            self.fs.remove(f"refs/{file_id(check_name(name))}")
            self.fs.sync_dir("refs")
