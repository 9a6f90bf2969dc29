"""Running `k3` in this process or in one of its own, with a scripted model and a private home."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from k3cli.commands import runtime
from k3cli.config import NANO
from k3cli.main import main

HERE = Path(__file__).resolve().parent


@dataclass
class Result:
    code: int
    out: str
    err: str

    @property
    def events(self) -> list[dict[str, Any]]:
        """stdout as NDJSON; every line must be an object with `v` and `type`."""
        found = [json.loads(line) for line in self.out.splitlines()]
        assert all(event["v"] == 1 and isinstance(event["type"], str) for event in found)
        return found

    def one(self, kind: str) -> dict[str, Any]:
        (event,) = [event for event in self.events if event["type"] == kind]
        return event


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(scope="session")
def scripted() -> ModuleType:
    """The module with the scripted model; tests have no package, so it is loaded from its file."""
    spec = importlib.util.spec_from_file_location("scripted_k3", HERE / "scripted_k3.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, private_home: Path) -> None:
    """Only the K3_ variables of the test itself; no free-space floor, as test disks may be nearly full."""
    for name in list(os.environ):
        if name.startswith("K3_") and name not in ("K3_HOME", "K3_CACHE"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("K3_FREE_FLOOR", "0")


@pytest.fixture
def k3(
    scripted: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., Result]]:
    """Run the command line in this process. stdin: text that is piped in; None is a terminal nobody types at."""
    from k3cli.engine.engine import Engine

    monkeypatch.setattr(Engine, "load", staticmethod(scripted.load))
    # the scripted model has no folder to look into
    monkeypatch.setattr(runtime, "recommended_sampling", lambda _ref: {})
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}

    def run(*args: str, stdin: str | bytes | None = None, **load: Any) -> Result:
        if load:
            monkeypatch.setattr(Engine, "load", staticmethod(lambda ref, **_: scripted.load(ref, **load)))
        raw = stdin.encode() if isinstance(stdin, str) else stdin
        monkeypatch.setattr(sys, "stdin", Terminal() if raw is None else io.TextIOWrapper(io.BytesIO(raw)))
        monkeypatch.setattr(sys, "argv", ["k3", *args])
        capsys.readouterr()
        code = main()
        captured = capsys.readouterr()
        return Result(int(code), captured.out, captured.err)

    yield run
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def splittable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """k3-nano's tokenizer over a random model of four heads, which two and four ranks can share."""
    from k3cli.model.random_weights import write_random_checkpoint

    raw = json.loads((NANO / "config.json").read_text())
    text = raw["text_config"]
    text |= {"num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 3, "num_experts": 8}
    text |= {"moe_intermediate_size": 128}
    text["linear_attn_config"] |= {"num_heads": 4, "full_attn_layers": [3], "kda_layers": [1, 2]}
    folder = write_random_checkpoint(tmp_path_factory.mktemp("model") / "four", raw, seed=3)
    for name in ("tiktoken.model", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(NANO / name, folder / name)
    return folder


@pytest.fixture
def process_env() -> dict[str, str]:
    path = os.pathsep.join(filter(None, sys.path))  # what this process can import, installed or not
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}


@pytest.fixture
def spawn(process_env: dict[str, str]) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start `k3` with the scripted model as a process of its own, all three streams piped unless told otherwise."""
    started: list[subprocess.Popen[str]] = []

    def start(*args: str, env: dict[str, str] | None = None, **options: Any) -> subprocess.Popen[str]:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = subprocess.Popen(
            [sys.executable, str(HERE / "scripted_k3.py"), *args],
            env={**process_env, **(env or {})},
            text=True,
            **{**pipes, **options},
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


class TerminalSession:
    """`k3` at the other end of a pseudo-terminal."""

    def __init__(self, args: list[str], env: dict[str, str]) -> None:
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.execve(sys.executable, [sys.executable, *args], env)
        self.seen = ""

    def expect(self, pattern: str, timeout: float = 60) -> str:
        """Read until a pattern appears in what is new; returns the new text."""
        end = time.monotonic() + timeout
        while not re.search(pattern, self.seen):
            ready, _, _ = select.select([self.fd], [], [], max(0, end - time.monotonic()))
            assert ready, f"{pattern!r} did not come; got {self.seen[-2000:]!r}"
            try:
                data = os.read(self.fd, 65536)
            except OSError:
                data = b""
            assert data, f"{pattern!r} did not come before the end; got {self.seen[-2000:]!r}"
            self.seen += data.decode(errors="replace")
            if "\x1b[6n" in self.seen:  # prompt_toolkit asks where the cursor is; a terminal answers
                self.seen = self.seen.replace("\x1b[6n", "")
                os.write(self.fd, b"\x1b[1;1R")
        found = self.seen
        self.seen = ""
        return found

    def send(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def close(self) -> int:
        """Read to the end and return the exit code."""
        try:
            while select.select([self.fd], [], [], 60)[0] and os.read(self.fd, 65536):
                pass
        except OSError:
            pass  # how Linux says that the other end is closed
        return self.wait()

    def hang_up(self) -> int:
        """The terminal goes away; returns the exit code."""
        os.close(self.fd)
        self.fd = -1
        return self.wait()

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def end(self) -> None:
        """Whatever it does, it stops."""
        try:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        except (ProcessLookupError, ChildProcessError):
            pass
        if self.fd >= 0:
            os.close(self.fd)


@pytest.fixture
def terminal(process_env: dict[str, str], scripted: ModuleType) -> Iterator[Callable[..., TerminalSession]]:
    """Start `k3` with the scripted model on a pseudo-terminal."""
    made: list[TerminalSession] = []

    def start(*args: str, env: dict[str, str] | None = None) -> TerminalSession:
        assert scripted.__file__ is not None
        made.append(TerminalSession([scripted.__file__, *args], {**process_env, "TERM": "xterm", **(env or {})}))
        return made[-1]

    yield start
    for session in made:
        session.end()
