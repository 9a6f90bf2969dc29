"""The ranks of a tensor-parallel world: joining it, sums in a fixed order, and agreeing on what went wrong.

Every sum adds the ranks' parts in the order of ranks, in fp32, and rounds once, whatever the size of the tensor: the
same world gives the same bits. Built on torch.distributed: gloo between CPUs, NCCL between GPUs; calls and objects go
over gloo in either case.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from datetime import timedelta
from threading import Thread
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from k3cli import errors
from k3cli.errors import K3Error

Result = TypeVar("Result")
JOINING = 120.0
"""Seconds that the ranks have to find each other."""
COLLECTIVE = 20.0
"""Seconds after which a rank that does not take part in a sum counts as hung."""
IDLE = timedelta(days=30)
"""How long a rank waits for the next call."""
SPLIT = 1 << 18
"""Bytes from which on each rank sums a share of the elements instead of all of them."""


class World:
    """One rank's end. `rank`, `size`; between hosts `calls` carries calls and `control` objects; `group` sums."""

    def __init__(self, rank: int, size: int, device: torch.device, seconds: float = COLLECTIVE) -> None:
        """The default process group must be there. seconds: patience of a collective on tensors."""
        self.rank, self.size, self.device = rank, size, device
        self.control = dist.new_group(backend="gloo", timeout=IDLE)
        # A call waits until it is taken: the one who calls for as long as for a sum, the others for the next call.
        self.calls = dist.new_group(backend="gloo", timeout=timedelta(seconds=seconds) if rank == 0 else IDLE)
        backend = "nccl" if device.type == "cuda" else "gloo"
        self.group = dist.new_group(backend=backend, timeout=timedelta(seconds=seconds))

    def sum(self, part: Tensor) -> Tensor:
        """The sum of every rank's `part` (one shape and dtype, fp32 or bf16), the same bits on each."""
        part = part.contiguous()
        if self.size == 2 or part.nbytes < SPLIT:
            parts = part.new_empty(self.size, *part.shape)
            dist.all_gather(list(parts.unbind(0)), part, group=self.group)
            return _in_order(parts)
        each = -(-part.numel() // self.size)
        mine = part.new_zeros(self.size, each)
        mine.view(-1)[: part.numel()] = part.view(-1)
        parts = torch.empty_like(mine)
        dist.all_to_all_single(parts, mine, group=self.group)
        dist.all_gather(list(mine.unbind(0)), _in_order(parts), group=self.group)
        return mine.view(-1)[: part.numel()].view(part.shape)

    def gather(self, part: Tensor, dim: int) -> Tensor:
        """Every rank's part, one behind the other along `dim`, on rank 0; on the others their part."""
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(self.size)] if self.rank == 0 else None
        dist.gather(part, parts, dst=0, group=self.group)
        return part if parts is None else torch.cat(parts, dim)

    def tell(self, header: Tensor) -> None:
        """Rank 0's host tensor to all, in place."""
        dist.broadcast(header, 0, group=self.calls)

    def share(self, thing: Any = None) -> Any:
        """Rank 0's object, on every rank."""
        box = [thing]
        dist.broadcast_object_list(box, 0, group=self.control, device=torch.device("cpu"))
        return box[0]

    def all(self, thing: Any) -> list[Any]:
        """Every rank's object, on every rank."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, thing, group=self.control)
        return found

    def together(self, work: Callable[[], Result]) -> Result:
        """work() on every rank. When it raised a K3Error or ran out of memory anywhere, that is raised on all of them,
        with the first such rank in front."""
        result, trouble = None, None
        try:
            result = work()
        except (K3Error, MemoryError, RuntimeError, OSError) as error:
            trouble = described(error)
        for rank, said in enumerate(self.all(trouble)):
            if said is not None:
                raise _raised(rank, *said)
        return result  # type: ignore[return-value]


def leave() -> None:
    """Closes the connections; a process may then join another world. Without it, threads of theirs abort an exit."""
    if dist.is_initialized():
        # In a thread: a device may wait for ranks that are gone.
        closing = Thread(target=dist.destroy_process_group, name="k3-leave", daemon=True)
        closing.start()
        closing.join(5)


def is_lost(error: BaseException) -> bool:
    """Whether a collective failed because another rank went away or did not come."""
    words = ("gloo", "Connection", "imed out", "NCCL", "peer")
    memory = type(error).__name__ == "OutOfMemoryError"
    return isinstance(error, RuntimeError) and not memory and any(word in str(error) for word in words)


def described(error: BaseException) -> tuple[str, str, str | None, str | None]:
    """(class, found, expected, do) of what stopped a rank, for the others."""
    if isinstance(error, K3Error):
        return type(error).__name__, error.found, error.expected, error.do
    memory = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    first = (str(error).splitlines() or [""])[0]
    found = "memory ran out" if memory else f"{type(error).__name__}: {first}"
    return "FitError" if memory else "K3Error", found, None, None


def _raised(rank: int, kind: str, found: str, expected: str | None, do: str | None) -> K3Error:
    made: K3Error = getattr(errors, kind, K3Error)(found if rank == 0 else f"rank {rank}: {found}", expected, do)
    return made


def _in_order(parts: Tensor) -> Tensor:
    """The sum over dim 0, first to last, in fp32, rounded once."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part
    return total.to(parts.dtype)


def join(rank: int, size: int, device: torch.device, store: Any = None, seconds: float = COLLECTIVE) -> World:
    """Meets the other ranks: through `store`, or as the environment says (torchrun). K3Error when they don't come."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if store is not None and sys.platform == "linux":
        # All on this machine: nothing of it is to be seen on a network.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        where: dict[str, Any] = {"init_method": "env://"} if store is None else {"store": store}
        dist.init_process_group("gloo", rank=rank, world_size=size, timeout=timedelta(seconds=JOINING), **where)
        return World(rank, size, device, seconds)
    except (RuntimeError, ValueError) as error:  # DistError is a RuntimeError
        why = (str(error).splitlines() or [""])[0]
        raise K3Error(f"rank {rank} of {size} could not join the others ({why})", "every rank to start") from error
