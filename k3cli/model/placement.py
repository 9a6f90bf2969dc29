"""Where and in which type a model runs, and whether it fits. Each choice comes with its reason."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from k3cli.errors import FitError, UsageError
from k3cli.model.blocks import dense_bytes
from k3cli.model.config import ModelConfig
from k3cli.model.parallel import held
from k3cli.model.sizing import weigh

DTYPES = {"float32": torch.float32, "fp32": torch.float32, "bfloat16": torch.bfloat16, "bf16": torch.bfloat16}


SHORT_CHUNK, LONG_CHUNK = 512, 8192
"""Chunk sizes, multiples of the page."""
LARGE_WEIGHTS = 4 << 30
"""Bytes from which on a model counts as large."""


def choose_device(name: str | torch.device = "auto") -> tuple[torch.device, str]:
    """(device, reason) for auto | cpu | cuda[:N]. UsageError for other names, FitError when the device is absent."""
    text = str(name)
    if text == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda", 0), "a CUDA device is present"
        return torch.device("cpu"), "no CUDA device is present"
    kind, colon, number = text.partition(":")
    if text != "cpu" and not (kind == "cuda" and (not colon or number.isdecimal())):
        raise UsageError(f"unknown device {text!r}", "auto, cpu, cuda or cuda:N")
    if kind == "cpu":
        return torch.device("cpu"), "asked for"
    index = int(number) if number else 0
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if index >= count:
        raise FitError(f"device {text} of {count} CUDA devices", "a device that is present", "use --device cpu")
    return torch.device("cuda", index), "asked for"


def fast_bf16_cpu() -> tuple[bool, str]:
    """Whether this CPU multiplies bf16 in hardware, and by what."""
    for name, what in (("_is_amx_tile_supported", "AMX"), ("_is_avx512_bf16_supported", "AVX512-BF16")):
        probe = getattr(torch.cpu, name, None)
        if probe is not None and probe():
            return True, what
    return False, "neither AMX nor AVX512-BF16"


def choose_dtype(name: str | torch.dtype, device: torch.device, config: ModelConfig) -> tuple[torch.dtype, str]:
    """(compute dtype, reason) for auto | float32 | bfloat16. bf16 on a CPU without fast bf16 becomes fp32."""
    text = str(name).removeprefix("torch.")
    if text == "auto":
        if device.type == "cpu":
            return torch.float32, "the CPU default"
        return getattr(torch, config.stored_dtype), "the checkpoint's type"
    if text not in DTYPES:
        raise UsageError(f"unknown dtype {text!r}", "auto, float32 or bfloat16")
    dtype = DTYPES[text]
    if dtype == torch.bfloat16 and device.type == "cpu":
        fast, what = fast_bf16_cpu()
        return (dtype, f"asked for; this CPU has {what}") if fast else (torch.float32, f"this CPU has {what}")
    return dtype, "asked for"


def prefill_chunk(weights: int, device: str) -> int:
    """Tokens of a prefill chunk for a model of so many bytes on a device type ("cpu", "cuda").

    Every chunk reads all weights, and most experts: on a GPU a large model wants many tokens for that. A CPU computes
    for long on any chunk, and a cancel waits for its end.
    """
    return LONG_CHUNK if device == "cuda" and weights >= LARGE_WEIGHTS else SHORT_CHUNK


def weights_memory(
    config: ModelConfig, dtype: torch.dtype, rank: int = 0, world: int = 1, device: str | None = None
) -> int:
    """Bytes the loaded weights of a rank take, without allocating them. Absorbed MLA matrices are counted too, and on a
    `device` of type "cpu" the experts kept dequantised; None: weights alone."""
    size = sum(part.ranks[rank] for part in weigh(config, dtype, world))
    mine = held(config, world)
    return size + (dense_bytes(mine, dtype, mine.moe.experts) if device == "cpu" and mine.moe is not None else 0)


def available_memory(device: torch.device) -> int | None:
    """Bytes free for a model on a device; None where the system doesn't say."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if (found := _kilobytes("/proc/meminfo", "MemAvailable:")) is not None:
        return found
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def most_memory(device: torch.device) -> int:
    """Most bytes that this process has had of a device: allocated on a GPU, where the count may have been begun anew;
    resident on a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    # Linux has the process that started this one in `ru_maxrss`, too.
    return _kilobytes("/proc/self/status", "VmHWM:") or _largest()


def _largest() -> int:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _kilobytes(file: str, name: str) -> int | None:
    """Bytes that a line of a file of the kernel's tells in kB; None where there is none."""
    try:
        lines = Path(file).read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(name)), None)


def rank_memory(device: torch.device, world: int) -> int | None:
    """What one of `world` ranks may count on: a GPU has one rank, a CPU those of its machine, as torchrun says."""
    free = available_memory(device)
    if free is None or device.type == "cuda":
        return free
    local = os.environ.get("LOCAL_WORLD_SIZE", "") if world > 1 else ""
    return free // (int(local) if local.isdecimal() and int(local) else world)
