"""The benchmark's arithmetic, and the command on the shipped model."""

from __future__ import annotations

import gc
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from k3cli.bench import record, spec
from k3cli.bench.floors import Work, parts, total, touched
from k3cli.bench.shares import counts, derive
from k3cli.bench.slice import random_model, slice_config
from k3cli.config import K3_SHAPE, NANO
from k3cli.engine.engine import Engine
from k3cli.errors import FitError, UsageError
from k3cli.model.config import ModelConfig
from k3cli.model.network import K3Model

K3 = ModelConfig.from_dir(K3_SHAPE)
BF16 = torch.bfloat16


def test_bytes_of_a_k3_token_are_the_published_ones():
    """111.16 GB of dense weights with the head, 25.83 GB of experts; here the router is kept in fp32, norms too."""
    work = parts(K3, BF16, 1, 0)
    dense = sum(w.bytes for name, w in work.items() if name not in ("routed experts", "KDA state", "embedding"))
    dense -= work["MLA attention over latents"].bytes
    assert dense == pytest.approx(111_160_730_624 + 1_182_000_000, rel=1e-4)
    assert work["routed experts"].bytes == pytest.approx(25_829_572_608)
    assert work["KDA state"].bytes == 2 * (434_110_464 + 15_261_696)


def test_experts_touched_by_a_window():
    """896 (1 - (1 - 16/896)^T), from the table of published byte ceilings."""
    assert [round(touched(K3, rows), 1) for rows in (1, 2, 4, 8, 9)] == [16.0, 31.7, 62.3, 120.3, 134.1]


