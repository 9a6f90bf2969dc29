# ruff: noqa: N818 - each name says what happened; "Error" would add nothing
"""Everything the store refuses, one class per kind of trouble.

Each message says what was found, what was expected and what to do next. The command line maps the classes to exit
codes; this package knows nothing of them.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager


class StoreError(Exception):
    """Base class. `found` is what the store saw, `expected` what it needed, `do` the next step."""

    def __init__(self, found: str, expected: str | None = None, do: str | None = None) -> None:
        self.found = found
        self.expected = expected
        self.do = do
        parts = [found]
        if expected is not None:
            parts.append(f"expected {expected}")
        if do is not None:
            parts.append(do)
        super().__init__("; ".join(" ".join(part.split()) for part in parts))


class BadName(StoreError):
    """A session name, mark or turn selector that the store does not accept."""


class BadDraft(StoreError):
    """A turn or state that cannot be stored as handed over (positions, ids, missing or undeclared fields)."""


class SessionExists(StoreError):
    """The name is taken."""


class SessionMissing(StoreError):
    """No session, or no turn of that session, has this name."""


class SessionLocked(StoreError):
    """Another process writes this session. `pid` and `host` say which, where known."""

    def __init__(self, found: str, do: str | None = None, *, pid: int | None = None, host: str | None = None) -> None:
        super().__init__(found, do=do)
        self.pid = pid
        self.host = host


class SessionChanged(StoreError):
    """The session moved on under the caller: a plan or a head it holds is out of date."""


class StoreBusy(StoreError):
    """Another process holds the whole store for a moment; trying again works."""


class IdentityMismatch(StoreError):
    """Stored state belongs to another model, tokenizer, chat format, dtype or layout. `fields` names what differs."""

    def __init__(self, found: str, expected: str, do: str, *, fields: tuple[str, ...]) -> None:
        super().__init__(found, expected, do)
        self.fields = fields


class Damaged(StoreError):
    """Stored bytes are not what was written. `object` names the file under the store's root."""

    def __init__(self, found: str, expected: str | None = None, do: str | None = None, *, object: str) -> None:  # noqa: A002
        super().__init__(found, expected, do)
        self.object = object


class FormatUnsupported(StoreError):
    """Written by a version this one cannot read."""


class StoreFull(StoreError):
    """The quota, the free-space floor or the disk itself leaves no room."""


class StoreReadOnly(StoreError):
    """The store cannot be written: read-only disk or missing permission."""


class IOFailure(StoreError):
    """The operating system reported an error other than a full or read-only disk."""


class NetworkFilesystem(StoreError):
    """The store lies on a network file system, whose locks and renames cannot be relied on."""


FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
"""Error numbers of a disk, a quota of the system, or a limit on file sizes that leaves no room."""
_READ_ONLY = {errno.EROFS, errno.EACCES, errno.EPERM}


def from_os_error(error: OSError, doing: str) -> StoreError:
    """The store error that tells what `error` means for someone who was `doing` something."""
    what = f"{doing}: {error.strerror or error}" + (f" ({error.filename})" if error.filename else "")
    if error.errno == errno.EFBIG:
        return StoreFull(what, do="raise the largest size a file may have (ulimit -f)")
    if error.errno in FULL:
        return StoreFull(what, do="free disk space or raise the quota; `k3 gc` and `k3 du` show what can go")
    if error.errno in _READ_ONLY:
        return StoreReadOnly(what, do="check the permissions of the store and whether its disk is mounted read-only")
    return IOFailure(what, do="check the disk; what was saved before is unchanged")


@contextmanager
def os_errors(doing: str) -> Iterator[None]:
    """Turns every OSError of the block into a StoreError naming what was being done."""
    try:
        yield
    except OSError as error:
        raise from_os_error(error, doing) from error
