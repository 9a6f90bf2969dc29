"""Short messages from rank 0 to processes that it has started, over a pair of sockets to each.

One way takes a few microseconds when the other end looks out for it, where a message through gloo wakes two threads.
Between hosts, and where another program started the ranks, there are no lines: calls go over gloo.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Sequence

LOOK_OUT = 0.005
"""Seconds for which the other end keeps asking for the next message before it lets itself be woken: longer than a step
takes, so that a decoding rank is always awake. Only where a device computes; a CPU has better things to do."""


class Lines:
    """Rank 0's ends, or the one end of another rank. Messages have a size that both sides know."""

    def __init__(self, ends: Sequence[socket.socket], look_out: float = 0.0) -> None:
        self._ends, self._look_out = list(ends), look_out
        for end in self._ends:
            end.setblocking(False)

    def post(self, message: bytes, seconds: float) -> None:
        """To every other rank. RuntimeError when one is gone, or takes nothing for `seconds`."""
        for end in self._ends:
            rest = memoryview(message)
            while rest:
                try:
                    rest = rest[end.send(rest) :]
                except BlockingIOError:
                    if not select.select((), (end,), (), seconds)[1]:
                        raise RuntimeError("a call to a peer timed out") from None
                except OSError as error:
                    raise RuntimeError(f"the connection to a peer broke ({error})") from error

    def fetch(self, size: int) -> bytes:
        """The next message, of `size` bytes, whenever it comes. RuntimeError when rank 0 is gone."""
        (end,) = self._ends
        until = time.monotonic() + self._look_out
        found = b""
        while len(found) < size:
            try:
                part = end.recv(size - len(found))
            except BlockingIOError:
                if time.monotonic() > until:
                    select.select((end,), (), ())
                continue
            except OSError as error:
                raise RuntimeError(f"the connection to a peer broke ({error})") from error
            if not part:
                raise RuntimeError("the peer that makes the calls has ended")
            found += part
        return found

    def close(self) -> None:
        for end in self._ends:
            end.close()
