"""The other ranks' processes: started by rank 0, watched, explained when they fail, and gone when rank 0 is.

A peer ends when the pipe from rank 0 closes, whatever closed it, and on Linux by a signal of the kernel as well. The
folder of the meeting point is removed as soon as everybody has met.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import selectors
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from k3cli.config import debugging
from k3cli.errors import FitError, K3Error
from k3cli.model.faults import ran_out
from k3cli.model.joining import join, leave
from k3cli.model.launch import local_rank
from k3cli.model.peer import LOST, SITTING
from k3cli.model.pulse import over
from k3cli.model.world import COLLECTIVE, JOINING, World

STAY = "every rank to stay"
AGAIN = "start the command again: the session on disk is its last saved turn"


class Peers:
    """Ranks 1 to size - 1 as child processes. `world` is rank 0's end of it."""

    def __init__(self, devices: list[str], seconds: float = COLLECTIVE) -> None:
        """devices: of every rank, torch names, this process's first. seconds: patience of a collective.

        K3Error when one of them does not come up.
        """
        self.size, self._seconds = len(devices), seconds
        self._folder = Path(tempfile.mkdtemp(prefix="k3-ranks-"))
        self._running: list[subprocess.Popen[bytes]] = []
        self._stopped: dict[int, float] = {}
        self._lines: list[socket.socket] = []
        self.parting: Callable[[], None] = lambda: None
        """What has to be done before connections are closed."""
        atexit.register(self.close)
        try:
            meeting = self._folder / "store"
            for rank, device in enumerate(devices[1:], 1):
                self._running.append(self._start(rank, device, meeting))
            for rank in range(1, self.size):
                if self._line(rank, JOINING) != "ready":
                    raise self.explain(RuntimeError("did not start"))
            store = dist.FileStore(str(meeting), self.size)
            self.world = join(0, self.size, torch.device(devices[0]), store, seconds, self._lines)
            self.world.guard(self._lost, lambda: self._blame(self._codes(), RuntimeError()))
            self.world.lost = self._any_ended
            self.world.all(0)
        except BaseException:
            self.close()
            raise
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self, rank: int, device: str, meeting: Path) -> subprocess.Popen[bytes]:
        environment = dict(os.environ, PYTHONPATH=os.pathsep.join(path for path in sys.path if path))
        place = [str(rank), str(self.size), device, str(meeting), str(self._seconds), str(os.getpid())]
        mine, theirs = socket.socketpair()
        self._lines.append(mine)
        with theirs:
            return subprocess.Popen(
                # -P: the folder the user is in has no say in what is imported.
                [sys.executable, "-P", "-m", "k3cli.model.peer", *place, str(theirs.fileno())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=None if debugging() else subprocess.DEVNULL,
                env=environment,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is rank 0's, who stops all ranks at the same token
            )

    def pids(self) -> list[int]:
        """Process ids of ranks 1, 2, ..."""
        return [process.pid for process in self._running]

    def explain(self, error: BaseException) -> K3Error:
        """Why the world broke: a rank and its cause. Ends the others."""
        found = _own_fault(error)
        _free(getattr(self, "world", None))
        if found is None:
            self._wait(2)  # who was ended has ended, who missed somebody in a sum, too
            self._hang_up()
            self._wait(1)  # who waited for a call ends now, and who sits in one says so; a stopped process does neither
            found = self._blame(self._codes(), error)
        self.close()
        return found

    def _blame(self, codes: dict[int, int | None], error: BaseException) -> K3Error:
        ended = {rank: code for rank, code in codes.items() if code not in (None, LOST, SITTING)}
        for rank, code in ended.items():
            assert code is not None
            line = self._line(rank, 0.5)
            with contextlib.suppress(ValueError, KeyError):
                said = json.loads(line)
                return _told(rank, said["kind"], said["found"], said["expected"], said["do"])
            how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
            return K3Error(f"rank {rank} {how}", STAY, AGAIN)
        stopped, sitting = ([rank for rank, code in codes.items() if code == found] for found in (None, SITTING))
        if stopped or sitting:
            who = ", ".join(map(str, stopped or sitting))
            return K3Error(f"rank {who} has not answered for {self._seconds:g} s", "every rank to take part", AGAIN)
        first = (str(error).splitlines() or [""])[0]
        return K3Error(f"rank 0: {first}", "a step that all ranks end", AGAIN)

    def _codes(self) -> dict[int, int | None]:
        return {rank: process.poll() for rank, process in enumerate(self._running, 1)}

    def _any_ended(self) -> bool:
        return any(process.poll() is not None for process in self._running)

    def _lost(self) -> bool:
        """Whether a peer has ended, or has been stopped for as long as a sum may take (where /proc says so)."""
        now = time.monotonic()
        for pid in self.pids():
            try:
                stopped = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
            except (OSError, IndexError):
                stopped = False
            since = self._stopped.setdefault(pid, now)
            if not stopped:
                self._stopped[pid] = now
            elif now - since > self._seconds:
                return True
        return self._any_ended()

    def _line(self, rank: int, seconds: float) -> str:
        """The next line a peer has written, "" when none comes in time or it has ended."""
        stream: Any = self._running[rank - 1].stdout
        with selectors.DefaultSelector() as ready:
            ready.register(stream, selectors.EVENT_READ)
            if not ready.select(seconds):
                return ""
        return bytes(stream.readline()).decode(errors="replace").strip()

    def _wait(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until and any(process.poll() is None for process in self._running):
            time.sleep(0.05)

    def _hang_up(self) -> None:
        """Closes the pipes and lines to the peers: they end."""
        for end in self._lines:
            end.close()
        for process in self._running:
            with contextlib.suppress(OSError):
                process.stdin.close()  # type: ignore[union-attr]

    def close(self) -> None:
        """Ends all peers, within a few seconds."""
        self.parting()
        self._hang_up()
        self._wait(2)
        for process in self._running:
            if process.poll() is None:
                process.kill()
        leave()  # before the last of them is waited for, whose end may wait for this device
        self._wait(3)
        for process in self._running:
            with contextlib.suppress(OSError):
                process.stdout.close()  # type: ignore[union-attr]
        shutil.rmtree(self._folder, ignore_errors=True)
        atexit.unregister(self.close)


def _free(world: World | None) -> None:
    """The world is lost: its device no longer waits. A peer that ends may in turn wait for this device."""
    if world is not None and world.watch is not None:
        world.watch.free()


def _own_fault(error: BaseException) -> K3Error | None:
    """What to say when the others are not to blame."""
    if ran_out(error):
        return FitError("rank 0: memory ran out", "room for a step on every rank", AGAIN)
    if not isinstance(error, Exception):
        return K3Error("the ranks were interrupted inside a step", "a step to end", AGAIN)
    return None


def _told(rank: int, kind: str | None, found: str | None, expected: str | None, do: str | None) -> K3Error:
    """What a rank has said of its end (`faults.described`)."""
    return (FitError if kind == "FitError" else K3Error)(f"rank {rank}: {found}", expected, do or AGAIN)


def local_device(kind: str) -> torch.device:
    """Where a launched rank of this machine runs: LOCAL_RANK's GPU, or the CPU. FitError for a GPU that isn't there."""
    number = local_rank()
    if kind == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if number >= count:
        raise FitError(f"LOCAL_RANK={number} on a machine with {count}", f"GPUs 0 to {count - 1}, one for each rank")
    return torch.device("cuda", number)


def end_early(size: int, code: int, seconds: float = 20.0) -> None:
    """Rank 0 of a launched world ends without a model: the others, who wait for it, end with the same exit code."""
    with contextlib.suppress(RuntimeError, ValueError):
        over(next(iter(rendezvous("env://", 0, size, timeout=timedelta(seconds=seconds))))[0], size, code, seconds)


class Launched:
    """The peers of a launched rank 0: it did not start them, and knows of them what their connections say."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.parting: Callable[[], None] = lambda: None
        if world.pulse is not None:
            world.guard(world.pulse.lost, lambda: self._blame(RuntimeError()))
        atexit.register(self.close)

    def explain(self, error: BaseException) -> K3Error:
        """Why the world broke: a rank and its cause, as far as they left word."""
        _free(self.world)
        found = self._blame(error)
        self.close()
        return found

    def _blame(self, error: BaseException) -> K3Error:
        if (own := _own_fault(error)) is not None:
            return own
        blamed = None if self.world.pulse is None else self.world.pulse.blame()
        if blamed is None:
            first = (str(error).splitlines() or [type(error).__name__])[0]
            return K3Error(f"a rank was lost ({first})", STAY, AGAIN)
        rank, said = blamed
        return _told(rank, *said) if said is not None else K3Error(f"rank {rank} is gone or stopped", STAY, AGAIN)

    def close(self) -> None:
        """Closes the connections, after which the peers end by themselves."""
        self.parting()
        leave()
        atexit.unregister(self.close)
