"""Results as JSON lines: what was measured under which conditions, and how a run goes on where it was cut.

The first line of a file is the run: command, versions, device, commit, model, measured ceilings. Every further line is
one finished cell, flushed before the next begins.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from k3cli.errors import K3Error, UsageError
from k3cli.words import counted

SCHEMA = 1
LIBRARIES = ("torch", "triton", "fla-core")
SAME_TO_COMPARE = ("model", "config", "dtype", "window", "device", "cache", "chunk")
NAMES = ("row", "op", "shape", "depth", "tokens", "text", "spec", "temperature")
"""What tells rows apart."""
FIGURES = ("seconds", "spread", "tokens_per_second", "floor_seconds", "bandwidth", "matrix_rate")
"""What is reckoned with when results are read back."""
NEVER_ZERO = ("seconds", "bandwidth", "matrix_rate")
BEGINNING = json.dumps({"v": SCHEMA, "row": "run"})[:-1].encode()
"""How every file of results begins."""
SAME_TO_RESUME = (*SAME_TO_COMPARE, "weights", "world", "versions", "commit", "kernels")

Row = dict[str, Any]


def spread(samples: Sequence[float]) -> float:
    """Half the distance between the tenth and the ninetieth percentile."""
    ordered = sorted(samples)
    last = len(ordered) - 1
    return (ordered[round(0.9 * last)] - ordered[round(0.1 * last)]) / 2


def measured(samples: Sequence[float]) -> Row:
    """Median, spread and raw samples, seconds."""
    return {"seconds": statistics.median(samples), "spread": spread(samples), "samples": list(samples)}


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def commit() -> str:
    """The commit k3 itself runs from, with + when files differ from it; the version outside a repository."""
    import k3cli

    folder = Path(k3cli.__file__).parent
    try:
        head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=folder, capture_output=True, check=True)
        state = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no"], cwd=folder, capture_output=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return f"release {k3cli.__version__}"
    return head.stdout.decode().strip() + ("+" if state.stdout.strip() else "")


def run_row(**conditions: Any) -> Row:
    """The first line: what holds for every row."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {
        "v": SCHEMA,
        "row": "run",
        "date": now,
        "command": ["k3", *sys.argv[1:]],
        "commit": commit(),
        "versions": versions(),
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "ram": _ram(),
        "load": load,
        **conditions,
    }


def _ram(pages: str = "SC_PHYS_PAGES") -> int | None:
    """Bytes of main memory; None where the system doesn't say."""
    try:
        return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


@dataclass
class Results:
    """Rows of one run; with a file, each is appended and flushed, and finished cells of an earlier start are kept."""

    run: Row
    rows: list[Row]
    file: Path | None = None

    @staticmethod
    def open(run: Row, file: Path | None, tell: Callable[[str], None] = lambda line: None) -> Results:
        """Continues `file` when it holds a run under the same conditions. UsageError when they differ, or when it holds
        anything else; it is left as it is. tell: one line for people, about a row that a crash cut."""
        if file is None or _holds_nothing(file):
            results = Results(run, [], file)
            if file is not None and file.exists() and file.stat().st_size:
                tell(f"{file} holds only the cut beginning of a run: it begins anew")
                os.truncate(file, 0)
            results._append(run)
            return results
        before, rows = read(file)
        differ = [key for key in SAME_TO_RESUME if before.get(key) != run.get(key)]
        if differ:
            key = differ[0]
            raise UsageError(
                f"{file} holds a run with {key} {before.get(key)}, this one has {run.get(key)}",
                "equal conditions to go on with it",
                "give another -o FILE",
            )
        if _mend_last_line(file):
            tell(f"the last row of {file} was cut: what it held is measured again")
        finished = [row for row in rows if "error" not in row]
        if number := len(finished):
            row = counted(number, "finished row")
            tell(f"{file} has {row}; the others get the rates that were measured when it was begun")
        return Results(run | before, finished, file)

    def done(self, **cell: Any) -> Row | None:
        """The finished row of a cell, None when it has still to be measured."""
        finished = (row for row in self.rows if "error" not in row)
        return next((row for row in finished if all(row.get(k) == v for k, v in cell.items())), None)

    @property
    def ceilings(self) -> tuple[float, float]:
        """(bytes per second, operations per second) as they were measured when these results were begun."""
        return self.run["bandwidth"], self.run["matrix_rate"]

    def add(self, row: Row) -> Row:
        row = {"v": SCHEMA, **row}
        if (world := self.run.get("world", 1)) > 1:
            row["world"] = world
        self.rows.append(row)
        self._append(row)
        return row

    @property
    def failed(self) -> list[Row]:
        return [row for row in self.rows if "error" in row]

    def _append(self, row: Row) -> None:
        if self.file is None:
            return
        try:
            with self.file.open("a") as out:
                out.write(json.dumps(row) + "\n")
                out.flush()
                os.fsync(out.fileno())
        except OSError as problem:
            raise K3Error(f"{self.file}: {problem.strerror}", "a file k3 may write", "give another -o FILE") from None


