"""Rank 0's second look at the other ranks, from a thread: for a host that sits in the driver.

`World.settled` looks at the others while it waits for the device. But the host may not come that far: to load a kernel
for the first time, to free memory or to find room in a full queue of launches, the driver waits for what runs on the
device, and a sum whose other end is gone runs for ever. Closing the connections from here ends it.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from threading import Event, Thread

from k3cli.errors import K3Error

LOOK = 0.25
"""Seconds between two looks."""
GRACE = 1.5
"""Seconds that the host has to notice by itself."""
LAST = 15.0
"""Seconds after which a host that still has not come back is ended."""


def _tell(problem: K3Error) -> None:
    sys.stderr.write(f"k3: error: {problem}\n")
    sys.stderr.flush()


tell: Callable[[K3Error], object] = _tell
"""Says why a process is ended from here. A command line has it said as whatever else ends a run."""


class Watch:
    """lost: whether a rank has ended, or has stopped for long. abort: ends sums that wait on this device. said: what
    happened, for a process that has to be ended from here."""

    def __init__(self, lost: Callable[[], bool], abort: Callable[[], None], said: Callable[[], K3Error]) -> None:
        self._lost, self._abort, self._said = lost, abort, said
        self.busy: Callable[[], bool] = lambda: True
        """Whether the host is at something that needs the others; between two calls nothing of theirs is missing."""
        self._over = Event()
        self.aborted = False
        """Sums were ended: what the device computes from here on is wrong."""
        Thread(target=self._run, name="k3-watch", daemon=True).start()

    def free(self) -> None:
        """Ends sums that wait on this device, at once: the ranks are lost."""
        if not self.aborted:
            self.aborted = True
            # In a thread of its own: what it waits for may need the host, too.
            Thread(target=self._abort, name="k3-abort", daemon=True).start()

    def end(self) -> None:
        """The host has come back, or never needed this."""
        self._over.set()

    def _run(self) -> None:
        while not (self.busy() and self._lost()):
            if self._over.wait(LOOK):
                return
        began = time.monotonic()
        if self._over.wait(GRACE):
            return
        self.free()
        if self._over.wait(LAST - (time.monotonic() - began)):
            return
        code = 1
        try:
            problem = self._said()
            code = problem.exit_code
            tell(problem)
        finally:
            os._exit(code)
