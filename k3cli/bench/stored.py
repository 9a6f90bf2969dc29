"""Saving and restoring a state of a given depth through the session store, in a folder of its own."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from k3_sessions.config import StoreConfig
from k3_sessions.fs import RealFS
from k3_sessions.identity import layout_digest
from k3_sessions.store import Store
from k3_sessions.types import DTYPES, Identity, TurnDraft

from k3cli.bench.record import Row, measured
from k3cli.engine.snapshot import Snapshot

NAME = "bench"
LOCK = "lock"
"""In the folder of a run that saves and restores: held, and so alive."""
YOUNG = 60.0
"""Seconds within which a folder may not have its lock yet."""


def save_and_restore(
    model: Any, state: Any, home: Path, keep: Callable[[Path], None] = shutil.rmtree
) -> tuple[Row, Row]:
    """(save, restore) rows. The restore reads files that were dropped from the page cache where the system allows.

    The restored state is loaded to the device and compared with the saved one before it counts. keep: takes the folder
    away, for `restored` perhaps.
    """
    home.mkdir(parents=True, exist_ok=True)
    _sweep(home)
    folder = Path(tempfile.mkdtemp(prefix="bench-", dir=home))
    fs = RealFS(folder)
    held = fs.lock(LOCK, shared=False, wait=0)
    try:
        store = opened(folder)
        draft = TurnDraft(tokens=[0] * (state.position + 1), position=state.position)
        layout = model.state_layout()
        began = time.perf_counter()
        with store.writer(NAME, create=True, identity=_identity(model), layout=layout) as writer:
            report = writer.commit(draft, Snapshot(state.fork()))
        saved = measured([time.perf_counter() - began])
        warm = _forget(folder)
        began = time.perf_counter()
        twin = restored(model, store, state.position)
        took = measured([time.perf_counter() - began])
        for name, array in state.checkpoint().items():
            if array.tobytes() != twin.checkpoint()[name].tobytes():
                raise RuntimeError(f"restored field {name} differs from what was saved")
        raw = state_bytes(model, state.position)
        sizes = {"state_bytes": raw, "bytes": report.bytes_written, "filesystem": fs.type_name()}
        read = {"cache": "as it comes" if warm else "cold"}
        keep(folder)
        return saved | sizes, took | sizes | read
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if held is not None:
            fs.close(held)


def restored(model: Any, store: Store, position: int) -> Any:
    """A new state of `model` from what `save_and_restore` has written. Raises a StoreError for what is damaged."""
    identity, layout = _identity(model), model.state_layout()
    head = store.session(NAME).head
    state = model.new_state()
    with store.stream(store.plan(head or "", identity, layout), identity, layout) as stored:
        state.load(stored)
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    if state.position != position:
        raise RuntimeError(f"position {state.position} was restored instead of {position}")
    return state


def state_bytes(model: Any, position: int) -> int:
    """Bytes of a state at `position`, as they are."""
    whole = 0
    for spec in model.state_layout().fields:
        rows = position if spec.scope == "page" else 1
        whole += rows * len(spec.layers) * math.prod(spec.shape) * DTYPES[spec.dtype].itemsize
    return whole


def opened(folder: Path) -> Store:
    """The store in the folder of a save."""
    return Store.open(folder / "store", config=StoreConfig(free_floor_bytes=0, free_floor_share=0.0))


def _identity(model: Any) -> Identity:
    layout = layout_digest(model.state_layout())
    return Identity("sha256:bench", "sha256:bench", "bench", layout, str(model.dtype).removeprefix("torch."))


def _sweep(home: Path) -> None:
    """Removes what runs that were killed in the middle of a save have left, gigabytes perhaps."""
    for folder in home.glob("bench-????????"):
        with contextlib.suppress(OSError):
            ours = {path.name for path in folder.iterdir()} <= {"store", LOCK}
            old = time.time() - folder.stat().st_mtime > YOUNG
            fs = RealFS(folder, create=False)
            if ours and old and (held := fs.lock(LOCK, shared=False, wait=0)) is not None:
                shutil.rmtree(folder, ignore_errors=True)
                fs.close(held)


def _forget(folder: Path) -> bool:
    """Drops the files from the page cache; True when they stay warm because the system can't."""
    if not hasattr(os, "posix_fadvise"):
        return True
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return False