def _holds_nothing(file: Path) -> bool:
    """Whether a run may begin in `file`: it is not there, is empty, or a crash or a full disk cut its very first line.

    Such a line begins as every run does, whatever zeros the file system put in place of the rest.
    """
    try:
        if file.stat().st_size == 0:  # so have pipes and devices, which are not to be read
            return True
        with file.open("rb") as source:
            first = source.readline(1 << 20)
            rest = source.read(1)
    except FileNotFoundError:
        return True
    except OSError:
        return False  # whoever reads it says why
    kept = first.rstrip(b"\0")
    begun = bool(kept) and kept[: len(BEGINNING)] == BEGINNING[: len(kept)]
    return begun and not first.endswith(b"\n") and not rest and not _whole(first)


def _whole(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _mend_last_line(file: Path) -> bool:
    """What a crash left behind the last line's end would spoil the next one: a whole row gets its end, a part goes.

    Returns whether a part went.
    """
    content = file.read_bytes()
    if content.endswith(b"\n"):
        return False
    begin = content.rfind(b"\n") + 1
    if _whole(content[begin:]):
        with file.open("ab") as out:
            out.write(b"\n")
        return False
    os.truncate(file, begin)
    return True


def check_output(file: Path) -> None:
    """UsageError or K3Error for a file that results can't go into, before anything is measured for it."""
    if not _holds_nothing(file):
        read(file)
    if not os.access(file if file.exists() else file.absolute().parent, os.W_OK):
        raise K3Error(f"{file} cannot be written", "a file k3 may write", "give another -o FILE")


def read(file: Path) -> tuple[Row, list[Row]]:
    """(run, rows) of a result file; a last line cut by a crash is dropped. UsageError for anything else."""
    try:
        lines = file.read_text().splitlines()
    except OSError as problem:
        raise UsageError(f"{file}: {problem.strerror}", "results that `k3 bench -o` wrote") from None
    except UnicodeDecodeError:
        raise UsageError(f"{file} is no text", "results that `k3 bench -o` wrote") from None
    rows = list(_parsed(lines, file))
    if not rows or rows[0].get("row") != "run" or rows[0].get("v") != SCHEMA:
        raise UsageError(f"{file} starts with no run", "results that `k3 bench -o` wrote")
    return rows[0], rows[1:]


def _parsed(lines: Sequence[str], file: Path) -> Iterator[Row]:
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            if number == len(lines):
                return
            raise UsageError(f"{file} line {number} is no JSON", "results that `k3 bench -o` wrote") from None
        if not isinstance(row, dict):
            raise UsageError(f"{file} line {number} is no object", "results that `k3 bench -o` wrote")
        for key in (*NAMES, *FIGURES):
            if key in row and not _possible(key, row[key]):
                raise UsageError(f"{file} line {number} has {key} {row[key]!r}", "results that `k3 bench -o` wrote")
        yield row


def _possible(key: str, value: Any) -> bool:
    if key in NAMES:
        return isinstance(value, str | int | float)
    if not isinstance(value, int | float) or not math.isfinite(value):
        return False
    return value > 0 or (value == 0 and key not in NEVER_ZERO)
