"""Loading: checkpoint folder to a ready `K3Model`. Each shard is read once, front to back, and hashed on the way.

In a world each rank reads the rows of its slices (columns are cut out of whole rows: what a rank needs of one is less
than a disk reads at a time). A shard whose digest is not known is read whole and hashed by one rank, shards in turn.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import torch
from k3_sessions.types import HASH_BLOCK
from torch import Tensor

from k3cli.errors import ModelError
from k3cli.model.blocks import Sinks, Weights
from k3cli.model.checkpoint import AGAIN, DTYPES, Entry, Shard, open_checkpoint
from k3cli.model.config import ModelConfig
from k3cli.model.digest import DigestCache, combine
from k3cli.model.network import DEFAULT_WINDOW, K3Model
from k3cli.model.parallel import held
from k3cli.model.placement import check_fit, choose_device, choose_dtype, prefill_chunk, rank_memory
from k3cli.model.pool import Geometry, granules_for
from k3cli.model.slices import Slices
from k3cli.model.world import World

PIECE = 32 << 20
"""Bytes per read."""

open_file = FileIO
"""Opens a shard for the one sequential read of its tensors."""


@dataclass(frozen=True)
class LoadProgress:
    """Bytes of weight files read so far, all bytes to read, seconds since the start."""

    bytes_done: int
    bytes_total: int
    seconds: float

    @property
    def rate(self) -> float:
        """Bytes per second."""
        return self.bytes_done / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run, its identity, and what was chosen why.

    weights_digest: "sha256:..." of config.json and all shards with text tensors, in name order, independent of paths.
    reasons: one line per choice (device, dtype). notices: what went wrong without consequence.
    """

    model: K3Model
    config: ModelConfig
    weights_digest: str
    path: Path
    bytes_read: int
    seconds: float
    reasons: dict[str, str]
    notices: tuple[str, ...]


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

    world: load this rank's part, as every other rank does at the same time; progress then counts its own bytes, and
    what stops one rank is raised on all.
    Raises ModelError for files that are absent, damaged or unsupported (before anything is allocated wherever headers
    tell), FitError when the weights exceed the free memory.
    """
    path = Path(path)
    if world is not None:
        return _load_part(path, world, dtype, window, progress)
    config = ModelConfig.from_dir(path)
    place, why_device = choose_device(device)
    kind, why_dtype = choose_dtype(dtype, place, config)
    checkpoint = open_checkpoint(path, config)
    check_fit(config, place, kind)
    weights = Weights(config, place, kind)
    cache = DigestCache()
    meter = _Meter(checkpoint.bytes_total, progress)
    sinks = weights.sinks()
    digests = [_load_shard(shard, sinks, cache, meter) for shard in checkpoint.shards]
    weights.finish()
    notice = cache.save() if cache.changed else None
    return LoadedModel(
        model=K3Model(config, weights, place, kind, window),
        config=config,
        weights_digest=combine((path / "config.json").read_bytes(), digests),
        path=path,
        bytes_read=meter.done,
        seconds=meter.seconds,
        reasons={"device": f"{place}: {why_device}", "dtype": f"{str(kind).removeprefix('torch.')}: {why_dtype}"},
        notices=() if notice is None else (notice,),
    )


def _load_part(
    path: Path, world: World, dtype: str | torch.dtype, window: int, progress: Callable[[LoadProgress], None] | None
) -> LoadedModel:
    rank, size, place = world.rank, world.size, world.device

    def prepare() -> tuple[ModelConfig, torch.dtype, str, tuple[Shard, ...], Weights]:
        config = ModelConfig.from_dir(path)
        kind, why = choose_dtype(dtype, place, config)
        shards = open_checkpoint(path, config).shards
        check_fit(config, place, kind, rank, size)
        return config, kind, why, shards, Weights(config, place, kind, rank, size)

    config, kind, why_dtype, shards, weights = world.together(prepare)
    cache = DigestCache()
    before = [os.stat(shard.path) for shard in shards]
    known: list[str | None] = world.share([cache.get(status) for status in before])
    slices = Slices(config, rank, size)
    hashed = [digest is None and i % size == rank for i, digest in enumerate(known)]
    meter = _Meter(sum(map(slices.bytes_read, shards, hashed)), progress)
    sinks = weights.sinks()

    def read() -> list[tuple[int, str, bool]]:
        found = []
        for i, shard in enumerate(shards):
            if (digest := _load_slices(shard, sinks, slices, hashed[i], meter)) is not None:
                found.append((i, *digest))
        weights.finish()
        return found

    for found in world.all(world.together(read)):
        for i, digest, unchanged in found:
            known[i] = digest
            if rank == 0 and unchanged and os.stat(shards[i].path) == before[i]:
                cache.put(before[i], digest)
    notice = cache.save() if cache.changed else None
    mine = held(config, size)

    # The whole model's chunks, so that every world takes a prompt in the same steps.
    whole = sum(sink.nbytes for sink in Weights(config, torch.device("meta"), kind).sinks().values())
    chunk = prefill_chunk(whole, place.type)

    def room() -> int:
        free = rank_memory(place, size)
        return granules_for(mine, Geometry.of(mine, HASH_BLOCK, kind), free, kind, chunk)

    granules = min(world.all(world.together(room)))
    return LoadedModel(
        model=K3Model(mine, weights, place, kind, window, world, granules, chunk),
        config=config,
        weights_digest=combine((path / "config.json").read_bytes(), (digest for digest in known if digest is not None)),
        path=path,
        bytes_read=meter.done,
        seconds=meter.seconds,
        reasons={
            "device": f"{place}: rank {rank} of {size}",
            "dtype": f"{str(kind).removeprefix('torch.')}: {why_dtype}",
        },
        notices=() if notice is None else (notice,),
    )


class _Meter:
    def __init__(self, total: int, report: Callable[[LoadProgress], None] | None) -> None:
        self.total, self.report = total, report
        self.done, self.began, self.last = 0, time.monotonic(), 0.0

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def add(self, count: int) -> None:
        self.done += count
        now = self.seconds
        if self.report is not None and (now - self.last > 0.1 or self.done == self.total):
            self.last = now
            self.report(LoadProgress(self.done, self.total, now))


class _Reader:
    """Sequential reads of one shard's data into tensors, hashed unless the digest is known."""

    def __init__(self, stream: FileIO, shard: Shard, hashed: bool, meter: _Meter, *, counted: bool = True) -> None:
        """counted: the header counts as read."""
        self.stream, self.shard, self.meter = stream, shard, meter
        self.hash = hashlib.sha256() if hashed else None
        self.scratch = torch.empty(PIECE, dtype=torch.uint8)
        stream.seek(len(shard.header))
        if self.hash is not None:
            self.hash.update(shard.header)
        if counted:
            meter.add(len(shard.header))

    def fill(self, target: Tensor, name: str) -> None:
        """Reads exactly target.numel() bytes into a contiguous uint8 host tensor."""
        view = memoryview(target.numpy().data)
        if self.stream.readinto(view) != len(view):
            raise ModelError(f"{self.shard.path.name} ended inside tensor {name}", "a file that isn't changing", AGAIN)
        if self.hash is not None:
            self.hash.update(view)
        self.meter.add(len(view))

    def tensor(self, entry: Entry, sink: Tensor | None) -> None:
        """Reads one tensor piece by piece; sink None reads past it."""
        kind = DTYPES.get(entry.dtype, torch.uint8)
        count = entry.stop - entry.start
        flat = None if sink is None else sink.view(-1)
        for begin in range(0, count, PIECE):
            size = min(PIECE, count - begin)
            first, last = begin // kind.itemsize, (begin + size) // kind.itemsize
            if flat is not None and flat.device.type == "cpu" and flat.dtype == torch.uint8:
                self.fill(flat[first:last], entry.name)
                continue
            piece = self.scratch[:size]
            self.fill(piece, entry.name)
            if flat is not None:
                flat[first:last] = piece.view(kind)

    def part(self, entry: Entry, sink: Tensor | None, slices: Slices) -> None:
        """Reads a rank's part of a tensor into its sink; all of it goes by when the shard is hashed."""
        held, shape = slices.of(entry)
        first, last = slices.rows(entry)
        row = (entry.stop - entry.start) // max(1, shape[0])
        begin, end = (0, shape[0]) if self.hash is not None else (first, last)
        if row == 0 or begin >= end:
            return
        kind = DTYPES.get(entry.dtype, torch.uint8)
        if self.scratch.numel() < row:
            self.scratch = torch.empty(row, dtype=torch.uint8)
        at_once = self.scratch.numel() // row
        self.stream.seek(len(self.shard.header) + entry.start + begin * row)
        for top in range(begin, end, at_once):
            count = min(at_once, end - top)
            piece = self.scratch[: count * row]
            self.fill(piece, entry.name)
            lo, hi = max(top, first), min(top + count, last)
            if sink is not None and lo < hi:
                block = piece.view(kind).view(count, -1)[lo - top : hi - top]
                if held.axis == 1:
                    block = block[:, held.start : held.stop]
                sink.view(last - first, -1)[lo - first : hi - first] = block


