"""Digests of weight files, remembered by device, inode, size and times, so that unchanged files aren't hashed again."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

import platformdirs

from k3cli.config import path_of

VERSION = 1


def cache_dir() -> Path:
    """Where derived data lives that may be deleted at any time: K3_CACHE, or the platform's cache folder."""
    return path_of(os.environ.get("K3_CACHE") or platformdirs.user_cache_dir("k3cli", appauthor=False))


def stamp(status: os.stat_result) -> str:
    """Identifies one version of one file; no path in it."""
    parts = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    return ":".join(str(part) for part in parts)


def combine(config: bytes, shards: Iterable[str]) -> str:
    """The weights digest: SHA-256 over the digests (hex) of config.json and of every shard, in name order."""
    total = hashlib.sha256(hashlib.sha256(config).hexdigest().encode())
    for digest in shards:
        total.update(digest.encode())
    return f"sha256:{total.hexdigest()}"


class DigestCache:
    """Stamp -> hex digest, in one small JSON file. An unreadable cache is an empty one: hashing again is right."""

    def __init__(self, folder: Path | None = None) -> None:
        self.path = (folder or cache_dir()) / "weights.json"
        self.known: dict[str, str] = {}
        self.changed = False
        try:
            raw = json.loads(self.path.read_bytes())
            if raw["version"] == VERSION:
                self.known = {str(key): str(value) for key, value in raw["files"].items()}
        except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
            self.known = {}

    def get(self, status: os.stat_result) -> str | None:
        return self.known.get(stamp(status))

    def put(self, status: os.stat_result, digest: str) -> None:
        self.known[stamp(status)] = digest
        self.changed = True

    def save(self) -> str | None:
        """Replaces the file atomically. Returns why it could not, or None."""
        body = json.dumps({"version": VERSION, "files": self.known}, indent=1)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            handle, temporary = tempfile.mkstemp(dir=self.path.parent, prefix=".weights-")
            try:
                with os.fdopen(handle, "w") as stream:
                    stream.write(body)
                os.replace(temporary, self.path)
            except OSError:
                os.unlink(temporary)
                raise
        except OSError as error:
            return f"weights digest not remembered in {self.path}: {error.strerror}"
        return None
