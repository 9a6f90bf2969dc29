"""Results on disk: begun, cut, gone on with, compared, drawn."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from k3cli.bench import record, show
from k3cli.bench.compare import compare
from k3cli.bench.record import Results
from k3cli.errors import K3Error, UsageError


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


def test_a_file_that_was_cut_in_its_first_line_begins_anew(tmp_path: Path):
    whole = tmp_path / "whole.jsonl"
    Results.open(run_row(), whole)
    line, file = whole.read_bytes(), tmp_path / "r.jsonl"
    told: list[str] = []
    for kept in (1, 7, 8, len(record.BEGINNING), len(record.BEGINNING) + 1, len(line) // 2, len(line) - 2):
        for zeros in (0, 100):  # what a file system may put where data was not written yet
            file.write_bytes(line[:kept] + bytes(zeros))
            Results.open(run_row(), file, told.append).add({"row": "decode", "depth": kept, "tokens": 1})
            run, rows = record.read(file)
            assert (run["model"], [row["depth"] for row in rows]) == ("m", [kept])
    assert told == [f"{file} holds only the cut beginning of a run: it begins anew"] * 14


@pytest.mark.parametrize(
    "content",
    [
        b"{}",
        b'{"v": 2, "row"',
        b'{"v": 1, "row": "decode"',
        b'{"row": "ru',
        bytes(9),
        b" ",
        b"a novel",
        b"{\n",
        b"\n{",
        pytest.param(b"[" * 100_000, id="deep"),
    ],
)
def test_what_is_no_beginning_of_a_run_is_refused_and_left_as_it_is(tmp_path: Path, content: bytes):
    file = tmp_path / "mine"
    file.write_bytes(content)
    with pytest.raises(UsageError, match=r"mine"):
        record.check_output(file)
    with pytest.raises(UsageError, match=r"mine"):
        Results.open(run_row(), file)
    assert file.read_bytes() == content


def test_a_cut_last_row_is_told(tmp_path: Path):
    file, told = tmp_path / "r.jsonl", []
    Results.open(run_row(), file).add({"row": "decode", "depth": 0, "tokens": 1, "seconds": 1.0})
    whole = file.read_bytes()
    for kept in range(whole.index(b"\n") + 2, len(whole) - 1, 9):
        file.write_bytes(whole[:kept])
        assert Results.open(run_row(), file, told.append).rows == []
        assert told.pop() == f"the last row of {file} was cut: what it held is measured again"
        assert file.read_bytes() == whole[: whole.index(b"\n") + 1]
    file.write_bytes(whole)
    assert len(Results.open(run_row(), file, told.append).rows) == 1
    assert told == [f"{file} has 1 finished row; the others get the rates that were measured when it was begun"]


def test_where_results_can_go_is_looked_at_before_anything_is_measured(
    bench: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr("k3cli.bench.run.subject", lambda *_: pytest.fail("a model was looked for"))
    (tmp_path / "novel").write_text("Call me Ishmael.")
    for name, code, words in (("novel", 2, "starts with no run"), ("no/such/place", 1, "cannot be written")):
        done = bench("--depths", "0", "-o", str(tmp_path / name))
        assert done[:2] == (code, "")
        assert words in done[2]
        assert done[2].count("\n") == 1
    assert (tmp_path / "novel").read_text() == "Call me Ishmael."


@pytest.mark.parametrize("key", ["model", "weights", "dtype", "window", "commit"])
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
        compare(tmp_path / "a", tmp_path / "b")


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
    assert [row["within_noise"] for row in compare(a, b)] == [True]
    (row,) = compare(a, c)
    assert (row["ratio"], row["within_noise"]) == (1.5, False)


@pytest.mark.parametrize("row", [{"spread": 0.0, "samples": [2.0]}, {"derived": True, "formula": "2 x 1"}])
def test_compare_judges_nothing_by_a_single_sample(
    bench: Callable[..., tuple[int, str, str]], tmp_path: Path, row: dict[str, Any]
):
    for name, seconds in (("a", 1.0), ("b", 1.5)):
        Results.open(run_row(), tmp_path / name).add({"row": "save", "depth": 9, "seconds": seconds} | row)
    (found,) = compare(tmp_path / "a", tmp_path / "b")
    assert (found["ratio"], found["within_noise"]) == (1.5, None)
    code, out, _ = bench("compare", str(tmp_path / "a"), str(tmp_path / "b"))
    assert (code, "noise not known" in out, "slower" in out) == (0, True, False)
    assert show.cells({"row": "save", "depth": 9, "seconds": 1.0} | row)[4] == ""


def test_compare_refuses_what_does_not_match(tmp_path: Path):
    a = results(tmp_path / "a", 1.0)
    for name, heat in (("cool", 0.0), ("hot", 0.5)):
        row = {"row": "spec", "text": "edit", "spec": "off", "tokens": 9, "seconds": 1.0, "temperature": heat}
        Results.open(run_row(), tmp_path / name).add(row)
    with pytest.raises(UsageError, match=r"edit off 0\.\d was measured in only one"):
        compare(tmp_path / "cool", tmp_path / "hot")
    with pytest.raises(UsageError, match=r"window is 8 .* and 4"):
        compare(a, results(tmp_path / "b", 1.0, run_row(window=4)))
    with pytest.raises(UsageError, match=r"decode (0|512) 1 was measured in only one"):
        compare(a, results(tmp_path / "c", 1.0, depth=512))


def test_a_run_that_went_on_compares_with_one_that_did_not_stop(tmp_path: Path):
    """Its state was evaluated from the start again, by another number of tokens."""
    for name, step in (("a", 512), ("b", 1024)):
        made = Results.open(run_row(), results(tmp_path / name, 1.0))
        made.add({"row": "extend", "depth": 1024, "tokens": step, "seconds": 1.0})
    assert [row["row"] for row in compare(tmp_path / "a", tmp_path / "b")] == ["decode"]


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
    pyplot = pytest.importorskip("matplotlib.pyplot")
    picture = tmp_path / "p.png"
    assert bench("plot", str(ladder_file(tmp_path)), str(picture)) == (0, "", "")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert {axis.get_xlim()[0] for axis in pyplot.gcf().axes} == {0}  # nothing is behind fewer tokens than none
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


def test_what_is_no_results_file_is_told_in_plain_words(tmp_path: Path):
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for name, said in (("gone", "gone: No such file"), (".", ": Is a directory"), ("binary", "binary is no text")):
        with pytest.raises(UsageError, match=said) as told:
            record.read(tmp_path / name)
        assert "Errno" not in str(told.value)
