"""`k3 plan`: whether what is asked for fits a machine, what is missing, and the nearest plan that fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from k3cli.commands.output import human_bytes
from k3cli.words import counted

if TYPE_CHECKING:
    import torch

    from k3cli.model.config import ModelConfig
    from k3cli.model.machine import Machine

PAGE = 512
"""Tokens of one MLA page: what a fork copies of its tail."""


@dataclass(frozen=True)
class Demand:
    """What has to fit: live sessions at `tokens` of context and forks of them, and what stays on disk."""

    tokens: int
    sessions: int
    forks: int
    checkpoints: int

    def __str__(self) -> str:
        live = f"{counted(self.sessions, 'session')} of {counted(self.tokens, 'token')}"
        if self.forks:
            live += f" and {counted(self.forks, 'fork')}"
        return f"{live}, {counted(self.checkpoints, 'checkpoint')} each on disk"


def state_room(config: ModelConfig, kind: torch.dtype, there: Machine) -> int:
    """Bytes of the fullest device left for sessions, beside what the pool leaves free; negative: there is no room."""
    from k3cli.model.placement import prefill_chunk
    from k3cli.model.pool import KEPT_FREE
    from k3cli.model.sizing import weigh, workspace

    parts = weigh(config, kind, there.count)
    weights = max(sum(entry.ranks[rank] for entry in parts) for rank in range(there.count))
    chunk = prefill_chunk(sum(entry.loaded for entry in parts), "cpu" if there.device == "CPU" else "cuda")
    left = there.usable - weights
    return int(left * (1 - KEPT_FREE) if left > 0 else left) - workspace(config, kind, chunk, there.count)


def shortage(config: ModelConfig, kind: torch.dtype, there: Machine, demand: Demand) -> str | None:
    """What is missing, in one line; None when everything fits."""
    from k3cli.model.sizing import state_size

    rank, full = state_size(config, kind, world=there.count), state_size(config, kind)
    room = state_room(config, kind, there)
    where = there.tightest or ("the CPU" if there.device == "CPU" else f"each of {there.count} x {there.device}")
    if room < 0:
        need, free = human_bytes(there.usable - room), human_bytes(max(0, there.usable))
        return f"{where} needs {need} for weights and work space, {free} are free"
    live = demand.sessions * rank.session(demand.tokens) + demand.forks * (rank.checkpoint + rank.row * PAGE)
    if live > room:
        return f"{where} needs {human_bytes(live)} for live state, {human_bytes(room)} are free beside the weights"
    stored = demand.sessions * (demand.tokens * full.row + demand.checkpoints * full.checkpoint)
    stored += demand.forks * full.checkpoint
    if there.disk is not None and stored > there.disk:
        return f"the sessions take {human_bytes(stored)} on disk, {human_bytes(there.disk)} are there"
    return None


def nearest(config: ModelConfig, kind: torch.dtype, there: Machine, demand: Demand) -> str:
    """The nearest plan that fits: here with less, else on more devices of the kind."""
    from k3cli.model.machine import GPUS
    from k3cli.model.parallel import worlds

    more = [count for count in worlds(config) if count > there.count and there.device != "CPU"]
    for machine in (there, *(replace(there, count=count) for count in more)):
        less = _less(config, kind, machine, demand)
        if less is not None:
            name = there.device if there.device in GPUS else f"{there.memory // 10**9}GB"
            place = () if machine is there else (f"--gpus {machine.count}x{name}",)
            return f"nearest that fits: {' '.join((*place, *less))}"
    smallest = replace(demand, tokens=PAGE, sessions=1, forks=0, checkpoints=1)
    if state_room(config, kind, there) >= 0:
        return f"nothing smaller fits: for one session of {PAGE} tokens, {shortage(config, kind, there, smallest)}"
    need = there.usable - state_room(config, kind, there)
    return f"weights and work space need {human_bytes(need)} on each device: use a smaller model or larger devices"


def _less(config: ModelConfig, kind: torch.dtype, machine: Machine, demand: Demand) -> list[str] | None:
    """Options that make the demand fit: fewer checkpoints, then a shorter context, then one session; None: nothing."""

    def fits(wanted: Demand) -> bool:
        return shortage(config, kind, machine, wanted) is None

    def most_kept(wanted: Demand) -> int:
        return _most(lambda kept: fits(replace(wanted, checkpoints=kept)), wanted.checkpoints)

    def most_pages(wanted: Demand) -> int:
        return _most(lambda pages: fits(replace(wanted, tokens=pages * PAGE, checkpoints=1)), wanted.tokens // PAGE)

    if kept := most_kept(demand):
        return [] if kept == demand.checkpoints else [f"--checkpoints {kept}"]
    for wanted, options in ((demand, []), (replace(demand, sessions=1, forks=0), ["--sessions 1", "--forks 0"])):
        if pages := most_pages(wanted):
            kept = most_kept(replace(wanted, tokens=pages * PAGE))
            return [*options, f"--context {pages * PAGE}", f"--checkpoints {kept}"]
    return None


def _most(fits: Callable[[int], bool], most: int) -> int:
    """The largest number up to `most` that fits, where whatever is below one that fits does, too; 0: none from 1 on."""
    low, high = 0, most
    while high > low:
        middle = high if high == most else (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
