"""What a killed benchmark leaves in the home folder goes; what a running one has there stays."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from k3_sessions.fs import RealFS

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
