"""What is measured or derived behind the last step of a depth: where a step's time goes, what follows for the whole
model, saving and restoring, and the speed-up that steps allow."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from k3cli.bench.kept import Kept
from k3cli.bench.record import Results, Row
from k3cli.bench.shares import derive, shares
from k3cli.bench.spec import implied
from k3cli.bench.stored import save_and_restore
from k3cli.errors import FitError
from k3cli.model.config import ModelConfig


def left(results: Results, depth: int, home: Path | None) -> bool:
    """Whether rows that need the state are missing. home: where to save, None: not at all."""
    wanted = ["shares", *(["restore"] if home is not None and depth else [])]
    return any(results.done(row=name, depth=depth) is None for name in wanted)


def behind(
    model: Any, state: Any, whole: ModelConfig, results: Results, depth: int, home: Path | None, kept: Kept | None
) -> Iterator[Row]:
    """Rows that are missing: shares, what follows for the `whole` model, save and restore. kept: gets what is saved."""
    config = model.config
    cell = {"row": "shares", "depth": depth, "tokens": 1}
    if results.done(**cell) is None:
        ids = torch.randint(0, config.vocab, (1,)).to(model.device)
        try:
            found = shares(model, state, ids)
        except (RuntimeError, MemoryError, FitError) as problem:
            yield results.add({**cell, "error": f"{type(problem).__name__}: {problem}"})
        else:
            yield results.add({**cell, **found})
    split, step = results.done(**cell), results.done(row="decode", depth=depth, tokens=1)
    cell["row"] = "whole"
    if split and step and len(config.layers) < len(whole.layers) and results.done(**cell) is None:
        yield results.add({**cell, **derive(whole, config, step["seconds"], split["shares"])})
    if home is not None and depth and results.done(row="restore", depth=depth) is None:
        try:
            if kept is None:
                saved, restored = save_and_restore(model, state, home)
            else:
                kept.make_room(model, depth)
                saved, restored = save_and_restore(model, state, home, partial(kept.take, position=depth))
        except Exception as problem:  # whatever the disk says belongs into the table
            yield results.add({"row": "save", "depth": depth, "error": f"{type(problem).__name__}: {problem}"})
        else:
            yield results.add({"row": "save", "depth": depth, **saved})
            yield results.add({"row": "restore", "depth": depth, **restored})


def allowed(windows: tuple[int, ...], results: Results, depth: int) -> Iterator[Row]:
    """The speed-up that the steps at a depth allow for published acceptance."""
    if results.done(row="spec", depth=depth) is not None:
        return
    steps = {n: results.done(depth=depth, tokens=n, row="verify" if n > 1 else "decode") for n in windows}
    seconds = {n: step["seconds"] for n, step in steps.items() if step is not None}
    if 1 in seconds and len(seconds) > 1:
        yield results.add(implied(seconds, depth, "of these layers"))
