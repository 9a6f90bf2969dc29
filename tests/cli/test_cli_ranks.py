"""`--gpus` as processes, on a CPU and where two GPUs are: turns with two ranks and with one; nothing stays."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from threading import Timer

import pytest
import torch

from k3cli.bench.run import subject
from k3cli.commands.plan import configuration
from k3cli.config import NANO, load_settings
from k3cli.engine.engine import Engine
from k3cli.errors import UsageError
from k3cli.main import main

LONG = pytest.mark.skipif(os.environ.get("K3_LONG") != "1", reason="slow: K3_LONG=1")
ENDLESS = ("-s", "k", "-p", "hello", "--max-tokens", "3000", "-t", "1", "--seed", "9", "--spec", "off", "--json")
"""Two thousand tokens of a random model; with another seed the first one may end the answer."""
PROC = pytest.mark.skipif(not Path("/proc/self/stat").is_file(), reason="reads /proc")


@pytest.fixture(params=["cpu", *(["cuda"] if torch.cuda.device_count() > 1 else [])])
def model(request: pytest.FixtureRequest, splittable: Path) -> tuple[str, ...]:
    """Arguments: the model and where it runs."""
    return "-m", str(splittable), "--device", request.param, "--dtype", "float32"


def start(*words: str, rank: tuple[str, str] | None = None, **more) -> subprocess.Popen[str]:
    """rank: (number, port) of one of two that this program starts, as torchrun does."""
    environment = dict(os.environ, OMP_NUM_THREADS="1", PYTHONFAULTHANDLER="1")
    environment |= {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    if rank is not None:
        environment |= {"RANK": rank[0], "LOCAL_RANK": rank[0], "WORLD_SIZE": "2", "MASTER_PORT": rank[1]}
        environment |= {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
        if "cuda" not in words:  # ranks above 0 read no command line
            environment["CUDA_VISIBLE_DEVICES"] = ""
    command = [sys.executable, "-m", "k3cli", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, **more)


def ended(process: subprocess.Popen[str], seconds: float = 60) -> tuple[str, str]:
    """(stdout, stderr) of a command that ends in time; of one that doesn't, where all of its threads are."""
    try:
        return process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGABRT)
        _, err = process.communicate(timeout=10)
        pytest.fail(f"{process.args} did not end in {seconds} s:\n{err}")


def said(*words: str) -> list[dict]:
    process = start(*words, "--json", "--max-tokens", "6", "-t", "0")
    out, err = ended(process)
    assert process.returncode == 0, err
    return [json.loads(line) for line in out.splitlines()]


def answer(events: list[dict]) -> str:
    return "".join(event["text"] for event in events if event["type"] in ("text", "thinking"))


def descendants(pid: int) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int((folder / "stat").read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(folder.name))
    return found


def running(pid: int) -> bool:
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_session_goes_from_two_ranks_to_one(model: tuple[str, ...]):
    two = said("chat", *model, "-s", "a", "-p", "hello", "--gpus", "2")
    one = said("chat", *model, "-s", "b", "-p", "hello")
    assert answer(two) == answer(one) != ""
    back = said("resume", "a", *model, "-p", "go on")
    assert answer(back) != ""
    notices = [event["message"] for event in back if event["type"] == "notice"]
    # On GPUs the half of a layer may be too narrow for a kernel that takes the whole: then those differ, too.
    assert any(re.search(r"\branks 2\b.*; now .*\branks 1\b", line) for line in notices), notices
    counts = next(event for event in back if event["type"] == "saved")
    assert counts["replayed"] == 0
    assert counts["reused"] > 50
    if "cuda" in model:
        assert answer(said("resume", "a", *model[:3], "cpu", "-p", "go on")) != ""


def test_two_ranks_go_on_where_one_stopped_and_drafts_change_nothing(model: tuple[str, ...]):
    if "cpu" in model:
        pytest.skip("as test_ranks.py and test_speculation_ranks.py do, in fewer processes")
    said("chat", *model, "-s", "a", "-p", "hello")
    more = ("-p", "go on", "--gpus", "2")
    assert answer(said("resume", "a", *model, *more, "--spec", "off")) != ""
    drafted, plain = (said("chat", *model, *more, "--spec", spec) for spec in ("suffix", "off"))
    assert answer(drafted) == answer(plain) != ""


@pytest.mark.parametrize("spec", ["both", pytest.param("dspark", marks=LONG), pytest.param("auto", marks=LONG)])
def test_a_draft_model_drafts_for_two_ranks(spec: str):
    """That no token differs is tests/engine/test_speculation_ranks.py."""
    events = said("chat", "-m", str(NANO), "--device", "cpu", "--gpus", "2", "--spec", spec, "-p", "hello")
    (told,) = [event for event in events if event["type"] == "speculation"]
    assert (told["drafter"], told["failed"]) == ("dspark" if spec == "dspark" else "suffix+dspark", None)
    assert told["inputs"]["draft_context"] > 50


def answering(process: subprocess.Popen[str]) -> None:
    """Waits until a command is in the middle of its answer."""
    assert process.stdout is not None
    watch = Timer(60, process.send_signal, (signal.SIGABRT,))
    watch.start()
    for line in process.stdout:
        if json.loads(line)["type"] in ("text", "thinking"):
            watch.cancel()
            return
    pytest.fail(f"no answer:\n{process.communicate()[1]}")


def with_peer(model: tuple[str, ...]) -> tuple[subprocess.Popen[str], int]:
    """A command with two ranks in the middle of an answer, and its peer."""
    process = start("chat", *model, "--gpus", "2", *ENDLESS)
    answering(process)
    (peer,) = descendants(process.pid)
    return process, peer


