"""The command as installed, on a real (tiny, random) K3 checkpoint, each step in a process of its own."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from k3cli.commands.runtime import recommended_sampling
from k3cli.config import NANO
from k3cli.errors import Exit, ModelError


@pytest.fixture(scope="module")
def tiny(repo_root, scripted, tmp_path_factory) -> Path:
    """A whole model folder: K3 layout, random weights, a vocabulary of bytes."""
    from k3cli.model.random_weights import write_random_checkpoint

    spec = importlib.util.spec_from_file_location("engine_conftest", repo_root / "tests" / "engine" / "conftest.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    folder = write_random_checkpoint(tmp_path_factory.mktemp("tiny"), module.TINY, seed=5, shards=1)
    return scripted.make_vocab(folder)


@pytest.fixture
def run(process_env, tiny) -> Callable[..., subprocess.CompletedProcess[str]]:
    def start(*args: str, stdin: str = "", model: Path | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "k3cli", *args],
            env={**process_env, "K3_MODEL": str(model or tiny)},
            input=stdin,
            capture_output=True,
            text=True,
            timeout=120,
        )

    return start


def events(done: subprocess.CompletedProcess[str]) -> list[dict]:
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_save_leave_resume_fork_replay(run) -> None:
    first = events(run("chat", "-s", "a", "--json", "--max-tokens", "24", "--seed", "1", "-p", "hello"))
    assert first[-1]["type"] == "done"
    assert first[-1]["saved"] is True
    second = events(run("resume", "a", "--json", "--max-tokens", "24", stdin="and more"))
    opened = next(e for e in second if e["type"] == "session")
    assert (opened["how"], opened["replayed"]) == ("resumed", 0)
    assert opened["reused"] == next(e for e in first if e["type"] == "saved")["position"]
    forked = run("fork", "a", "b", "--at", "1", "-p", "on another branch", "--max-tokens", "16", "--seed", "3")
    assert forked.returncode == 0, forked.stderr
    assert "forked from a" in forked.stderr
    assert "\x1b" not in forked.stderr
    replayed = run("replay", "b")
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    assert "equal: 2 turns" in replayed.stdout


def test_sampling_comes_from_the_model_unless_asked(run, tiny, tmp_path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny, model)
    (model / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.5, "top_p": 0.9, "x": 1}')
    done = run("chat", "-s", "a", "-p", "x", "--max-tokens", "4", "--top-p", "0.8", model=model)
    assert done.returncode == 0, done.stderr
    (turn, _) = events(run("show", "a", "--at", "1", "--json"))
    sampling = turn["meta"]["sampling"]
    assert (sampling["temperature"], sampling["top_p"], sampling["top_k"]) == (0.5, 0.8, 0)


@pytest.mark.parametrize(
    "text", ['{"temperature": -1}', '{"do_sample": "no"}', f'{{"top_p": {"[" * 900}{"]" * 900}}}', "[1]", "{"]
)
def test_a_bad_generation_config_is_refused(tmp_path, text) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ModelError, match="generation_config"):
        recommended_sampling(str(tmp_path))


def test_greedy_models_are_greedy(tmp_path) -> None:
    (tmp_path / "generation_config.json").write_text('{"do_sample": false, "temperature": 1.0}')
    assert recommended_sampling(str(tmp_path)) == {"temperature": 0.0}


def test_debug_logits_and_tokens(run, tiny, tmp_path) -> None:
    ids = tmp_path / "ids.json"
    tokens = run("debug", "tokens", "--tokenizer", str(tiny), stdin="Hi <|im_end|>")
    assert json.loads(tokens.stdout) == list(b"Hi <|im_end|>")
    (tmp_path / "chat.json").write_text('{"messages": [{"role": "user", "content": "Hi"}], "effort": "low"}')
    chat = run("debug", "tokens", "--tokenizer", str(tiny), "--chat", str(tmp_path / "chat.json"))
    ids.write_text(chat.stdout)
    rows = {}
    for schedule in ("prefill", "1,3,64"):
        out = tmp_path / f"{schedule}.safetensors"
        options = ("--model", str(tiny), "--tokens-file", str(ids), "--out", str(out), "--schedule", schedule)
        done = run("debug", "logits", *options)
        assert done.returncode == 0, done.stderr
        from safetensors.numpy import load_file

        rows[schedule] = load_file(out)["logits"]
    assert rows["prefill"].shape == (len(json.loads(chat.stdout)), 512)
    assert rows["prefill"].dtype == np.float32
    assert np.abs(rows["prefill"] - rows["1,3,64"]).max() < 1e-3
    bad = run("debug", "logits", "--model", str(tiny), "--tokens-file", str(ids), "--out", "/nowhere/x")
    assert bad.returncode == Exit.USAGE


def test_doctor(run, tiny, tmp_path) -> None:
    found = events(run("doctor", "--json"))
    rows = {(e["section"], e["name"]): e for e in found if e["type"] == "check"}
    assert all(row["ok"] for row in rows.values())
    assert rows["model", "folder"]["value"] == str(tiny)
    assert rows["model", "folder"]["reason"] == "K3_MODEL"
    assert rows["chosen", "device"]["reason"]
    assert rows["chosen", "dtype"]["value"] in ("float32", "bfloat16")
    assert rows["fit", "room"]["value"] == "8,192 tokens of context"
    assert rows["paths", "home"]["reason"] == "K3_HOME"
    broken = tmp_path / "broken"
    shutil.copytree(tiny, broken)
    (weights,) = broken.glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-100])
    done = run("doctor", model=broken)
    assert done.returncode == Exit.MODEL
    assert weights.name in done.stdout
    assert "! problem" in done.stdout
    chat = run("chat", "-p", "x", model=broken)
    assert (chat.returncode, chat.stdout) == (Exit.MODEL, "")
    assert weights.name in chat.stderr


def wrapper(tmp_path: Path, program: list[str]) -> str:
    script = tmp_path / "k3"
    script.write_text("#!/bin/sh\nexec " + " ".join(f"'{part}'" for part in program) + ' "$@"\n')
    script.chmod(0o755)
    return str(script)


@pytest.mark.skipif(shutil.which("bash") is None or shutil.which("jq") is None, reason="bash and jq run the example")
def test_the_tool_loop_example(repo_root, scripted, process_env, tmp_path) -> None:
    k3 = wrapper(tmp_path, [sys.executable, scripted.__file__])
    done = subprocess.run(
        ["bash", str(repo_root / "examples" / "tool_loop.sh"), "call get_time"],
        env={**process_env, "K3": k3},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith('The tool said: {"time": ')
    assert "tool get_time" in done.stderr


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash runs the example")
def test_the_subagents_example(repo_root, scripted, process_env, tmp_path) -> None:
    k3 = wrapper(tmp_path, [sys.executable, scripted.__file__])
    done = subprocess.run(
        ["bash", str(repo_root / "examples" / "subagents.sh")],
        env={**process_env, "K3": k3},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "subagent 2: You said: What is the path of the log file?" in done.stdout
    assert done.stderr.count("not saved (ephemeral): reused") == 3


@pytest.mark.skipif(not (NANO / "config.json").is_file(), reason="the shipped model is not in this checkout")
def test_the_resume_example_on_the_shipped_model(repo_root, process_env, tmp_path) -> None:
    k3 = wrapper(tmp_path, [sys.executable, "-m", "k3cli"])
    done = subprocess.run(
        ["bash", str(repo_root / "examples" / "resume.sh")],
        env={**process_env, "K3": k3},
        capture_output=True,
        text=True,
        timeout=290,
    )
    assert done.returncode == 0, done.stderr
    assert "K7-4411-QX" in done.stdout.split("--- turns")[0].splitlines()[-1]
    assert "replay of notes is equal: 3 turns" in done.stdout
    assert "no model configured: using the shipped k3-nano" in done.stderr
