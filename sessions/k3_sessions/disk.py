"""What the store needs of a disk: one small interface, whatever is behind it.

Paths are relative to the root ("objects/ab/cd..."), made of names the store generates.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

Buffer = bytes | bytearray | memoryview

_NETWORK = """
afs afpfs beegfs ceph cifs davfs fuse.ceph fuse.glusterfs fuse.rclone fuse.s3fs fuse.sshfs glusterfs gpfs lustre ncpfs
nfs nfs4 ocfs2 orangefs panfs smb3 smbfs
"""
NETWORK_TYPES = frozenset(_NETWORK.split())
"""File-system types whose locks or renames depend on another machine."""


@dataclass(frozen=True)
class FileInfo:
    """size: bytes of content. allocated: bytes on disk. kind "other" covers links and devices: never opened."""

    size: int
    allocated: int
    inode: int
    kind: Literal["file", "dir", "other"]


@dataclass(frozen=True)
class Space:
    """Bytes of the disk, and bytes an ordinary user can still write."""

    total: int
    free: int


class FileSystem(Protocol):
    """What the store needs. Every method may raise OSError; none interprets content."""

    where: str

    def make_dir(self, path: str) -> bool:
        """Create one directory, owner only; False if it is there already."""
        ...

    def create(self, path: str) -> Any:
        """Create a file that must not exist, owner only, and return a handle for write, sync and close."""
        ...

    def write(self, handle: Any, data: Buffer) -> None:
        """Append all of `data`."""
        ...

    def sync(self, handle: Any) -> None: ...

    def close(self, handle: Any) -> None: ...

    def replace(self, source: str, target: str) -> None:
        """Atomic rename; an existing target is replaced."""
        ...

    def remove(self, path: str) -> None: ...

    def sync_dir(self, path: str) -> None:
        """Make creations, renames and removals in this directory durable."""
        ...

    def read(self, path: str, start: int = 0, size: int | None = None) -> bytes:
        """Content from `start`, `size` bytes or all; shorter only where the file ends."""
        ...

    def reader(self, path: str) -> AbstractContextManager[Callable[[memoryview], int]]:
        """A file from front to back: each call fills memory (writable bytes) with what comes next, and returns how many
        bytes that were: possibly fewer than fit, 0 at the end.
        """
        ...

    def names(self, path: str) -> list[str]:
        """Names in a directory, sorted; "" is the root."""
        ...

    def entries(self, path: str) -> list[tuple[str, FileInfo]]:
        """Names in a directory, sorted, with what each is; names that vanish meanwhile are left out."""
        ...

    def info(self, path: str) -> FileInfo | None:
        """None if there is nothing."""
        ...

    def space(self) -> Space: ...

    def type_name(self) -> str:
        """The file system's type as the system names it, "" if unknown."""
        ...

    def lock(self, path: str, *, shared: bool, wait: float, note: bytes = b"") -> Any:
        """Kernel lock on a file (created if absent), or None if others still hold it after `wait` seconds.

        `note` is written into the file by an exclusive holder, for others to read; where the disk has no room for it,
        the lock holds all the same. The lock ends with the process.
        """
        ...

    def note(self, lock: Any, note: bytes) -> None:
        """Replace the note of a lock held alone."""
        ...

    def unlock(self, lock: Any) -> None: ...
