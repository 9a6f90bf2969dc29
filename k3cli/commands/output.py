"""Where things are printed: the answer or NDJSON events on stdout, everything else on stderr.

No escape byte or carriage return is written to a stream that is not a terminal.
"""

from __future__ import annotations

import errno
import json
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from k3cli.commands import bar
from k3cli.engine.events import SCHEMA
from k3cli.errors import K3Error

DUMB = ("dumb", "unknown")
"""Values of TERM for a terminal that knows no escapes."""
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def prepare_streams() -> None:
    """UTF-8 out whatever the locale; a character that cannot be written is escaped, never a crash.

    A stream that was closed for us becomes the null device, so that no file opened later takes its descriptor.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number, inheritable=True)
                os.close(null)
            setattr(sys, name, os.fdopen(number, mode))
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")
    bar.erase_before_warnings()


def silence(stream: TextIO) -> None:
    """Point a stream's descriptor at the null device, so that no later write or flush (at exit too) can fail."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


def visible(text: str) -> str:
    """Control characters (a model may write any) as `\\x1b`, so that text cannot steer the terminal."""
    return _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


def human_bytes(count: float) -> str:
    """1536 -> "1.5 KB" (powers of 1000)."""
    for unit in ("B", "KB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def human_seconds(seconds: float) -> str:
    """0.25 -> "250 ms", 90 -> "90.0 s", 600 -> "10 min"."""
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], align: str) -> list[str]:
    """Lines of a plain table; `align` has < or > for each column."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    return [
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, align, widths, strict=True)).rstrip()
        for row in (head, *rows)
    ]


class Printer:
    """One command's output. With `json` stdout carries events only; the last one is `done` (or `error`, from main).

    Everything that prints raises BrokenPipeError when the reader of stdout is gone, K3Error when stdout cannot be
    written for another reason. A stderr that is gone stops nothing.
    """

    def __init__(self, *, json: bool = False, hide_thinking: bool = False) -> None:
        self.json = json
        self.hide_thinking = hide_thinking
        self.goes_on = False  # a prompt follows what is printed: set by the one that asks
        self.out: TextIO = sys.stdout
        self.err: TextIO = sys.stderr
        self._dim = (
            self.err.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM", "").lower() not in DUMB
        )
        self._bar_time = 0.0
        self._event_time = 0.0
        self._thinking_open = False
        self._answer_open = False

    def event(self, kind: str, **data: Any) -> None:
        """One NDJSON line on stdout; nothing in text mode."""
        self.raw_event({"v": SCHEMA, "type": kind, **data})

    def raw_event(self, data: Mapping[str, Any]) -> None:
        if self.json:
            self._write_out(json.dumps(data, ensure_ascii=False, separators=(",", ":"), default=str) + "\n")

    def done(self, **data: Any) -> None:
        self.event("done", **data)

    def line(self, text: str = "") -> None:
        """One line of result on stdout, text mode only."""
        if not self.json:
            self._write_out((visible(text) if self.out.isatty() else text) + "\n")

    def answer(self, text: str) -> None:
        """A piece of the answer, as it comes."""
        self.clear_bar()
        self._close_thinking()
        if not self.json and text:
            self._write_out(visible(text) if self.out.isatty() else text)
            self._answer_open = not text.endswith("\n")

    def thinking(self, text: str) -> None:
        """A piece of thinking: stderr, dim on a terminal."""
        if self.json or self.hide_thinking or not text:
            return
        self.clear_bar()
        self._break_answer()
        self._thinking_open = True
        self._say(text)

    def notice(self, text: str) -> None:
        """One line for the person, on stderr, in JSON mode too."""
        self.clear_bar()
        self._close_thinking()
        self._break_answer()
        self._say(f"k3: {' '.join(text.split())}\n")

    def aside(self, text: str) -> None:
        """One line of a table for the person, on stderr as it stands."""
        self.clear_bar()
        self._write_err(text + "\n")

    def progress(self, label: str, done: float, total: float, unit: str = "", detail: str = "") -> None:
        """A bar that redraws itself; only where stderr is a terminal."""
        now = time.monotonic()
        if not self.err.isatty() or (done < total and now - self._bar_time < 0.1):
            return
        self._bar_time = now
        self._close_thinking()
        self._break_answer()
        share = min(1.0, done / total) if total else 1.0
        text = f"k3: {label} [{'#' * int(20 * share):<20}] {100 * share:3.0f}% {unit}{' ' + detail if detail else ''}"
        self._write_err(bar.drawn(self.err, text))

    def progress_due(self, final: bool) -> bool:
        """Whether a progress event is worth a line of NDJSON: a few a second, and the final one."""
        now = time.monotonic()
        if not final and now - self._event_time < 0.25:
            return False
        self._event_time = now
        return True

    def clear_bar(self) -> None:
        """Take the bar away, whoever drew it."""
        if text := bar.erased(self.err):
            self._write_err(text)

    def abandon(self) -> None:
        """A reader went away: whatever is printed from here on goes nowhere."""
        self._answer_open = self._thinking_open = False
        silence(self.out)

    def end(self) -> None:
        """Both streams end on a full line."""
        self.clear_bar()
        self._close_thinking()
        self._close_answer()

    def _say(self, text: str) -> None:
        if self.err.isatty():
            text = visible(text)
        self._write_err(f"\x1b[2m{text}\x1b[0m" if self._dim else text)

    def _write_err(self, text: str) -> None:
        try:
            self.err.write(text)
            self.err.flush()
        except OSError:
            silence(self.err)

    def _write_out(self, text: str) -> None:
        if self.out.isatty():  # one terminal may show both streams
            self.clear_bar()
        try:
            self.out.write(text)
            self.out.flush()
        except BrokenPipeError:
            raise
        except OSError as problem:
            silence(self.out)
            if problem.errno == errno.EIO:  # a terminal that was closed
                raise BrokenPipeError from None
            raise K3Error(f"stdout: {problem.strerror}", "an output that takes the answer") from None

    def _close_thinking(self) -> None:
        if self._thinking_open:
            self._thinking_open = False
            self._write_err("\n")

    def _break_answer(self) -> None:
        """Start a new line before stderr text where one terminal may show both; a pipe gets the answer as it is."""
        if self.out.isatty():
            self._close_answer()

    def _close_answer(self) -> None:
        if self._answer_open and not self.json:
            self._answer_open = False
            self._write_out("\n")
