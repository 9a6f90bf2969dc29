"""A process that is rank 1 or higher: loads its part of the model, then does what rank 0 calls for.

`python -m k3cli.model.peer RANK SIZE DEVICE STORE SECONDS PARENT LINE` when rank 0 starts it, LINE being the number of
an open socket; `run_launched` under torchrun.
Writes "ready", and if it fails one JSON line that says why; ends when rank 0 does.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from k3cli.model.launch import Tell

LOST = 69
"""Exit code of a peer that only lost the others."""
SITTING = 70
"""Exit code of a peer whose pipe closed in the middle of a call."""
_serving: list[Any] = []
"""This process's `Replica`, once it serves."""


@dataclass(frozen=True)
class Job:
    """What rank 0 tells the others to load.

    layers: so many of the model's, with random weights, 0: the model. threads: of a CPU, for each rank; 0 leaves it.
    """

    model: str
    dtype: str
    window: int
    layers: int = 0
    threads: int = 0


def main() -> int:
    rank, size, device, store, seconds, parent, line = sys.argv[1:]
    _end_with_parent(int(parent))
    import torch
    import torch.distributed as dist

    from k3cli.model.joining import join

    print("ready", flush=True)
    try:
        meeting, ends = dist.FileStore(store, int(size)), [socket.socket(fileno=int(line))]
        world = join(int(rank), int(size), torch.device(device), meeting, float(seconds), ends)
        world.all(0)
        return _work(world)
    except BaseException as error:
        return _told(error)


def run_launched(rank: int, size: int, tell: Tell) -> int:
    """The life of a rank that another program started; ends the process. Raises K3Error when it can't join.

    tell: that others are waited for; only the first rank of a machine says so.
    """
    import torch

    from k3cli.model.faults import described, is_lost
    from k3cli.model.joining import join
    from k3cli.model.launch import local_rank
    from k3cli.model.peers import local_device
    from k3cli.model.pulse import OverError

    first = local_rank() == 0
    try:
        # One kind of device for all: a machine with GPUs that is to use its CPU hides them (CUDA_VISIBLE_DEVICES).
        place = local_device("cuda" if torch.cuda.is_available() else "cpu")
        world = join(rank, size, place, tell=tell if first else lambda line: None)
    except OverError as end:
        if end.exit_code and first:
            raise  # one line a machine
        os._exit(end.exit_code)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # rank 0 saves the turn and ends; its end is everybody's
    try:
        code = _work(world)
    except Exception as error:
        if not is_lost(error):
            if world.pulse is not None:
                world.pulse.fail(described(error))
            raise
        code = LOST
    sys.stdout.flush()
    os._exit(code)  # past the process groups, whose ends wait for ranks that may be gone


def _work(world: Any) -> int:
    import torch

    from k3cli.model.replica import Replica, serve
    from k3cli.model.weights import load_model

    try:
        job = Job(**world.share())
    except RuntimeError:
        return LOST
    if job.threads:
        torch.set_num_threads(job.threads)
    if job.layers:
        from k3cli.bench.slice import random_part

        model = random_part(Path(job.model), job.layers, job.dtype, job.window, world)
    else:
        model = load_model(job.model, dtype=job.dtype, window=job.window, world=world).model
    _serving.append(Replica(model, world))
    serve(_serving[0])
    return 0


def describe(model: str, dtype: str, window: int, layers: int = 0) -> dict[str, Any]:
    """A `Job` as it goes to the others."""
    return asdict(Job(model, dtype, window, layers))


def _told(error: BaseException) -> int:
    from k3cli.config import debugging
    from k3cli.model.faults import described, is_lost

    if is_lost(error):
        return LOST
    if debugging():
        import traceback

        traceback.print_exception(error)
    kind, found, expected, do = described(error)
    print(json.dumps({"kind": kind, "found": found, "expected": expected, "do": do}), flush=True)
    return 1


def _end_with_parent(parent: int) -> None:
    """This process ends when rank 0 does, in the middle of a collective, too."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(0)

    def watch() -> None:
        while os.read(0, 1 << 10):
            pass
        os._exit(SITTING if any(replica.busy for replica in _serving) else LOST)

    Thread(target=watch, name="k3-parent", daemon=True).start()


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # past the process groups, whose ends wait for ranks that may be gone
