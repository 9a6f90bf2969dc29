"""Ranks that another program started (torchrun): what its environment says of them, and the address where they meet.

Without torch: a world that can't be is told before anything heavy is loaded.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from threading import Event

from k3cli.errors import K3Error, UsageError

SET = "as torchrun sets them"
QUIET = 4.0
"""Seconds of waiting after which a line says what is waited for."""
GRACE = 3.0
"""Seconds beyond its patience in which a library may say itself why it waited for nothing."""
Tell = Callable[[str], None]
"""Gets one line for people."""


def launched() -> tuple[int, int] | None:
    """(rank, size) of this process; None where nobody has started ranks, or one alone.

    UsageError for a world that can't be, and for an environment that says half of it.
    """
    words = os.environ.get("RANK") or None, os.environ.get("WORLD_SIZE") or None
    if words == (None, None):
        return None
    rank, size = (_number(word) for word in words)
    said = f"RANK={words[0] or ''} and WORLD_SIZE={words[1] or ''}"
    if rank is None or size is None:
        raise UsageError(said, f"two numbers, 0 or more, {SET}")
    if size < 1:
        raise UsageError(said, f"a world of at least one rank, {SET}")
    if rank >= size:
        raise UsageError(said, f"a rank below the number of ranks, {SET}")
    return (rank, size) if size > 1 else None


def local_rank() -> int:
    """This process's number among those of its machine. UsageError."""
    word = os.environ.get("LOCAL_RANK") or "0"
    number = _number(word)
    if number is None:
        raise UsageError(f"LOCAL_RANK={word}", "the number of this rank on its machine, 0 or more, as torchrun sets it")
    return number


@dataclass(frozen=True)
class Meeting:
    """Where the ranks of a world meet. served: the program that started them listens there, not rank 0."""

    address: str
    port: int
    served: bool

    def __str__(self) -> str:
        return f"{self.address}:{self.port}"

    def reach(self, left: Callable[[], float]) -> None:
        """Returns as soon as somebody listens there. K3Error with the last reason when no seconds are left."""
        why = "nobody listens there"
        while (seconds := left()) > 0:
            try:
                socket.create_connection((self.address, self.port), timeout=min(seconds, 10)).close()
                return
            except OSError as problem:
                why = problem.strerror or str(problem)
            time.sleep(0.3)
        raise K3Error(why)


def meeting() -> Meeting:
    """Where the environment says that ranks meet. UsageError."""
    address, port = os.environ.get("MASTER_ADDR") or "", os.environ.get("MASTER_PORT") or ""
    number = _number(port)
    if not address.strip() or number is None or not 0 < number < 1 << 16:
        found = f"MASTER_ADDR={address} and MASTER_PORT={port}"
        raise UsageError(found, f"rank 0's machine and a port of it from 1 to 65535, {SET}")
    # The same word as torch looks for.
    return Meeting(address, number, os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True")


class Patience:
    """How long a rank waits for others, in all, and the line that says so after a while."""

    def __init__(self, seconds: float, whom: str, tell: Tell) -> None:
        """whom: it waits for, and where."""
        self.seconds, self.whom, self._tell = seconds, whom, tell
        self._began = time.monotonic()
        self._told = False

    def spent(self) -> float:
        return time.monotonic() - self._began

    def left(self) -> float:
        return self.seconds - self.spent()

    def wait(self, ended: Event) -> bool:
        """Whether it has ended before no time is left; says after QUIET seconds that it is waited for."""
        if not self._told and not ended.wait(max(0.0, QUIET - self.spent())):
            self._told = True
            self._tell(f"waiting for {self.whom}, {self.seconds:g} s at most")
        return ended.wait(max(0.0, self.left()) + GRACE)

    def over(self, who: str, why: str) -> K3Error:
        """The error for a wait that brought nothing."""
        return K3Error(
            f"{who} has waited {self.spent():.0f} s for {self.whom}: {why}",
            "every rank to start, with the same MASTER_ADDR and MASTER_PORT",
            "check the address, and that nothing between the machines blocks the port",
        )


def _number(word: str | None) -> int | None:
    """Digits alone: neither a sign nor what else int() takes."""
    return int(word) if word is not None and word.isascii() and word.isdecimal() and len(word) < 10 else None
