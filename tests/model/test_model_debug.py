"""`k3 debug logits` behind the scenes, and finding models by folder or hub id."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from k3cli.errors import ContextError, ModelError, UsageError
from k3cli.model import debug
from k3cli.model.config import ModelConfig
from k3cli.model.debug import chunk_sizes, write_logits
from k3cli.model.hub import resolve_model


@pytest.mark.parametrize(
    ("schedule", "count", "sizes"),
    [
        ("prefill", 9, [9]),
        ("1,2,3", 12, [1, 2, 3, 3, 3]),
        ("4", 9, [4, 4, 1]),
        ("5,100", 7, [5, 2]),
        ("9,1", 9, [9]),
    ],
)
def test_a_list_repeats_its_last_size(schedule: str, count: int, sizes: list[int]):
    assert list(chunk_sizes(schedule, count)) == sizes


@pytest.mark.parametrize("schedule", ["", "fast", "1,,2", "0", "-1", "1,0"])
def test_schedules_that_make_no_sense(schedule: str):
    with pytest.raises(UsageError, match="chunk sizes"):
        list(chunk_sizes(schedule, 5))


@pytest.mark.parametrize("schedule", ["prefill", "decode", "1,5,7"])
def test_logits_file(checkpoints, loaded, tmp_path: Path, schedule: str):
    ids = list(range(17))
    (tmp_path / "ids.json").write_text(json.dumps(ids))
    out = tmp_path / "logits.safetensors"
    shape = write_logits(checkpoints["k3"], tmp_path / "ids.json", out, schedule=schedule, device="cpu")
    net = loaded["k3"].model
    expected = net.prefill(torch.tensor(ids), net.new_state(), logits="all")
    logits = load_file(out)["logits"]
    assert logits.shape == shape == expected.shape
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("text", ["[]", "[1, -2]", "[1.5]", '{"a": 1}', "[true]", "nonsense", "[1, 131]"])
def test_ids_that_make_no_sense(checkpoints, tmp_path: Path, text: str):
    (tmp_path / "ids.json").write_text(text)
    with pytest.raises(UsageError, match=r"ids"):
        write_logits(checkpoints["k3"], tmp_path / "ids.json", tmp_path / "out", device="cpu")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("schedule", ["prefill", "decode", "100"])
def test_more_ids_than_the_context_holds(checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, schedule: str):
    """Told from config.json, before anything is loaded; as many as it holds are fine."""
    short = dataclasses.replace(ModelConfig.from_dir(checkpoints["k3"]), context_limit=20)
    monkeypatch.setattr(ModelConfig, "from_dir", lambda _: short)
    monkeypatch.setattr(debug, "load_model", lambda *_, **__: pytest.fail("loaded"))
    ids, out = tmp_path / "ids.json", tmp_path / "out"
    ids.write_text(json.dumps([1] * 21))
    with pytest.raises(ContextError, match=r"ids\.json holds 21 ids; expected at most 20, the context limit"):
        write_logits(checkpoints["k3"], ids, out, schedule=schedule, device="cpu")
    ids.write_text(json.dumps([1] * 20))
    with pytest.raises(pytest.fail.Exception, match="loaded"):
        write_logits(checkpoints["k3"], ids, out, schedule=schedule, device="cpu")


def test_folder_and_hub_id(checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert resolve_model(checkpoints["k3"]) == checkpoints["k3"]
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub-home"))
    repo = tmp_path / "hub-home" / "hub" / "models--someone--small-k3"
    revision = "0123456789abcdef0123456789abcdef01234567"
    shutil.copytree(checkpoints["k3"], repo / "snapshots" / revision)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(revision)
    assert resolve_model("someone/small-k3") == repo / "snapshots" / revision
    assert resolve_model(f"someone/small-k3@{revision}") == repo / "snapshots" / revision
    with pytest.raises(ModelError, match="someone/other is not in the Hugging Face cache"):
        resolve_model("someone/other")
    with pytest.raises(ModelError, match="small-k3@v2"):
        resolve_model("someone/small-k3@v2")


@pytest.mark.parametrize("ref", ["nowhere", "./nowhere/x", "/nowhere/x", "a/b/c", "~/nowhere-at-all", "bad id/x y"])
def test_what_is_neither(ref: str):
    with pytest.raises(ModelError):
        resolve_model(ref)


def test_a_file_is_no_folder(checkpoints):
    with pytest.raises(ModelError, match="is a file"):
        resolve_model(checkpoints["k3"] / "config.json")