@PROC
@pytest.mark.parametrize("how", ["kill", pytest.param("terminate", marks=LONG)])
def test_nothing_stays_when_rank_0_ends(model: tuple[str, ...], how: str):
    process, peer = with_peer(model)
    getattr(process, how)()
    ended(process, 30)
    until = time.monotonic() + 5
    while running(peer) and time.monotonic() < until:
        time.sleep(0.05)
    assert not running(peer)


@LONG
@PROC
def test_ctrl_c_stops_all_ranks_at_one_token(model: tuple[str, ...]):
    """What was said up to there is saved, and goes on in one process without evaluating anything again."""
    process, peer = with_peer(model)
    process.send_signal(signal.SIGINT)
    out, err = ended(process)
    assert process.returncode == 130, err
    assert any(json.loads(line)["type"] == "saved" for line in out.splitlines())
    assert not running(peer)
    counts = next(event for event in said("resume", "k", *model, "-p", "go on") if event["type"] == "saved")
    assert counts["replayed"] == 0
    assert counts["reused"] > 50


@PROC
@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=LONG)])
def test_a_lost_peer_is_one_line_and_nothing_stays(model: tuple[str, ...], how: int):
    process, peer = with_peer(model)
    os.kill(peer, how)
    began = time.monotonic()
    _, err = ended(process, 35)
    assert time.monotonic() - began < 30
    killed = how == signal.SIGKILL
    found = "was ended by signal 9; expected every rank to stay" if killed else "has not answered for 20 s"
    assert process.returncode == 1, err
    lines = [line for line in err.splitlines() if "error" in line]
    assert len(lines) == 1
    assert lines[0].startswith(f"k3: error: rank 1 {found}")
    assert lines[0].endswith("start the command again: the session on disk is its last saved turn")
    assert not running(peer)


@PROC
@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=LONG)])
def test_a_lost_rank_that_another_program_started_is_named(model: tuple[str, ...], how: int):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    first, second = (start("chat", *model, *ENDLESS, rank=(rank, port)) for rank in "01")
    try:
        answering(first)
        os.kill(second.pid, how)
        began = time.monotonic()
        _, err = ended(first, 35)
        assert time.monotonic() - began < 30
    finally:
        second.kill()
        second.communicate()
    assert first.returncode == 1, err
    (line,) = [line for line in err.splitlines() if "error" in line]
    assert line.startswith("k3: error: rank 1 is gone or stopped; expected every rank to stay; start the command again")


@pytest.mark.parametrize("number", ["0", "1"])
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_wait_for_ranks_that_do_not_come(number: str, how: signal.Signals):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        if number == "1":
            free.listen()
        else:
            free.close()
        process = start("chat", "-m", str(NANO), "--device", "cpu", "-p", "hello", rank=(number, str(port)))
        until = time.monotonic() + 60
        if number == "1":  # it has come to the meeting point, where nobody answers
            free.settimeout(60)
            free.accept()
        else:
            while socket.socket().connect_ex(("127.0.0.1", port)) and time.monotonic() < until:
                time.sleep(0.1)
        time.sleep(0.5)
        process.send_signal(how)
        ended(process, 10)
    assert process.returncode == (130 if how == signal.SIGINT else 143)


def test_refusals_name_what_works(splittable: Path):
    for words, found in (
        (("--gpus", "3"), "3 GPUs; expected a number that divides heads and experts: 1, 2, 4"),
        (("--gpus", "0"), "--gpus is '0'; expected a number of GPUs"),
        (("--gpus", "2", "--spec", "dspark"), "spec is dspark: four has no draft of its own"),
    ):
        process = start("chat", "-m", str(splittable), "--device", "cpu", "-p", "hello", *words)
        _, err = ended(process)
        assert process.returncode == 2, err
        assert found in err


def test_a_place_that_not_all_launched_ranks_can_have_is_refused(monkeypatch: pytest.MonkeyPatch):
    """Those above 0 read no command line: they would wait on another kind of device, or another GPU."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match=r"--device cuda:1 under torchrun; .*LOCAL_RANK"):
        Engine.load(NANO, device="cuda:1")
    for layers in (None, 2):  # of `k3 bench`, which loads no engine
        with pytest.raises(UsageError, match=r"--device cuda:1 under torchrun; .*LOCAL_RANK"):
            subject(load_settings({"device": "cuda:1"}), layers, configuration)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(UsageError, match=r"--device cpu under torchrun, and a GPU; .*CUDA_VISIBLE_DEVICES"):
        Engine.load(NANO, device="cpu")


@pytest.mark.parametrize(
    ("rank", "size", "found"),
    [
        ("1", None, "RANK=1 and WORLD_SIZE=; expected two numbers"),
        ("2", "2", "RANK=2 and WORLD_SIZE=2; expected a rank below the number of ranks"),
        ("-1", "2", "RANK=-1 and WORLD_SIZE=2; expected two numbers"),
        ("0", "x", "RANK=0 and WORLD_SIZE=x; expected two numbers"),
    ],
)
def test_a_world_that_cannot_be_is_told_at_once(
    rank: str, size: str | None, found: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if size is not None:
        monkeypatch.setenv("WORLD_SIZE", size)
    monkeypatch.setattr(sys, "argv", ["k3", "chat", "-p", "hello", "--device", "cpu"])
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        assert main() == 2
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    err = capfd.readouterr().err
    assert found in err
    assert len([line for line in err.splitlines() if "no model configured" not in line]) == 1


def test_half_a_world_keeps_no_command_without_a_model_from_running(k3, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert k3("ls").code == 0
    monkeypatch.setenv("WORLD_SIZE", "2")
    done = k3("ls", "--json")  # which process is to answer, nobody can say
    assert (done.code, done.one("error")["exit_code"]) == (2, 2)
