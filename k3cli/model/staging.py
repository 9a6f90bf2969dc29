"""Reading batches of a checkpoint ahead into host memory, many requests at a time, and hashing what goes by.

Threads read and hash; whoever iterates gets one batch after the other and has its bytes until it asks for the next.
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from k3cli.errors import ModelError
from k3cli.model.checkpoint import AGAIN, Shard
from k3cli.model.digest import stamp
from k3cli.model.reading import ALONE, BUFFERS, LANES, Batch, Read

REQUEST = 4 << 20
"""Bytes of one read request at most."""
READERS, READERS_ALONE = 16, 64
"""Requests on their way at a time, of one of several ranks and of one alone."""
VECTOR = 512
"""Pieces of memory that one request fills at most; systems allow 1,024."""
ALIGN = 16
"""Bytes: pieces of any type can be looked at as that type."""

read_at = os.preadv
"""Fills buffers from a place in a file: (descriptor, buffers, offset) -> bytes read."""


@dataclass(frozen=True)
class Staged:
    """A batch in host memory. block: all its bytes, uint8, pinned for a GPU; at: where in it each read begins."""

    batch: Batch
    block: Tensor
    own: tuple[int, ...]
    shared: tuple[int, ...]


@dataclass
class _File:
    """A file that batches in memory read from. users: how many; before: its state when it was opened first."""

    before: os.stat_result
    descriptor: int = -1
    users: int = 0


@dataclass
class _Hash:
    """The hash of a file so far, and the job that was asked for last."""

    state: Any
    tail: Future[None] | None = None


@dataclass(frozen=True)
class _Work:
    """A batch under way: its buffer, the files it reads from, what fills and what hashes it."""

    staged: Staged
    block: Tensor
    files: frozenset[int]
    reads: list[Future[None]]
    hashes: list[Future[None]]


class Staging:
    """Reads the batches of one rank. `done`: bytes that were read; `digests`: complete behind the last batch.

    Raises ModelError for a file that can't be read or is shorter than its header says.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        batches: Iterable[Batch],
        rank: int,
        hashed: Iterable[int],
        *,
        pin: bool = False,
        alone: bool = False,
    ) -> None:
        """hashed: numbers of the shards that this rank reads whole and hashes; their headers count as read.

        pin: page-locked memory, for a GPU. alone: no other rank reads.
        """
        self._buffers = ALONE if alone else BUFFERS
        self._shards, self._batches, self._rank, self._pin = shards, batches, rank, pin
        self.done = 0
        self.digests: dict[int, tuple[str, bool]] = {}
        """Hex digest of each hashed shard, and whether the file stayed as it was meanwhile."""
        self._files: dict[int, _File] = {}
        self._hashes: dict[int, _Hash] = {}
        for number in hashed:
            self._hashes[number] = _Hash(hashlib.sha256(shards[number].header))
            self.done += len(shards[number].header)
        self._free: list[Tensor] = []
        self._readers = ThreadPoolExecutor(READERS_ALONE if alone else READERS, thread_name_prefix="k3-read")
        self._hashers = ThreadPoolExecutor(LANES, thread_name_prefix="k3-hash")

    def __iter__(self) -> Iterator[Staged]:
        source = iter(self._batches)
        ahead: deque[_Work] = deque()
        behind: deque[_Work] = deque()
        try:
            more = True
            while more or ahead:
                while more and len(ahead) + len(behind) < self._buffers:
                    batch = next(source, None)
                    if batch is None:
                        more = False
                    else:
                        ahead.append(self._start(batch))
                if ahead:
                    work = ahead.popleft()
                    for request in work.reads:
                        request.result()
                    self.done += sum(read.size for read in self._of(work.staged.batch))
                    yield work.staged
                    behind.append(work)
                while behind and (len(behind) == self._buffers - 1 or all(job.done() for job in behind[0].hashes)):
                    self._end(behind.popleft())
            while behind:
                self._end(behind.popleft())
            self._finish()
        finally:
            self._readers.shutdown(cancel_futures=True)
            self._hashers.shutdown(cancel_futures=True)
            for file in self._files.values():
                if file.users:
                    os.close(file.descriptor)

    def release(self) -> None:
        """Gives back the memory that was read into."""
        self._free.clear()
        if self._pin:  # torch keeps page-locked memory for the next who wants some
            getattr(torch._C, "_host_emptyCache", lambda: None)()

    def _of(self, batch: Batch) -> tuple[Read, ...]:
        return (*batch.own, *(() if batch.shared is None else batch.shared[self._rank]))

    def _start(self, batch: Batch) -> _Work:
        reads, places, size = self._of(batch), [], 0
        for read in reads:
            places.append(size)
            size += -(-read.size // ALIGN) * ALIGN
        block = self._block(size)
        memory = memoryview(block.numpy().data)
        parts = [(read, memory[at : at + read.size]) for at, read in zip(places, reads, strict=True)]
        files = frozenset(read.shard for read in reads)
        for number in files:
            self._open(number)
        requests = [self._readers.submit(self._fill, *request) for request in _requests(parts)]
        hashes = [self._hash(number, parts, requests) for number in files if number in self._hashes]
        mine = len(batch.own)
        staged = Staged(batch, block[:size], tuple(places[:mine]), tuple(places[mine:]))
        return _Work(staged, block, files, requests, hashes)

    def _end(self, work: _Work) -> None:
        for job in work.hashes:
            job.result()
        self._free.append(work.block)
        for number in work.files:
            file = self._files[number]
            file.users -= 1
            if not file.users:
                os.close(file.descriptor)

    def _finish(self) -> None:
        for number, found in self._hashes.items():
            file = self._files.get(number)
            same = file is None or stamp(file.before) == stamp(os.stat(self._shards[number].path))
            self.digests[number] = found.state.hexdigest(), same

    def _open(self, number: int) -> None:
        path = self._shards[number].path
        file = self._files.get(number)
        try:
            if file is None or not file.users:
                descriptor = os.open(path, os.O_RDONLY)
                if file is None:
                    file = self._files[number] = _File(os.fstat(descriptor))
                file.descriptor = descriptor
        except OSError as error:
            raise ModelError(f"cannot read {path}: {error.strerror}", "a readable weight file") from error
        file.users += 1

    def _block(self, size: int) -> Tensor:
        """A buffer that is free; where none is large enough, a new one instead of it."""
        for i, block in enumerate(self._free):
            if block.numel() >= size:
                return self._free.pop(i)
        if self._free:
            self._free.pop()
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._pin)

    def _fill(self, number: int, name: str, offset: int, views: list[memoryview]) -> None:
        shard, descriptor = self._shards[number], self._files[number].descriptor
        at = len(shard.header) + offset
        try:
            while views:
                count = read_at(descriptor, views, at)
                if not count:
                    raise ModelError(
                        f"{shard.path.name} ended inside tensor {name}", "a file that isn't changing", AGAIN
                    )
                at += count
                views = _behind(views, count)
        except OSError as error:
            raise ModelError(f"cannot read {shard.path}: {error.strerror}", "a readable weight file") from error

    def _hash(self, number: int, parts: list[tuple[Read, memoryview]], requests: list[Future[None]]) -> Future[None]:
        """Hashes a batch's bytes of a file once they are read, behind what was hashed of it before."""
        found = self._hashes[number]
        before = found.tail
        views = [view for read, view in parts if read.shard == number]

        def work() -> None:
            if before is not None:
                before.result()
            for request in requests:
                request.result()
            for view in views:
                found.state.update(view)

        found.tail = self._hashers.submit(work)
        return found.tail


def _requests(parts: Iterable[tuple[Read, memoryview]]) -> Iterator[tuple[int, str, int, list[memoryview]]]:
    """(shard, first tensor, offset, buffers): what lies side by side in a file is one request, up to REQUEST bytes."""
    number, name, start, stop, views = -1, "", 0, 0, list[memoryview]()
    for read, view in parts:
        for begin in range(0, len(view), REQUEST):
            piece, at = view[begin : begin + REQUEST], read.offset + begin
            apart = read.shard != number or at != stop
            if views and (apart or stop - start + len(piece) > REQUEST or len(views) == VECTOR):
                yield number, name, start, views
                views = []
            if not views:
                number, name, start = read.shard, read.entry.name, at
            views.append(piece)
            stop = at + len(piece)
    if views:
        yield number, name, start, views


def _behind(views: list[memoryview], count: int) -> list[memoryview]:
    """What is left of buffers of which the first `count` bytes are filled."""
    for i, view in enumerate(views):
        if count < len(view):
            return [view[count:], *views[i + 1 :]]
        count -= len(view)
    return []
