"""All operators' cases, measured one by one."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator, Sequence

import torch

from k3_kernels import bench
from k3_kernels.bench.harness import Case, Timing, time_runs


def names() -> list[str]:
    """Every module bench_NAME.py of this package."""
    return [m.name.removeprefix("bench_") for m in pkgutil.iter_modules(bench.__path__) if m.name.startswith("bench_")]


def rows(
    ceilings: tuple[float, float],
    skip: Callable[[str, str], bool] = lambda _op, _shape: False,
    wanted: Sequence[str] = (),
) -> Iterator[dict[str, object]]:
    """One row a case; what fails is a row with `error`. skip(op, shape): cases somebody has measured already."""
    for name in wanted or names():
        try:
            cases: Sequence[Case] = importlib.import_module(f"k3_kernels.bench.bench_{name}").cases()
        except Exception as problem:
            yield {"op": name, "shape": "", "error": f"{type(problem).__name__}: {problem}"}
            continue
        for case in cases:
            if skip(case.op, case.shape):
                continue
            try:
                yield row(case, ceilings)
            except Exception as problem:
                yield {"op": case.op, "shape": case.shape, "error": f"{type(problem).__name__}: {problem}"}
        del cases
        torch.cuda.empty_cache()


def row(case: Case, ceilings: tuple[float, float]) -> dict[str, object]:
    """Measures one case. ceilings: (bytes per second, operations per second). Times in seconds."""
    floor = max(case.bytes / ceilings[0], case.flops / ceilings[1])
    own, peer = _in_turns(case)
    found: dict[str, object] = {"op": case.op, "shape": case.shape, "bytes": case.bytes, "flops": case.flops}
    found |= _timed(own)
    seconds = own.median / 1e6
    found |= {
        "floor_seconds": floor,
        "of_floor": floor / seconds,
        "of_bandwidth": case.bytes / seconds / ceilings[0],
        "of_matrix_rate": case.flops / seconds / ceilings[1],
        "cache": "cold",
        "note": case.note,
    }
    if case.target_us is not None:
        found["target_seconds"] = case.target_us / 1e6
    if peer is not None:
        found |= {f"peer_{key}": value for key, value in _timed(peer).items()} | {"peer": case.peer_name}
    return found


def _in_turns(case: Case) -> tuple[Timing, Timing | None]:
    """The kernel's times and the peer's, None without one: kernel, peer, peer, kernel, so that a clock that drifts or
    other work on the host hits both alike."""
    if not case.peer:
        return time_runs(case.runs), None
    first, second, third, fourth = (time_runs(runs) for runs in (case.runs, case.peer, case.peer, case.runs))
    return Timing(first.samples + fourth.samples), Timing(second.samples + third.samples)


def _timed(timing: Timing) -> dict[str, object]:
    samples = [sample / 1e6 for sample in timing.samples]
    return {"seconds": timing.median / 1e6, "spread": timing.spread / 1e6, "samples": samples}
