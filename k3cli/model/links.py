"""How the GPUs of a machine reach each other: what the driver's tool says, else what torch does, else unknown."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

import torch

TOOL = "nvidia-smi"
PATIENCE = 10
"""Seconds the tool may take."""
WAYS = {
    "PIX": "PCIe, one switch",
    "PXB": "PCIe, several switches",
    "PHB": "PCIe, through the CPU",
    "NODE": "PCIe, across the CPU's bridges",
    "SYS": "PCIe, from one CPU to another",
}
"""What the tool's short words mean; NVn is n NVLinks."""


@dataclass(frozen=True)
class Link:
    """One pair of devices, torch numbers; `way` in words, `source`: who says so."""

    first: int
    second: int
    way: str
    source: str


def links(numbers: Sequence[int]) -> list[Link]:
    """The link of every pair of CUDA devices."""
    matrix, places = _matrix(_said("topo", "-m")), _places(numbers)
    found = []
    for at, first in enumerate(numbers):
        for second in numbers[at + 1 :]:
            word = matrix.get((places.get(first, -1), places.get(second, -1)))
            way, source = ("", "") if word is None else (_way(word), f"{TOOL} topo: {word}")
            found.append(Link(first, second, way, source) if way else _peer(first, second))
    return found


def _way(word: str) -> str:
    if match := re.fullmatch(r"NV(\d+)", word):
        return f"NVLink, {match[1]} links"
    return WAYS.get(word, "")


def _said(*words: str) -> str:
    """What the tool prints; "" where there is none or it fails."""
    try:
        done = subprocess.run([TOOL, *words], capture_output=True, text=True, timeout=PATIENCE, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _matrix(text: str) -> dict[tuple[int, int], str]:
    """(row, column) of the tool's table of GPUs -> its word for the pair."""
    found: dict[tuple[int, int], str] = {}
    columns: list[str] = []
    for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines():
        words = line.split()
        if not words or not re.fullmatch(r"GPU\d+", words[0]):
            continue
        if not columns:
            columns = [word for word in words if re.fullmatch(r"GPU\d+", word)]
            continue
        for column, word in zip(columns, words[1:], strict=False):
            found[int(words[0][3:]), int(column[3:])] = word
    return found


def _places(numbers: Sequence[int]) -> dict[int, int]:
    """torch's number of a device -> the tool's, which counts devices hidden from this process, too."""
    listed = re.findall(r"^(\d+), GPU-(\S+)$", _said("--query-gpu=index,uuid", "--format=csv,noheader"), re.MULTILINE)
    known = {uuid: int(index) for index, uuid in listed}
    found = {}
    for number in numbers:
        uuid = str(getattr(torch.cuda.get_device_properties(number), "uuid", ""))
        if uuid.removeprefix("GPU-") in known:
            found[number] = known[uuid.removeprefix("GPU-")]
    return found


def _peer(first: int, second: int) -> Link:
    """What torch knows: whether one device reads the other's memory, but not over what."""
    try:
        direct = torch.cuda.can_device_access_peer(first, second)
    except (RuntimeError, AssertionError) as error:
        return Link(first, second, "unknown", (str(error).splitlines() or ["torch can't tell"])[0])
    if direct:
        return Link(first, second, "direct, over what is unknown", "torch; no table of links from the driver's tool")
    return Link(first, second, "through main memory", "torch: no direct access")
