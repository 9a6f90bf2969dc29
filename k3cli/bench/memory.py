"""Memory of a run, device by device: what it is planned to take, and the most it took."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from k3_sessions.types import HASH_BLOCK

from k3cli.bench.ladder import Plan
from k3cli.bench.record import Row
from k3cli.errors import FitError
from k3cli.model.choices import kernel_choices
from k3cli.model.config import ModelConfig
from k3cli.model.network import DEFAULT_WINDOW
from k3cli.model.parallel import held
from k3cli.model.placement import most_memory, rank_memory, weights_memory
from k3cli.model.pool import Geometry, granules_for
from k3cli.model.sizing import workspace


def planned_peaks(
    config: ModelConfig, kind: torch.dtype, place: torch.device, plan: Plan, tell: Callable[[str], None], world: int = 1
) -> list[int]:
    """Bytes that weights, pool and the widest step will take on each of `world` ranks; FitError before anything is made
    when they don't fit."""
    weights = [weights_memory(config, kind, rank, world, place.type) for rank in range(world)]
    most = max(weights)
    config, free = held(config, world), rank_memory(place, world)
    told = "unknown" if free is None else f"{free / 1e9:.1f} GB"
    if free is not None and most > free:
        raise FitError(
            f"the weights take {most / 1e9:.1f} GB on {place}, {told} are free",
            "room",
            "--slice with fewer layers" if len(config.layers) > 1 else "a device with more memory, or --gpus",
        )
    geometry = Geometry.of(config, HASH_BLOCK, kind)
    pool = granules_for(config, geometry, None if free is None else free - most, kind, plan.chunk) * geometry.granule
    rest = pool + workspace(config, kind, plan.chunk, context=plan.depths[-1] + plan.prompt)
    rest += _libraries(config, kind, place)
    tell(
        f"plan{'' if world == 1 else ' of each rank'}: weights {most / 1e9:.2f} GB, state pool {pool / 1e9:.2f} GB, "
        f"peak {(most + rest) / 1e9:.2f} of {told} free"
    )
    return [own + rest for own in weights]


def _libraries(config: ModelConfig, kind: torch.dtype, place: torch.device) -> int:
    """Bytes torch sets aside for its library of products, by its defaults: a work space for each stream, that of plain
    steps, the one they are recorded on and the one shared experts run on, where the library computes them."""
    if place.type != "cuda":
        return 0
    own = kernel_choices(config, place, kind, DEFAULT_WINDOW)["linear.few"].kernel
    streams = 2 + (config.moe is not None and config.moe.shared > 0 and not own)
    return streams * ((32 << 20) if torch.cuda.get_device_capability(place)[0] >= 9 else (8 << 20) + (128 << 10))


class Meter:
    """The most that a model's ranks have had of their devices. What only the measuring takes, rank 0 alone takes."""

    def __init__(self, model: Any, place: torch.device) -> None:
        """model: just made, a `K3Model` or a `MirrorModel`. place: rank 0's device."""
        self._model, self._place = model, place
        self._made = most_memory(place)

    def begin(self) -> None:
        """Forgets what measuring the machine took, where the system can."""
        if self._place.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._place)

    def row(self, planned: Sequence[int], own: int, anew: bool) -> Row:
        """planned: bytes, of each rank. own: bytes on rank 0 that measuring holds. anew: no row is an earlier start's.

        Of several ranks, `planned` and `peak` are the largest, and `ranks` has each one's.
        """
        notes = []
        if self._place.type != "cuda":
            notes.append("a peak is a whole process's")
        if not anew:
            notes.append("of the rows measured since the run was gone on with")
        found = self._peaks()
        peaks = [max(self._made, found[0][1] - own), *(peak for _, peak in found[1:])]
        row: Row = {"row": "memory", "planned": max(planned), "peak": max(peaks), "note": "; ".join(notes)}
        if len(planned) > 1:
            each = zip(found, planned, peaks, strict=True)
            row["ranks"] = [{"device": device, "planned": plan, "peak": peak} for (device, _), plan, peak in each]
        return row

    def _peaks(self) -> list[tuple[str, int]]:
        """(device, bytes) of every rank."""
        if hasattr(self._model, "memory"):
            found: list[tuple[str, int]] = self._model.memory()
            return found
        return [(str(self._place), most_memory(self._place))]
