"""Bytes of an object from front to back, for whoever decodes them: from memory, or hashed on their way from a file.

A file passes through a buffer that stays in the processor's cache, or goes straight to where it belongs; it is never in
memory as a whole. What comes out is not yet known to be right: that is known at the end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

READ_BLOCK = 512 * 1024
"""Bytes read and hashed at a time: few calls, and still in the cache when they are hashed and decoded."""

_BUFFER = 5 * READ_BLOCK
"""Room for the largest piece decoded at once, a run of four planes, and one block more."""

_local = threading.local()


class EndsEarly(ValueError):  # noqa: N818
    """There are fewer bytes than were asked for."""


class Source(Protocol):
    """What a decoder reads from."""

    def take(self, size: int) -> memoryview:
        """The next `size` bytes, good until the next call. Raises EndsEarly."""
        ...

    def into(self, out: memoryview) -> None:
        """Fill `out` with the next bytes. Raises EndsEarly."""
        ...


class Memory:
    """A Source over bytes that are in memory."""

    def __init__(self, data: memoryview) -> None:
        self._data = data

    def take(self, size: int) -> memoryview:
        found, self._data = self._data[:size], self._data[size:]
        if len(found) != size:
            raise EndsEarly(f"{len(found)} bytes where {size} are needed")
        return found

    def into(self, out: memoryview) -> None:
        out[:] = self.take(len(out))


class Passing:
    """A Source over a file that is read once. `digest` sees every byte, in order."""

    def __init__(self, read: Callable[[memoryview], int], digest: Any) -> None:
        self._read, self._digest = read, digest
        # One for each thread, used again: finding new memory takes longer than reading a file.
        if not hasattr(_local, "buffer"):
            _local.buffer = memoryview(bytearray(_BUFFER))
        self._buffer: memoryview = _local.buffer
        self._start = self._stop = 0
        self.at = 0
        """Bytes taken so far."""

    def peek(self, size: int) -> memoryview:
        """Like `take`, but they come again."""
        if size > self._stop - self._start:
            held = self._stop - self._start
            if size + READ_BLOCK > len(self._buffer):
                larger = memoryview(bytearray(size + READ_BLOCK))
                larger[:held] = self._buffer[self._start : self._stop]
                self._buffer = larger
            elif self._start:
                self._buffer[:held] = self._buffer[self._start : self._stop]
            self._start, self._stop = 0, held
            while self._stop < size:
                self._stop += self._more(self._buffer[self._stop : self._stop + READ_BLOCK])
        return self._buffer[self._start : self._start + size]

    def take(self, size: int) -> memoryview:
        found = self.peek(size)
        self._start += size
        self.at += size
        return found

    def into(self, out: memoryview) -> None:
        done = min(len(out), self._stop - self._start)
        out[:done] = self.take(done)
        self.at += len(out) - done
        while done < len(out):
            done += self._more(out[done : done + READ_BLOCK])

    def skip_to(self, at: int) -> None:
        while self.at < at:
            self.take(min(READ_BLOCK, at - self.at))

    def rest(self) -> None:
        """Read to the end; nothing can be taken afterwards."""
        self._start = self._stop = 0
        while more := self._read(self._buffer[:READ_BLOCK]):
            self._digest.update(self._buffer[:more])

    def _more(self, out: memoryview) -> int:
        more = self._read(out)
        if not more:
            raise EndsEarly("the file ends early")
        self._digest.update(out[:more])
        return more
