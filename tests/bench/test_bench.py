"""The benchmark's arithmetic, its record of results, and the command on the shipped model."""

from __future__ import annotations

import gc
import importlib.util
import itertools
import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from k3cli.bench import record, show, spec
from k3cli.bench.floors import Work, parts, total, touched
from k3cli.bench.record import Results
from k3cli.bench.run import Ask, climb, subject
from k3cli.bench.shares import counts, derive
from k3cli.bench.slice import random_model, slice_config
from k3cli.commands.plan import configuration
from k3cli.config import K3_SHAPE, NANO, Settings
from k3cli.errors import K3Error, UsageError
from k3cli.main import main
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


def run_row(**changes: Any) -> dict[str, Any]:
    return (
        record.run_row(model="m", config="c", dtype="float32", window=8, device="d", cache="cold", chunk=512) | changes
    )


def test_results_go_on_where_they_stopped(tmp_path: Path):
    file = tmp_path / "r.jsonl"
    first = Results.open(run_row(), file)
    first.add({"row": "decode", "depth": 0, "tokens": 1, "seconds": 1.0})
    first.add({"row": "decode", "depth": 512, "tokens": 1, "error": "out of memory"})
    with file.open("a") as out:
        out.write('{"row": "decode", "de')  # a crash in the middle of a line
    again = Results.open(run_row(), file)
    assert again.done(row="decode", depth=0, tokens=1) is not None
    assert again.done(row="decode", depth=512, tokens=1) is None, "failed cells are measured again"
    assert again.done(row="decode", depth=0, tokens=2) is None


def test_rows_of_a_cut_file_stay_readable_when_it_is_gone_on_with(tmp_path: Path):
    file = tmp_path / "r.jsonl"
    Results.open(run_row(), file).add({"row": "decode", "depth": 0, "tokens": 1, "seconds": 1.0})
    with file.open("a") as out:
        out.write('{"row": "dec')
    Results.open(run_row(), file).add({"row": "decode", "depth": 9, "tokens": 1, "seconds": 2.0})
    assert [row["depth"] for row in record.read(file)[1]] == [0, 9]


@pytest.mark.parametrize("rows", [0, 1])
def test_a_file_that_was_cut_between_a_row_and_its_end_loses_nothing(tmp_path: Path, rows: int):
    file = tmp_path / "r.jsonl"
    first = Results.open(run_row(), file)
    for depth in range(rows):
        first.add({"row": "decode", "depth": depth, "tokens": 1, "seconds": 1.0})
    file.write_bytes(file.read_bytes()[:-1])
    again = Results.open(run_row(), file)
    assert len(again.rows) == rows
    again.add({"row": "decode", "depth": 9, "tokens": 1, "seconds": 2.0})
    assert [row["depth"] for row in record.read(file)[1]] == [*range(rows), 9]


@pytest.mark.parametrize("key", ["model", "dtype", "window", "commit"])
def test_other_conditions_are_another_file(tmp_path: Path, key: str):
    file = tmp_path / "r.jsonl"
    Results.open(run_row(), file)
    with pytest.raises(UsageError, match=f"holds a run with {key}"):
        Results.open(run_row(**{key: "other"}), file)


@pytest.mark.parametrize("row", [{"row": "decode", "seconds": 0}, {"seconds": None}, {"row": [1]}, {"spread": "x"}])
def test_figures_that_cannot_be_are_refused(tmp_path: Path, row: dict[str, Any]):
    results(tmp_path / "a", 1.0)
    Results.open(run_row(), tmp_path / "b").add({"row": "decode", "depth": 0, "tokens": 1, "seconds": 1.0} | row)
    with pytest.raises(UsageError, match="line 2 has"):
        record.compare(tmp_path / "a", tmp_path / "b")


@pytest.mark.parametrize("content", ["", "{}\n", "[1]\n{}\n", "nonsense\n{}\n", '{"row": "decode"}\n'])
def test_files_that_hold_no_results_are_refused(tmp_path: Path, content: str):
    (tmp_path / "x").write_text(content)
    with pytest.raises(UsageError):
        record.read(tmp_path / "x")


def results(file: Path, seconds: float, run: dict[str, Any] | None = None, depth: int = 0) -> Path:
    made = Results.open(run or run_row(), file)
    made.add({"row": "decode", "depth": depth, "tokens": 1, "seconds": seconds, "spread": 0.01})
    return file


