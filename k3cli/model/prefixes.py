"""What of the pool can serve a new sequence that begins with known tokens.

A block is 512 tokens; its key is a hash of the key before it and its own ids. Only blocks that were evaluated in whole
prefill chunks from position 0 on are entered, with KDA states at ends of chunks: their bits are a function of the
tokens alone, so that it makes no difference whose page is used. An entry is a page of all MLA layers, and perhaps the
KDA state of all layers behind it: a lookup takes the longest chain of pages, then back to the last KDA state on it.

A visible entry always describes exactly the tokens it claims: it is matched only once the device has written it, its
page is full and never written again, and an entry goes together with all that follow it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from k3cli.model.pool import Pool

ROOT = b""


class Written(Protocol):
    """A device event: `query` tells whether the work before it is done."""

    def query(self) -> bool: ...


def block_key(before: bytes, ids: bytes) -> bytes:
    """Key of a block behind the block with key `before` (ROOT for the first). ids: its int64 ids."""
    return hashlib.blake2b(ids, digest_size=16, key=before).digest()


@dataclass
class Entry:
    """One block. slot: KDA state behind it, -1 for none. wanted: a lookup ended here for want of a KDA state."""

    key: bytes
    parent: Entry | None
    page: int
    written: Written | None
    used: int = 0
    slot: int = -1
    slot_written: Written | None = None
    wanted: bool = False
    children: set[bytes] = field(default_factory=set)


@dataclass(frozen=True)
class Match:
    """pages, slot: held for the caller, who has to release them. Both empty or both there."""

    pages: tuple[int, ...] = ()
    slot: int = -1


class Prefixes:
    """The index. It holds one reference to every page and slot in it."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._entries: dict[bytes, Entry] = {}
        self._clock = 0

    def __len__(self) -> int:
        return len(self._entries)

    def pages_and_slots(self) -> tuple[list[int], list[int]]:
        """Everything the index holds."""
        found = self._entries.values()
        return [entry.page for entry in found], [entry.slot for entry in found if entry.slot >= 0]

    def add(self, before: bytes, key: bytes, page: int, written: Written | None) -> bool:
        """Enter a full page behind the block `before`. False when that one is not here (any more).

        written: tells when the page's contents are there; None when they are. A key that is known keeps its page.
        """
        parent = self._entries.get(before)
        if before != ROOT and parent is None:
            return False
        if key not in self._entries:
            self._pool.hold(page)
            self._entries[key] = Entry(key, parent, page, written)
            if parent is not None:
                parent.children.add(key)
        self._touch(self._entries[key])
        return True

    def keep_slot(self, key: bytes, slot: int, written: Written | None) -> bool:
        """Enter the KDA state behind a block. False when the block is not here or has one."""
        entry = self._entries.get(key)
        if entry is None or entry.slot >= 0:
            return False
        self._pool.hold(slot)
        entry.slot, entry.slot_written = slot, written
        return True

    def give_up_slot(self, key: bytes) -> None:
        """Drop the KDA state behind a block, unless a lookup has asked for it."""
        entry = self._entries.get(key)
        if entry is not None and entry.slot >= 0 and not entry.wanted:
            self._drop_slot(entry)

    def match(self, keys: Sequence[bytes]) -> Match:
        """The longest usable prefix of a chain of keys, pinned: nothing of it goes until the caller releases it."""
        path: list[Entry] = []
        for key in keys:
            entry = self._entries.get(key)
            if entry is None or not _done(entry.written):
                break
            path.append(entry)
        if path:
            path[-1].wanted = True
            self._touch(path[-1])
        while path and not (path[-1].slot >= 0 and _done(path[-1].slot_written)):
            path.pop()
        if not path:
            return Match()
        pages, slot = tuple(entry.page for entry in path), path[-1].slot
        self._pool.hold(*pages, slot)
        return Match(pages, slot)

    def evict_page(self) -> bool:
        """Give up the entry used longest ago that nobody else holds, with its KDA state. False when there is none.

        Only ends of chains go, so that what is left can still be found.
        """
        free = [entry for entry in self._entries.values() if not entry.children and self._pool.only_indexed(entry.page)]
        if not free:
            return False
        self._remove(min(free, key=lambda entry: entry.used))
        return True

    def evict_slot(self) -> bool:
        """Give up the KDA state used longest ago that nobody else holds. False when there is none."""
        free = [entry for entry in self._entries.values() if entry.slot >= 0 and self._pool.only_indexed(entry.slot)]
        if not free:
            return False
        self._drop_slot(min(free, key=lambda entry: entry.used))
        return True

    def _remove(self, entry: Entry) -> None:
        assert not entry.children
        if entry.slot >= 0:
            self._drop_slot(entry)
        self._pool.release_page(entry.page)
        del self._entries[entry.key]
        if entry.parent is not None:
            entry.parent.children.discard(entry.key)

    def _drop_slot(self, entry: Entry) -> None:
        self._pool.release_slot(entry.slot)
        entry.slot, entry.slot_written = -1, None

    def _touch(self, entry: Entry | None) -> None:
        """An entry is never older than those behind it."""
        self._clock += 1
        while entry is not None:
            entry.used = self._clock
            entry = entry.parent


def _done(written: Written | None) -> bool:
    return written is None or written.query()
