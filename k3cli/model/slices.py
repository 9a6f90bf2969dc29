"""What each rank needs of the tensors of a checkpoint, in bytes: the parallel plan laid over stored files."""

from __future__ import annotations

from typing import NamedTuple

import torch

from k3cli.model.blocks import Weights
from k3cli.model.checkpoint import Entry
from k3cli.model.config import ModelConfig
from k3cli.model.parallel import handed_round, part


class Need(NamedTuple):
    """Rows [first, last) of a stored tensor, and of each the bytes [begin, end)."""

    first: int
    last: int
    begin: int
    end: int


NOTHING = Need(0, 0, 0, 0)


class Slices:
    """Stored tensors as rows of bytes, and what the ranks of a world need of them.

    A row is one index of the first dimension. Decay rates (A_log) are one row that every rank looks at: what is behind
    the heads must be zeros.
    """

    def __init__(self, config: ModelConfig, world: int) -> None:
        self._config, self._world = config, world
        meta = Weights(config, torch.device("meta"), torch.float32)
        self.shapes = {name: tuple(sink.shape) for name, sink in meta.sinks().items()}
        """Shapes of the whole model's tensors; a stored tensor without one is not the text model's."""

    def rows(self, entry: Entry) -> tuple[int, int]:
        """(rows, bytes of one); a tensor of another model is one row."""
        shape, size = self.shapes.get(entry.name), entry.stop - entry.start
        if shape is None or entry.name.endswith("A_log") or not size:
            return min(size, 1), size
        return shape[0], size // shape[0]

    def need(self, entry: Entry, rank: int) -> Need:
        """What `rank` needs of a stored tensor."""
        shape = self.shapes.get(entry.name)
        if shape is None:
            return NOTHING
        rows, width = self.rows(entry)
        if entry.name.endswith("A_log"):
            return Need(0, rows, 0, width)
        held = part(self._config, entry.name, shape, rank, self._world)
        if held.axis is None:
            return Need(0, rows, 0, width)
        if held.axis == 0:
            return Need(held.start, held.stop, 0, width)
        item = width // shape[1]
        return Need(0, rows, held.start * item, held.stop * item)

    def handed_round(self, entry: Entry) -> bool:
        """See `parallel.handed_round`."""
        if entry.name.endswith("A_log"):
            return self._world > 1
        return entry.name in self.shapes and handed_round(self._config, entry.name, self._world)

    def heads(self, entry: Entry, rank: int) -> tuple[int, int]:
        """(first head of a rank, heads of the whole model) for decay rates."""
        shape = self.shapes[entry.name]
        return part(self._config, entry.name, shape, rank, self._world).start, shape[0]
