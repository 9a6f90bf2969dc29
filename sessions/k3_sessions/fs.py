"""Every file-system call of the store, in one class, so that a test can fail or crash each of them.

Paths are walked with directory descriptors and no link is followed, so nothing below the root can lead outside it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from k3_sessions.disk import Buffer, FileInfo, Space
from k3_sessions.errors import FULL

_DIR = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
_PAUSE = 0.01  # seconds between two tries for a lock


class RealFS:
    """`FileSystem` below the folder `root`. The root itself may be reached through links; nothing under it may."""

    def __init__(self, root: str | os.PathLike[str], *, create: bool = True) -> None:
        path = Path(root).expanduser().absolute()
        if create:
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                path.mkdir(mode=0o700)
            except FileExistsError:
                pass
            else:
                _sync_directory(path.parent)
        self.where = str(path)
        self._root = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def __del__(self) -> None:
        root = getattr(self, "_root", None)
        if root is not None:
            os.close(root)

    @contextmanager
    def _parent(self, path: str) -> Iterator[tuple[int, str]]:
        """Descriptor of the directory that holds `path`, and the last name."""
        *folders, name = path.split("/")
        if not name or "." in folders or ".." in (*folders, name):
            raise OSError(errno.EINVAL, "not a path inside the store", path)
        current = self._root
        try:
            for folder in folders:
                deeper = os.open(folder, _DIR, dir_fd=current)
                if current != self._root:
                    os.close(current)
                current = deeper
            yield current, name
        except OSError as error:
            if error.filename is not None:
                error.filename = path
            raise
        finally:
            if current != self._root:
                os.close(current)

    def make_dir(self, path: str) -> bool:
        with self._parent(path) as (folder, name):
            try:
                os.mkdir(name, 0o700, dir_fd=folder)
            except FileExistsError:
                os.close(os.open(name, _DIR, dir_fd=folder))
                return False
            return True

    def create(self, path: str) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with self._parent(path) as (folder, name):
            return os.open(name, flags, 0o600, dir_fd=folder)

    def write(self, handle: int, data: Buffer) -> None:
        view = memoryview(data).cast("B")
        while len(view):
            view = view[os.write(handle, view) :]

    def sync(self, handle: int) -> None:
        os.fsync(handle)

    def close(self, handle: int) -> None:
        os.close(handle)

    def replace(self, source: str, target: str) -> None:
        with self._parent(source) as (old, old_name), self._parent(target) as (new, new_name):
            os.rename(old_name, new_name, src_dir_fd=old, dst_dir_fd=new)

    def place(self, source: str, target: str) -> None:
        """Rename that replaces nothing: FileExistsError where `target` is, even if it appeared only now."""
        with self._parent(source) as (old, old_name), self._parent(target) as (new, new_name):
            try:
                os.link(old_name, new_name, src_dir_fd=old, dst_dir_fd=new, follow_symlinks=False)
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                # A file system without hard links: the name is taken first, then what was taken is replaced.
                os.close(os.open(new_name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=new))
                os.rename(old_name, new_name, src_dir_fd=old, dst_dir_fd=new)
                return
            os.unlink(old_name, dir_fd=old)

    def remove(self, path: str) -> None:
        with self._parent(path) as (folder, name):
            os.unlink(name, dir_fd=folder)

    @contextmanager
    def _directory(self, path: str) -> Iterator[int]:
        if not path:
            yield self._root
            return
        with self._parent(path) as (folder, name):
            directory = os.open(name, _DIR, dir_fd=folder)
        try:
            yield directory
        finally:
            os.close(directory)

    def sync_dir(self, path: str) -> None:
        with self._directory(path) as directory:
            os.fsync(directory)

    @contextmanager
    def _opened(self, path: str) -> Iterator[tuple[int, int]]:
        """Descriptor and size of a regular file."""
        with self._parent(path) as (folder, name):
            handle = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=folder)
        try:
            found = os.fstat(handle)
            if not stat.S_ISREG(found.st_mode):
                raise OSError(errno.EINVAL, "not a regular file", path)
            yield handle, found.st_size
        finally:
            os.close(handle)

    def read(self, path: str, start: int = 0, size: int | None = None) -> bytes:
        with self._opened(path) as (handle, length):
            wanted = max(0, length - start) if size is None else size
            # One piece in all but odd cases: large reads may come back short.
            data = os.pread(handle, wanted, start)
            while len(data) < wanted and (more := os.pread(handle, wanted - len(data), start + len(data))):
                data += more
            return data

    @contextmanager
    def reader(self, path: str) -> Iterator[Callable[[memoryview], int]]:
        with self._opened(path) as (handle, _):
            yield lambda out: os.readv(handle, [out])

    def names(self, path: str) -> list[str]:
        with self._directory(path) as directory:
            return sorted(os.listdir(directory))

    def entries(self, path: str) -> list[tuple[str, FileInfo]]:
        found: list[tuple[str, FileInfo]] = []
        with self._directory(path) as directory:
            for name in sorted(os.listdir(directory)):
                try:
                    found.append((name, _info(os.stat(name, dir_fd=directory, follow_symlinks=False))))
                except FileNotFoundError:
                    continue
        return found

    def info(self, path: str) -> FileInfo | None:
        try:
            with self._parent(path) as (folder, name):
                return _info(os.stat(name, dir_fd=folder, follow_symlinks=False))
        except (FileNotFoundError, NotADirectoryError):
            return None

    def space(self) -> Space:
        found = os.fstatvfs(self._root)
        return Space(found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize)

    def type_name(self) -> str:
        device = os.fstat(self._root).st_dev
        wanted = f"{os.major(device)}:{os.minor(device)}"
        try:
            lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return ""
        for line in lines:
            before, _, after = line.partition(" - ")
            if before.split()[2:3] == [wanted]:
                return after.split()[0]
        return ""

    def lock(self, path: str, *, shared: bool, wait: float, note: bytes = b"") -> int | None:
        deadline = time.monotonic() + wait
        while True:
            handle = self._open_lock(path, readable_only=not note)
            try:
                fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                os.close(handle)
                if time.monotonic() >= deadline:
                    return None
                time.sleep(_PAUSE)
                continue
            except OSError:
                os.close(handle)
                raise
            # A removed session takes its lock file with it: a lock on a file nobody else can find is no lock.
            now = self.info(path)
            if now is None or now.inode != os.fstat(handle).st_ino:
                os.close(handle)
                continue
            if note and not shared:
                self._begin_note(handle, note)
            return handle

    def _open_lock(self, path: str, *, readable_only: bool) -> int:
        """A lock without a note also works on a disk that has become read-only."""
        flags = os.O_NOFOLLOW | os.O_CLOEXEC
        with self._parent(path) as (folder, name):
            try:
                return os.open(name, flags | os.O_RDWR | os.O_CREAT, 0o600, dir_fd=folder)
            except OSError as error:
                if not readable_only or error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):
                    raise
                return os.open(name, flags | os.O_RDONLY, dir_fd=folder)

    def _begin_note(self, lock: int, note: bytes) -> None:
        """The note of a lock just taken. A full disk costs the note, not the lock: `rm` has to work there."""
        try:
            self.note(lock, note)
        except OSError as error:
            if error.errno not in FULL:
                os.close(lock)
                raise

    def note(self, lock: int, note: bytes) -> None:
        os.ftruncate(lock, 0)
        os.pwrite(lock, note, 0)

    def unlock(self, lock: int) -> None:
        os.close(lock)


def _info(found: os.stat_result) -> FileInfo:
    kind: Literal["file", "dir", "other"] = "other"
    if stat.S_ISREG(found.st_mode):
        kind = "file"
    elif stat.S_ISDIR(found.st_mode):
        kind = "dir"
    return FileInfo(found.st_size, found.st_blocks * 512, found.st_ino, kind)


def _sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
