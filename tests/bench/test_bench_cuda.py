"""Memory on a GPU as the benchmark plans it and as it is, in processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("what", [("--dtype", "float32"), ("--dtype", "bfloat16"), ("--slice", "2")])
def test_planned_memory_is_the_peak(tmp_path: Path, what: tuple[str, str]):
    """Within 3 %: neither counts the CUDA context."""
    file = tmp_path / "rows.jsonl"
    command = ["bench", *what, "--depths", "0,4k", "--no-stored", "-o", str(file)]
    subprocess.run([sys.executable, "-m", "k3cli", *command], check=True, capture_output=True, timeout=240)
    row = next(row for row in map(json.loads, file.read_text().splitlines()) if row["row"] == "memory")
    print(f"{what}: planned {row['planned'] / 1e6:.1f} MB, peak {row['peak'] / 1e6:.1f} MB")
    assert abs(row["planned"] / row["peak"] - 1) < 0.03
