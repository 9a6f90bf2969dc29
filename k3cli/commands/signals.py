"""Ctrl-C and SIGTERM: during an answer they stop the answer and the turn is saved; elsewhere they end the run."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event
from types import FrameType

from k3cli.errors import Exit


class EndRun(SystemExit):
    """The process was asked to end; `exit` is the code of the signal. A SystemExit, so that event loops let it pass."""

    def __init__(self, exit_code: Exit) -> None:
        super().__init__(int(exit_code))
        self.exit = exit_code


class Cancel:
    """Asks a running turn to stop between two tokens. `code`: exit code of whatever asked first, 0 if nothing did."""

    def __init__(self) -> None:
        self.event = Event()
        self.code = Exit.OK

    def __call__(self, code: Exit) -> None:
        if not self.event.is_set():
            self.code = code
            self.event.set()

    def is_set(self) -> bool:
        return self.event.is_set()


def exit_on_sigterm() -> None:
    """SIGTERM outside an answer: unwind (locks, files, the terminal) and exit 143."""

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise EndRun(Exit.TERMINATED)

    signal.signal(signal.SIGTERM, stop)


@contextmanager
def cancel_on_signals() -> Iterator[Cancel]:
    """In the block the first SIGINT or SIGTERM sets the Cancel; a second one ends the run without saving the turn."""
    cancel = Cancel()
    codes = {signal.SIGINT: Exit.INTERRUPTED, signal.SIGTERM: Exit.TERMINATED}

    def ask(number: int, _frame: FrameType | None) -> None:
        code = codes[signal.Signals(number)]
        if cancel.is_set():
            raise EndRun(code)
        cancel(code)
        if sys.stderr.isatty():
            sys.stderr.write("\nk3: stopping; the turn is being saved (once more to leave without saving)\n")

    before = {number: signal.signal(number, ask) for number in codes}
    try:
        yield cancel
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
