"""`examples/two_nodes.sh`: two groups of processes that find each other over loopback, as two machines would."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
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
