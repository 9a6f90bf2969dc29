"""The progress bar of a terminal. It belongs to the stream, so that whoever writes there next can take it away first.

These functions only say what to write: the caller knows how to write to a terminal that may be gone.
"""

from __future__ import annotations

import os
import shutil
import sys
import warnings
from typing import Any, TextIO
from weakref import WeakKeyDictionary

_SHOWN: WeakKeyDictionary[TextIO, int] = WeakKeyDictionary()
"""Columns of the bar that stands on a stream's last line."""
ECHO = 2
"""Columns behind a bar where a terminal may show the ^C that somebody typed; it goes with the bar."""


def drawn(stream: TextIO, text: str) -> str:
    """What to write so that `text` stands in place of the bar before, cut where the line ends: a second line would
    stay."""
    limit = max(1, _columns(stream) - 1 - ECHO)
    text = text[:limit]
    before = _SHOWN.get(stream, 0)
    _SHOWN[stream] = len(text)
    return "\r" + text.ljust(min(before, limit))


def erased(stream: TextIO) -> str:
    """What to write so that no bar stands there; "" where none does."""
    width = _SHOWN.pop(stream, 0)
    return "\r" + " " * (width + ECHO) + "\r" if width else ""


def erase_before_warnings() -> None:
    """Have Python's warnings, which libraries write to stderr as they please, begin on a line of their own."""
    plain = warnings.showwarning
    if getattr(plain, "erases", False):
        return

    def show(message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None) -> None:
        if file is None and sys.stderr is not None:
            sys.stderr.write(erased(sys.stderr))
        plain(message, category, filename, lineno, file, line)

    show.erases = True  # type: ignore[attr-defined]
    warnings.showwarning = show


def _columns(stream: TextIO) -> int:
    try:
        width = os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        width = 0
    return width or shutil.get_terminal_size().columns