def test_compare_tells_noise_from_difference(tmp_path: Path):
    a, b, c = (results(tmp_path / name, s) for name, s in (("a", 1.0), ("b", 1.005), ("c", 1.5)))
    assert [row["within_noise"] for row in record.compare(a, b)] == [True]
    (row,) = record.compare(a, c)
    assert (row["ratio"], row["within_noise"]) == (1.5, False)


def test_compare_refuses_what_does_not_match(tmp_path: Path):
    a = results(tmp_path / "a", 1.0)
    for name, heat in (("cool", 0.0), ("hot", 0.5)):
        row = {"row": "spec", "text": "edit", "spec": "off", "tokens": 9, "seconds": 1.0, "temperature": heat}
        Results.open(run_row(), tmp_path / name).add(row)
    with pytest.raises(UsageError, match=r"edit off 0\.\d was measured in only one"):
        record.compare(tmp_path / "cool", tmp_path / "hot")
    with pytest.raises(UsageError, match=r"window is 8 .* and 4"):
        record.compare(a, results(tmp_path / "b", 1.0, run_row(window=4)))
    with pytest.raises(UsageError, match=r"decode (0|512) 1 was measured in only one"):
        record.compare(a, results(tmp_path / "c", 1.0, depth=512))


@pytest.fixture
def bench(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., tuple[int, str, str]]]:
    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["k3", "bench", *arguments])
        code = main()
        out, err = capsys.readouterr()
        return int(code), out, err

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield run
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_ladder_on_the_shipped_model(bench: Callable[..., tuple[int, str, str]], tmp_path: Path):
    file = tmp_path / "r.jsonl"
    arguments = ("--depths", "0,40", "--prompt-tokens", "24", "-o", str(file))
    code, out, err = bench(*arguments)
    assert (code, out) == (0, ""), err
    run, rows = record.read(file)
    assert (run["model"], run["cache"]) == ("k3-nano", "cold" if torch.cuda.is_available() else "warm")
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


def test_a_failed_row_is_in_the_table_and_in_the_exit_code(
    bench: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
):
    def broken(*_: object) -> None:
        raise RuntimeError("out of memory, say")

    monkeypatch.setattr(K3Model, "verify", broken)
    code, out, err = bench("--depths", "0", "--prompt-tokens", "8", "--no-stored", "--json")
    assert code == 1
    failed = [row for row in map(json.loads, out.splitlines()) if "error" in row]
    assert {row["row"] for row in failed} == {"decode", "verify"}
    assert "FAILED" in err


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


def test_ids_that_differ_fail_the_row(
    bench: Callable[..., tuple[int, str, str]], short: None, monkeypatch: pytest.MonkeyPatch
):
    whole = spec.converse

    def off_by_one(engine: Any, name: str, *rest: Any) -> spec.Run:
        run = whole(engine, name, *rest)
        run.ids[5] += name == "suffix"
        return run

    monkeypatch.setattr(spec, "converse", off_by_one)
    code, out, _ = bench("--spec", "suffix", "--texts", "edit", "--rounds", "1", "--json")
    assert code == 1
    failed = [row for row in map(json.loads, out.splitlines()) if "error" in row]
    assert [(row["spec"], row["error"][-10:]) for row in failed] == [("suffix", "first at 5")]


def test_a_slice_tells_what_its_steps_allow(bench: Callable[..., tuple[int, str, str]], tmp_path: Path):
    file = tmp_path / "s.jsonl"
    nano = ("--model", str(NANO), "--slice", "2")
    code, _, err = bench("--spec", "all", *nano, "--depths", "0", "--window", "4", "-o", str(file))
    assert code == 0, err
    *steps, allowed = record.read(file)[1]
    assert [(row["row"], row["tokens"]) for row in steps] == [("decode", 1), *(("verify", n) for n in (2, 3, 4))]
    ratios = [1.84 * steps[0]["seconds"] / steps[1]["seconds"], 2.87 * steps[0]["seconds"] / steps[3]["seconds"]]
    assert [allowed["speed_ups"][n] for n in ("1", "3")] == pytest.approx(ratios)
    assert allowed["derived"] is True
    assert allowed["ratio"] == max(allowed["speed_ups"].values())
    assert "time of 1 row" in allowed["formula"]


