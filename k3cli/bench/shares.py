"""Where a step's time goes, by kind of layer part, and what that says about the whole model.

The network marks its parts (`k3cli/model/marks.py`); their device time, on a CPU their time by the clock, is summed
over a step that runs without a captured graph. Shares are of that sum; seconds are shares of the measured step.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from k3cli.bench.record import Row
from k3cli.model.config import ModelConfig
from k3cli.model.marks import MARK, clocked


def shares(model: Any, state: Any, ids: torch.Tensor) -> Row:
    """{part: share of their time} of one verify step; state stays as it was (a fork is used).

    Of several ranks it is rank 0's time, sums and waiting in them with the part they belong to.
    """
    twin = state.fork()
    with model.eager():
        _, log = model.verify(ids, twin)  # warm
        model.commit(twin, log, ids.numel())
        if model.device.type == "cuda":
            spent = _profiled(model, twin, ids)
        else:
            with clocked() as spent:
                model.verify(ids, twin)
    whole = sum(spent.values())
    if not whole:
        raise RuntimeError("no marked part was seen")
    return {"shares": {name: value / whole for name, value in spent.items()}}


def _profiled(model: Any, state: Any, ids: torch.Tensor) -> dict[str, float]:
    """{part: device time} of a step."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it would write to stderr
    kinds = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=kinds, acc_events=True) as found:  # without it torch warns of what it drops
        logits, _ = model.verify(ids, state)
        logits.argmax(-1).tolist()
    spent: dict[str, float] = defaultdict(float)
    for entry in found.key_averages():
        if entry.key.startswith(MARK):
            spent[entry.key.removeprefix(MARK)] += entry.device_time_total
    return spent


def counts(config: ModelConfig) -> dict[str, int]:
    """How often each marked part runs in one step."""
    depth, mixtures = len(config.layers), sum(config.moe_layers)
    found = {
        "kda": len(config.kda_layers),
        "mla": len(config.mla_layers),
        "moe": mixtures,
        "mlp": depth - mixtures,
        "mix": 2 * depth + 1,
        "head": 1,
    }
    return {name: count for name, count in found.items() if count}


def derive(whole: ModelConfig, part: ModelConfig, seconds: float, split: Mapping[str, float]) -> Row:
    """A step of the whole model from a slice's step: each part's time times how much more often it runs there.

    Parts the slice doesn't have (a dense MLP) are left out and named.
    """
    here, there = counts(part), counts(whole)
    total, terms, missing = 0.0, [], []
    for name, count in there.items():
        if name not in here or name not in split:
            missing.append(name)
            continue
        each = seconds * split[name] / here[name]
        total += count * each
        terms.append(f"{count} x {name} {1e6 * each:.1f} us")
    formula = " + ".join(terms) + (f"; without {', '.join(missing)}" if missing else "")
    return {"derived": True, "seconds": total, "formula": formula}


def usual(row: Mapping[str, Any]) -> str:
    """Shares as one line, the largest first."""
    ordered = sorted(row["shares"].items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {share:.0%}" for name, share in ordered)
