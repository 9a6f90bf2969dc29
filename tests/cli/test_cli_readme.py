"""The note beside the commands names what the code has: exit codes, events, settings."""

from __future__ import annotations

import re

import pytest

from k3cli.config import ENV_ONLY, KEYS
from k3cli.engine import events as ev
from k3cli.errors import Exit


@pytest.fixture(scope="module")
def note(repo_root) -> str:
    return (repo_root / "k3cli" / "commands" / "README.md").read_text()


def section(note: str, title: str) -> str:
    return note.split(f"## {title}\n")[1].split("\n## ")[0]


def test_exit_codes(note) -> None:
    rows = re.findall(r"^\| (\d+) \| (\w+) \|", section(note, "Exit codes"), re.MULTILINE)
    assert {name: int(code) for code, name in rows} == {code.name: int(code) for code in Exit}


def test_events(note, repo_root) -> None:
    told = {
        name for row in re.findall(r"^\| (`.*?) \|", section(note, "Events"), re.MULTILINE) for name in row.split("`")
    }
    known = {kind.type for kind in ev.Event.__subclasses__()}
    for file in (repo_root / "k3cli" / "commands").glob("*.py"):
        known |= set(re.findall(r"\.event\(\s*\"(\w+)\"", file.read_text()))
    told = {name for name in told if re.fullmatch(r"\w+", name)}
    assert told == known


def test_settings(note) -> None:
    text = section(note, "Settings")
    rows = re.findall(r"^\| (`.*?) \|", text, re.MULTILINE)
    assert [key for row in rows for key in re.findall(r"`(\w+)`", row)] == list(KEYS)
    assert set(re.findall(r"`(K3_\w+)`", text.split("Environment only")[1])) == set(ENV_ONLY)
