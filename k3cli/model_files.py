"""Small files of a model's folder, read whole: regular ones of bounded size, objects that say each thing once.

A folder may come from anywhere, half fetched or made by hand: whatever lies in it ends in one line, never in a wait, in
memory taken without bounds, or in a value that two readers would read differently.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from k3cli.errors import ModelError

LARGEST = 16 << 20
"""Bytes of a file that is read whole: its values may take twenty times as much memory."""
LARGEST_INDEX = 256 << 20
"""The same of a checkpoint's index: one of K3's half a million tensors takes 58 MB."""


def lies_there(file: Path) -> bool:
    """Whether the folder has something of this name, be it a link to nothing. A folder that won't tell may have it."""
    try:
        os.lstat(file)
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a name that no file can have
        return False
    except OSError:
        pass  # whoever reads it will say why not
    return True


def read_file(file: Path, expected: str, do: str | None = None, *, most: int = LARGEST) -> bytes:
    """The bytes of a file. Raises ModelError for one that is absent, unreadable, no regular file, or has more than
    `most` bytes. expected, do: see K3Error."""
    try:
        status = file.stat()
        if not stat.S_ISREG(status.st_mode):  # opening a pipe would wait for its writer
            kind = "a folder" if stat.S_ISDIR(status.st_mode) else "no regular file"
            raise ModelError(f"{file} is {kind}", expected, do)
        if status.st_size > most:
            raise ModelError(f"{file} has {status.st_size:,} bytes", f"{expected}, at most {most:,} bytes", do)
        return file.read_bytes()
    except OSError as problem:
        raise ModelError(f"{file} cannot be read: {problem.strerror}", expected, do) from None


def read_object(file: Path, expected: str, do: str | None = None, *, most: int = LARGEST) -> dict[str, Any]:
    """The JSON object that a file holds. Raises ModelError as `read_file` and `parse_object` do."""
    return parse_object(read_file(file, expected, do, most=most), str(file), expected, do)


def parse_object(text: bytes, name: str, expected: str, do: str | None = None) -> dict[str, Any]:
    """A JSON object. Raises ModelError for anything else, and for a key that one object in it has twice.

    name: what messages call the text; expected, do: see K3Error.
    """
    try:
        found = json.loads(text, object_pairs_hook=_once)
    except _TwiceError as problem:
        raise ModelError(f"{name} has the key {problem} twice in one object", expected, do) from None
    except UnicodeDecodeError as problem:
        raise ModelError(f"{name} is not JSON: byte {problem.start} is no UTF-8", expected, do) from None
    except (ValueError, RecursionError) as problem:
        why = "nested too deep" if isinstance(problem, RecursionError) else problem
        raise ModelError(f"{name} is not JSON: {why}", expected, do) from None
    if not isinstance(found, dict):
        raise ModelError(f"{name} holds no object but {'null' if found is None else shown(found)}", expected, do)
    return found


class _TwiceError(Exception):
    """A key that an object has twice; JSON does not say which one counts."""


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [key for key, _ in pairs]
        raise _TwiceError(shown(next(key for key in found if names.count(key) > 1)))
    return found


def shown(value: Any) -> str:
    """A value as messages show it."""
    try:
        return "missing" if value is None else json.dumps(value)[:80]
    except RecursionError:
        return "nested too deep to be shown"
