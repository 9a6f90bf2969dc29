"""What a machine offers: detected, or described in words such as `8xB300`."""

from __future__ import annotations

import os
import re
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from k3cli.config import parse_bytes
from k3cli.errors import UsageError

GPUS: dict[str, int] = {
    "A100-40G": 42_400,
    "A100": 85_000,
    "L40S": 48_300,
    "RTX4090": 25_700,
    "RTX5090": 34_100,
    "RTXPRO6000": 102_600,
    "H100": 85_500,
    "H200": 150_700,
    "B200": 191_000,
    "B300": 288_000,
    "GB300": 288_000,
}
"""Memory of one GPU in MB (10^6 bytes), about what drivers leave of it; a size (8x288GB) says it exactly."""

RESERVE = 10**9
"""Bytes of each GPU that are not planned with: the CUDA context and the libraries' own work space."""
ASSUMED_RATE = 2 * 10**9
"""Bytes per second of a disk nobody measured."""
SAMPLE = 256 << 20
PIECE = 8 << 20


@dataclass(frozen=True)
class Machine:
    """Bytes everywhere. memory: of each device the model runs on (the RAM itself when there is no GPU); of the fullest
    one where they differ, and `tightest` is then its torch name.

    rate: sequential read of the disk, bytes per second. sources: where each number comes from, for people.
    """

    device: str
    count: int
    memory: int
    ram: int | None
    disk: int | None
    rate: float
    sources: dict[str, str]
    tightest: str | None = None

    @property
    def usable(self) -> int:
        """Bytes of one device to plan with."""
        return self.memory - (0 if self.device == "CPU" else RESERVE)


def parse_gpus(text: str) -> tuple[str, int, int]:
    """`8xB300`, `H200`, `2x96GB` or `0` -> (name, count, bytes of one). Raises UsageError."""
    match = re.fullmatch(r"(?:(\d+)\s*[x*]\s*)?(\S+)", text.strip(), re.IGNORECASE)
    if match is None:
        raise UsageError(f"--gpus {text!r}", "a number and a kind, as 8xB300, 2x96GB, or 0")
    if text.strip() == "0":
        return "CPU", 1, 0
    count, kind = int(match[1] or 1), match[2].upper()
    if count < 1:
        raise UsageError(f"--gpus {text!r}", "at least one GPU, or 0 for the CPU alone")
    if kind in GPUS:
        return kind, count, GPUS[kind] * 10**6
    try:
        size = parse_bytes(match[2]) if re.search(r"[KMGT]", kind) else 0
    except ValueError:
        size = 0
    if size < 10**9:
        raise UsageError(f"--gpus {text!r}", f"a kind out of {', '.join(GPUS)}, or its memory, as 2x96GB")
    return match[2], count, size


def describe(
    gpus: str | None, ram: int | None, disk: int | None, rate: int | None, home: Path, weights: Path | None
) -> Machine:
    """The machine to plan for; what is None is detected. weights: a large file to measure the disk with."""
    import torch

    from k3cli.model.placement import available_memory

    sources: dict[str, str] = {}
    tightest = None
    if ram is None:
        ram, sources["ram"] = available_memory(torch.device("cpu")), "free now"
    else:
        sources["ram"] = "--ram"
    if gpus is not None:
        name, count, memory = parse_gpus(gpus)
        sources["device"] = "--gpus"
    elif torch.cuda.is_available():
        count = torch.cuda.device_count()
        name = torch.cuda.get_device_name(0)
        free = [torch.cuda.mem_get_info(i)[0] for i in range(count)]
        memory = min(free) + RESERVE
        sources["device"] = "present; the memory is what is free now"
        if max(free) - min(free) > RESERVE:
            tightest = f"cuda:{free.index(min(free))}"
            sources["device"] += (
                f", on {tightest}; most is free on cuda:{free.index(max(free))}: {max(free) / 1e9:.1f} GB"
            )
    else:
        name, count, memory, sources["device"] = "CPU", 1, 0, "no CUDA device is present"
    if name == "CPU":
        memory = ram or 0
    if disk is None:
        disk, sources["disk"] = _free(home), "free now under K3_HOME"
    else:
        sources["disk"] = "--disk"
    if rate is not None:
        sources["rate"] = "--disk-rate"
        found: float = rate
    else:
        measured = None if weights is None else read_rate(weights)
        found = measured or ASSUMED_RATE
        sources["rate"] = "measured on the weights" if measured else "assumed; --disk-rate says better"
    return Machine(name, count, memory, ram, disk, found, sources, tightest)


def _free(folder: Path) -> int | None:
    for place in (folder, *folder.parents):
        if place.is_dir():
            return shutil.disk_usage(place).free
    return None


def read_rate(file: Path) -> float | None:
    """Bytes per second of reading up to 256 MiB from the end of `file`, past the page cache; None when it won't."""
    direct = getattr(os, "O_DIRECT", 0)
    try:
        size = file.stat().st_size // PIECE * PIECE
        if not direct or size < 4 * PIECE:
            return None
        import mmap

        fd = os.open(file, os.O_RDONLY | direct)
    except OSError:
        return None
    try:
        buffer = mmap.mmap(-1, PIECE)  # page-aligned, as direct reads want it
        at, done, began = max(0, size - SAMPLE), 0, time.monotonic()
        while at < size:
            done += (step := os.preadv(fd, [buffer], at))
            at += step or size
        took = time.monotonic() - began
    except OSError:
        return None
    finally:
        os.close(fd)
    return done / took if took > 0 and done else None
