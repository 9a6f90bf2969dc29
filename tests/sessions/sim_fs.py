"""A file system in memory that can run full, fail, turn read-only, and lose power at any call.

Two things reach the disk: content at `sync`, names at `sync_dir`. After a crash each directory change that was not
synced is kept or lost on its own, and content that was not synced is lost, kept, cut or garbled, as the random source
decides. A rename is one change: never half done.
"""

from __future__ import annotations

import errno
import io
import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from k3_sessions.disk import Buffer, FileInfo, Space

BLOCK = 4096


class Crash(BaseException):
    """The power went off. Not an Exception, so that no error handling of the code under test sees it as one."""


@dataclass
class File:
    data: bytearray = field(default_factory=bytearray)
    synced: bytes = b""
    inode: int = 0


@dataclass
class Folder:
    entries: dict[str, Any] = field(default_factory=dict)
    durable: dict[str, Any] = field(default_factory=dict)
    changes: list[dict[str, Any]] = field(default_factory=list)  # each: name -> node or None, applied as one
    inode: int = 0

    def change(self, names: dict[str, Any]) -> None:
        _apply(self.entries, names)
        self.changes.append(names)


def _apply(entries: dict[str, Any], names: dict[str, Any]) -> None:
    for name, node in names.items():
        if node is None:
            entries.pop(name, None)
        else:
            entries[name] = node


