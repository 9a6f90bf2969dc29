"""Which implementation an operator runs with here: its Triton kernel or the reference, and why.

Nothing is slow in silence: the choice is a value that `k3 doctor` and the benchmarks print. `K3_KERNELS=reference`
turns kernels off; `K3_KERNELS=triton` with `TRITON_INTERPRET=1` runs them on a CPU, slowly, for tests.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import torch


@dataclass(frozen=True)
class Choice:
    """kernel: whether the Triton kernel runs; reason: one line for people."""

    kernel: bool
    reason: str


@cache
def for_device(kind: str) -> Choice:
    """The choice for a device type ("cuda", "cpu"), before any look at shapes. Read once per process."""
    wanted = os.environ.get("K3_KERNELS", "")
    if wanted == "reference":
        return Choice(False, "K3_KERNELS=reference")
    if find_spec("triton") is None:
        return Choice(False, "triton is not installed")
    if wanted == "triton" and os.environ.get("TRITON_INTERPRET") == "1":
        return Choice(True, "K3_KERNELS=triton, TRITON_INTERPRET=1: interpreted")
    if kind != "cuda":
        return Choice(False, f"device {kind}: Triton kernels need a CUDA device")
    major, minor = torch.cuda.get_device_capability()
    if major < 8:
        return Choice(False, f"compute capability {major}.{minor}: kernels need 8.0 or newer")
    return Choice(True, f"compute capability {major}.{minor}")


def choose(device: torch.device, refusal: str | None = None) -> Choice:
    """The choice for one call. refusal: why the kernel doesn't take these shapes or types, None when it does."""
    found = for_device(device.type)
    return found if refusal is None or not found.kernel else Choice(False, refusal)


@cache
def dependent(device: torch.device) -> bool:
    """Whether a kernel may start before the one before it has ended: from Hopper on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def power_of_two(**sizes: int) -> str | None:
    """A refusal naming the first size that is no power of two, or None."""
    for name, size in sizes.items():
        if size < 1 or size & (size - 1):
            return f"{name} = {size}: the kernel takes powers of two"
    return None
