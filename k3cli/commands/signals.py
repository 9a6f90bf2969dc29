"""Ctrl-C, SIGTERM and a closed terminal: during an answer they stop it and the turn is saved; else they end the run."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Event
from types import FrameType

from k3cli.commands.bar import erased
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


CODES = {signal.SIGINT: Exit.INTERRUPTED, signal.SIGTERM: Exit.TERMINATED, signal.SIGHUP: Exit.TERMINATED}


def _handled() -> list[signal.Signals]:
    """The signals of CODES, without a SIGHUP that whoever started us ignores (nohup)."""
    return [number for number in CODES if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN]


_at_once: Callable[[Exit], object] = os._exit


def exit_on_signals(at_once: Callable[[Exit], object] | None = None) -> None:
    """Outside an answer each signal unwinds (locks, files, the terminal) and ends the run with 130 or 143.

    at_once: called instead where unwinding is not possible, while modules are imported; has to end the process.
    """
    global _at_once
    _at_once = at_once or _at_once
    for number in _handled():
        signal.signal(number, _leave)


def ignore_signals() -> None:
    """From here on the run is ending: another signal must not cut the unwinding short."""
    for number in CODES:
        signal.signal(number, signal.SIG_IGN)


def _leave(number: int, frame: FrameType | None) -> None:
    ignore_signals()
    code = CODES[signal.Signals(number)]
    if _importing(frame):
        # A native library that is being loaded aborts the process when an exception comes out of Python.
        _at_once(code)
    raise EndRun(code)


def _importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


@contextmanager
def prompt_signals() -> Iterator[None]:
    """While a terminal is asked for prompts SIGINT is a KeyboardInterrupt, which does not end the run."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def leave_prompt_on_signals(end_prompt: Callable[[], bool]) -> Iterator[None]:
    """While a prompt waits: SIGTERM and SIGHUP end it from inside, then the run.

    An exception raised in a signal's handler may come out of any task of the prompt's event loop, which prints it and
    waits for a key. So the handler calls `end_prompt`, which has the prompt raise EOFError soon, or returns False when
    its loop does not run yet. The block ends with EndRun, whatever the prompt returned.
    """
    code = Exit.OK

    def leave(number: int, frame: FrameType | None) -> None:
        nonlocal code
        ignore_signals()
        code = CODES[signal.Signals(number)]
        if not end_prompt():
            _leave(number, frame)

    before = {number: signal.signal(number, leave) for number in _handled() if number != signal.SIGINT}
    try:
        yield
    except EOFError:
        if code == Exit.OK:
            raise
    finally:
        if code == Exit.OK:
            for number, handler in before.items():
                signal.signal(number, handler)
    if code != Exit.OK:
        raise EndRun(code)


@contextmanager
def cancel_on_signals() -> Iterator[Cancel]:
    """In the block the first signal sets the Cancel; a second one ends the run without saving the turn."""
    cancel = Cancel()
    leaving = False

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal leaving
        if cancel.is_set():
            leaving = True
            _leave(number, frame)
        cancel(CODES[signal.Signals(number)])
        if sys.stderr.isatty():
            begin = erased(sys.stderr) or "\n"
            with suppress(OSError, RuntimeError):  # the terminal is gone, or this came in the middle of a write to it
                sys.stderr.write(f"{begin}k3: stopping; the turn is being saved (once more to leave without saving)\n")

    before = {number: signal.signal(number, ask) for number in _handled()}
    try:
        yield cancel
    finally:
        if not leaving:
            for number, handler in before.items():
                signal.signal(number, handler)
