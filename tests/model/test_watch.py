"""Rank 0's watch over a host that may sit in a driver: when it ends sums, when it doesn't, and its last resort."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time

import pytest

from k3cli.errors import K3Error
from k3cli.model import watch
from k3cli.model.watch import Watch


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "LOOK", 0.01)
    monkeypatch.setattr(watch, "GRACE", 0.1)
    monkeypatch.setattr(watch, "LAST", 60.0)


def test_a_host_that_sits_in_the_driver_is_freed():
    freed, began = threading.Event(), time.monotonic()
    found = Watch(lambda: True, freed.set, K3Error)
    assert freed.wait(5)
    assert time.monotonic() - began >= 0.1
    assert found.aborted
    found.end()


def test_who_notices_by_himself_is_left_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(watch, "GRACE", 1.0)
    freed = threading.Event()
    found = Watch(lambda: True, freed.set, K3Error)
    time.sleep(0.05)
    found.end()
    assert not freed.wait(1.2)
    assert not found.aborted


def test_nothing_is_ended_while_the_others_stay_or_are_not_needed():
    lost, freed = threading.Event(), threading.Event()
    found = Watch(lost.is_set, freed.set, K3Error)
    assert not freed.wait(0.2)
    found.busy = lambda: False
    lost.set()
    assert not freed.wait(0.2)
    found.busy = lambda: True
    assert freed.wait(5)
    found.end()


@pytest.mark.parametrize("command_line", [False, True])
def test_a_host_that_does_not_come_back_is_ended_with_a_line(command_line: bool):
    """With --json the last line of stdout says so, too."""
    program = (
        "import sys, time\nfrom k3cli.errors import FitError\nfrom k3cli.model import watch\n"
        "watch.GRACE, watch.LAST = 0.1, 0.3\n"
        "def work(*_):\n"
        "    watch.Watch(lambda: True, lambda: time.sleep(60), lambda: FitError('rank 1: memory ran out'))\n"
        "    time.sleep(60)\n"
    )
    if command_line:
        program += "from k3cli import main\nsys.argv[1:] = ['ls', '--json']\nmain._run = work\nmain.main()\n"
    else:
        program += "work()\n"
    path = ["-c", f"import sys\nsys.path[:0] = {sys.path!r}\n{program}"]
    ended = subprocess.run([sys.executable, *path], capture_output=True, text=True, timeout=30)
    assert ended.returncode == 4
    assert ended.stderr == "k3: error: rank 1: memory ran out\n"
    events = [json.loads(line) for line in ended.stdout.splitlines()]
    assert [(event["type"], event["exit_code"]) for event in events] == [("error", 4)] * command_line
