"""State read piece by piece, for a caller that copies it elsewhere: disk, hashing, decoding and the copy overlap, and
only a few pieces are in memory at a time, in memory that is used again and again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial

import numpy as np

from k3_sessions.errors import BadDraft
from k3_sessions.opened import OpenStore
from k3_sessions.restoring import Piece, abandon
from k3_sessions.staging import new_memory
from k3_sessions.state_objects import fields_of
from k3_sessions.types import DTYPES, HASH_BLOCK, Array, StateLayout

_ALIGN = 64


class Stream:
    """A RestoredState that is read once, from front to back: `checkpoint` or `checkpoint_parts`, then rows in order.

    Whatever it hands out was checked, but what comes later may be damaged: the caller must be able to drop all of it.
    Arrays of `checkpoint_parts` are good until the next part, rows until rows of a later block are asked for.
    """

    def __init__(self, store: OpenStore, layout: StateLayout, position: int, pieces: Sequence[Piece]) -> None:
        self.position = position
        self._store, self._layout, self._pieces = store, layout, pieces
        # Enough for every core to go on while the caller copies; more would only take memory.
        self._ahead = store.workers + 3
        self._limit = store.config.staging_bytes
        self._largest = max((_bytes(piece) for piece in pieces), default=0)
        self._whole: dict[str, Array] | None = None
        self._free: list[memoryview] = []
        self._running: dict[int, tuple[Future[None], dict[str, Array], memoryview]] = {}
        self._next = 0  # first piece that nobody began to read
        self._first = 0  # first piece that may still be asked for

    def checkpoint_parts(self) -> Iterator[tuple[str, int, Array]]:
        """Every checkpoint field in parts: name, index of its first layer, `[layers, *shape]`."""
        for number, piece in enumerate(self._pieces):
            if piece.group is None:
                return
            self._let_go(number)
            for name, array in self._wait(number).items():
                yield name, piece.group.spans[name][0], array

    def checkpoint(self) -> Mapping[str, Array]:
        """Every checkpoint field whole, in memory of its own; read once, however often it is asked for."""
        if self._whole is None:
            fields = fields_of(self._layout, "checkpoint")
            self._whole = {f.name: np.empty((len(f.layers), *f.shape), DTYPES[f.dtype]) for f in fields}
            for name, first, array in self.checkpoint_parts():
                self._whole[name][first : first + len(array)] = array
        return self._whole

    def page_rows(self, name: str, start: int, stop: int) -> Array:
        """Rows [start, stop) of a page field, `[layers, stop - start, *shape]`; `start` never goes back a block."""
        if not 0 <= start < stop <= self.position:
            raise BadDraft(f"rows {start} to {stop}", f"0 to {self.position}")
        groups = sum(piece.group is not None for piece in self._pieces)
        first, last = start // HASH_BLOCK, -(-stop // HASH_BLOCK)
        self._let_go(groups + first)
        parts = []
        for block in range(first, last):
            at = block * HASH_BLOCK
            parts.append(self._wait(groups + block)[name][:, max(0, start - at) : stop - at])
        return np.ascontiguousarray(parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1))

    def close(self) -> None:
        """Stop reading."""
        abandon(future for future, _, _ in self._running.values())
        self._running.clear()

    def _let_go(self, first: int) -> None:
        """Pieces before `first` are done with: their memory is for those to come."""
        assert first >= self._first, "state read backwards"
        self._first = first
        for number in [number for number in self._running if number < first]:
            future, _, memory = self._running[number]
            future.result()
            del self._running[number]
            self._free.append(memory)
        self._next = max(self._next, first)
        self._begin(first)

    def _begin(self, number: int) -> None:
        """Have pieces read, as far ahead as there is memory for, and up to `number` in any case."""
        while self._next < len(self._pieces):
            held = len(self._running)
            if self._next > number and (held >= self._ahead or (held + 1) * self._largest > self._limit):
                return
            memory = self._free.pop() if self._free else memoryview(new_memory(self._largest, "for restored state"))
            piece = self._pieces[self._next]
            arrays = _arrays(piece, memory)
            self._running[self._next] = (self._store.submit(partial(piece.fill, arrays)), arrays, memory)
            self._next += 1

    def _wait(self, number: int) -> dict[str, Array]:
        self._begin(number)
        future, arrays, _ = self._running[number]
        future.result()
        return arrays


def _bytes(piece: Piece) -> int:
    return sum(_rounded(shape, dtype.itemsize) for shape, dtype in piece.arrays.values())


def _rounded(shape: tuple[int, ...], itemsize: int) -> int:
    return -(-int(np.prod(shape, dtype=np.int64)) * itemsize // _ALIGN) * _ALIGN


def _arrays(piece: Piece, memory: memoryview) -> dict[str, Array]:
    """The piece's arrays, one behind the other."""
    found: dict[str, Array] = {}
    at = 0
    for name, (shape, dtype) in piece.arrays.items():
        found[name] = np.ndarray(shape, dtype=dtype, buffer=memory, offset=at)
        at += _rounded(shape, dtype.itemsize)
    return found
