"""State on its way to and from the disk, through the store's workers, within a bound on memory."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress

from k3_sessions.blobs import Batch
from k3_sessions.errors import StoreError
from k3_sessions.objects import Blob, Parts
from k3_sessions.opened import OpenStore


class Staging:
    """Bounds the raw bytes on their way to the disk; one piece may pass even if it alone is over the bound."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._used = 0
        self._changed = threading.Condition()

    def take(self, size: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._used == 0 or self._used + size <= self._limit)
            self._used += size

    def give(self, size: int) -> None:
        with self._changed:
            self._used -= size
            self._changed.notify_all()


_HUGE = 2 * 1024 * 1024


def new_memory(size: int, what: str) -> mmap.mmap:
    """At least `size` zeroed bytes, in huge pages where the system has them: finding small ones costs more time.

    Raises MemoryError, which says `what` they were for.
    """
    try:
        pages = mmap.mmap(-1, max(1, -(-size // _HUGE)) * _HUGE)
    except OSError as error:
        raise MemoryError(f"no {size} bytes {what} ({error.strerror})") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


class Jobs:
    """Encoding, hashing and writing on the store's workers, within the staging bound. The first failure wins."""

    def __init__(self, store: OpenStore) -> None:
        self._store = store
        self.staging = Staging(store.config.staging_bytes)
        self._futures: list[Future[tuple[Blob, int]]] = []
        self._stop = threading.Event()

    def put(self, size: int, make: Callable[[], Parts], batch: Batch, taken: bool = False) -> Future[tuple[Blob, int]]:
        """Store the object `make` builds. `size`: raw bytes it stands for; `taken`: already counted as staged."""
        if not taken:
            self.staging.take(size)

        def work() -> tuple[Blob, int]:
            try:
                if self._stop.is_set():
                    raise StoreError("stopped after another part of the same turn failed")
                return self._store.blobs.put(make(), batch)
            except BaseException:
                self._stop.set()
                raise
            finally:
                self.staging.give(size)

        future = self._store.submit(work)
        self._futures.append(future)
        return future

    @contextmanager
    def run(self) -> Iterator[None]:
        """Wait for all jobs at the end, whatever happened, and raise the first failure."""
        try:
            yield
        except BaseException:
            self._stop.set()
            for future in self._futures:
                future.exception()
            raise
        failures = [error for future in self._futures if (error := future.exception()) is not None]
        real = [error for error in failures if type(error) is not StoreError]
        if failures:
            raise (real or failures)[0]
