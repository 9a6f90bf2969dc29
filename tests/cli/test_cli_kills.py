"""kill -9 of real commands at their file-system calls: what was told as done stays, and the same command, run again,
ends well. K3_LONG=1 takes every call; else some of them.
"""

from __future__ import annotations

import json
import os
import random
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import TerminalSession

LONG = os.environ.get("K3_LONG") == "1"
HERE = Path(__file__).resolve().parent


class Killer:
    """Runs commands in processes of their own; see kill_server.py."""

    def __init__(self, env: dict[str, str]) -> None:
        self._server = subprocess.Popen(
            [sys.executable, str(HERE / "kill_server.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
        )

    def __call__(self, home: Path, *args: str, **how: Any) -> dict[str, Any]:
        env = {"K3_HOME": str(home), "K3_CACHE": str(home.parent / "cache"), "K3_FREE_FLOOR": "0", **how.pop("env", {})}
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps({"args": args, "env": env, **how}) + "\n")
        self._server.stdin.flush()
        found: dict[str, Any] = json.loads(self._server.stdout.readline())
        return found

    def good(self, home: Path, *args: str, **how: Any) -> dict[str, Any]:
        found = self(home, *args, **how)
        assert found["code"] == 0, (args, found)
        return found

    def turns(self, home: Path, name: str) -> list[str]:
        """Turn ids of a session; [] if there is no such session."""
        found = self(home, "log", name, "--json")
        assert found["code"] in (0, 6), found
        events = [json.loads(line) for line in found["out"].splitlines()]
        return [event["id"] for event in events if event["type"] == "turn"]

    def close(self) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait()


@pytest.fixture(scope="module")
def k3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Killer]:
    path = os.pathsep.join(filter(None, sys.path))
    env = {key: value for key, value in os.environ.items() if not key.startswith("K3_")}
    killer = Killer({**env, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"})
    yield killer
    killer.close()


@pytest.fixture(scope="module")
def history(k3: Killer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home: a with five turns, b a fork of it with one more, c a session of its own."""
    home = tmp_path_factory.mktemp("history") / "home"
    for number in range(5):
        k3.good(home, "chat", "-s", "a", "-p", f"{number} " + "word " * 40)
    k3.good(home, "fork", "a", "b", "--at", "3", "-p", "another way")
    k3.good(home, "chat", "-s", "c", "-p", "alone")
    return home


def points(calls: int, some: int = 4) -> list[int]:
    """Calls to die at: all, or some of them, the first and the last among them."""
    if LONG or calls <= some:
        return list(range(1, calls + 1))
    return sorted({1 + (calls - 1) * i // (some - 1) for i in range(some)})


def each_death(k3: Killer, home: Path, tmp_path: Path, *args: str) -> Iterator[Path]:
    """A copy of `home` for each call of the command, in which it died there."""
    whole = tmp_path / "whole"
    shutil.copytree(home, whole)
    calls = k3.good(whole, *args)["calls"]
    assert calls > 3
    for at in points(calls):
        for half in (False, True) if LONG else (at % 2 == 0,):
            copy = tmp_path / f"died-{at}-{half}"
            shutil.copytree(home, copy)
            assert k3(copy, *args, at=at, half=half)["code"] == -9, (at, half)
            yield copy
            shutil.rmtree(copy)


def test_gc_dies_anywhere(k3: Killer, history: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    shutil.copytree(history, home)
    before = {name: k3.turns(home, name) for name in "ac"}
    k3.good(home, "chat", "-s", "d", "-p", "to be removed")
    last = k3.good(home, "rm", "d", env={"K3_HOME": str(shutil.copytree(home, tmp_path / "rm"))})["calls"]
    assert k3(home, "rm", "d", at=last - 5)["code"] == -9  # its ref is gone, its objects are not
    (home / "sessions/objects/.tmp-0123").write_bytes(b"left behind")
    expected = k3.good(home, "gc", "--dry-run")["out"]
    assert expected.count("\n") > 3
    for died in each_death(k3, home, tmp_path, "gc"):
        k3.good(died, "verify")
        assert {name: k3.turns(died, name) for name in "ac"} == before
        k3.good(died, "gc")
        assert json.loads(k3.good(died, "gc", "--dry-run", "--json")["out"].splitlines()[-1])["files"] == 0
        k3.good(died, "resume", "a", "-p", "after")
        k3.good(died, "replay", "c")


def spoil(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at % len(data)] ^= 0x10
    path.write_bytes(data)


def objects_of(home: Path, kind: int) -> list[Path]:
    found = (path for path in (home / "sessions/objects").rglob("*") if path.is_file())
    return sorted(path for path in found if path.read_bytes()[10] == kind)


def sessions_of(k3: Killer, home: Path) -> dict[str, list[str]]:
    """Turns of each session. What recovered sessions are called is told by their turns."""
    events = [json.loads(line) for line in k3.good(home, "ls", "--json")["out"].splitlines()]
    return {e["name"]: k3.turns(home, e["name"]) for e in events if e["type"] == "session_info"}


@pytest.mark.parametrize("damage", ["turn", "page", "ref", "all"] if LONG else ["turn", "all"])
def test_repair_dies_anywhere(k3: Killer, history: Path, tmp_path: Path, damage: str) -> None:
    home = tmp_path / "home"
    shutil.copytree(history, home)
    folder = home / "sessions"
    if damage in ("turn", "all"):
        turn = k3.turns(home, "a")[3]
        spoil(folder / "objects" / turn[:2] / turn[2:], -1)
    if damage in ("page", "all"):
        for path in objects_of(home, 3)[::2]:
            spoil(path, -1)
    if damage in ("ref", "all"):
        for path in sorted((folder / "refs").iterdir())[:2]:
            spoil(path, path.stat().st_size - 20)
    if damage == "all":
        spoil(folder / "FORMAT", 5)
    whole = tmp_path / "mended"
    shutil.copytree(home, whole)
    k3.good(whole, "repair")
    expected = sessions_of(k3, whole)
    assert k3(home, "verify")["code"] == 8
    for died in each_death(k3, home, tmp_path, "repair"):
        k3.good(died, "repair")
        k3.good(died, "verify")
        found = sessions_of(k3, died)
        turns = {turn for session in found.values() for turn in session}
        assert turns == {turn for session in expected.values() for turn in session}
        assert {name: found.get(name) for name in "abc"} == {name: expected.get(name) for name in "abc"}
        k3.good(died, "gc")
        for name in found if LONG else "c":
            k3.good(died, "resume", name, "-p", "after")


def test_export_dies_anywhere(k3: Killer, history: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    shutil.copytree(history, home)
    file = tmp_path / "a.k3s"
    calls = k3.good(home, "export", "a", str(file))["calls"]
    want = file.read_bytes()
    for at in points(calls):
        file.unlink(missing_ok=True)
        assert k3(home, "export", "a", str(file), at=at, half=at % 2 == 0)["code"] == -9
        assert not file.exists() or file.read_bytes() == want
        file.unlink(missing_ok=True)
        k3.good(home, "export", "a", str(file))
        assert file.read_bytes() == want
        k3.good(home, "verify")


@pytest.mark.parametrize("into", ["empty", "related"])
def test_import_dies_anywhere(k3: Killer, history: Path, tmp_path: Path, into: str) -> None:
    file = tmp_path / "a.k3s"
    k3.good(history, "export", "a", str(file))
    home = tmp_path / "home"
    if into == "empty":
        home.mkdir()
    else:
        shutil.copytree(history, home)
        k3.good(home, "rm", "a")
    before = k3.turns(home, "b")
    want = k3.turns(history, "a")
    for died in each_death(k3, home, tmp_path, "import", str(file)):
        found = k3.turns(died, "a")
        assert found in ([], want)
        if not found:
            k3.good(died, "import", str(file))
        k3.good(died, "verify")
        assert (k3.turns(died, "a"), k3.turns(died, "b")) == (want, before)
        again = tmp_path / "again.k3s"
        k3.good(died, "export", "a", str(again))
        assert again.read_bytes() == file.read_bytes()
        again.unlink()
        k3.good(died, "resume", "a", "-p", "after")
        k3.good(died, "gc")
        assert json.loads(k3.good(died, "gc", "-n", "--json")["out"].splitlines()[-1])["files"] == 0


def test_prompts_die_anywhere(k3: Killer, tmp_path: Path) -> None:
    """A script of prompts, each in a process of its own, most of which die: the session is what was told last."""
    rng = random.Random(7)
    home = tmp_path / "home"
    acknowledged = k3_turns = 0
    last = ""
    calls = k3.good(home, "chat", "-s", "a", "-p", "first")["calls"]
    before = k3.turns(home, "a")
    deaths = 0
    for number in range(200 if LONG else 12):
        words = rng.choice([f"m{number}", f"slow {rng.randint(3, 20)}", "x" * rng.randint(1, 300)])
        command = ["chat", "-s", "a", "-p", words] if number % 2 else ["resume", "a", "-p", words]
        how: dict[str, Any] = {"at": rng.randint(1, calls + 3), "half": rng.random() < 0.5}
        if rng.random() < 0.3:
            how = {"after": rng.uniform(0.01, 0.6)}
        done = k3(home, *command, **how)
        assert done["code"] in (0, -9), done
        deaths += done["code"] == -9
        told = re.findall(r"saved a turn ([0-9a-f]+)", done["err"])
        now = k3.turns(home, "a")
        assert now[: len(before)] == before, "what was acknowledged earlier is gone"
        assert len(now) - len(before) <= 1
        if told:
            assert now[-1].startswith(told[-1])
            acknowledged += 1
        last, before, k3_turns = now[-1], now, len(now)
        if number % 10 == 9:
            k3.good(home, "verify")
    assert deaths
    assert acknowledged or not LONG
    assert k3_turns == len(before)
    k3.good(home, "replay", "a")
    k3.good(home, "resume", "a", "-p", "after")
    assert k3.turns(home, "a")[-2] == last
    k3.good(home, "gc")
    k3.good(home, "verify")


@pytest.mark.skipif(not LONG, reason="K3_LONG=1 runs it: ten chats with the shipped model")
def test_a_chat_of_the_shipped_model_dies_anywhere(process_env: dict[str, str]) -> None:
    rng = random.Random(11)
    acknowledged: list[str] = []

    def run(*args: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "k3cli", *args]
        return subprocess.run(command, env=process_env, capture_output=True, text=True)

    for number in range(10):
        chat = TerminalSession(["-m", "k3cli", "chat", "-s", "a"], process_env)
        seen, looked, end = "", 0, time.monotonic() + rng.uniform(6, 20)
        while (left := end - time.monotonic()) > 0:
            if not select.select([chat.fd], [], [], min(left, 0.05))[0]:
                continue
            new = os.read(chat.fd, 65536).decode(errors="replace")
            seen += new
            if "\x1b[6n" in new:  # where is the cursor?
                chat.send("\x1b[1;1R")
            if "k3>" in seen[looked:]:
                looked = len(seen)
                chat.send(f"Remember: the port is {number}.\r")
        os.kill(chat.pid, signal.SIGKILL)
        # What the terminal still holds was told, too.
        with suppress(OSError):
            while select.select([chat.fd], [], [], 0.1)[0] and (more := os.read(chat.fd, 65536)):
                seen += more.decode(errors="replace")
        chat.wait()
        os.close(chat.fd)
        acknowledged += re.findall(r"saved a turn ([0-9a-f]{10})", seen)
        assert "error" not in seen
        listed = [json.loads(line) for line in run("log", "a", "--json").stdout.splitlines()]
        ids = [event["id"] for event in listed if event["type"] == "turn"]
        assert all(any(turn.startswith(told) for turn in ids) for told in acknowledged)
        assert run("verify").returncode == 0
    assert acknowledged
    assert run("resume", "a", "-p", "Which port?").returncode == 0
    assert run("replay", "a").returncode == 0
    assert run("gc").returncode == 0
