"""Two files of results side by side: equal conditions only, noise told from difference."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from k3cli.bench.record import NAMES, SAME_TO_COMPARE, Row, read
from k3cli.errors import UsageError


def _identity(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """What two rows must share to be compared."""
    return tuple(row.get(key) for key in NAMES)


def compare(first: Path, second: Path) -> list[Row]:
    """Rows of both files side by side, with the ratio of their medians; within_noise is None where noise is not known.
    UsageError when conditions or rows differ."""
    (run_a, rows_a), (run_b, rows_b) = read(first), read(second)
    for key in SAME_TO_COMPARE:
        if run_a.get(key) != run_b.get(key):
            raise UsageError(
                f"{key} is {run_a.get(key)} in {first} and {run_b.get(key)} in {second}", "runs under equal conditions"
            )
    # How far it was to a depth depends on where the run was begun, or gone on with.
    by_b = {_identity(row): row for row in rows_b if "seconds" in row and row.get("row") != "extend"}
    ours = {_identity(row): row for row in rows_a if "seconds" in row and row.get("row") != "extend"}
    alone = [*(key for key in ours if key not in by_b), *(key for key in by_b if key not in ours)]
    if alone or not ours:
        name = " ".join(str(part) for part in alone[0] if part is not None) if alone else "nothing"
        raise UsageError(f"{name} was measured in only one of {first} and {second}", "the same rows in both")
    found = []
    for same, row in ours.items():
        other = by_b[same]
        ratio = other["seconds"] / row["seconds"]
        noise = max(_noise(row), _noise(other))
        within = None if noise == math.inf else abs(ratio - 1) <= noise
        names = {key: row[key] for key in NAMES if key in row}
        found.append(names | {"seconds": [row["seconds"], other["seconds"]], "ratio": ratio, "within_noise": within})
    return found


def _noise(row: Row) -> float:
    """Spread over median; infinite for what was measured once, or derived."""
    samples = row.get("samples")
    once = isinstance(samples, list) and len(samples) < 2
    return math.inf if once or "spread" not in row else row["spread"] / row["seconds"]
