"""Ranks that another program starts: what its environment may say, and how long and how loudly they are waited for."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
import torch

from k3cli.errors import FitError, K3Error, UsageError
from k3cli.model import joining, launch
from k3cli.model.joining import join
from k3cli.model.launch import launched, local_rank, meeting
from k3cli.model.peers import local_device

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE")


@pytest.fixture(autouse=True)
def nobody_started_us(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


def set_all(monkeypatch: pytest.MonkeyPatch, **values: str | None) -> None:
    for name, value in values.items():
        if value is not None:
            monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("rank", "size", "found"),
    [
        (None, None, None),
        ("", "", None),
        ("0", "1", None),
        ("0", "2", (0, 2)),
        ("15", "16", (15, 16)),
        ("-1", "2", "RANK=-1 and WORLD_SIZE=2; expected two numbers, 0 or more"),
        ("2", "2", "RANK=2 and WORLD_SIZE=2; expected a rank below the number of ranks"),
        ("5", "1", "a rank below"),
        ("0", "0", "at least one rank"),
        ("0", "-2", "WORLD_SIZE=-2; expected two numbers"),
        ("one", "2", "RANK=one"),
        ("0", "2.0", r"WORLD_SIZE=2\.0"),
        ("1_0", "20", "RANK=1_0"),
        ("9" * 5000, "2", "two numbers"),
        ("1", None, "RANK=1 and WORLD_SIZE=; expected"),
        (None, "2", "RANK= and WORLD_SIZE=2"),
    ],
)
def test_a_world_is_as_the_environment_says_or_refused(
    rank: str | None, size: str | None, found: object, monkeypatch: pytest.MonkeyPatch
):
    set_all(monkeypatch, RANK=rank, WORLD_SIZE=size)
    if isinstance(found, str):
        with pytest.raises(UsageError, match=found):
            launched()
    else:
        assert launched() == found


def test_a_place_on_the_machine_is_one_that_it_has(monkeypatch: pytest.MonkeyPatch):
    assert (local_rank(), local_device("cpu")) == (0, torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert local_device("cuda") == torch.device("cuda", 1)
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert local_device("cpu") == torch.device("cpu")
    with pytest.raises(FitError, match="LOCAL_RANK=2 on a machine with 2; expected GPUs 0 to 1"):
        local_device("cuda")
    for word in ("-1", "x", "1.5"):
        monkeypatch.setenv("LOCAL_RANK", word)
        for kind in ("cpu", "cuda"):
            with pytest.raises(UsageError, match=f"LOCAL_RANK={word}; expected the number"):
                local_device(kind)


@pytest.mark.parametrize(
    ("address", "port"),
    [(None, "29500"), ("", "29500"), ("here", None), ("here", "abc"), ("here", "0"), ("here", "65536"), ("here", "-1")],
)
def test_a_meeting_point_has_an_address_and_a_port(
    address: str | None, port: str | None, monkeypatch: pytest.MonkeyPatch
):
    set_all(monkeypatch, MASTER_ADDR=address, MASTER_PORT=port)
    with pytest.raises(UsageError, match=f"MASTER_ADDR={address or ''} and MASTER_PORT={port or ''}; expected rank 0"):
        meeting()
    set_all(monkeypatch, MASTER_ADDR="here", MASTER_PORT="65535")
    assert str(meeting()) == "here:65535"


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """A port of this machine that nobody listens at, and patience for a second."""
    monkeypatch.setattr(joining, "JOINING", 1.0)
    monkeypatch.setattr(joining, "stuck", False)
    monkeypatch.setattr(launch, "QUIET", 0.3)
    monkeypatch.setattr(launch, "GRACE", 1.5)
    with socket.socket() as place:
        place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        place.bind(("127.0.0.1", 0))
        set_all(monkeypatch, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(place.getsockname()[1]))
        yield place
    # Of one that still waited in a library: what that says belongs to no other test.
    for thread in threading.enumerate():
        if thread.name == "k3-wait":
            thread.join(20)


def refused(rank: int, capfd: pytest.CaptureFixture[str]) -> tuple[str, list[str]]:
    """The error of a rank of two that meets nobody, and what was told before. Nothing else is written anywhere."""
    told: list[str] = []
    with pytest.raises(K3Error) as error:
        join(rank, 2, torch.device("cpu"), tell=told.append)
    assert capfd.readouterr() == ("", "")
    return str(error.value), told


def test_nobody_at_the_address(hasty: socket.socket, capfd: pytest.CaptureFixture[str]):
    where = f"127.0.0.1:{hasty.getsockname()[1]}"
    error, told = refused(1, capfd)
    assert error.startswith(
        f"rank 1 of 2 has waited 1 s for rank 0 at {where}: Connection refused; expected every rank"
    )
    assert told == [f"waiting for rank 0 at {where}, 1 s at most"]


def test_an_address_that_is_none(
    hasty: socket.socket, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    def unknown(*_: object, **__: object) -> socket.socket:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "create_connection", unknown)
    monkeypatch.setenv("MASTER_ADDR", "nosuch.invalid")
    error, told = refused(1, capfd)
    assert f"nosuch.invalid:{hasty.getsockname()[1]}: Name or service not known" in error
    assert len(told) == 1


def test_somebody_else_at_the_address(hasty: socket.socket, capfd: pytest.CaptureFixture[str]):
    """Who listens and says nothing: a library would wait for them without end."""
    hasty.listen()
    error, told = refused(1, capfd)
    assert "s for rank 0 at 127.0.0.1" in error
    assert "does not answer as rank 0 does" in error
    assert len(told) == 1
    assert joining.stuck


def test_a_port_that_is_taken_is_told_at_once(hasty: socket.socket, capfd: pytest.CaptureFixture[str]):
    hasty.listen()
    error, told = refused(0, capfd)
    assert error.startswith(f"MASTER_PORT={hasty.getsockname()[1]} is in use on this machine; expected a free")
    assert told == []


def test_rank_0_alone(hasty: socket.socket, capfd: pytest.CaptureFixture[str]):
    where = f"127.0.0.1:{hasty.getsockname()[1]}"
    hasty.close()
    error, told = refused(0, capfd)
    assert f"s for the other rank at {where}: 1 of 2 ranks came" in error
    assert told == [f"waiting for the other rank at {where}, 1 s at most"]


def test_a_process_writes_lines_of_its_own_alone(hasty: socket.socket):
    """Torch reads how much it is to say when it is loaded, which is after the environment was looked at."""
    hasty.listen()

    def hang_up() -> None:
        while True:
            try:
                hasty.accept()[0].close()
            except OSError:
                return

    threading.Thread(target=hang_up, daemon=True).start()
    code = """
import sys
from k3cli.model import peer
run = peer.run_launched
def hasty(*words):
    from k3cli.model import joining
    joining.JOINING = 2.0
    return run(*words)
peer.run_launched = hasty
from k3cli.main import main
sys.argv = ["k3", "chat", "-p", "hello"]
sys.exit(main())
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "CUDA_VISIBLE_DEVICES": ""}
    environment |= {"RANK": "1", "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    environment.pop("TORCH_CPP_LOG_LEVEL", None)
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert all(line.startswith("k3: ") for line in lines), done.stderr
    assert lines[-1].startswith("k3: error: rank 1 of 2 has waited ")
    assert f"127.0.0.1:{hasty.getsockname()[1]}" in lines[-1]
