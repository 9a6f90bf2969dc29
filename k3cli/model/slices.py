"""What a rank reads of a checkpoint."""

from __future__ import annotations

import torch

from k3cli.model.blocks import Weights
from k3cli.model.checkpoint import Entry, Shard
from k3cli.model.config import ModelConfig
from k3cli.model.parallel import Part, part


class Slices:
    """Which rows of a stored tensor a rank reads, by the parallel plan."""

    def __init__(self, config: ModelConfig, rank: int, world: int) -> None:
        self._config, self._rank, self._world = config, rank, world
        meta = Weights(config, torch.device("meta"), torch.float32)
        self._shapes = {name: tuple(sink.shape) for name, sink in meta.sinks().items()}

    def of(self, entry: Entry) -> tuple[Part, tuple[int, ...]]:
        """(part, shape of the whole tensor); nothing of a tensor that is not the text model's."""
        shape = self._shapes.get(entry.name)
        if shape is None:
            return Part(0, 0, 0), (entry.stop - entry.start,)
        return part(self._config, entry.name, shape, self._rank, self._world), shape

    def rows(self, entry: Entry) -> tuple[int, int]:
        """First and last row that a rank needs anything of; decay rates are looked at whole."""
        found, shape = self.of(entry)
        whole = found.axis != 0 or entry.name.endswith("A_log")
        return (0, shape[0]) if whole else (found.start, found.stop)

    def bytes_read(self, shard: Shard, hashed: bool) -> int:
        if hashed:
            return shard.size
        total = 0
        for entry in shard.entries:
            first, last = self.rows(entry)
            total += (entry.stop - entry.start) // max(1, self.of(entry)[1][0]) * (last - first)
        return total
