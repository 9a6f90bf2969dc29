"""Running `k3 bench` in this process."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator

import pytest

from k3cli.main import main


@pytest.fixture
def bench(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., tuple[int, str, str]]]:
    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["k3", "bench", *arguments])
        code = main()
        out, err = capsys.readouterr()
        return int(code), out, err

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield run
    for number, handler in before.items():
        signal.signal(number, handler)
