"""Reads the text files of words and phrases: sections `== NAME words` or `== NAME lines`, comments above the first."""

from __future__ import annotations

from pathlib import Path


def load_lists(file: str) -> dict[str, list[str]]:
    """Lists by name, from a file beside this one."""
    lists: dict[str, list[str]] = {}
    name, by_word = "", False
    for line in (Path(__file__).parent / file).read_text(encoding="utf-8").splitlines():
        if line.startswith("== "):
            name, kind = line[3:].split()
            by_word = kind == "words"
            lists[name] = []
        elif name and line:
            lists[name] += line.split() if by_word else [line]
    return lists
