"""Loading: checkpoint folder to a ready `K3Model`, alone or as one rank of a world.

`reading` says who reads what, `staging` reads and hashes ahead, `delivery` takes it to its place. Every byte is read
once in the whole world, file by file from front to back; a file whose digest is not known is hashed on the way.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from k3cli.model.assemble import assemble
from k3cli.model.blocks import Weights
from k3cli.model.checkpoint import Shard, open_checkpoint
from k3cli.model.config import ModelConfig
from k3cli.model.delivery import Delivery, OthersFailedError, WorldRing
from k3cli.model.digest import DigestCache, combine, stamp
from k3cli.model.fit import check_fit
from k3cli.model.network import DEFAULT_WINDOW, K3Model
from k3cli.model.placement import choose_device, choose_dtype
from k3cli.model.reading import batches, hashers, total_bytes
from k3cli.model.slices import Slices
from k3cli.model.staging import Staging
from k3cli.model.world import World


@dataclass(frozen=True)
class LoadProgress:
    """Bytes of weight files that all ranks have read so far, all bytes to read, seconds since the start."""

    bytes_done: int
    bytes_total: int
    seconds: float

    @property
    def rate(self) -> float:
        """Bytes per second."""
        return self.bytes_done / self.seconds if self.seconds > 0 else 0.0

    @property
    def left(self) -> float | None:
        """Seconds left at that rate; None as long as there is none."""
        return (self.bytes_total - self.bytes_done) / self.rate if self.rate > 0 else None


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run, its identity, and what was chosen why.

    weights_digest: "sha256:..." of config.json and all shards with text tensors, in name order, independent of paths.
    bytes_read: by this rank; ranks_read: by every rank. reasons: one line per choice (device, dtype). notices: what
    went wrong without consequence.
    """

    model: K3Model
    config: ModelConfig
    weights_digest: str
    path: Path
    bytes_read: int
    seconds: float
    reasons: dict[str, str]
    notices: tuple[str, ...]
    ranks_read: tuple[int, ...]


def load_model(
    path: Path | str,
    *,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype = torch.float32,
    window: int = DEFAULT_WINDOW,
    progress: Callable[[LoadProgress], None] | None = None,
    world: World | None = None,
) -> LoadedModel:
    """Loads the folder `path`. device: auto | cpu | cuda[:N]; dtype: auto | float32 | bfloat16; window: W rows.

    world: load this rank's part, as every other rank does at the same time; device is then the world's, and what stops
    one rank is raised on all. progress: called with what all ranks have read.
    Raises ModelError for files that are absent, damaged or unsupported (before anything is allocated wherever headers
    tell), FitError when a device has too little free memory, before anything is allocated on any.
    """
    path, began = Path(path), time.monotonic()
    rank, size = (0, 1) if world is None else (world.rank, world.size)

    def prepare() -> tuple[ModelConfig, torch.device, str, torch.dtype, str, tuple[Shard, ...]]:
        config = ModelConfig.from_dir(path)
        if world is None:
            place, why = choose_device(device)
        else:
            place, why = world.device, f"rank {rank} of {size}"
        kind, why_dtype = choose_dtype(dtype, place, config)
        return config, place, why, kind, why_dtype, open_checkpoint(path, config).shards

    config, place, why_device, kind, why_dtype, shards = prepare() if world is None else world.together(prepare)
    check_fit(config, kind, place, world)
    weights = (
        Weights(config, place, kind, rank, size)
        if world is None
        else world.together(lambda: Weights(config, place, kind, rank, size))
    )
    cache = DigestCache()
    before = [os.stat(shard.path) for shard in shards]
    digests = [cache.get(status) for status in before]
    if world is not None:
        digests = world.share(digests)
    known = [digest is not None for digest in digests]
    slices = Slices(config, size)
    total = total_bytes(shards, known, slices)
    last = 0.0

    def report(done: int) -> None:
        nonlocal last
        now = time.monotonic() - began
        if progress is not None and (now - last > 0.1 or done == total):
            last = now
            progress(LoadProgress(done, total, now))

    mine = [number for number, (who, _) in hashers(known, size).items() if who == rank]
    plan = batches(shards, known, slices, rank, size)
    staging = Staging(shards, plan, rank, mine, pin=place.type == "cuda", alone=size == 1)
    delivery = Delivery(weights.sinks(), slices, rank, place, None if world is None else WorldRing(world))

    def read() -> tuple[int, dict[int, tuple[str, bool]]]:
        try:
            delivery.run(staging, report)
        except OthersFailedError:
            return 0, {}
        weights.finish()
        return staging.done, staging.digests

    found = [read()] if world is None else world.all(world.together(read))
    for _, hashed in found:
        for i, (digest, unchanged) in hashed.items():
            digests[i] = digest
            if rank == 0 and unchanged and stamp(os.stat(shards[i].path)) == stamp(before[i]):
                cache.put(before[i], digest)
    notice = cache.save() if cache.changed else None
    staging.release()
    if place.type == "cuda":
        torch.cuda.empty_cache()  # what was handed round lay there
    model = (
        K3Model(config, weights, place, kind, window)
        if world is None
        else assemble(config, weights, kind, window, world)
    )
    return LoadedModel(
        model=model,
        config=config,
        weights_digest=combine((path / "config.json").read_bytes(), (digest for digest in digests if digest)),
        path=path,
        bytes_read=staging.done,
        seconds=time.monotonic() - began,
        reasons={"device": f"{place}: {why_device}", "dtype": f"{str(kind).removeprefix('torch.')}: {why_dtype}"},
        notices=() if notice is None else (notice,),
        ranks_read=tuple(count for count, _ in found),
    )
