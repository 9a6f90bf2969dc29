"""The state of a run's deepest saved depth, kept in the home folder until the run is finished: whoever goes on with its
results, after a kill or Ctrl-C, doesn't evaluate the way there again."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from k3cli.bench.record import read
from k3cli.bench.stored import opened, restored, state_bytes
from k3cli.errors import UsageError

MARK = "run.json"
"""In a kept folder: whose it is, and the position of its state."""


class Kept:
    """What a run with results in `file` keeps. A folder whose results are gone, or have begun anew, is removed."""

    def __init__(self, home: Path, file: Path, begun: str, tell: Callable[[str], None]) -> None:
        """begun: the date in the first line of the results. tell: one line for people."""
        self._file, self._begun, self._tell = file.resolve(), begun, tell
        self._folder = home / f"bench-of-{hashlib.sha256(str(self._file).encode()).hexdigest()[:16]}"
        for folder in home.glob("bench-of-*"):
            mark = _mark(folder)
            if mark is not None and not _stands(mark):
                shutil.rmtree(folder, ignore_errors=True)

    def make_room(self, model: Any, position: int) -> None:
        """Gives up what is kept where two states may not have room on the disk."""
        with contextlib.suppress(OSError):
            if shutil.disk_usage(self._folder.parent).free < 2 * state_bytes(model, position):
                if _mark(self._folder) is not None:
                    self._tell(
                        "the disk may not have room for two states: the one kept for whoever goes on is given up"
                    )
                self.drop()

    def take(self, folder: Path, position: int) -> None:
        """A folder of `save_and_restore` with a state at `position` takes the place of what was kept."""
        mark = {"file": str(self._file), "begun": self._begun, "position": position}
        try:
            (folder / MARK).write_text(json.dumps(mark))
            self.drop()
            folder.rename(self._folder)
        except OSError as problem:
            self._tell(f"the state at {position:,} is not kept for whoever goes on: {problem.strerror or problem}")

    def load(self, model: Any, behind: int, upto: int) -> Any | None:
        """A new state of `model` from what is kept, where that lies beyond `behind` and not beyond `upto`."""
        mark = _mark(self._folder)
        if mark is None or not behind < mark["position"] <= upto:
            return None
        try:
            return restored(model, opened(self._folder), mark["position"])
        except Exception as problem:  # damaged, say: each way to fail costs time only
            self._tell(f"the state kept at {mark['position']:,} can't be used: {problem}; it is evaluated again")
            return None

    def drop(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


def _mark(folder: Path) -> dict[str, Any] | None:
    try:
        mark = json.loads((folder / MARK).read_text())
        return {"file": str(mark["file"]), "begun": str(mark["begun"]), "position": int(mark["position"])}
    except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError):  # whatever lies there
        return None


def _stands(mark: dict[str, Any]) -> bool:
    """Whether the results that a state was kept for are still there."""
    file = Path(mark["file"])
    try:
        return file.is_file() and read(file)[0].get("date") == mark["begun"]
    except (UsageError, OSError):
        return False
