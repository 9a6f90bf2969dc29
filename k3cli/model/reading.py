"""Who reads which bytes of a checkpoint: the reading plan of a world, the same on every rank, made as it is needed.

Every byte is read once in the whole world, by each rank in file order, in batches of bounded size.

- A file whose digest is known: each rank reads its own rows. What is cut into columns, or held by all, is collected
  in file order; whenever there is a batch for everybody each rank reads one stretch of it, and the ranks hand round.
- A file whose digest is not known is read from end to end by one rank, which hashes it, and handed round; several
  files at once on each rank, since hashing is slower than disks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from k3cli.model.checkpoint import Entry, Shard
from k3cli.model.slices import Slices

BATCH = 32 << 20
"""Bytes a rank reads at a time for itself, and as many to be handed round; less in worlds of more than 16 ranks."""
HANDED = 512 << 20
"""Most bytes handed round at a time: what a rank may have to send, and to take."""
BUFFERS = 3
"""Batches in memory: one being read, one being hashed, one on its way to the device."""
ALONE = 8
"""The same for one rank alone; its batches are half as large, since nothing is handed round."""
LANES = 4
"""Files that a rank hashes at a time."""


class Read(NamedTuple):
    """Rows [first, last) of a tensor of shard number `shard`, whole rows of `width` bytes."""

    shard: int
    entry: Entry
    first: int
    last: int
    width: int

    @property
    def size(self) -> int:
        return (self.last - self.first) * self.width

    @property
    def offset(self) -> int:
        """Of the first byte, behind the file's header."""
        return self.entry.start + self.first * self.width


@dataclass(frozen=True)
class Batch:
    """What one rank reads next. own: for itself. shared: what each rank reads to be handed round then, or None."""

    own: tuple[Read, ...]
    shared: tuple[tuple[Read, ...], ...] | None = None


def batch_bytes(world: int, batch: int = BATCH) -> int:
    """Bytes of a rank's part of a batch, its own or shared."""
    return min(batch, HANDED // world)


def staging_bytes(world: int, batch: int = BATCH) -> tuple[int, int]:
    """Bytes a rank takes while loading: (of host memory for reading ahead, of its device to hand round)."""
    size = batch_bytes(world, batch)
    return (ALONE * size, 0) if world == 1 else (BUFFERS * 2 * size, 2 * size + 2 * world * size)


def hashers(known: Sequence[bool], world: int) -> dict[int, tuple[int, int]]:
    """(rank, lane) that reads and hashes each shard whose digest is not known."""
    unknown = [i for i, there in enumerate(known) if not there]
    lanes = min(LANES, -(-len(unknown) // world))
    return {i: (at % world, at // world % lanes) for at, i in enumerate(unknown)}


def total_bytes(shards: Sequence[Shard], known: Sequence[bool], slices: Slices) -> int:
    """Bytes that all ranks read together: hashed files whole, of the others the text model's tensors."""
    total = 0
    for shard, there in zip(shards, known, strict=True):
        total += sum(e.stop - e.start for e in shard.entries if e.name in slices.shapes) if there else shard.size
    return total


def batches(
    shards: Sequence[Shard], known: Sequence[bool], slices: Slices, rank: int, world: int, batch: int = BATCH
) -> Iterator[Batch]:
    """The batches of `rank`. Those with something shared are as many on every rank, in the same order."""
    size = batch_bytes(world, batch)
    unknown = hashers(known, world)
    if unknown:
        yield from _whole_files(shards, unknown, slices, world, size)
    yield from _slices(shards, [i for i, there in enumerate(known) if there], slices, rank, world, size)


def _whole_files(
    shards: Sequence[Shard], unknown: dict[int, tuple[int, int]], slices: Slices, world: int, size: int
) -> Iterator[Batch]:
    lanes = 1 + max(lane for _, lane in unknown.values())
    streams = [
        [_cut(_all_of(i, shards[i], slices), size // lanes) for i, where in unknown.items() if where == (rank, lane)]
        for rank in range(world)
        for lane in range(lanes)
    ]
    running = [chain.from_iterable(stream) for stream in streams]
    while True:
        found = [next(stream, ()) for stream in running]
        if not any(found):
            return
        yield Batch((), tuple(tuple(chain(*found[r * lanes : (r + 1) * lanes])) for r in range(world)))


def _all_of(number: int, shard: Shard, slices: Slices) -> Iterator[Read]:
    for entry in shard.entries:
        rows, width = slices.rows(entry)
        yield Read(number, entry, 0, rows, width)


def _slices(
    shards: Sequence[Shard], numbers: Iterable[int], slices: Slices, rank: int, world: int, size: int
) -> Iterator[Batch]:
    own: list[Read] = []
    pool: list[Read] = []
    mine = pooled = 0
    for i in numbers:
        for entry in shards[i].entries:
            rows, width = slices.rows(entry)
            if slices.handed_round(entry):
                for read in _pieces(Read(i, entry, 0, rows, width), size):
                    if pooled + read.size > world * size and pool:
                        yield Batch(tuple(own), _shares(pool, world))
                        own, pool, mine, pooled = [], [], 0, 0
                    pool.append(read)
                    pooled += read.size
            else:
                need = slices.need(entry, rank)
                for read in _pieces(Read(i, entry, need.first, need.last, width), size):
                    if mine + read.size > size and own:
                        yield Batch(tuple(own))
                        own, mine = [], 0
                    own.append(read)
                    mine += read.size
    if own or pool:
        yield Batch(tuple(own), _shares(pool, world) if pool else None)


def _cut(reads: Iterable[Read], size: int) -> Iterator[tuple[Read, ...]]:
    """Consecutive reads in groups of about `size` bytes."""
    group: list[Read] = []
    taken = 0
    for whole in reads:
        for read in _pieces(whole, size):
            if taken + read.size > size and group:
                yield tuple(group)
                group, taken = [], 0
            group.append(read)
            taken += read.size
    if group:
        yield tuple(group)


def _pieces(read: Read, size: int) -> Iterator[Read]:
    """A read in pieces of whole rows, each of about `size` bytes at most, or of one row."""
    step = max(1, size // max(1, read.width))
    for first in range(read.first, read.last, step):
        yield read._replace(first=first, last=min(first + step, read.last))


def _shares(pool: list[Read], world: int) -> tuple[tuple[Read, ...], ...]:
    """Reads in file order, dealt out in stretches of about as many bytes each, cut between rows."""
    total = sum(read.size for read in pool)
    shares: list[list[Read]] = [[] for _ in range(world)]
    done = 0
    for read in pool:
        while read.size:
            rank = min(done * world // max(1, total), world - 1)
            left = (rank + 1) * total / world - done
            rows = read.last - read.first
            take = min(rows, max(1, round(left / read.width))) if rank < world - 1 else rows
            shares[rank].append(read._replace(last=read.first + take))
            done += take * read.width
            read = read._replace(first=read.first + take)
    return tuple(map(tuple, shares))
