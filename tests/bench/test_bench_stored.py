"""What a killed benchmark leaves in the home folder goes; what a running one has there stays, and so does the state
from which a run with results is gone on with."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from k3_sessions.fs import RealFS

from k3cli.bench import record
from k3cli.bench.kept import Kept
from k3cli.bench.ladder import Ladder
from k3cli.bench.slice import random_model, slice_config
from k3cli.bench.stored import save_and_restore
from k3cli.config import NANO
from k3cli.model.config import ModelConfig


def test_folders_of_dead_runs_are_removed_and_no_others(tmp_path: Path):
    for name in ("bench-dead0000", "bench-alive000", "bench-young000", "bench-results0", "sessions"):
        (tmp_path / name / "store").mkdir(parents=True)
        (tmp_path / name / "store" / "page").write_bytes(b"x")
        if name != "bench-young000":
            os.utime(tmp_path / name, (0, 0))
    (tmp_path / "bench-results0" / "table").write_text("mine")
    os.utime(tmp_path / "bench-results0", (0, 0))
    (tmp_path / "bench-file").write_text("mine")
    os.utime(tmp_path / "bench-file", (0, 0))
    alive = RealFS(tmp_path / "bench-alive000")
    held = alive.lock("lock", shared=False, wait=0)
    os.utime(tmp_path / "bench-alive000", (0, 0))
    model = random_model(slice_config(ModelConfig.from_dir(NANO), 2), torch.device("cpu"), torch.float32, 1)
    state = model.new_state()
    model.prefill(torch.arange(9), state, logits="last")
    saved, restored = save_and_restore(model, state, tmp_path)
    assert saved["bytes"] == restored["bytes"] > 0
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"bench-alive000", "bench-young000", "bench-results0", "sessions", "bench-file"}
    alive.close(held)


LADDER = ("--model", str(NANO), "--slice", "2", "--window", "1", "--depths", "40,80", "--prompt-tokens", "8")


@pytest.fixture
def run(bench: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A ladder with results in rows.jsonl; ended by Ctrl-C in the first cell behind a depth."""

    def ladder(stopped: int | None = None) -> tuple[int, list[Any], str]:
        def prefill(self: Ladder, depth: int) -> Any:
            if depth == stopped:
                raise KeyboardInterrupt
            return whole(self, depth)

        with monkeypatch.context() as patch:
            patch.setattr(Ladder, "_prefill_cell", prefill)
            code, _, err = bench(*LADDER, "-o", str(tmp_path / "rows.jsonl"))
        return code, record.read(tmp_path / "rows.jsonl")[1], err

    whole = Ladder._prefill_cell
    return ladder


@pytest.fixture
def folders(private_home: Path) -> Callable[[], list[Path]]:
    return lambda: sorted((private_home / "k3").glob("bench-*"))


def extended(rows: list[Any]) -> list[tuple[Any, ...]]:
    return [(row["depth"], row["tokens"], row["state"]) for row in rows if row["row"] == "extend"]


def test_a_run_that_is_gone_on_with_begins_at_its_deepest_saved_state(run, folders):
    code, rows, _ = run(stopped=80)
    assert code == 130
    assert rows[-1]["row"] == "extend"
    assert len(folders()) == 1
    assert json.loads((folders()[0] / "run.json").read_text())["position"] == 40
    code, rows, err = run()
    assert code == 0, err
    plain = [(40, 40, "extended from 0"), (80, 40, "extended from 40")]
    assert extended(rows) == [*plain, (80, 40, "restored, then extended from 40")]
    assert rows[-1]["row"] == "memory"
    assert "gone on with" in rows[-1]["note"]
    assert not folders()


def test_what_is_kept_is_the_state_that_was_saved(tmp_path: Path):
    model = random_model(slice_config(ModelConfig.from_dir(NANO), 2), torch.device("cpu"), torch.float32, 1)
    state, ids = model.new_state(), torch.arange(9)
    model.prefill(ids, state, logits="last")
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"v": 1, "row": "run", "date": "now"}) + "\n")
    kept = Kept(tmp_path, file, "now", print)
    assert kept.load(model, 0, 9) is None
    save_and_restore(model, state, tmp_path, lambda folder: kept.take(folder, 9))
    again = Kept(tmp_path, file, "now", print)
    assert [again.load(model, *depths) for depths in ((9, 40), (0, 8))] == [None, None]
    twin = again.load(model, 8, 9)
    assert twin.position == 9
    rows = [model.verify(ids[:1], each)[0] for each in (state, twin)]
    assert torch.equal(*rows)


@pytest.mark.parametrize("how", ["damaged", "another run", "no results", "no mark"])
def test_what_can_not_be_gone_on_with_is_evaluated_again(run, folders, tmp_path: Path, how: str):
    run(stopped=80)
    (folder,) = folders()
    results = tmp_path / "rows.jsonl"
    if how == "damaged":
        page = max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
        page.write_bytes(page.read_bytes()[:-1] + b"?")
    elif how == "another run":
        head, *rest = results.read_text().splitlines(keepends=True)
        results.write_text("".join([json.dumps(json.loads(head) | {"date": "earlier"}) + "\n", *rest]))
    elif how == "no results":
        results.unlink()
    else:
        (folder / "run.json").write_text("{")
    code, rows, err = run()
    assert code == 0, err
    last = (80, 40, "extended from 40") if how == "no results" else (80, 80, "extended from 0")
    assert extended(rows)[-1] == last
    assert ("can't be used" in err) == (how == "damaged")
    assert not folders()


@pytest.mark.parametrize("kind", ["name", "position", "deep", "results"])
def test_a_mark_that_no_run_has_written_stops_none(tmp_path: Path, kind: str):
    folder, results = tmp_path / "bench-of-others", tmp_path / "rows.jsonl"
    mark: dict[str, Any] = {"file": str(results), "begun": "now", "position": 1}
    results.write_text("[" * 100_000)
    text = {
        "name": json.dumps(mark | {"file": "x" * 5000}),
        "position": json.dumps(mark | {"position": float("inf")}),
        "deep": "[" * 100_000,
        "results": json.dumps(mark),
    }
    folder.mkdir()
    (folder / "run.json").write_text(text[kind])
    assert Kept(tmp_path, tmp_path / "mine.jsonl", "now", print).load(None, 0, 9) is None
    # Where a mark can be read, its results can't be gone on with.
    assert folder.exists() == (kind in ("position", "deep"))


def test_a_state_that_is_not_kept_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    told: list[str] = []
    kept = Kept(tmp_path, tmp_path / "mine.jsonl", "now", told.append)
    saved = tmp_path / "saved"
    saved.mkdir()
    kept.take(saved, 5)
    assert not told
    model = random_model(slice_config(ModelConfig.from_dir(NANO), 2), torch.device("cpu"), torch.float32, 1)
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1))
    kept.make_room(model, 9)
    kept.make_room(model, 9)  # nothing is kept any more
    kept.take(tmp_path / "gone", 9)
    assert len(told) == 2
    assert "is given up" in told[0]
    assert told[1].startswith("the state at 9 is not kept")
