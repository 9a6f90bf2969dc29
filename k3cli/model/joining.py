"""Joining a tensor-parallel world, and leaving it again."""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from threading import Event, Thread
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from k3cli.errors import K3Error
from k3cli.model.launch import Meeting, Patience, Tell, meeting
from k3cli.model.pulse import OverError, Pulse, begin
from k3cli.model.waiting import Result, beside
from k3cli.model.world import COLLECTIVE, JOINING, World

NCCL = {
    # Multicast over NVLink stays off: a program that ends in the middle of one can take the links of a host with it.
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    # Sums are launched in one order on one stream, recorded or not, and need no guard: 2.5 of 9 microseconds each.
    "NCCL_GRAPH_MIXING_SUPPORT": "0",
    "NCCL_GRAPH_REGISTER": "0",
    # A rank that is lost ends a turn with a line that names it, not the process by an abort.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}
"""Environment of NCCL, set before its first group is made."""
stuck = False
"""Connections of this process could not be closed: a device of it waits for ranks that are gone, or a thread for those
that never came. It should end by `os._exit`, past the end of the driver, which would wait, too."""
met = False
"""Whether this process has gone to meet others that another program started."""
_current: World | None = None


def leave(seconds: float = 5.0) -> None:
    """Closes the connections; a process may then join another world. Without it, threads of theirs abort an exit.

    Recorded steps have to be gone: a communicator lives as long as they do. seconds: after which `stuck` is set.
    """
    global stuck, _current
    if dist.is_initialized():
        if _current is not None and _current.watch is not None:
            _current.watch.end()
        # In a thread: a device may wait for ranks that are gone.
        closing = Thread(target=_close, args=(_current,), name="k3-leave", daemon=True)
        _current = None
        closing.start()
        closing.join(seconds)
        stuck = stuck or closing.is_alive()


def _close(world: World | None) -> None:
    if world is not None:
        world.forget()
        if world.lines is not None:
            world.lines.close()
    if world is not None and world.device.type == "cuda":
        # Ends kernels that wait for others, and does not wait for anybody itself.
        world.group.abort()
    dist.destroy_process_group()


def _interruptible(call: Callable[[], Result], patience: Patience | None = None) -> Result:
    """What a call gives that waits inside a library: in a thread of its own, so that a signal ends the wait.

    patience: after which it is given up, TimeoutError.
    """

    def wait(ended: Event) -> None:
        global stuck
        try:
            if patience is None:
                ended.wait()
            elif not patience.wait(ended):
                raise TimeoutError("whoever listens there does not answer as rank 0 does")
        except BaseException:
            stuck = True  # the thread still waits for the others
            raise

    return beside(call, wait)


def join(
    rank: int,
    size: int,
    device: torch.device,
    store: Any = None,
    seconds: float = COLLECTIVE,
    ends: Sequence[socket.socket] = (),
    tell: Tell = lambda line: None,
) -> World:
    """Meets the other ranks: through `store`, or as the environment says (torchrun). K3Error when they don't come,
    UsageError for an environment that can't be.

    ends: of the lines to the other ranks, where rank 0 has started them. tell: that others are waited for.
    """
    if store is not None and sys.platform == "linux":
        # All on this machine: nothing of it is to be seen on a network.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if device.type == "cuda":
        os.environ.update(NCCL)
        if store is not None and sys.platform == "linux":
            os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        torch.cuda.set_device(device)
    if store is not None:
        try:
            return _joined(rank, size, device, store, seconds, ends, None)
        except (RuntimeError, ValueError) as error:  # DistError is a RuntimeError
            raise K3Error(
                f"rank {rank} of {size} could not join the others ({_first_line(error)})", "every rank to start"
            ) from error
    place = meeting()
    others = "the other rank" if size == 2 else f"{size - 1} other ranks"
    patience = Patience(JOINING, f"{others if rank == 0 else 'rank 0'} at {place}", tell)
    try:
        found = _meet(rank, size, place, patience)
        world = _joined(rank, size, device, found, seconds, ends, patience)
    except OverError:
        raise
    except (K3Error, RuntimeError, ValueError, OSError) as error:
        if rank == 0 and "EADDRINUSE" in str(error):
            raise K3Error(
                f"MASTER_PORT={place.port} is in use on this machine",
                "a free port for the ranks to meet",
                "start every rank with another MASTER_PORT",
            ) from None
        came = re.search(r"(\d+)/(\d+) clients", str(error))  # how torch says it
        why = f"{came[1]} of {came[2]} ranks came" if came else _first_line(error)
        raise patience.over(f"rank {rank} of {size}", why) from error
    world.pulse = Pulse(found, rank, size)
    return world


def _meet(rank: int, size: int, place: Meeting, patience: Patience) -> Any:
    """The store that ranks of another program meet through, when all have come and rank 0 goes ahead."""
    global met
    if rank > 0 or place.served:
        # Torch would try again and again, and say so each time.
        _interruptible(lambda: place.reach(patience.left), patience)
    limit = timedelta(seconds=max(1.0, patience.left()))
    store = _interruptible(lambda: next(iter(rendezvous("env://", rank, size, timeout=limit)))[0], patience)
    met = True
    _interruptible(lambda: begin(store, rank), patience)
    store.set_timeout(timedelta(seconds=JOINING))
    return store


def _joined(
    rank: int,
    size: int,
    device: torch.device,
    store: Any,
    seconds: float,
    ends: Sequence[socket.socket],
    patience: Patience | None,
) -> World:
    global _current
    limit = timedelta(seconds=JOINING)
    _interruptible(
        lambda: dist.init_process_group("gloo", rank=rank, world_size=size, timeout=limit, store=store), patience
    )
    _current = World(rank, size, device, seconds, ends)
    return _current


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
