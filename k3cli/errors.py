"""The one error family of the command, and the exit codes it documents.

Every message says what was found, what was expected and what to do next, on one line.
"""

from __future__ import annotations

import re
from enum import IntEnum


class Exit(IntEnum):
    """Exit codes of `k3` (README, "Exit codes")."""

    OK = 0
    FAILED = 1
    USAGE = 2
    MODEL = 3
    NO_FIT = 4
    CONTEXT = 5
    SESSION = 6
    REPLAY_DIFFERS = 7
    DAMAGED = 8
    BUSY = 75
    INTERRUPTED = 130
    BROKEN_PIPE = 141
    TERMINATED = 143


LONGEST = 1000
"""Characters of each part of a message; what a damaged file holds may be of any length."""
_UNSEEN = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")


class K3Error(Exception):
    """A failure the user can act on.

    `found` is what the program saw, `expected` what it needed, `do` the next step; `str()` joins them into one line.
    Control characters are escaped, and the middle of what is very long is left out.
    """

    exit_code: Exit = Exit.FAILED

    def __init__(self, found: str, expected: str | None = None, do: str | None = None) -> None:
        self.found = _in_a_line(found)
        self.expected = None if expected is None else _in_a_line(expected)
        self.do = None if do is None else _in_a_line(do)
        parts = [self.found]
        if self.expected is not None:
            parts.append(f"expected {self.expected}")
        if self.do is not None:
            parts.append(self.do)
        super().__init__("; ".join(parts))


def _in_a_line(text: str) -> str:
    if len(text) > LONGEST:
        text = f"{text[: LONGEST * 3 // 4]} ... {text[-LONGEST // 4 :]}"
    return _UNSEEN.sub(lambda found: ascii(found[0])[1:-1], " ".join(text.split()))


class UsageError(K3Error):
    """The command line, a config key or an environment value is wrong."""

    exit_code = Exit.USAGE


class ModelError(K3Error):
    """Model files are missing, incomplete, unsupported, or not the ones a session recorded."""

    exit_code = Exit.MODEL


class FitError(K3Error):
    """The work does not fit on this machine."""

    exit_code = Exit.NO_FIT


class ContextError(K3Error):
    """The context limit would be exceeded."""

    exit_code = Exit.CONTEXT


class SessionError(K3Error):
    """A session exists, is missing, or is locked."""

    exit_code = Exit.SESSION


class ReplayDiffers(K3Error):  # noqa: N818 - what happened, not a fault of the program
    """A replay did not reproduce what was recorded."""

    exit_code = Exit.REPLAY_DIFFERS


class DamagedError(K3Error):
    """Stored data cannot be trusted."""

    exit_code = Exit.DAMAGED


class BusyError(K3Error):
    """Temporary: trying again later may work."""

    exit_code = Exit.BUSY
