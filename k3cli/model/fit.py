"""The plan against the memory of every device: what each rank needs, and the nearest plan where one has too little.

Arithmetic on shapes and on the bytes free: asked before anything is allocated. GB means 10^9 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from k3_sessions.types import HASH_BLOCK

from k3cli.errors import FitError
from k3cli.model.config import ModelConfig
from k3cli.model.parallel import held, worlds
from k3cli.model.placement import available_memory, fast_bf16_cpu, prefill_chunk, rank_memory, weights_memory
from k3cli.model.pool import KEPT_FREE, Geometry, least_granules
from k3cli.model.reading import staging_bytes
from k3cli.model.sizing import workspace
from k3cli.model.world import World


@dataclass(frozen=True)
class Need:
    """Bytes one rank needs on its device at least.

    weights: of its part, on a CPU with experts kept dequantised. state: two KDA slots and a page. work: of a prefill
    chunk, and what the pool leaves free. loading: what is in memory beside the weights while they are read, and gone
    when the state is allocated.
    """

    weights: int
    state: int
    work: int
    loading: int

    @property
    def total(self) -> int:
        return self.weights + max(self.state + self.work, self.loading)


def needs(config: ModelConfig, dtype: torch.dtype, kind: str, world: int) -> list[Need]:
    """What each of `world` ranks needs. kind: the type of all devices, "cpu" or "cuda"."""
    mine = held(config, world)
    geometry = Geometry.of(mine, HASH_BLOCK, dtype)
    state = least_granules(geometry) * geometry.granule
    chunk = prefill_chunk(weights_memory(config, dtype), kind)
    work = workspace(mine, dtype, chunk)
    kept = int((state + work) * KEPT_FREE / (1 - KEPT_FREE)) + 1
    host, device = staging_bytes(world)
    loading = device + (host if kind == "cpu" else 0)
    sizes = [weights_memory(config, dtype, rank, world, kind) for rank in range(world)]
    # Small models are read in less than a whole batch.
    return [Need(size, state, work + kept, min(loading, 4 * size)) for size in sizes]


@dataclass(frozen=True)
class Device:
    """The device of a rank, a torch name; free: bytes its rank may count on, None where the system doesn't say."""

    name: str
    free: int | None

    @property
    def kind(self) -> str:
        return self.name.partition(":")[0]


def check_fit(config: ModelConfig, dtype: torch.dtype, device: torch.device, world: World | None = None) -> None:
    """FitError, on every rank alike, when a rank needs more than is free on its device; with the nearest plan."""
    size = 1 if world is None else world.size
    mine = Device(str(device), rank_memory(device, size))
    problem = shortage(config, dtype, [mine] if world is None else world.all(mine))
    if problem is not None:
        raise problem


def shortage(config: ModelConfig, dtype: torch.dtype, devices: Sequence[Device]) -> FitError | None:
    """The error for ranks on these devices, or None when every rank fits."""
    size = len(devices)
    wanted = needs(config, dtype, devices[0].kind, size)
    lacking = [
        (need.total - device.free, rank)
        for rank, (need, device) in enumerate(zip(wanted, devices, strict=True))
        if device.free is not None and need.total > device.free
    ]
    if not lacking:
        return None
    _, rank = max(lacking)
    need, device = wanted[rank], devices[rank]
    assert device.free is not None
    who = device.name if size == 1 else f"rank {rank} on {device.name}"
    if device.kind == "cpu" and size > 1:
        who = f"each of {size} ranks on the CPU" if len(lacking) == size else who
    beside = f"{gb(need.total - need.weights)} for state and work"
    found = f"{who} needs {gb(need.total)} ({gb(need.weights)} of weights, {beside}), {gb(device.free)} are free"
    return FitError(found, "a plan that fits", nearest(config, dtype, devices))


def nearest(config: ModelConfig, dtype: torch.dtype, devices: Sequence[Device]) -> str:
    """What to do instead, in one line: on these devices, on more of them, on the CPU, or with a smaller model."""
    kind, size = devices[0].kind, len(devices)
    free = [device for device in devices if device.free is not None]
    types = [dtype]
    if dtype == torch.float32 and config.stored_dtype == "bfloat16" and (kind == "cuda" or fast_bf16_cpu()[0]):
        types.append(torch.bfloat16)
    for found in types:
        option = [] if found == dtype else ["--dtype bfloat16"]
        for count in sorted(worlds(config), key=lambda count: (count != size, abs(count - size))):
            if count == size and found == dtype:
                continue
            place = _on_these(config, found, free, count, size)
            if place is not None:
                return f"nearest that fits: {' '.join([*place, *option])}"
    if kind == "cuda":
        for count in (count for count in worlds(config) if count > size):
            least = max(need.total for need in needs(config, types[-1], kind, count))
            if least <= max((device.free or 0 for device in free), default=0):
                here = torch.cuda.device_count()
                more = "" if here >= count else f" (this machine has {here})"
                return f"nearest that fits: --gpus {count}, {gb(least)} free on each{more}"
        room = available_memory(torch.device("cpu"))
        if room is not None and needs(config, torch.float32, "cpu", 1)[0].total <= room:
            return "nearest that fits: --device cpu"
    least = min(max(need.total for need in needs(config, types[-1], kind, count)) for count in worlds(config))
    return f"use a smaller model: {gb(least)} free on each device is the least that any number of them needs"


def _on_these(
    config: ModelConfig, dtype: torch.dtype, devices: Sequence[Device], count: int, size: int
) -> list[str] | None:
    """Options for `count` ranks on some of these devices, None where they don't fit."""
    wanted = max(need.total for need in needs(config, dtype, devices[0].kind, count))
    if devices[0].kind == "cpu":
        room = sum(device.free or 0 for device in devices)  # every rank was told its share
        fits = wanted * count <= room
        return (["--gpus", str(count)] if count != size else []) if fits else None
    roomy = [device.name.partition(":")[2] for device in devices if (device.free or 0) >= wanted]
    if len(roomy) < count:
        return None
    chosen = ",".join(roomy[:count])
    if count == size:
        return []
    return [f"--device cuda:{chosen}"] if count == 1 else [f"--gpus {chosen}"]


def gb(size: float) -> str:
    """Bytes as GB, with as many digits as small models need."""
    return f"{size / 1e9:.1f} GB" if size >= 5e8 else f"{size / 1e9:.3f} GB"
