"""One model over several ranks: which devices, and loading it on all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from k3cli.errors import FitError, UsageError
from k3cli.model.config import ModelConfig
from k3cli.model.joining import join
from k3cli.model.launch import Tell, launched
from k3cli.model.mirror import MirrorModel
from k3cli.model.network import K3Model
from k3cli.model.parallel import check_world
from k3cli.model.peer import describe
from k3cli.model.peers import Launched, Peers, local_device
from k3cli.model.placement import choose_device
from k3cli.model.weights import LoadedModel, LoadProgress, load_model

Result = TypeVar("Result")
Ranks = Peers | Launched


def rank_devices(gpus: str | None, device: str) -> list[str]:
    """The device of every rank, [] for a model in one piece. gpus: N, all, a list as 0,1, or None.

    On a CPU N ranks share it. UsageError for a setting that means nothing here, FitError for GPUs that are not there.
    """
    if launched() is not None:
        _for_all_ranks(device)
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


def _for_all_ranks(device: str) -> None:
    """UsageError for a device that ranks of another program can't all have: those above 0 read no command line."""
    if ":" in device:
        raise UsageError(
            f"--device {device} under torchrun", "--device cuda or auto: a rank has the GPU of its LOCAL_RANK"
        )
    if device == "cpu" and torch.cuda.is_available():
        raise UsageError(
            "--device cpu under torchrun, and a GPU", "one kind of device", "hide the GPUs with CUDA_VISIBLE_DEVICES="
        )


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
    tell: Tell = lambda line: None,
) -> tuple[LoadedModel, Ranks]:
    """Starts the ranks, or joins those that torchrun started, and loads the model; `model` of the result is a
    `MirrorModel`.

    seconds: patience of a collective. tell: that ranks are waited for. Raises UsageError when the model can't be split
    so, and what `load_model` raises.
    """
    peers = _meet(config, devices, device, seconds, tell)
    job = describe(str(folder.resolve()), dtype, window)
    loaded = _made(
        peers, job, lambda: load_model(folder, dtype=dtype, window=window, progress=progress, world=peers.world)
    )
    mirror: Any = _mirror(loaded.model, config, peers)
    return replace(loaded, model=mirror), peers


def slice_ranks(
    model: Path,
    part: ModelConfig,
    devices: list[str],
    *,
    device: str,
    dtype: str,
    window: int,
    tell: Tell = lambda line: None,
) -> tuple[MirrorModel, Ranks]:
    """The same for `part`, some layers of a model (a folder, or a config.json of any name), with random weights."""
    from k3cli.bench.slice import random_part

    peers = _meet(part, devices, device, None, tell)
    layers = len(part.layers)
    job = describe(str(model.resolve()), dtype, window, layers)
    made = _made(peers, job, lambda: random_part(model, layers, dtype, window, peers.world))
    return _mirror(made, part, peers), peers


def _meet(config: ModelConfig, devices: list[str], device: str, seconds: float | None, tell: Tell) -> Ranks:
    found = launched()
    size = len(devices) if found is None else found[1]
    check_world(config, size)
    if found is None:
        return Peers(devices, **({} if seconds is None else {"seconds": seconds}))
    return Launched(join(0, size, local_device(choose_device(device)[0].type), tell=tell))


def _made(peers: Ranks, job: dict[str, Any], work: Callable[[], Result]) -> Result:
    """work(), while the other ranks do their part of the job."""
    world = peers.world
    try:
        if world.device.type == "cpu":
            job["threads"] = max(1, torch.get_num_threads() // world.size)
            torch.set_num_threads(job["threads"])
        world.share(job)
        return work()
    except RuntimeError as error:
        raise peers.explain(error) from error
    except BaseException:
        peers.close()
        raise


def _mirror(model: K3Model, config: ModelConfig, peers: Ranks) -> MirrorModel:
    made = MirrorModel(model, config, peers.world, peers.explain)
    peers.parting, made.close = made.part, peers.close
    return made
