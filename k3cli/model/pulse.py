"""Signs of life of ranks that another program started, as torchrun does.

Rank 0 has no processes of theirs to look at. So each rank counts a number up in the store through which they have met,
and writes there why it fails, if it can still say so.
"""

from __future__ import annotations

import contextlib
import json
import time
from threading import Thread
from typing import Any

import torch.distributed as dist

from k3cli.errors import Exit, K3Error

FIRST, HEARD = "k3-first", "k3-heard"
"""Rank 0's first word in the store, and by how many it was heard."""
BEGIN = "begin"
BEAT = 0.5
"""Seconds between two counts."""
SILENT = 6.0
"""Seconds without one after which a rank counts as gone or stopped."""


class OverError(K3Error):
    """Rank 0 has ended before it needed the others, with `exit_code`."""

    def __init__(self, code: int) -> None:
        found = f"rank 0 ended with exit code {code} before it needed the other ranks"
        super().__init__(found, "a command that runs the model", "its own line says why")
        self.exit_code = Exit(code)


def begin(store: Any, rank: int) -> None:
    """Rank 0 goes ahead; the others wait for that. Raises OverError on them when it has ended instead."""
    if rank == 0:
        store.set(FIRST, BEGIN)
        return
    word = store.get(FIRST).decode()
    if word != BEGIN:
        with contextlib.suppress(RuntimeError):
            store.add(HEARD, 1)
        raise OverError(int(word))


def over(store: Any, size: int, code: int, seconds: float) -> None:
    """Rank 0 ends instead: returns when all others have heard it, or after so many seconds."""
    until = time.monotonic() + seconds
    with contextlib.suppress(RuntimeError):
        store.set(FIRST, str(int(code)))
        while store.add(HEARD, 0) < size - 1 and time.monotonic() < until:
            time.sleep(BEAT / 5)


class Pulse:
    """One rank's end: counts while this process runs."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._store, self._rank, self._others = dist.PrefixStore("k3-pulse", store), rank, range(1, size)
        self._seen: dict[int, tuple[int, float]] = {}
        self._looked = 0.0
        Thread(target=self._beat, name="k3-pulse", daemon=True).start()

    def _beat(self) -> None:
        while True:
            try:
                self._store.add(f"beat {self._rank}", 1)
            except RuntimeError:  # the store has ended with whoever held it
                return
            time.sleep(BEAT)

    def fail(self, said: tuple[str, str, str | None, str | None]) -> None:
        """Leaves word of why this rank ends (`faults.described`), and time to read it."""
        try:
            self._store.set(f"why {self._rank}", json.dumps(said))
            time.sleep(6 * BEAT)
        except RuntimeError:
            pass

    def reasons(self) -> dict[int, list[str | None]]:
        """What the others have left word of, by rank."""
        found = {}
        for rank in self._others:
            key = f"why {rank}"
            if self._store.check([key]):
                found[rank] = json.loads(self._store.get(key))
        return found

    def silent(self) -> list[int]:
        """Ranks that have not counted for a while. Says so only of whom it was asked about before."""
        now, found = time.monotonic(), []
        for rank in self._others:
            count = self._store.add(f"beat {rank}", 0)
            before = self._seen.get(rank)
            if before is None or before[0] != count:
                self._seen[rank] = count, now
            elif now - before[1] > SILENT:
                found.append(rank)
        return found

    def lost(self) -> bool:
        """Whether one of the others is silent or has left word; looks twice a second."""
        now = time.monotonic()
        if now - self._looked < BEAT:
            return False
        self._looked = now
        try:
            return bool(self.reasons() or self.silent())
        except RuntimeError:
            return False

    def blame(self) -> tuple[int, list[str | None] | None] | None:
        """The first rank that is lost and what it said, None for nothing; waits until it is known, SILENT at most."""
        until = time.monotonic() + SILENT + 2 * BEAT
        while time.monotonic() < until:
            try:
                for rank, said in self.reasons().items():
                    return rank, said
                for rank in self.silent():
                    return rank, None
            except RuntimeError:
                return None
            time.sleep(BEAT / 2)
        return None