def ladder_file(folder: Path) -> Path:
    """Results as another machine wrote them: two depths, one of them deepest first, and rows that are not drawn."""
    made = Results.open(run_row(commit="elsewhere"), folder / "ladder.jsonl")
    cell = {"tokens": 1, "seconds": 0.5, "tokens_per_second": 2.0, "floor_seconds": 0.25}
    for depth in (1 << 20, 0):
        made.add({"row": "decode", "depth": depth, **cell})
        made.add({"row": "verify", "depth": depth, **cell | {"tokens": 8}})
        made.add({"row": "prefill", "depth": depth, **cell | {"tokens": 512, "tokens_per_second": 1024.0}})
    made.add({"row": "prefill", "depth": 9, "tokens": 512, "error": "out of memory"})
    return folder / "ladder.jsonl"


def test_what_is_drawn_of_a_ladder(tmp_path: Path):
    found = show.series(record.read(ladder_file(tmp_path))[1])
    assert found == {
        "decode": [(0, 2.0, 4.0), (1 << 20, 2.0, 4.0)],
        "prefill": [(0, 1024.0, 2048.0), (1 << 20, 1024.0, 2048.0)],
    }
    with pytest.raises(K3Error, match="run the benchmark"):
        show.series([])


def test_recorded_results_are_drawn_wherever_they_were_measured(
    bench: Callable[..., tuple[int, str, str]], tmp_path: Path
):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "p.png"
    assert bench("plot", str(ladder_file(tmp_path)), str(picture)) == (0, "", "")
    assert picture.read_bytes().startswith(b"\x89PNG")
    code, _, err = bench("plot", str(tmp_path / "ladder.jsonl"), str(tmp_path / "p.poem"))
    assert code == 1
    assert "a picture file" in err


def test_a_picture_without_matplotlib_is_refused_before_anything_is_measured(
    bench: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    code, _, err = bench("--depths", "0", "--plot", str(tmp_path / "p.png"), "-o", str(tmp_path / "r.jsonl"))
    assert code == 1
    assert err.count("\n") == 1
    assert "matplotlib" in err
    assert not (tmp_path / "r.jsonl").exists()


@pytest.mark.parametrize("name", ["", "p.poem", "p", "missing/p.png"])
def test_a_picture_that_cannot_be_written_is_refused_before_anything_is_measured(
    bench: Callable[..., tuple[int, str, str]], tmp_path: Path, name: str
):
    pytest.importorskip("matplotlib")
    code, _, err = bench("--depths", "0", "--plot", str(tmp_path / name), "-o", str(tmp_path / "r.jsonl"))
    assert code == 1
    assert "picture file" in err
    assert not (tmp_path / "r.jsonl").exists()


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

    def stop(self: Any, model: Any, config: Any, plan: Any, limits: Any) -> None:
        depths.extend(plan.depths)
        raise KeyboardInterrupt

    monkeypatch.setattr("k3cli.bench.ladder.Ladder.__init__", stop)
    monkeypatch.setattr("k3cli.bench.run.ceilings", lambda *_: (1.0, 1.0))
    ask = Ask(Settings(tmp_path, device="cpu"), None, None, (5, 130_900, 131_072), 512, None, False)
    with pytest.raises(KeyboardInterrupt):
        list(climb(ask, subject(ask.settings, None, configuration), None, lambda line: None))
    assert depths == [5, 131_072 - 512]


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


def test_a_slice_over_two_ranks_names_them_and_what_sums_take(
    bench: Callable[..., tuple[int, str, str]], tmp_path: Path
):
    raw = json.loads((NANO / "config.json").read_text())
    text = raw["text_config"]
    text |= {"num_attention_heads": 4, "num_key_value_heads": 4}
    text["linear_attn_config"]["num_heads"] = 4
    (tmp_path / "config.json").write_text(json.dumps(raw))
    words = ("-m", str(tmp_path), "--slice", "2", "--gpus", "2", "--depths", "0", "--window", "2")
    code, out, err = bench(*words, "--prompt-tokens", "32", "--device", "cpu", "--json")
    assert code == 0, err
    run, *rows = [json.loads(line) for line in out.splitlines() if '"row"' in line]
    assert run["world"] == 2
    assert [row["row"] for row in rows] == ["prefill", "decode", "verify", "shares", "whole", "memory"]
    assert all(row["world"] == 2 for row in rows)
    for row in rows[:3]:
        assert row["sums_seconds"] == row["seconds"] - row["apart_seconds"]
    assert "2 ranks, each CPU" in err
    assert "for their sums" in err
    gc.collect()  # a profiler that watches gloo leaves something behind that this would trip over
