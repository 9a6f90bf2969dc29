"""Damaged model folders at the command line: one line and exit code 3, and doctor says what chat would say."""

from __future__ import annotations

import base64
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from k3cli.errors import K3Error

Run = Callable[..., Any]


@pytest.fixture
def folder(splittable: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(splittable, tmp_path / "model"))


def change(folder: Path, **values: Any) -> None:
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, "text_config": {**raw["text_config"], **values}}))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"architectures": 5}, "text_config.architectures is 5; expected a list of names"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers is 1000000000000; expected an integer from 1 to 1,024"),
        ({"num_experts": 10**12}, "num_experts is 1000000000000; expected an integer from 1 to 65,536"),
    ],
)
def test_plan_and_doctor_say_the_same_of_config_json(k3: Run, folder: Path, values: dict, words: str) -> None:
    change(folder, **values)
    planned = k3("plan", str(folder))
    assert (planned.code, planned.err.count("\n")) == (3, 1)
    assert words in planned.err
    looked = k3("doctor", "--model", str(folder))
    assert looked.code == 3
    assert words in looked.out


def test_more_experts_than_tensors_are_refused_before_they_are_thought_of(k3: Run, folder: Path) -> None:
    """So many tensors would be looked for one by one, for minutes."""
    change(folder, num_experts=1 << 16, num_hidden_layers=1003, first_k_dense_replace=0)
    raw = json.loads((folder / "config.json").read_text())
    raw["text_config"]["linear_attn_config"] |= {"kda_layers": list(range(2, 1004)), "full_attn_layers": [1]}
    (folder / "config.json").write_text(json.dumps(raw))
    looked = k3("doctor", "--model", str(folder))
    assert looked.code == 3
    assert "config.json has 1,003 layers, the checkpoint" in looked.out


def test_doctor_knows_a_tokenizer_that_is_too_large_for_the_model(k3: Run, folder: Path) -> None:
    (folder / "tokenizer_config.json").unlink()  # it names ids, and would be refused first
    ranks = folder / "tiktoken.model"
    lines = ranks.read_bytes().rstrip(b"\n").split(b"\n")
    more = [base64.b64encode(b"\x00%d\x01" % i) + b" %d" % (len(lines) + i) for i in range(2)]
    ranks.write_bytes(b"\n".join([*lines, *more]))
    looked = k3("doctor", "--model", str(folder))
    assert looked.code == 3
    assert "the tokenizer has 3,074 ids, config.json a vocab_size of 3,072" in looked.out


def test_a_link_to_a_weight_file_that_is_gone_is_no_matter_for_a_plan(k3: Run, folder: Path) -> None:
    os.symlink(folder / "gone", folder / "other.safetensors")
    assert k3("plan", str(folder), "--gpus", "0", "--ram", "100GB", "--disk", "100GB").code == 0


@pytest.mark.parametrize("damage", [lambda at: at.symlink_to(at), Path.touch, Path.mkdir])
def test_a_draft_of_the_models_own_that_cannot_be_read_is_told(k3: Run, folder: Path, damage: Callable) -> None:
    damage(folder / "dspark")
    looked = k3("doctor", "--model", str(folder))
    assert looked.code == 0
    assert "drafts: suffix  (auto: the model's own draft can't be used" in looked.out
    assert "dspark/config.json cannot be read" in looked.out


def test_memory_that_runs_out_is_a_row_of_the_report(k3: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("k3cli.model.checkpoint.open_checkpoint", opened)
    looked = k3("doctor", "--model", str(folder))
    assert looked.code == 4
    assert "! problem: memory ran out" in looked.out
    assert "\nstore\n" in looked.out


@pytest.mark.parametrize("name", ["~nobody-has-this-name/model", "y" * 300, "y" * 300 + ".json", "a\ud800b"])
def test_a_folder_that_nobody_can_have_is_no_model(k3: Run, name: str) -> None:
    refused = k3("plan", name)
    assert (refused.code, refused.err.count("\n")) == (3, 1)
    drafted = k3("chat", "--spec", f"dspark:{name}", "-p", "x")
    assert drafted.code in (2, 3)
    assert drafted.err.count("error: ") == 1


def test_what_a_file_holds_is_shown_in_one_line_of_bounded_length() -> None:
    problem = K3Error("it has \x1b[31m\ud800\n\t" + "x" * 10**6 + " at the end", "no\r\nsuch thing", "drop\x00 it")
    assert str(problem).startswith("it has \\x1b[31m\\ud800 xxxx")
    assert str(problem).endswith("x at the end; expected no such thing; drop\\x00 it")
    assert len(str(problem)) < 1200
    assert (problem.expected, problem.do) == ("no such thing", "drop\\x00 it")
