"""Objects by the hash of their bytes: written once, verified on every read, never changed.

Writing is temp file in the target's directory, write, fsync, size check, rename. The directories of new objects are
synced by `settle`, which must return before anything that points to the objects is written.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import secrets
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import xxhash

from k3_sessions.disk import Buffer, FileSystem
from k3_sessions.errors import Damaged, StoreError, os_errors
from k3_sessions.objects import Blob
from k3_sessions.source import READ_BLOCK, Passing

TEMP_PREFIX = ".tmp-"
"""Names of unfinished files, in any directory of the store."""


def path_of(key: str) -> str:
    """Path of an object below the store's root."""
    return f"objects/{key[:2]}/{key[2:]}"


def is_id(text: str) -> bool:
    return len(text) == 64 and all(c in "0123456789abcdef" for c in text)


def write_file(fs: FileSystem, path: str, parts: Sequence[Buffer]) -> None:
    """Whole file, atomically in place of whatever `path` was. Durable once the directory is synced too."""
    folder, _, _ = path.rpartition("/")
    temp = f"{folder}/{TEMP_PREFIX}{secrets.token_hex(8)}" if folder else TEMP_PREFIX + secrets.token_hex(8)
    handle = fs.create(temp)
    try:
        try:
            for part in parts:
                fs.write(handle, part)
            fs.sync(handle)
        finally:
            fs.close(handle)
        size, found = sum(len(part) for part in parts), fs.info(temp)
        if found is None or found.size != size:
            raise OSError(errno.EIO, f"wrote {size} bytes, {found.size if found else 'nothing'} arrived", temp)
        fs.replace(temp, path)
    except OSError:
        # If it stays it is collected with the other leftovers; the first error is the one to tell.
        with contextlib.suppress(OSError):
            fs.remove(temp)
        raise


@dataclass
class Batch:
    """Objects one operation wrote, and the directories that have to be synced before anything may point to them."""

    written: int = 0
    folders: set[str] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)


class Blobs:
    """The objects directory. Safe to use from several threads."""

    def __init__(self, fs: FileSystem) -> None:
        self.fs = fs
        self.bad: dict[str, str] = {}
        """Objects that failed a read in this process, and why: plans go around them."""

    def put(self, parts: Sequence[Buffer], batch: Batch) -> tuple[Blob, int]:
        """Store an object; returns its reference and the bytes written (0 if it was there, whole, already)."""
        name, check = hashlib.sha256(), xxhash.xxh3_128()
        for part in parts:
            for at in range(0, len(part), READ_BLOCK):
                piece = memoryview(part)[at : at + READ_BLOCK]
                name.update(piece)
                check.update(piece)
        blob = Blob(name.hexdigest(), sum(len(part) for part in parts), check.hexdigest())
        path = path_of(blob.id)
        folder, _, _ = path.rpartition("/")
        with os_errors("writing to the session store"):
            # Synced in either case: another process may have made either name a moment ago and not synced it yet.
            with batch.lock:
                batch.folders.update(("objects", folder))
            if self._intact(blob, path):
                return blob, 0
            self.fs.make_dir(folder)
            write_file(self.fs, path, parts)
        self.bad.pop(blob.id, None)
        with batch.lock:
            batch.written += blob.size
        return blob, blob.size

    def _intact(self, blob: Blob, path: str) -> bool:
        found = self.fs.info(path)
        if found is None or found.kind != "file" or found.size != blob.size:
            return False
        return xxhash.xxh3_128_hexdigest(self.fs.read(path)) == blob.check

    def settle(self, batch: Batch) -> None:
        """Make the batch's objects durable under their names."""
        with os_errors("writing to the session store"):
            for folder in sorted(batch.folders):
                self.fs.sync_dir(folder)
        batch.folders.clear()

    def check(self, blob: Blob) -> str:
        """Empty if the object is there with the right size and never failed; else what is wrong."""
        if blob.id in self.bad:
            return self.bad[blob.id]
        with os_errors("reading the session store"):
            found = self.fs.info(path_of(blob.id))
        if found is None:
            return "is missing"
        if found.kind != "file":
            return "is not a regular file"
        if found.size != blob.size:
            return f"has {found.size} bytes where {blob.size} were written"
        return ""

    def get(self, key: str, size: int | None = None) -> bytes:
        """Bytes of an object, hashed. Raises Damaged naming the file when they are not the ones written."""
        with os_errors("reading the session store"):
            self._found(key, size)
            try:
                data = self.fs.read(path_of(key))
            except OSError as error:
                self._unreadable(key, error)
                raise
        if hashlib.sha256(data).hexdigest() != key:
            raise self._damaged(key, "does not match its hash")
        return data

    @contextmanager
    def passing(self, blob: Blob) -> Iterator[Passing]:
        """An object that is decoded while it is read, and hashed; that it is right is known when the block has ended.

        Bytes that match the blob's check are right; of others, and where there is none, sha256 says what they are.
        Raises Damaged in place of what was raised in the block, where the bytes are not the ones written.
        """
        digest: Any = xxhash.xxh3_128() if blob.check else hashlib.sha256()
        with os_errors("reading the session store"):
            self._found(blob.id, blob.size)
            try:
                with self.fs.reader(path_of(blob.id)) as read:
                    source = Passing(read, digest)
                    try:
                        yield source
                    except (StoreError, ValueError):
                        source.rest()
                        self._prove(blob, digest)
                        raise
                    source.rest()
            except OSError as error:
                self._unreadable(blob.id, error)
                raise
            self._prove(blob, digest)

    def _prove(self, blob: Blob, digest: Any) -> None:
        if digest.hexdigest() == (blob.check or blob.id):
            return
        if not blob.check or hashlib.sha256(self.fs.read(path_of(blob.id))).hexdigest() != blob.id:
            raise self._damaged(blob.id, "does not match its hash")

    def _found(self, key: str, size: int | None) -> None:
        found = self.fs.info(path_of(key))
        if found is None or found.kind != "file":
            raise self._damaged(key, "is missing" if found is None else "is not a regular file")
        if size is not None and found.size != size:
            raise self._damaged(key, f"has {found.size} bytes where {size} were written")

    def _unreadable(self, key: str, error: OSError) -> None:
        """Raises Damaged where the disk gave an error for these very bytes."""
        if error.errno == errno.EIO:
            raise self._damaged(key, f"cannot be read ({error.strerror})") from error

    def _damaged(self, key: str, what: str) -> Damaged:
        self.bad[key] = what
        return Damaged(
            f"{path_of(key)} {what}",
            "the bytes that were written",
            "run `k3 verify`, then `k3 repair`",
            object=path_of(key),
        )