def test_attention_at_a_million_tokens():
    """1.208 GB and 209 kFLOP a key for each of 24 layers, one row; a prefill expands instead."""
    work = parts(K3, BF16, 1, (1 << 20) - 1)["MLA attention over latents"]
    assert work.bytes / 24 == pytest.approx(1.208e9, rel=1e-3)
    assert work.flops / 24 / 2**20 == 2 * 96 * (576 + 512)
    chunk = parts(K3, BF16, 8192, 0, prefill=True)["MLA attention over latents"]
    assert chunk.flops / 24 == 2 * 96 * (8192 * 8193 // 2 * 320 + 8192 * 256 * 512)


def test_a_window_scores_every_row_and_a_prefill_its_last():
    head = 2 * 163_840 * 7168
    assert parts(K3, BF16, 8, 0)["head"].flops == 8 * head
    assert parts(K3, BF16, 8, 0, prefill=True)["head"].flops == head


def test_the_floor_is_the_slower_of_the_two():
    assert Work(100, 10).floor(10, 10) == 10
    assert Work(10, 100).floor(10, 10) == 10
    assert total({"a": Work(1, 2), "b": Work(3, 4)}) == Work(4, 6)


def test_a_slice_has_the_mix_of_the_whole():
    part = slice_config(K3, 4)
    assert sorted(part.layers) == ["kda", "kda", "kda", "mla"]
    assert all(part.moe_layers)
    assert slice_config(K3, 93) == K3
    with pytest.raises(UsageError, match="1 to 93"):
        slice_config(K3, 94)


def test_a_random_slice_runs_and_stays_finite():
    config = slice_config(ModelConfig.from_dir(NANO), 3)
    model = random_model(config, torch.device("cpu"), torch.float32, 4)
    state = model.new_state()
    logits = model.prefill(torch.arange(70), state)
    assert logits is not None
    assert torch.isfinite(logits).all()
    assert 0.1 < float(logits.std()) < 10


def test_a_whole_model_step_is_derived_from_parts():
    part = slice_config(K3, 4)
    split = {"kda": 0.3, "mla": 0.1, "moe": 0.4, "mix": 0.1, "head": 0.1}
    found = derive(K3, part, 1e-3, split)
    expected = 1e-3 * (69 / 3 * 0.3 + 24 * 0.1 + 92 / 4 * 0.4 + 187 / 9 * 0.1 + 0.1)
    assert found["seconds"] == pytest.approx(expected)
    assert found["derived"] is True
    assert "69 x kda 100.0 us" in found["formula"]
    assert "without mlp" in found["formula"]
    assert counts(K3) == {"kda": 69, "mla": 24, "moe": 92, "mlp": 1, "mix": 187, "head": 1}


def test_a_ladder_on_the_shipped_model(bench: Callable[..., tuple[int, str, str]], tmp_path: Path):
    file = tmp_path / "r.jsonl"
    arguments = ("--depths", "0,40", "--prompt-tokens", "24", "-o", str(file))
    code, out, err = bench(*arguments)
    assert (code, out) == (0, ""), err
    run, rows = record.read(file)
    assert (run["model"], run["cache"]) == ("k3-nano", "cold" if torch.cuda.is_available() else "warm")
    assert run["weights"].startswith("sha256:")
    kinds = [(row["row"], row.get("depth")) for row in rows]
    for depth in (0, 40):
        assert ("prefill", depth) in kinds
        assert kinds.count(("verify", depth)) == 3
        assert ("decode", depth) in kinds
        assert ("shares", depth) in kinds
    assert ("extend", 40) in kinds
    assert ("restore", 40) in kinds
    decode = next(row for row in rows if row["row"] == "decode")
    assert len(decode["samples"]) == 24
    assert min(decode["samples"]) <= decode["seconds"] <= max(decode["samples"])
    assert decode["of_floor"] == pytest.approx(decode["floor_seconds"] / decode["seconds"])
    split = next(row for row in rows if row["row"] == "shares")["shares"]
    assert {"kda", "mla", "moe", "mlp", "mix", "head"} <= set(split)
    assert sum(split.values()) == pytest.approx(1)
    assert "prefill" in err

    before = file.read_text()
    code, _, _ = bench(*arguments)
    assert code == 0
    assert file.read_text() == before, "finished cells are not measured again"

    code, out, _ = bench("compare", str(file), str(file))
    assert code == 0
    assert "within noise" in out
    assert "1.000" in out


def test_what_is_missing_behind_the_last_step_is_measured_when_a_run_goes_on(
    bench: Callable[..., tuple[int, str, str]], tmp_path: Path
):
    """A crash can fall between a depth's last step and its other rows, and saving can fail."""
    file = tmp_path / "r.jsonl"
    nano = ("--model", str(NANO), "--slice", "2", "--window", "1")
    words = (*nano, "--depths", "40", "--prompt-tokens", "8", "-o", str(file))
    assert bench(*words)[0] == 0
    whole = file.read_text()
    rows = record.read(file)[1]
    names = ["extend", "prefill", "decode", "shares", "whole", "save", "restore", "memory"]
    assert [row["row"] for row in rows] == names
    assert rows[5]["filesystem"]
    assert record.read(file)[0]["weights"] == "random, seed 0"
    for cut, missing in ((4, names[3:]), (5, names[4:]), (6, names[5:])):
        kept = whole.splitlines(keepends=True)[:cut]
        failed = json.dumps({"v": 1, "row": "save", "depth": 40, "error": "the disk is full"}) + "\n"
        file.write_text("".join([*kept, failed]))
        code, _, err = bench(*words)
        assert code == 0, err
        assert f"{cut - 1} finished rows" in err
        found = record.read(file)[1]
        assert [row["row"] for row in found[cut:]] == ["extend", *missing]


def test_rows_of_a_run_that_goes_on_have_the_rates_it_was_begun_with(
    bench: Callable[..., tuple[int, str, str]], tmp_path: Path
):
    file = tmp_path / "r.jsonl"
    words = ("--depths", "0", "--prompt-tokens", "8", "--window", "1", "--no-stored", "-o", str(file))
    assert bench(*words)[0] == 0
    run = record.read(file)[0] | {"bandwidth": 1e6, "matrix_rate": 1e12}
    file.write_text(json.dumps(run) + "\n")
    assert bench(*words)[0] == 0
    decode = next(row for row in record.read(file)[1] if row["row"] == "decode")
    assert decode["floor_seconds"] == pytest.approx(decode["bytes"] / 1e6)


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a CPU, every operation runs as reference")
def test_what_runs_as_reference_is_told_with_its_reason(bench: Callable[..., tuple[int, str, str]]):
    code, out, err = bench("--depths", "0", "--prompt-tokens", "8", "--window", "1", "--no-stored", "--json")
    assert code == 0
    assert "reference (torch): kda.step, kda.prefill" in err
    assert "activation: device cpu: Triton kernels need a CUDA device" in err
    run = json.loads(out.splitlines()[0])
    assert "CUDA device" in run["reference"]["mla.decode"]
    assert run["ram"] > 1 << 28


@pytest.mark.parametrize("problem", [RuntimeError("out of memory, say"), FitError("the pool is full", "room")])
def test_a_failed_row_is_in_the_table_and_in_the_exit_code(
    bench: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch, problem: Exception
):
    def broken(*_: object) -> None:
        raise problem

    monkeypatch.setattr(K3Model, "verify", broken)
    code, out, err = bench("--depths", "0", "--prompt-tokens", "8", "--no-stored", "--json")
    assert code == 1
    failed = [row for row in map(json.loads, out.splitlines()) if "error" in row]
    assert {row["row"] for row in failed} == {"decode", "verify"}
    assert "FAILED" in err


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of one message, with answers of a few tokens."""
    monkeypatch.setattr(spec, "TEXTS", {"edit": spec.TEXTS["edit"][:1], "noise": ["Hello"]})
    monkeypatch.setattr(spec, "LONGEST", 24)


def test_drafters_are_compared_on_the_same_conversations(
    bench: Callable[..., tuple[int, str, str]], short: None, tmp_path: Path
):
    file = tmp_path / "s.jsonl"
    arguments = ("--spec", "all", "--rounds", "1", "-o", str(file))
    code, out, err = bench(*arguments)
    assert (code, out) == (0, ""), err
    rows = record.read(file)[1]
    assert [(row["text"], row["spec"]) for row in rows] == list(
        itertools.product(("edit", "noise"), ("off", "suffix", "dspark"))
    )
    for row in rows:
        assert sum(n * count for n, count in enumerate(row["rows"], 1)) >= row["tokens"] >= row["steps"]
        assert row["tokens_per_second"] == pytest.approx(row["tokens"] / row["seconds"])
        assert row["seconds"] == pytest.approx(sum(row[f"{part}_seconds"] for part in ("draft", "verify", "commit")))
        assert (row["ratio"] == 1) == (row["spec"] == "off")
        assert row["temperature"] == (5 if row["text"] == "noise" else 0)
    assert "tokens a step" in err
    before = file.read_text()
    assert bench(*arguments)[0] == 0
    assert file.read_text() == before, "finished texts are not run again"
    code, out, _ = bench("compare", str(file), str(file))
    assert code == 0
    assert "noise dspark" in out


def test_drafters_decode_in_turns_and_every_other_round_begins_with_the_last(monkeypatch: pytest.MonkeyPatch):
    order: list[str] = []

    def conversing(engine: Any, name: str, *rest: Any) -> Iterator[spec.Run]:
        run = spec.Run(verify=1.0, processor=1.0)
        for _ in range(3 if name == "off" else 2):
            order.append(name)
            run.steps = run.tokens = run.tokens + 1
            yield run

    monkeypatch.setattr(spec, "conversing", conversing)
    request = spec.Request(("off", "suffix"), ("edit",), rounds=2)
    rows = list(spec.compare_drafts(None, "edit", request))  # type: ignore[arg-type]
    assert order == ["off", "suffix", "off", "suffix", "off", "suffix", "off", "suffix", "off", "off"]
    assert [(row["spec"], row["tokens"], len(row["samples"])) for row in rows] == [("off", 3, 2), ("suffix", 2, 2)]


def test_turns_are_of_the_same_conversation(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(spec, "TURN", 10)
    nano = Engine.load(NANO, device="cpu")
    request = spec.Request(("off", "suffix"), ("edit",), longest=24)
    alone = spec.converse(nano, "off", "edit", request, messages=2)
    *before, whole = [
        (list(run.ids), run.steps) for run in spec.conversing(nano, "suffix", "edit", request, messages=2)
    ]
    steps = before[2][1]
    assert [(len(ids), made) for ids, made in before] == [(10, 0), (20, 0), (34, steps), (44, steps)]
    assert 0 < steps < whole[1] < 48
    assert whole[0] == alone.ids
    assert len(alone.ids) == alone.steps + 2 == 48, "the last token of an answer stays pending"
    assert len({id(run) for run in spec.conversing(nano, "off", "edit", request, messages=1)}) == 1


def test_ids_that_differ_fail_the_row(
    bench: Callable[..., tuple[int, str, str]], short: None, monkeypatch: pytest.MonkeyPatch
):
    whole = spec.conversing

    def off_by_one(engine: Any, name: str, *rest: Any, **more: Any) -> Iterator[spec.Run]:
        *_, run = whole(engine, name, *rest, **more)
        run.ids[5] += name == "suffix"
        yield run

    monkeypatch.setattr(spec, "conversing", off_by_one)
    code, out, _ = bench("--spec", "suffix", "--texts", "edit", "--rounds", "1", "--json")
    assert code == 1
    failed = [row for row in map(json.loads, out.splitlines()) if "error" in row]
    assert [(row["spec"], row["error"][-10:]) for row in failed] == [("suffix", "first at 5")]


def test_a_slice_tells_what_its_steps_allow(bench: Callable[..., tuple[int, str, str]], tmp_path: Path):
    file = tmp_path / "s.jsonl"
    nano = ("--model", str(NANO), "--slice", "2")
    file.write_bytes(record.BEGINNING)  # as a full disk leaves it
    code, _, err = bench("--spec", "all", *nano, "--depths", "0", "--window", "4", "-o", str(file))
    assert code == 0, err
    assert "it begins anew" in err
    *steps, allowed = record.read(file)[1]
    assert [(row["row"], row["tokens"]) for row in steps] == [("decode", 1), *(("verify", n) for n in (2, 3, 4))]
    ratios = [1.84 * steps[0]["seconds"] / steps[1]["seconds"], 2.87 * steps[0]["seconds"] / steps[3]["seconds"]]
    assert [allowed["speed_ups"][n] for n in ("1", "3")] == pytest.approx(ratios)
    assert allowed["derived"] is True
    assert allowed["ratio"] == max(allowed["speed_ups"].values())
    assert "time of 1 row" in allowed["formula"]


def test_a_slice_over_two_ranks_names_them_and_what_sums_take(
    bench: Callable[..., tuple[int, str, str]], tmp_path: Path
):
    raw = json.loads((NANO / "config.json").read_text())
    text = raw["text_config"]
    text |= {"num_attention_heads": 4, "num_key_value_heads": 4}
    text["linear_attn_config"]["num_heads"] = 4
    (tmp_path / "shape.json").write_text(json.dumps(raw))
    words = ("-m", str(tmp_path / "shape.json"), "--slice", "2", "--gpus", "2", "--depths", "0", "--window", "2")
    code, out, err = bench(*words, "--prompt-tokens", "32", "--device", "cpu", "--json")
    assert code == 0, err
    run, *rows = [json.loads(line) for line in out.splitlines() if '"row"' in line]
    assert run["world"] == 2
    assert [row["row"] for row in rows] == ["prefill", "decode", "verify", "shares", "whole", "memory"]
    assert all(row["world"] == 2 for row in rows)
    for row, samples in zip(rows, (6, 48, 48), strict=False):
        assert row["sums_seconds"] == row["seconds"] - row["apart_seconds"]
        assert len(row["samples"]) == samples, "with sums, twice without, with them again"
    assert "2 ranks, each CPU" in err
    assert "for their sums" in err
    memory = rows[-1]
    assert [part["device"] for part in memory["ranks"]] == ["cpu", "cpu"]
    for name in ("planned", "peak"):
        assert memory[name] == max(part[name] for part in memory["ranks"])
    # Two processes, neither of which can do with less than a bare interpreter takes, nor holds what this one does.
    assert memory["ranks"][0]["peak"] != memory["ranks"][1]["peak"]
    assert all(part["peak"] > 50 << 20 for part in memory["ranks"])
    assert "rank 1 on cpu: planned" in err
    gc.collect()  # a profiler that watches gloo leaves something behind that this would trip over