def _load_slices(shard: Shard, sinks: Sinks, slices: Slices, hashed: bool, meter: _Meter) -> tuple[str, bool] | None:
    """Copies a rank's parts of a shard's tensors to their places.

    When it is to be hashed, returns its hex digest and whether the file stayed as it was.
    """
    try:
        with open_file(shard.path) as stream:
            before = os.fstat(stream.fileno())
            reader = _Reader(stream, shard, hashed, meter, counted=hashed)
            for entry in shard.entries:
                sink = sinks.get(entry.name)
                if entry.name.endswith("A_log") and sink is not None:
                    stream.seek(len(shard.header) + entry.start)
                    held, shape = slices.of(entry)
                    _decay_rates(reader, entry, sink, held.start, shape[0])
                else:
                    reader.part(entry, sink, slices)
            after = os.fstat(stream.fileno())
    except OSError as error:
        raise ModelError(f"cannot read {shard.path}: {error.strerror}", "a readable weight file") from error
    return None if reader.hash is None else (reader.hash.hexdigest(), before == after)


def _load_shard(shard: Shard, sinks: Sinks, cache: DigestCache, meter: _Meter) -> str:
    """Copies a shard's text tensors to their places. Returns the shard's hex digest."""
    try:
        with open_file(shard.path) as stream:
            before = os.fstat(stream.fileno())
            known = cache.get(before)
            reader = _Reader(stream, shard, known is None, meter)
            for entry in shard.entries:
                sink = sinks.get(entry.name)
                if entry.name.endswith("A_log") and sink is not None:
                    _decay_rates(reader, entry, sink)
                else:
                    reader.tensor(entry, sink)
            after = os.fstat(stream.fileno())
    except OSError as error:
        raise ModelError(f"cannot read {shard.path}: {error.strerror}", "a readable weight file") from error
    if known is not None:
        return known
    assert reader.hash is not None
    digest = reader.hash.hexdigest()
    if after == before:
        cache.put(before, digest)
    return digest


def _decay_rates(reader: _Reader, entry: Entry, sink: Tensor, first: int = 0, heads: int | None = None) -> None:
    """A_log holds one value per head, then padding, which must be zero (a per-channel reading would go unnoticed).

    first: head of the sink's first value; heads: of the whole tensor, None: those of the sink.
    """
    count = (entry.stop - entry.start) // DTYPES[entry.dtype].itemsize
    whole = torch.empty(count, dtype=DTYPES[entry.dtype])
    reader.tensor(entry, whole)
    heads = sink.numel() if heads is None else heads
    tail = whole[heads:]
    if tail.any():
        at = heads + int(tail.float().abs().argmax())
        raise ModelError(
            f"tensor {entry.name} holds {float(whole[at]):.6g} at index {at}",
            f"zero padding behind the {heads} heads",
            "check that config.json and weights belong together",
        )
    sink.copy_(whole[first : first + sink.numel()])
