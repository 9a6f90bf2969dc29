"""An append-only stream of token ids in which the newest places with the same last n ids are found in constant time.

For each order n there is a table from the hash of n ids to the newest place that had them, and for every place a link
to the one before it in the same slot, as LZ77 compressors keep them. Adding an id costs one hash and two writes; tables
double when the stream outgrows them, which is constant per id over time. A bulk of ids is added with numpy: a
million in well under a second. Unlike a suffix automaton's, neither cost nor size depends on the text: 4 bytes an id
for the stream, and for each order 4 for the links and about 4 to 8 for the table; 20 to 28 bytes with two orders.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

BREAK = -1
"""Separates documents. It is no token, so nothing matches across it."""

_BASE = 0x9E3779B97F4A7C15
_SPREAD = 0xD1B54A32D192ED03
_MASK = (1 << 64) - 1
_SMALLEST = 10
"""Bits of the smallest table."""


class _Chain:
    """Places by their last n ids. A place e is the end of ids[e - n : e]; 0 means none."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.links = array("i", [0])
        self.table = array("i")
        self.bits = 0
        self._hash = 0
        self._leave = pow(_BASE, n, 1 << 64)

    def grow(self, ids: array[int], bits: int) -> None:
        """A table of 2^bits slots over everything so far."""
        self.bits = bits
        self.table = array("i", bytes(4 << bits))
        self.links = array("i", bytes(4))
        self.add_bulk(ids, 0)

    def add_bulk(self, ids: array[int], start: int) -> None:
        """The places start + 1 ... len(ids), after those up to `start`."""
        stop = len(ids)
        first = max(start + 1, self.n)
        self.links.frombytes(bytes(4 * (stop - start)))
        if stop < first:
            self._hash = self._hash_at(ids)
            return
        words = np.frombuffer(ids, dtype=np.int32)[first - self.n :].astype(np.int64).astype(np.uint64)
        count = stop - first + 1
        keys = np.zeros(count, dtype=np.uint64)
        for j in range(self.n):
            keys *= np.uint64(_BASE)
            keys += words[j : j + count]
        self._hash = int(keys[-1])
        keys *= np.uint64(_SPREAD)
        slots = (keys >> np.uint64(64 - self.bits)).astype(np.int32)
        order = np.argsort(slots, kind="stable").astype(np.int32)
        sorted_slots = slots[order]
        places = order + np.int32(first)
        fresh = np.ones(count, dtype=bool)
        fresh[1:] = sorted_slots[1:] != sorted_slots[:-1]
        table: Any = np.frombuffer(self.table, dtype=np.int32)
        links: Any = np.frombuffer(self.links, dtype=np.int32)
        before = np.empty(count, dtype=np.int32)
        before[1:] = places[:-1]
        before[fresh] = table[sorted_slots[fresh]]
        links[places] = before
        last = np.ones(count, dtype=bool)
        last[:-1] = fresh[1:]
        table[sorted_slots[last]] = places[last]

    def add(self, ids: array[int]) -> None:
        """The place at the end of the stream, whose last id was just appended."""
        e = len(ids)
        gone = ids[e - 1 - self.n] if e > self.n else 0
        self._hash = (self._hash * _BASE + ids[e - 1] - gone * self._leave) & _MASK
        if e < self.n:
            self.links.append(0)
            return
        slot = (self._hash * _SPREAD & _MASK) >> (64 - self.bits)
        self.links.append(self.table[slot])
        self.table[slot] = e

    def _hash_at(self, ids: array[int]) -> int:
        found = 0
        for x in ids[-self.n :]:
            found = (found * _BASE + x) & _MASK
        return found

    @property
    def nbytes(self) -> int:
        return 4 * (len(self.links) + len(self.table))


class NgramIndex:
    """The stream. `ids` may be read, not changed."""

    def __init__(self, orders: Sequence[int]) -> None:
        """orders: lengths n >= 1 that can be asked for."""
        self.ids: array[int] = array("i")
        self._chains = {n: _Chain(n) for n in orders}
        self._grow(1)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def nbytes(self) -> int:
        """Bytes of stream, links and tables."""
        return 4 * len(self.ids) + sum(chain.nbytes for chain in self._chains.values())

    def append(self, token: int) -> None:
        """One more id, 0 <= id < 2^31, or BREAK."""
        self.ids.append(token)
        if not self._grow(len(self.ids)):
            for chain in self._chains.values():
                chain.add(self.ids)

    def extend(self, tokens: Sequence[int]) -> None:
        """More ids. Many at once are much cheaper than one by one. OverflowError for what is no int32."""
        if len(tokens) < 32:
            for token in tokens:
                self.append(token)
            return
        start = len(self.ids)
        self.ids.extend(tokens)
        if not self._grow(len(self.ids)):
            for chain in self._chains.values():
                chain.add_bulk(self.ids, start)

    def places(self, n: int, limit: int) -> Iterator[int]:
        """Ends of earlier runs equal to the last n ids, newest first: `ids[place]` is what followed there.

        At most `limit` places with the same hash are looked at. n: one of the orders.
        """
        ids, links = self.ids, self._chains[n].links
        end = len(ids)
        tail = ids[end - n :]
        if end < n or BREAK in tail:
            return
        place = links[end]
        while place and limit:
            if ids[place - n : place] == tail:
                yield place
            place = links[place]
            limit -= 1

    def _grow(self, size: int) -> bool:
        """Tables for `size` ids. True when they were built anew, which takes in everything."""
        bits = self._bits
        if bits and size <= 1 << bits:
            return False
        bits = max(_SMALLEST, (size + size // 4).bit_length())
        for chain in self._chains.values():
            chain.grow(self.ids, bits)
        return True

    @property
    def _bits(self) -> int:
        return next(iter(self._chains.values())).bits
