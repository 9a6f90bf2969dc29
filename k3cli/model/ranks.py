"""One model over several ranks: which devices, and loading it on all of them."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from k3cli.errors import FitError, UsageError
from k3cli.model.config import ModelConfig
from k3cli.model.mirror import Explain, MirrorModel
from k3cli.model.parallel import check_world
from k3cli.model.peer import describe
from k3cli.model.peers import Launched, Peers, launched, local_device
from k3cli.model.placement import choose_device
from k3cli.model.weights import LoadedModel, LoadProgress, load_model
from k3cli.model.world import join


def rank_devices(gpus: str | None, device: str) -> list[str]:
    """The device of every rank, [] for a model in one piece. gpus: N, all, a list as 0,1, or None.

    On a CPU N ranks share it. UsageError for a setting that means nothing here, FitError for GPUs that are not there.
    """
    if gpus is None:
        return []
    if launched() is not None:
        raise UsageError(f"--gpus {gpus} under torchrun", "ranks from one of the two")
    place, _ = choose_device(device)
    if ":" in device:
        raise UsageError(f"--gpus {gpus} with --device {device}", "--device cuda, cpu or auto with --gpus")
    if place.type == "cpu":
        if not gpus.isdecimal():
            raise UsageError(f"--gpus {gpus} on the CPU", "a number of ranks that share it")
        return ["cpu"] * int(gpus) if int(gpus) > 1 else []
    count = torch.cuda.device_count()
    numbers = list(range(count)) if gpus == "all" else [int(word) for word in gpus.split(",")]
    if gpus.isdecimal():
        numbers = list(range(int(gpus)))
    if len(set(numbers)) < len(numbers):
        raise UsageError(f"--gpus {gpus}", "every GPU once")
    if max(numbers) >= count:
        raise FitError(f"--gpus {gpus} on a machine with {count}", f"GPUs 0 to {count - 1}")
    return [f"cuda:{number}" for number in numbers]


def load_ranks(
    folder: Path,
    config: ModelConfig,
    devices: list[str],
    *,
    device: str,
    dtype: str,
    window: int,
    progress: Callable[[LoadProgress], None] | None = None,
    seconds: float | None = None,
) -> tuple[LoadedModel, Peers | Launched]:
    """Starts the ranks, or joins those that torchrun started, and loads the model; `model` of the result is a
    `MirrorModel`.

    seconds: patience of a collective. Raises UsageError when the model can't be split so, and what `load_model` raises.
    """
    found = launched()
    size = len(devices) if found is None else found[1]
    check_world(config, size)
    peers: Peers | Launched
    if found is None:
        peers = Peers(devices, **({} if seconds is None else {"seconds": seconds}))
    else:
        peers = Launched(join(0, size, local_device(choose_device(device)[0].type)))
    world = peers.world
    explain: Explain = peers.explain
    try:
        threads = max(1, torch.get_num_threads() // size) if world.device.type == "cpu" else 0
        world.share(describe(str(folder.resolve()), dtype, window, threads))
        if threads:
            torch.set_num_threads(threads)
        loaded = load_model(folder, dtype=dtype, window=window, progress=progress, world=world)
    except RuntimeError as error:
        raise explain(error) from error
    except BaseException:
        if isinstance(peers, Peers):
            peers.close()
        raise
    mirror: Any = MirrorModel(loaded.model, config, world, explain)
    if isinstance(peers, Launched):
        atexit.register(mirror.close)
    return replace(loaded, model=mirror), peers
