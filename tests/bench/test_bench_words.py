"""What `k3 bench` refuses before anything is measured, each with one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from k3cli.bench.run import Ask, climb, subject
from k3cli.commands.plan import configuration
from k3cli.config import Settings


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--depths", "0,many"), "--depths"),
        (("--depths", "0", "--context", "4k"), "one of them"),
        (("--context", "9m"), "at most the model's limit"),
        (("--cache", "lukewarm"), "cold or warm"),
        (("--kernels", "--plot", "x.png"), "a ladder"),
        (("--kernels", "--ops", "moe,hashing"), "some of attnres"),
        (("--ops", "moe"), "--ops without --kernels"),
        (("--ops", "moe", "--spec", "all"), "--ops with --spec"),
        (("--slice", "0"), "1 to 93"),
        (("--spec", "eagle"), "auto, off, suffix"),
        (("--spec", "all", "--texts", "poems"), "some of edit"),
        (("--spec", "all", "--depths", "0"), "--slice"),
        (("--texts", "edit"), "--texts without --spec"),
        (("--rounds", "3"), "--rounds without --spec"),
        (("--texts", "edit", "--temperature", "0"), "--texts and --temperature without --spec"),
        (("--kernels", "--rounds", "3"), "--rounds with --kernels"),
        (("--kernels", "--slice", "4", "--depths", "0"), "--slice and --depths with --kernels"),
        (("--kernels", "--cache", "warm"), "--cache with --kernels"),
        (("--kernels", "--device", "cpu", "--model", "m"), "--model and --device with --kernels"),
        (("--kernels", "--stored"), "--stored with --kernels"),
        (("--kernels", "--spec", "all"), "one of them"),
        (("--spec", "all", "--cache", "cold"), "--cache with --spec"),
        (("--spec", "all", "--stored"), "--stored with --spec"),
        (("--spec", "all", "--plot", "x.png"), "a ladder"),
        (("--spec", "all", "--slice", "4", "--rounds", "3"), "--rounds with --spec and --slice"),
        (("--spec", "all", "--slice", "4", "--prompt-tokens", "8"), "--prompt-tokens with --spec and --slice"),
        (("--spec", "off", "--slice", "4"), "--spec off with --slice"),
        (("--spec", "all", "--texts", "noise", "--temperature", "1"), "noise is drawn at 5"),
        (("--device", "cpu", "--cache", "cold"), "--cache warm"),
        (("--rounds", "3", "compare", "a", "b"), "--rounds before compare"),
        (("--no-stored", "plot", "a", "b.png"), "--no-stored before plot"),
        (("--spec", "all", "--rounds", "0"), "1 or more"),
    ],
)
def test_bad_words_are_one_line(bench: Callable[..., tuple[int, str, str]], arguments: tuple[str, ...], words: str):
    code, out, err = bench(*arguments)
    assert (code, out) == (2, "")
    assert words in err
    assert err.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="would measure there")
@pytest.mark.parametrize(
    "words", [("--device", "cuda"), ("--dtype", "bfloat16"), ("--cache", "cold"), ("--gpus", "1"), ("--no-stored",)]
)
def test_words_that_say_what_happens_anyhow_are_no_mistake(
    bench: Callable[..., tuple[int, str, str]], words: tuple[str, ...]
):
    code, _, err = bench("--kernels", *words)
    assert (code, "--kernels without a CUDA device" in err) == (2, True), err


def test_json_before_a_command_of_bench_is_refused(bench: Callable[..., tuple[int, str, str]]):
    code, out, _ = bench("--json", "compare", "a", "b")
    assert code == 2
    assert json.loads(out)["found"] == "--json before compare"


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (("--gpus", "3"), "3 GPUs; expected a number that divides heads and experts"),
        (("--gpus", "3", "--slice", "1"), "3 GPUs; expected a number that divides heads and experts"),
        (("--prompt-tokens", "200k"), "a prompt of 204,800 tokens; expected at most the model's limit of 131,072"),
    ],
)
def test_what_the_model_cannot_have_is_refused(
    bench: Callable[..., tuple[int, str, str]], words: tuple[str, ...], found: str
):
    code, _, err = bench("--device", "cpu", "--depths", "0", *words)
    assert code == 2
    assert found in err


def test_depths_beyond_the_last_tokens_become_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    depths: list[int] = []

    def stop(self: Any, model: Any, config: Any, plan: Any, *_: Any) -> None:
        depths.extend(plan.depths)
        raise KeyboardInterrupt

    monkeypatch.setattr("k3cli.bench.ladder.Ladder.__init__", stop)
    monkeypatch.setattr("k3cli.bench.run.ceilings", lambda *_: (1.0, 1.0))
    ask = Ask(Settings(tmp_path, device="cpu"), None, None, (5, 130_900, 131_072), 512, None, False)
    told: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        list(climb(ask, subject(ask.settings, None, configuration), None, told.append))
    assert depths == [5, 131_072 - 512]
    assert told[0] == "depths beyond 130,560 are measured there: 512 tokens more are evaluated at each"


@pytest.mark.skipif(torch.cuda.is_available(), reason="refused only without a CUDA device")
def test_kernels_need_a_device(bench: Callable[..., tuple[int, str, str]]):
    code, _, err = bench("--kernels")
    assert code == 2
    assert "CUDA" in err


def test_help_needs_no_torch():
    from k3cli.main import app

    found = CliRunner().invoke(app, ["bench", "--help"])
    assert found.exit_code == 0
    assert "compare" in found.output
