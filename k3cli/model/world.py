"""The ranks of a tensor-parallel world: sums in a fixed order, and agreeing on what went wrong.

Every sum adds the ranks' parts in the order of ranks, in fp32, and rounds once, whatever the size of the tensor: the
same world gives the same bits, whichever algorithm a library takes for a message of that size. Built on
torch.distributed: gloo between CPUs, NCCL between GPUs; calls and objects go over gloo in either case.

On GPUs nothing inside a step waits on a host, and sums can be recorded in graphs. A sum whose other end is gone then
spins on the device, where no library's patience ends it: rank 0 looks at its device while it waits (`settled`).
"""

from __future__ import annotations

import select
import socket
import struct
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from threading import Event
from typing import Any

import torch
import torch.distributed as dist
from k3_kernels import ranks
from torch import Tensor

from k3cli.errors import K3Error
from k3cli.model.faults import described, is_lost, raised
from k3cli.model.lines import LOOK_OUT, Lines
from k3cli.model.pulse import Pulse
from k3cli.model.waiting import Result, beside
from k3cli.model.watch import Watch

JOINING = 120.0
"""Seconds that the ranks have to find each other."""
COLLECTIVE = 20.0
"""Seconds after which a rank that does not take part in a sum counts as hung."""
IDLE = timedelta(days=30)
"""How long a rank waits for the next call."""
SPLIT = 1 << 18
"""Bytes from which on each rank sums a share of the elements instead of all of them."""
LOOK = 0.02
"""Seconds between two looks at the other ranks' processes while a device computes."""
WAKE = 0.1
"""The same while rank 0 waits for what the others do with their hosts."""
_gather_all: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
"""The newer name where torch has it."""


