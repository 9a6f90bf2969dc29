"""`examples/two_nodes.sh`: two groups of processes that find each other over loopback, as two machines would."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

LONG = pytest.mark.skipif(os.environ.get("K3_LONG") != "1", reason="slow: K3_LONG=1")
pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="bash runs the example")


def free_port() -> int:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return int(made.getsockname()[1])


@pytest.mark.parametrize("each", [1, pytest.param(2, marks=LONG)])
def test_two_groups_answer_as_one_process_does(
    repo_root: Path, splittable: Path, process_env: dict[str, str], tmp_path: Path, each: int
):
    turn = ("chat", "-m", str(splittable), "-p", "hello", "-t", "0", "--max-tokens", "5", "--spec", "off", "--json")
    own = {"PYTHON": sys.executable, "PORT": str(free_port()), "RANKS": str(each)}
    script = ["bash", str(repo_root / "examples" / "two_nodes.sh")]
    nodes = []
    for node, words in ((0, (*turn, "--session", "two")), (1, ())):
        # Each node has a home of its own, and the second must leave its empty.
        env = {**process_env, **own, "CUDA_VISIBLE_DEVICES": "", "K3_HOME": str(tmp_path / f"home{node}")}
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        command = [*script, str(node), "127.0.0.1", *words]
        nodes.append(subprocess.Popen(command, env=env, text=True, start_new_session=True, **pipes))
    said = []
    try:
        for process in nodes:
            out, err = process.communicate(timeout=100)
            assert process.returncode == 0, err
            said.append(out)
    finally:
        for process in nodes:
            if process.poll() is None:
                os.killpg(process.pid, 9)
                process.communicate()
    assert said[1] == ""
    assert not (tmp_path / "home1").exists()
    events = [json.loads(line) for line in said[0].splitlines()]
    assert events[-1]["type"] == "done"
    assert events[-1]["saved"]

    env = {**process_env, "K3_HOME": str(tmp_path / "home0"), "CUDA_VISIBLE_DEVICES": ""}
    alone = subprocess.run(
        [sys.executable, "-m", "k3cli", "replay", "two", "-m", str(splittable), "--json"],
        env=env,
        capture_output=True,
        text=True,
        timeout=100,
    )
    replayed = [json.loads(line) for line in alone.stdout.splitlines()]
    assert any(e["type"] == "notice" and f"ranks {2 * each}; now ranks 1" in e["message"] for e in replayed), (
        alone.stdout
    )
    # Every token is the same; the state differs by rounding.
    assert [e["tokens"] for e in replayed if e["type"] == "turn_replayed"] == [5], alone.stdout
    assert all(e["recorded"] is None and e["max_abs"] < 1e-4 for e in replayed if e["type"] == "difference")


def test_a_command_that_cannot_begin_ends_both_at_once(repo_root: Path, process_env: dict[str, str], tmp_path: Path):
    own = {"PYTHON": sys.executable, "PORT": str(free_port()), "RANKS": "1", "CUDA_VISIBLE_DEVICES": ""}
    env = {**process_env, **own, "K3_HOME": str(tmp_path / "home")}
    script = ["bash", str(repo_root / "examples" / "two_nodes.sh")]
    began, nodes = time.monotonic(), []
    for words in (("0", "127.0.0.1", "chat", "--nonsense"), ("1", "127.0.0.1")):
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        nodes.append(subprocess.Popen([*script, *words], env=env, text=True, start_new_session=True, **pipes))
    try:
        said = [process.communicate(timeout=60)[1] for process in nodes]
    finally:
        for process in nodes:
            if process.poll() is None:
                os.killpg(process.pid, 9)
                process.communicate()
    assert time.monotonic() - began < 40
    assert "k3: error: no such option --nonsense" in said[0]
    (line,) = [line for line in said[1].splitlines() if line.startswith("k3:")]
    assert line.startswith("k3: error: rank 0 ended with exit code 2 before it needed the other ranks")