class SimFS:
    """Implements k3_sessions.disk.FileSystem."""

    def __init__(self, capacity: int = 1 << 40, root: Folder | None = None) -> None:
        self.where = "memory"
        self.capacity = capacity
        self.root = root or Folder()
        self.calls: list[str] = []
        self.fault: Callable[[str, str, int], int | None] = lambda name, path, number: None
        """Called before each changing call; may raise, or say how many bytes of a write arrive before a crash."""
        self._dead = False
        self._inodes = iter(range(1, 1 << 60))
        self._mutex = threading.RLock()
        self._locks: dict[str, list[tuple[bool, object]]] = {}

    # Helpers

    def _alive(self) -> None:
        if self._dead:
            raise Crash

    def _change(self, name: str, path: str) -> int | None:
        self._alive()
        self.calls.append(f"{name} {path}")
        try:
            return self.fault(name, path, len(self.calls) - 1)
        except Crash:
            self._dead = True
            raise

    def _folder(self, path: str) -> Folder:
        node: Any = self.root
        for name in path.split("/") if path else ():
            node = node.entries.get(name) if isinstance(node, Folder) else None
            if node is None:
                raise FileNotFoundError(errno.ENOENT, "no such directory", path)
        if not isinstance(node, Folder):
            raise NotADirectoryError(errno.ENOTDIR, "not a directory", path)
        return node

    def _split(self, path: str) -> tuple[Folder, str]:
        folder, _, name = path.rpartition("/")
        return self._folder(folder), name

    def _used(self, folder: Folder | None = None) -> int:
        total = 0
        for node in (folder or self.root).entries.values():
            total += self._used(node) if isinstance(node, Folder) else _blocks(len(node.data))
        return total

    # The interface

    def make_dir(self, path: str) -> bool:
        with self._mutex:
            self._change("make_dir", path)
            folder, name = self._split(path)
            if name in folder.entries:
                return False
            folder.change({name: Folder(inode=next(self._inodes))})
            return True

    def create(self, path: str) -> tuple[str, File]:
        with self._mutex:
            self._change("create", path)
            folder, name = self._split(path)
            if name in folder.entries:
                raise FileExistsError(errno.EEXIST, "exists", path)
            node = File(inode=next(self._inodes))
            folder.change({name: node})
            return path, node

    def write(self, handle: tuple[str, File], data: Buffer) -> None:
        with self._mutex:
            path, node = handle
            upto = self._change("write", path)
            more = bytes(data)
            if self._used() + _blocks(len(node.data) + len(more)) - _blocks(len(node.data)) > self.capacity:
                node.data += more[: len(more) // 2]
                raise OSError(errno.ENOSPC, "no space left", path)
            node.data += more if upto is None else more[:upto]
            if upto is not None:
                self._dead = True
                raise Crash

    def sync(self, handle: tuple[str, File]) -> None:
        with self._mutex:
            self._change("sync", handle[0])
            handle[1].synced = bytes(handle[1].data)

    def close(self, handle: tuple[str, File]) -> None:
        self._alive()

    def replace(self, source: str, target: str) -> None:
        with self._mutex:
            self._change("replace", target)
            old, old_name = self._split(source)
            new, new_name = self._split(target)
            if old_name not in old.entries:
                raise FileNotFoundError(errno.ENOENT, "nothing there", source)
            node = old.entries[old_name]
            if old is new:
                old.change({old_name: None, new_name: node})
            else:
                new.change({new_name: node})
                old.change({old_name: None})

    def remove(self, path: str) -> None:
        with self._mutex:
            self._change("remove", path)
            folder, name = self._split(path)
            if name not in folder.entries:
                raise FileNotFoundError(errno.ENOENT, "nothing there", path)
            folder.change({name: None})

    def sync_dir(self, path: str) -> None:
        with self._mutex:
            self._change("sync_dir", path)
            folder = self._folder(path)
            folder.durable = dict(folder.entries)
            folder.changes = []

    def read(self, path: str, start: int = 0, size: int | None = None) -> bytes:
        with self._mutex:
            self._alive()
            folder, name = self._split(path)
            if not isinstance(folder.entries.get(name), File):
                raise FileNotFoundError(errno.ENOENT, "nothing there", path)
            data = folder.entries[name].data
            return bytes(data[start:] if size is None else data[start : start + size])

    @contextmanager
    def reader(self, path: str) -> Iterator[Callable[[memoryview], int]]:
        data = io.BytesIO(self.read(path))
        yield data.readinto

    def names(self, path: str) -> list[str]:
        with self._mutex:
            self._alive()
            return sorted(self._folder(path).entries)

    def entries(self, path: str) -> list[tuple[str, FileInfo]]:
        with self._mutex:
            return [(name, self._info(self._folder(path).entries[name])) for name in self.names(path)]

    def info(self, path: str) -> FileInfo | None:
        with self._mutex:
            self._alive()
            try:
                folder, name = self._split(path)
            except OSError:
                return None
            return self._info(folder.entries[name]) if name in folder.entries else None

    @staticmethod
    def _info(node: Any) -> FileInfo:
        if isinstance(node, Folder):
            return FileInfo(0, 0, node.inode, "dir")
        return FileInfo(len(node.data), _blocks(len(node.data)), node.inode, "file")

    def space(self) -> Space:
        with self._mutex:
            return Space(self.capacity, self.capacity - self._used())

    def type_name(self) -> str:
        return "memory"

    def lock(self, path: str, *, shared: bool, wait: float, note: bytes = b"") -> Any:
        with self._mutex:
            self._alive()
            folder, name = self._split(path)
            if name not in folder.entries:
                self.create(path)
            held = self._locks.setdefault(path, [])
            if held and not (shared and all(other for other, _ in held)):
                return None
            lock = (shared, object())
            held.append(lock)
            if note and not shared:
                folder.entries[name].data[:] = note
            return path, lock

    def note(self, lock: Any, note: bytes) -> None:
        with self._mutex:
            self._alive()
            folder, name = self._split(lock[0])
            if name in folder.entries:
                folder.entries[name].data[:] = note

    def unlock(self, lock: Any) -> None:
        path, token = lock
        with self._mutex:
            self._locks[path].remove(token)

    # What is left after the power went

    def after_crash(self, rng: random.Random) -> SimFS:
        """A new file system with what the disk holds; everything on it is durable."""
        return SimFS(self.capacity, _surviving(self.root, rng, {}))


def _blocks(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def _surviving(folder: Folder, rng: random.Random, done: dict[int, File]) -> Folder:
    entries = dict(folder.durable)
    mode = rng.choice(["all", "none", "some", "prefix"])
    until = rng.randrange(len(folder.changes) + 1)
    for number, names in enumerate(folder.changes):
        kept = {"all": True, "none": False, "some": rng.random() < 0.5, "prefix": number < until}[mode]
        if kept:
            _apply(entries, names)
    left: dict[str, Any] = {}
    for name, node in entries.items():
        if isinstance(node, Folder):
            left[name] = _surviving(node, rng, done)
        else:
            left[name] = done.setdefault(id(node), _content(node, rng))
    return Folder(dict(left), dict(left), inode=folder.inode)


def _content(node: File, rng: random.Random) -> File:
    synced, data = node.synced, bytes(node.data)
    if data != synced:
        mode = rng.choice(["lost", "kept", "cut", "garbled", "zeroed"])
        new = data[len(synced) :]
        if mode == "lost":
            data = synced
        elif mode == "cut":
            data = synced + new[: rng.randrange(len(new) + 1)]
        elif mode == "garbled":
            data = synced + rng.randbytes(len(new))
        elif mode == "zeroed":
            data = synced + bytes(len(new))
    return File(bytearray(data), data, node.inode)


def failing(code: int, names: tuple[str, ...] = ("create", "write", "sync", "replace", "sync_dir", "make_dir")) -> Any:
    """A fault that fails every one of these calls with an OSError."""

    def fault(name: str, path: str, number: int) -> None:
        if name in names:
            raise OSError(code, os.strerror(code), path)

    return fault
