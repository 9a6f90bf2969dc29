"""`k3 bench --kernels` around the timing itself, which needs a device: rows, peers, targets, failures, going on."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from k3_kernels import select
from k3_kernels.bench import rows as operators
from k3_kernels.bench.harness import Case, Timing

from k3cli.bench import record

ran: list[str] = []
"""What ran, in its order."""


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Two operators on a device that isn't there; shapes in this set fail."""
    shapes: set[str] = set()
    ran.clear()

    def work(shape: str) -> Callable[[], object]:
        def run() -> None:
            ran.append(shape)
            if shape in shapes:
                raise RuntimeError("out of memory, say")

        return run

    def cases() -> list[Case]:
        return [
            Case("op.a", "8 rows", [work("8 rows")], 4000, 10, [work("peer")], "the other one", target_us=50.0),
            Case("op.b", "1 row", [work("1 row")], 10, 4_000_000),
        ]

    def timed(runs: Sequence[Callable[[], object]]) -> Timing:
        for run in runs:
            run()
        return Timing((100.0, 80.0, 120.0))

    monkeypatch.setitem(sys.modules, "k3_kernels.bench.bench_made", SimpleNamespace(cases=cases))
    monkeypatch.setattr(operators, "names", lambda: ["made"])
    monkeypatch.setattr(operators, "time_runs", timed)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(select, "for_device", lambda kind: select.Choice(True, "able"))
    monkeypatch.setattr("k3cli.bench.run.ceilings", lambda *_: (1e8, 1e11))
    monkeypatch.setattr("k3cli.bench.run.device_name", lambda *_: "a device")
    monkeypatch.setattr("k3cli.bench.run.references", lambda *_: {"linear.few": "rows of 3 bytes"})
    return shapes


def test_each_operator_stands_beside_its_floor_its_peer_and_its_target(
    bench: Callable[..., tuple[int, str, str]], broken: set[str], tmp_path: Path
):
    file = tmp_path / "k.jsonl"
    code, out, err = bench("--kernels", "-o", str(file))
    assert (code, out) == (0, ""), err
    run, (a, b) = record.read(file)
    assert (run["cache"], run["kernels"], run["bandwidth"], run["matrix_rate"]) == ("cold", "able", 1e8, 1e11)
    assert (a["seconds"], a["floor_seconds"], a["of_floor"]) == pytest.approx((1e-4, 4e-5, 0.4))
    assert (a["peer"], a["peer_seconds"], len(a["samples"])) == ("the other one", pytest.approx(1e-4), 6)
    assert (b["floor_seconds"], b["of_matrix_rate"]) == pytest.approx((4e-5, 0.4))
    assert "peer" not in b
    assert ran == ["8 rows", "peer", "peer", "8 rows", "1 row"]
    for words in ("op.a", "8 rows", "the other one 100 us", "target 50 us", "linear.few: rows of 3 bytes"):
        assert words in err


@pytest.mark.parametrize("what", ["1 row", "peer"])
def test_an_operator_that_fails_is_in_the_table_and_measured_when_the_run_goes_on(
    bench: Callable[..., tuple[int, str, str]], broken: set[str], tmp_path: Path, what: str
):
    file = tmp_path / "k.jsonl"
    broken.add(what)
    code, _, err = bench("--kernels", "-o", str(file))
    assert code == 1
    assert "FAILED" in err
    assert "RuntimeError: out of memory, say" in err
    assert ["error" in row for row in record.read(file)[1]] == [what == "peer", what == "1 row"]
    broken.clear()
    assert bench("--kernels", "-o", str(file))[0] == 0
    assert [row["op"] for row in record.read(file)[1]] == ["op.a", "op.b", "op.a" if what == "peer" else "op.b"]
    before = file.read_text()
    assert bench("--kernels", "-o", str(file))[0] == 0
    assert file.read_text() == before


def test_an_operator_whose_inputs_can_not_be_made_is_a_failed_row(
    bench: Callable[..., tuple[int, str, str]], broken: set[str], monkeypatch: pytest.MonkeyPatch
):
    def cases() -> list[Case]:
        raise RuntimeError("no room")

    monkeypatch.setitem(sys.modules, "k3_kernels.bench.bench_made", SimpleNamespace(cases=cases))
    code, _, err = bench("--kernels")
    assert code == 1
    assert "RuntimeError: no room" in err
