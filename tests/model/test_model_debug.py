"""`k3 debug logits` behind the scenes, and finding models by folder or hub id."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from k3cli.errors import ModelError, UsageError
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
