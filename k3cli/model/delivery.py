"""From bytes in host memory to a rank's weights: its own parts to their places, shared ones handed round first.

On a GPU a batch is copied there as it is; cutting, handing round (NCCL) and changing types happen on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from k3cli.errors import ModelError
from k3cli.model.blocks import Sinks
from k3cli.model.checkpoint import DTYPES, Entry
from k3cli.model.faults import is_lost
from k3cli.model.reading import Read
from k3cli.model.slices import Slices
from k3cli.model.staging import ALIGN, Staged, Staging
from k3cli.model.world import World

PATIENCE = 300.0
"""Seconds that a rank may take to read its part of a batch before it counts as hung."""
FAILED = -1
"""What a rank that can't go on says instead of how much it has read."""


class Ring(Protocol):
    """How the ranks hand round; one rank alone has none."""

    rank: int
    size: int

    def counts(self, done: int) -> list[int]:
        """Every rank's `done`, once all ranks are here."""

    def swap(self, send: Tensor, to: Sequence[int], found: Tensor, taken: Sequence[int]) -> None:
        """send uint8: to[r] bytes for each rank r, one behind the other; found takes taken[r] bytes of each rank r."""


class WorldRing:
    """`Ring` over a world. Ranks wait long for each other, since disks may be slow, before they hand round."""

    def __init__(self, world: World) -> None:
        self.rank, self.size, self._world = world.rank, world.size, world

    def counts(self, done: int) -> list[int]:
        self._world.settled()  # what was handed round before has arrived, or a rank is gone
        found = torch.empty(self.size, 1, dtype=torch.int64)
        mine = torch.tensor([done])
        work = dist.all_gather(list(found.unbind(0)), mine, group=self._world.control, async_op=True)
        if work is not None:
            self._world.waited(lambda: work.wait(timedelta(seconds=PATIENCE)))
        return [int(count) for count in found.view(-1)]

    def swap(self, send: Tensor, to: Sequence[int], found: Tensor, taken: Sequence[int]) -> None:
        dist.all_to_all_single(found, send, list(taken), list(to), group=self._world.group)


class OthersFailedError(Exception):
    """Another rank can't go on; it has the reason."""


