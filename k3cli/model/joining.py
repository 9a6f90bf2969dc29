"""Joining a tensor-parallel world, and leaving it again."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from threading import Event, Thread
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from k3cli.errors import K3Error
from k3cli.model.pulse import Pulse, begin
from k3cli.model.world import COLLECTIVE, JOINING, World

Result = TypeVar("Result")
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


def _interruptible(call: Callable[[], Result]) -> Result:
    """What a call gives that waits inside a library: in a thread of its own, so that a signal ends the wait."""
    global stuck
    found: list[Result] = []
    failed: list[BaseException] = []
    ended = Event()

    def work() -> None:
        try:
            found.append(call())
        except BaseException as error:
            failed.append(error)
        finally:
            ended.set()

    Thread(target=work, name="k3-join", daemon=True).start()
    try:
        ended.wait()
    except BaseException:
        stuck = True  # the thread still waits for the others
        raise
    if failed:
        raise failed[0]
    return found[0]


def join(
    rank: int,
    size: int,
    device: torch.device,
    store: Any = None,
    seconds: float = COLLECTIVE,
    ends: Sequence[socket.socket] = (),
) -> World:
    """Meets the other ranks: through `store`, or as the environment says (torchrun). K3Error when they don't come.

    ends: of the lines to the other ranks, where rank 0 has started them.
    """
    global _current, met
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if store is not None and sys.platform == "linux":
        # All on this machine: nothing of it is to be seen on a network.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if device.type == "cuda":
        os.environ.update(NCCL)
        if store is not None and sys.platform == "linux":
            os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        torch.cuda.set_device(device)
    patience = timedelta(seconds=JOINING)
    try:
        if store is None:
            place = _interruptible(lambda: next(iter(rendezvous("env://", rank, size, timeout=patience)))[0])
            met = True
            _interruptible(lambda: begin(place, rank))
        else:
            place = store
        _interruptible(
            lambda: dist.init_process_group("gloo", rank=rank, world_size=size, timeout=patience, store=place)
        )
        _current = World(rank, size, device, seconds, ends)
        if store is None:
            _current.pulse = Pulse(place, rank, size)
        return _current
    except (RuntimeError, ValueError) as error:  # DistError is a RuntimeError
        why = (str(error).splitlines() or [""])[0]
        raise K3Error(f"rank {rank} of {size} could not join the others ({why})", "every rank to start") from error
