"""`k3 plan`: figures, verdicts, and the nearest plan that fits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from k3cli.config import K3_SHAPE

Run = Callable[..., Any]
BIG = ("--ram", "2T", "--disk", "4T", "--disk-rate", "5GB")


def test_k3_on_eight_b300(k3: Run):
    found = k3("plan", "k3", "--gpus", "8xB300", *BIG, "-c", "128000", "-c", "1000000", "--json")
    assert found.code == 0
    contexts = {event["tokens"]: event for event in found.events if event["type"] == "context"}
    assert sorted(contexts) == [128_000, 1_000_000]
    million = contexts[1_000_000]
    assert round((million["mla"] + million["recurrent_bf16"]) / 1e9, 2) == 27.87
    assert million["session"] == million["mla"] + million["recurrent_fp32"] + million["conv"]
    assert million["stored_sessions"] == 4 * 10**12 // million["stored"]
    assert million["restore_seconds"] == pytest.approx(million["session"] / 5e9)
    assert million["live"] == 2
    assert found.one("verdict")["fits"] is True


def test_no_is_exit_4_with_a_plan_that_fits(k3: Run):
    """The options of the answer are tried: they must fit."""
    asked = ("plan", "k3", "--gpus", "8xB300", *BIG, "--sessions", "3", "-c", "1m")
    refused = k3(*asked)
    assert refused.code == 4
    assert "each of 8 x B300 needs " in refused.err
    assert "GB for live state, " in refused.err
    assert "GB are free beside the weights" in refused.err
    nearest = refused.err.split("nearest that fits: ")[1].split()
    context = nearest[nearest.index("--context") + 1]
    assert 512 * 1024 < int(context) < 1 << 20
    assert k3(*asked[:-2], *nearest).code == 0
    longer = str(int(context) + 512)
    assert k3(*asked[:-2], *[longer if word == context else word for word in nearest]).code == 4


def test_more_gpus_are_proposed_when_the_weights_do_not_fit(k3: Run):
    refused = k3("plan", "k3", "--gpus", "8xH200", *BIG)
    assert refused.code == 4
    assert "each of 8 x H200 needs 2" in refused.err
    assert "GB for weights and work space, 149.7 GB are free" in refused.err
    assert "nearest that fits: --gpus 16xH200" in refused.err


def test_the_gpu_with_least_free_memory_decides_and_is_named(k3: Run, monkeypatch: pytest.MonkeyPatch):
    import torch

    free = {0: 280 * 10**9, 1: 150 * 10**9}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA B300")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (free[index], 288 * 10**9))
    refused = k3("plan", "k3")
    assert refused.code == 4
    assert "cuda:1 needs " in refused.err
    assert " for weights and work space, 150.0 GB are free" in refused.err
    assert "nearest that fits: --gpus 16x151GB" in refused.err
    assert "most is free on cuda:0: 280.0 GB" in refused.out


def test_disk_counts_and_fewer_checkpoints_are_tried_first(k3: Run):
    refused = k3("plan", "k3", "--gpus", "8xB300", "--ram", "2T", "--disk", "33GB", "-c", "1m")
    assert refused.code == 4
    assert "on disk, 33.0 GB are there" in refused.err
    assert "nearest that fits: --checkpoints 8" in refused.err


def test_a_number_of_checkpoints_beyond_any_is_answered_at_once(k3: Run):
    asked = ("plan", "k3", "--gpus", "8xB300", "--ram", "2T", "--disk", "4T", "-c", "1m", "--checkpoints", "9" * 12)
    refused = k3(*asked)
    assert refused.code == 4
    kept = refused.err.split("nearest that fits: --checkpoints ")[1].strip()
    assert k3(*asked[:-1], kept).code == 0
    assert k3(*asked[:-1], str(int(kept) + 1)).code == 4


def test_what_is_not_short_is_not_cut(k3: Run):
    refused = k3("plan", "k3", "--gpus", "16xH200", *BIG, "-c", "1m", "--sessions", "2", "--checkpoints", "9")
    assert refused.code == 4
    assert "GB for live state" in refused.err
    assert refused.err.strip().endswith("--checkpoints 9")


def test_a_disk_without_room_is_what_is_named(k3: Run):
    refused = k3("plan", "--gpus", "0", "--ram", "8G", "--disk", "0")
    assert refused.code == 4
    assert "nothing smaller fits: for one session of 512 tokens, the sessions take " in refused.err
    assert "larger devices" not in refused.err


def test_a_disk_that_reads_nothing_is_refused(k3: Run):
    refused = k3("plan", "--disk-rate", "0")
    assert (refused.code, refused.err) == (2, "k3: error: --disk-rate is '0'; expected more than 0 bytes a second\n")


def test_the_shipped_model_on_this_machine(k3: Run):
    found = k3("plan", "--gpus", "0")
    assert found.code == 0
    assert "yes: 1 session of 131,072 tokens" in found.out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("k3", "--gpus", "3xB300"), "1, 2, 4, 8, 16, 32"),
        (("k3", "--gpus", "8xB999"), "B300"),
        (("k3", "-c", "many"), "128000, 32k or 1m"),
        (("k3", "-c", "2m"), "1,048,576"),
        (("--ram", "lots"), "--ram"),
    ],
)
def test_bad_words_are_usage_errors(k3: Run, arguments: tuple[str, ...], words: str):
    refused = k3("plan", *arguments)
    assert refused.code == 2
    assert words in refused.err
    assert refused.err.count("\n") == 1


def test_a_missing_model_is_exit_3(k3: Run, tmp_path: Any):
    assert k3("plan", str(tmp_path / "config.json")).code == 3


def changed(**values: Any) -> str:
    """K3's shape with other values in its text part."""
    raw = json.loads((K3_SHAPE / "config.json").read_text())
    raw["text_config"] |= values
    return json.dumps(raw)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("[]", "holds no object"),
        ("nonsense", "is not JSON: "),
        ('{"model_type": "llama"}', 'model_type = "llama"'),
        (changed(hidden_size=0), "key text_config.hidden_size is 0"),
        (changed(mla_use_nope=False), "key text_config.mla_use_nope is false"),
        (changed(sliding_window=512), "key text_config.sliding_window = 512"),
        (changed(linear_attn_config={"kda_layers": [], "full_attn_layers": [1]}), "layer 2 (counted from 1)"),
        (changed(num_experts=3), "asks for the best 16 of 3 experts"),
        (changed(moe_intermediate_size=33), "expert sizes"),
        (changed(quantization_config=5), "key text_config.quantization_config is 5"),
        (changed(quantization_config={"format": "int4"}), "key text_config.quantization_config.format"),
    ],
)
def test_a_file_with_something_wrong_is_called_by_its_name(k3: Run, tmp_path: Path, text: str, found: str):
    file = tmp_path / "mine.json"
    file.write_text(text)
    refused = k3("plan", str(file), "--gpus", "8xB300", *BIG)
    assert refused.code == 3
    assert f"{file} {found}" in refused.err
    assert "config.json" not in refused.err.replace("a model's config.json", "")
    assert len(refused.err.splitlines()) == 1