class Delivery:
    """Fills the sinks of one rank from staged batches."""

    def __init__(self, sinks: Sinks, slices: Slices, rank: int, device: torch.device, ring: Ring | None) -> None:
        self._sinks, self._slices, self._rank, self._device, self._ring = sinks, slices, rank, device, ring
        self._buffers: dict[str, Tensor] = {}

    def run(self, staging: Staging, report: Callable[[int], None]) -> None:
        """Takes every batch to its place. report: called with the bytes that all ranks have read so far.

        ModelError when a file is not what its header says, on the rank that finds it; OthersFailedError on the others.
        """
        others = 0
        try:
            for staged in staging:
                block = self._on_device(staged.block)
                copied = self._event()
                for read, at in zip(staged.batch.own, staged.own, strict=True):
                    self._place(read, self._matrix(block, at, read))
                if staged.batch.shared is not None:
                    others = self._hand_round(block, staged, staging.done)
                if copied is not None:
                    copied.synchronize()  # the host's block is read into again
                report(staging.done + others)
        except OthersFailedError:
            raise
        except Exception as error:
            if self._ring is not None and not is_lost(error):
                self._ring.counts(FAILED)
            raise
        if self._ring is not None:
            others = self._meet(staging.done)
        self._buffers.clear()
        report(staging.done + others)

    def _meet(self, done: int) -> int:
        """Waits for all ranks; what the others have read."""
        assert self._ring is not None
        counts = self._ring.counts(done)
        if FAILED in counts:
            raise OthersFailedError
        return sum(counts) - done

    def _on_device(self, block: Tensor) -> Tensor:
        if self._device.type == "cpu":
            return block
        target = self._buffer("block", block.numel())
        target.copy_(block, non_blocking=True)
        return target

    def _buffer(self, name: str, size: int) -> Tensor:
        """uint8 [size] on the device; memory under one name is used again and again."""
        found = self._buffers.get(name)
        if found is None or found.numel() < size:
            self._buffers.pop(name, None)
            found = self._buffers[name] = torch.empty(size, dtype=torch.uint8, device=self._device)
        return found[:size]

    def _event(self) -> torch.cuda.Event | None:
        if self._device.type == "cpu":
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _matrix(self, block: Tensor, at: int, read: Read) -> Tensor:
        """The rows of a read that is wholly in a block, uint8 [rows, width]."""
        return block[at : at + read.size].view(-1, read.width)

    def _wanted(self, read: Read, rank: int) -> Read | None:
        """What a rank needs of a read: whole rows, or the same bytes of each; None when nothing."""
        need = self._slices.need(read.entry, rank)
        first, last = max(read.first, need.first), min(read.last, need.last)
        if first >= last or need.begin == need.end:
            return None
        return read._replace(first=first, last=last, width=need.end - need.begin)

    def _part(self, block: Tensor, at: int, read: Read, rank: int) -> tuple[Read, Tensor] | None:
        """(what of a read a rank needs, its bytes as rows of the block)."""
        wanted = self._wanted(read, rank)
        if wanted is None:
            return None
        need = self._slices.need(read.entry, rank)
        rows = self._matrix(block, at, read)[wanted.first - read.first : wanted.last - read.first]
        return wanted, rows[:, need.begin : need.end]

    def _hand_round(self, block: Tensor, staged: Staged, done: int) -> int:
        """The shared part of a batch to all who need of it; what the others have read so far."""
        assert staged.batch.shared is not None
        others = 0
        if self._ring is not None:
            send, to = self._pack(block, staged, self._ring.size)
            others = self._meet(done)
            self._unpack(staged.batch.shared, send, to)
        for read, at in zip(staged.batch.shared[self._rank], staged.shared, strict=True):
            part = self._part(block, at, read, self._rank)
            if part is not None:
                self._place(*part)
        return others

    def _pack(self, block: Tensor, staged: Staged, size: int) -> tuple[Tensor, list[int]]:
        """What goes to every other rank, and how many bytes that is for each."""
        assert staged.batch.shared is not None
        mine = staged.batch.shared[self._rank]
        to, parts, total = [0] * size, [], 0
        for rank in range(size):
            for read, at in zip(mine, staged.shared, strict=True):
                part = None if rank == self._rank else self._part(block, at, read, rank)
                if part is not None:
                    parts.append((total, part[1]))
                    to[rank] += _up(part[0].size)
                    total += _up(part[0].size)
        send = self._buffer("send", total)
        for at, rows in parts:
            send[at : at + rows.numel()].view(rows.shape).copy_(rows)
        return send, to

    def _unpack(self, shared: Sequence[Sequence[Read]], send: Tensor, to: Sequence[int]) -> None:
        assert self._ring is not None
        wanted = [
            [] if rank == self._rank else [want for read in reads if (want := self._wanted(read, self._rank))]
            for rank, reads in enumerate(shared)
        ]
        taken = [sum(_up(read.size) for read in reads) for reads in wanted]
        found = self._buffer("found", sum(taken))
        self._ring.swap(send, to, found, taken)
        at = 0
        for read in (read for reads in wanted for read in reads):
            self._place(read, self._matrix(found, at, read))
            at += _up(read.size)

    def _place(self, read: Read, rows: Tensor) -> None:
        """rows uint8 [read.last - read.first, bytes needed of each] to their place among the rank's weights."""
        sink = self._sinks.get(read.entry.name)
        if sink is None:
            return
        kind = DTYPES.get(read.entry.dtype, torch.uint8)
        if read.entry.name.endswith("A_log"):
            sink.copy_(self._decay_rates(read.entry, rows.contiguous().view(kind).view(-1), sink.numel()))
            return
        if not rows.is_contiguous() or kind != torch.uint8:
            rows = rows.contiguous().view(kind)
        begin = read.first - self._slices.need(read.entry, self._rank).first
        sink.view(sink.shape[0], -1)[begin : begin + rows.shape[0]].copy_(rows)

    def _decay_rates(self, entry: Entry, values: Tensor, count: int) -> Tensor:
        """One value per head, then padding, which must be zero (a per-channel reading would go unnoticed)."""
        first, heads = self._slices.heads(entry, self._rank)
        tail = values[heads:]
        if tail.any():
            at = heads + int(tail.float().abs().argmax())
            raise ModelError(
                f"tensor {entry.name} holds {float(values[at]):.6g} at index {at}",
                f"zero padding behind the {heads} heads",
                "check that config.json and weights belong together",
            )
        return values[first : first + count]


def _up(size: int) -> int:
    return -(-size // ALIGN) * ALIGN