class World:
    """One rank's end. `rank`, `size`; `lines`, where there are any, or `calls` carry calls, `control` objects; `group`
    sums.

    lost: whether a rank is known to have ended, from whoever watches them. apart: sums leave parts as they are, for who
    measures what sums cost; what is computed is then wrong. pulse: of ranks that another program started. watch: rank
    0's, where a device computes.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        device: torch.device,
        seconds: float = COLLECTIVE,
        ends: Sequence[socket.socket] = (),
    ) -> None:
        """The default process group must be there. seconds: patience of a collective on tensors. ends: see `Lines`."""
        self.rank, self.size, self.device, self.seconds = rank, size, device, seconds
        self.lines = Lines(ends, LOOK_OUT if device.type == "cuda" else 0.0) if ends else None
        self.lost: Callable[[], bool] = lambda: False
        self._gone: Callable[[], bool] = lambda: False
        self.apart = False
        self.pulse: Pulse | None = None
        self.watch: Watch | None = None
        self.control = dist.new_group(backend="gloo", timeout=IDLE)
        # A call waits until it is taken: the one who calls for as long as for a sum, the others for the next call.
        self.calls = dist.new_group(backend="gloo", timeout=timedelta(seconds=seconds) if rank == 0 else IDLE)
        cuda = device.type == "cuda"
        patience = IDLE if cuda else timedelta(seconds=seconds)
        self.group = dist.new_group(backend="nccl" if cuda else "gloo", timeout=patience)
        self._sent: list[tuple[Any, Tensor]] = []
        self._event = torch.cuda.Event() if cuda else None
        if cuda:  # connects the devices, which is no work for the middle of a step
            self.sum(torch.zeros(size, device=device))
            self.settled(JOINING)

    def guard(self, lost: Callable[[], bool], said: Callable[[], K3Error]) -> None:
        """Has rank 0's host watched, too, where it may come to sit in a driver; see `Watch`."""
        self.lost = self._gone = lost
        if self.device.type == "cuda":
            self.watch = Watch(lost, self.group.abort, said)

    def _check(self) -> None:
        if self.watch is not None and self.watch.aborted:
            raise RuntimeError("a peer has ended inside a call")

    def sum(self, part: Tensor) -> Tensor:
        """The sum of every rank's `part` (one shape and dtype, fp32 or bf16), the same bits on each; `part` is nobody's
        afterwards."""
        if self.apart:
            return part
        self._check()
        part = part.contiguous()
        if self.size == 2 and part.is_cuda:  # a + b is b + a: there is one order, and one rounding
            dist.all_reduce(part, group=self.group)
            return part
        if self.size == 2 or part.nbytes < SPLIT:
            parts = part.new_empty(self.size, *part.shape)
            _gather_all(parts.view(-1), part.view(-1), group=self.group)
            return ranks.add(parts)
        each = -(-part.numel() // self.size)
        mine = part.new_zeros(self.size, each)
        mine.view(-1)[: part.numel()] = part.view(-1)
        parts = torch.empty_like(mine)
        dist.all_to_all_single(parts, mine, group=self.group)
        _gather_all(mine.view(-1), ranks.add(parts), group=self.group)
        return mine.view(-1)[: part.numel()].view(part.shape)

    def sum_both(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        """The sums of two parts of one dtype; small ones as one."""
        if first.nbytes + second.nbytes > SPLIT:
            return self.sum(first), self.sum(second)
        both = self.sum(torch.cat((first.reshape(-1), second.reshape(-1))))
        return both[: first.numel()].view(first.shape), both[first.numel() :].view(second.shape)

    def gather(self, part: Tensor, dim: int) -> Tensor:
        """Every rank's part, one behind the other along `dim`, on rank 0; on the others their part."""
        if self.apart:
            return torch.cat([part] * self.size, dim) if self.rank == 0 else part
        self._check()
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(self.size)] if self.rank == 0 else None
        dist.gather(part, parts, dst=0, group=self.group)
        return part if parts is None else torch.cat(parts, dim)

    def post(self, numbers: list[int]) -> None:
        """Rank 0's numbers, as many as the others `fetch`, to all of them. RuntimeError when one is gone."""
        if self.lines is None:
            self.tell(torch.tensor(numbers, dtype=torch.int64))
        else:
            self.lines.post(struct.pack(f"{len(numbers)}q", *numbers), self.seconds)

    def fetch(self, count: int) -> list[int]:
        """The next `count` numbers that rank 0 posts, whenever it does."""
        if self.lines is not None:
            return list(struct.unpack(f"{count}q", self.lines.fetch(8 * count)))
        header = torch.empty(count, dtype=torch.int64)
        self.tell(header)
        found: list[int] = header.tolist()
        return found

    def tell(self, header: Tensor) -> None:
        """Rank 0's host tensor, which then stays as it is, to all, in place.

        Sent to each: a broadcast of gloo passes through a thread of its. That it has gone out is looked at with the
        next one (`told`), so that a step doesn't wait for it.
        """
        if self.rank:
            dist.recv(header, 0, group=self.calls)
            return
        self.told()
        self._sent = [(dist.isend(header, rank, group=self.calls), header) for rank in range(1, self.size)]

    def told(self) -> None:
        """Waits until what rank 0 has told has gone out. RuntimeError when a rank is gone."""
        sent, self._sent = self._sent, []
        for work, _ in sent:
            if work is not None:
                work.wait()

    def forget(self) -> None:
        """Lets go of what was told and has not gone out: an exit of the process can't."""
        self._sent = []

    def settled(self, seconds: float | None = None) -> None:
        """Waits until the device has done what it was given. RuntimeError when a rank ended before, or after `seconds`
        (None: a collective's patience)."""
        if self._event is None:
            return
        self._event.record(torch.cuda.current_stream(self.device))
        until = time.monotonic() + (self.seconds if seconds is None else seconds)
        look = time.monotonic() + LOOK
        while not self._event.query():
            select.select((), (), (), 0)  # gives other threads their turn and comes back at once, as no sleep does
            now = time.monotonic()
            if now < look:
                continue
            if self.lost():
                raise RuntimeError("a peer has ended inside a call")
            if now > until:
                raise RuntimeError("a sum of all ranks timed out")
            look = now + LOOK
        self._check()

    def share(self, thing: Any = None) -> Any:
        """Rank 0's object, on every rank."""
        box = [thing]
        self.waited(lambda: dist.broadcast_object_list(box, 0, group=self.control, device=torch.device("cpu")))
        return box[0]

    def all(self, thing: Any) -> list[Any]:
        """Every rank's object, on every rank."""
        found: list[Any] = [None] * self.size
        self.waited(lambda: dist.all_gather_object(found, thing, group=self.control))
        return found

    def waited(self, call: Callable[[], Result]) -> Result:
        """A call of `control`, for which the others may take long. On rank 0 it waits in a thread of its own: a signal
        ends the wait, and so does a rank that has ended or was stopped for too long: RuntimeError."""

        def wait(ended: Event) -> None:
            while not ended.wait(WAKE):
                # Who has ended may have said why first.
                if self._gone() and not ended.wait(1):
                    raise RuntimeError("a peer has ended inside a call")

        return call() if self.rank else beside(call, wait)

    def together(self, work: Callable[[], Result]) -> Result:
        """work() on every rank. When it raised a K3Error or ran out of memory anywhere, that is raised on all of them,
        with the first such rank in front."""
        result, trouble = None, None
        try:
            result = work()
        except (K3Error, MemoryError, RuntimeError, OSError) as error:
            if is_lost(error):
                raise  # there is nobody to agree with
            trouble = described(error)
        for rank, said in enumerate(self.all(trouble)):
            if said is not None:
                raise raised(rank, *said)
        return result  # type: ignore[return-value]
