"""What `k3 doctor` looks at. Each check returns rows; a problem is a row with an exit code, never an exception."""

from __future__ import annotations

import math
import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from k3cli import __version__
from k3cli.commands.failures import as_k3_error
from k3cli.commands.output import human_bytes
from k3cli.config import KEYS, Settings
from k3cli.errors import Exit, FitError, K3Error
from k3cli.words import counted, in_words

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from k3_sessions.types import StateLayout

    from k3cli.model.config import ModelConfig

LIBRARIES = ("torch", "triton", "numpy", "safetensors", "tiktoken", "huggingface-hub", "zstandard", "xxhash", "typer")


@dataclass(frozen=True)
class Check:
    """One line of the report. `reason`: why, or where the value comes from; `code` is 0 when all is well.

    data: the same in numbers, for scripts.
    """

    section: str
    name: str
    value: str
    reason: str = ""
    code: Exit = Exit.OK
    data: dict[str, Any] | None = None


def versions() -> Iterator[Check]:
    yield Check("versions", "k3", __version__)
    yield Check("versions", "python", platform.python_version(), sys.executable)
    for name in LIBRARIES:
        try:
            yield Check("versions", name, version(name))
        except PackageNotFoundError:
            # triton exists for Linux only, and only a GPU needs it
            code = Exit.OK if name == "triton" else Exit.FAILED
            yield Check("versions", name, "not installed", "" if name == "triton" else "reinstall k3cli", code)


def machine() -> Iterator[Check]:
    import torch

    from k3cli.model.placement import available_memory, fast_bf16_cpu

    yield Check("machine", "system", f"{platform.system()} {platform.release()} {platform.machine()}")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield Check("machine", "cores", str(cores), f"torch uses {counted(torch.get_num_threads(), 'thread')}")
    free = available_memory(torch.device("cpu"))
    yield Check("machine", "memory free", "unknown" if free is None else human_bytes(free))
    fast, what = fast_bf16_cpu()
    yield Check("machine", "fast bf16 on the CPU", "yes" if fast else "no", what)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        yield Check("machine", "CUDA devices", "none", "torch sees none")
    for index in range(count):
        room, total = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_properties(index).name
        yield Check("machine", f"cuda:{index}", name, f"{human_bytes(room)} of {human_bytes(total)} free")


def paths(settings: Settings) -> Iterator[Check]:
    from k3cli.model.digest import cache_dir
    from k3cli.model.hub import hub_cache

    source = "K3_HOME" if os.environ.get("K3_HOME") else "the platform's data directory"
    yield Check("paths", "home", str(settings.home), source)
    yield Check("paths", "sessions", str(settings.store_root))
    there = "read" if settings.config_file.exists() else "absent: defaults apply"
    yield Check("paths", "config file", str(settings.config_file), there)
    yield Check(
        "paths", "cache", str(cache_dir()), "K3_CACHE" if os.environ.get("K3_CACHE") else "the platform's cache"
    )
    yield Check("paths", "Hugging Face cache", str(hub_cache()))


def settings_rows(settings: Settings) -> Iterator[Check]:
    """Every key that is not at its default, and where its value came from."""
    for key in KEYS:
        if key in settings.sources:
            value = getattr(settings, key)
            shown = human_bytes(value) if key in ("quota", "free_floor") else in_words(value)
            yield Check("settings", key, shown, settings.sources[key])
    if not settings.sources:
        yield Check("settings", "all", "defaults")


def model(settings: Settings) -> Iterator[Check]:
    """The model's files, the chosen device and type, and whether weights and state fit; nothing is loaded."""
    import torch

    from k3cli.chat.renderer import renderer_for
    from k3cli.chat.tokenizer import Tokenizer
    from k3cli.commands.doctor_drafts import drafting
    from k3cli.commands.doctor_ranks import links, ranks
    from k3cli.commands.runtime import recommended_sampling
    from k3cli.model.checkpoint import open_checkpoint
    from k3cli.model.config import ModelConfig
    from k3cli.model.fields import state_layout
    from k3cli.model.fit import Device
    from k3cli.model.hub import resolve_model
    from k3cli.model.network import DEFAULT_WINDOW
    from k3cli.model.parallel import check_world, held
    from k3cli.model.placement import choose_device, choose_dtype, prefill_chunk, rank_memory, weights_memory
    from k3cli.model.ranks import rank_devices

    why = settings.sources.get("model", "none configured: the shipped k3-nano")
    try:
        folder = resolve_model(settings.model_ref)
        yield Check("model", "folder", str(folder), why)
        config = ModelConfig.from_dir(folder)
        kinds = f"{len(config.kda_layers)} KDA and {len(config.mla_layers)} MLA layers"
        yield Check("model", "architecture", config.model_type, kinds)
        yield Check("model", "context limit", counted(config.context_limit, "token"), "config.json")
        files = open_checkpoint(folder, config)
        shards = "headers agree with config.json in " + counted(len(files.shards), "file")
        yield Check("model", "weight files", human_bytes(files.bytes_total), shards)
        tokenizer = Tokenizer.from_dir(folder)
        tokenizer.check_model(config.vocab)
        yield Check("model", "tokenizer", counted(tokenizer.n_vocab, "id"), tokenizer.digest)
        renderer = renderer_for(config.model_type, tokenizer)
        yield Check("model", "chat format", renderer.format_version, tokenizer.family_reason)
        device, reason = choose_device(settings.device)
        yield Check("chosen", "device", str(device), reason)
        dtype, reason = choose_dtype(settings.dtype, device, config)
        yield Check("chosen", "dtype", str(dtype).removeprefix("torch."), reason)
        names = rank_devices(settings.gpus, settings.device) or [str(device)]
        world = len(names)
        check_world(config, world)
        if settings.gpus is not None:
            yield Check("chosen", "ranks", ", ".join(names), settings.sources["gpus"])
        yield from drafting(settings, DEFAULT_WINDOW, folder, config)
        drawn = ", ".join(f"{key} {value}" for key, value in recommended_sampling(settings.model_ref).items())
        yield Check("chosen", "sampling", drawn or "defaults", "the model's generation_config.json" if drawn else "")
        mine, where = held(config, world), str(device) if world == 1 else "each rank"
        yield from kernels(mine, device, dtype, DEFAULT_WINDOW)
        chunk = prefill_chunk(weights_memory(config, dtype), device.type)
        devices = [Device(name, rank_memory(torch.device(name), world)) for name in names]
        if world > 1:
            yield from ranks(config, dtype, devices)
            yield from links(names)
        sizes = [weights_memory(config, dtype, rank, world, device.type) for rank in range(world)]
        tightest = min(range(world), key=lambda rank: (devices[rank].free or 0) - sizes[rank])
        free = devices[tightest].free
        yield from fit(mine, dtype, sizes[tightest], state_layout(mine, dtype), free, where, chunk)
    except (K3Error, MemoryError, OSError) as problem:
        known = as_k3_error(problem)
        if known is None:
            raise
        yield Check("model", "problem", str(known), why, known.exit_code)


def kernels(config: ModelConfig, device: torch.device, dtype: torch.dtype, window: int) -> Iterator[Check]:
    """What each operation runs with, in one line where all run with the same; and whether steps are recorded."""
    from k3cli.model.choices import eager_reason, kernel_choices

    found = kernel_choices(config, device, dtype, window)
    words = {True: "Triton", False: "reference (torch)"}
    if len(set(found.values())) == 1:
        choice = next(iter(found.values()))
        yield Check("chosen", "kernels", words[choice.kernel], f"{choice.reason}; {', '.join(found)}")
    else:
        for name, choice in found.items():
            word = "library attention" if choice.kernel and name == "mla.prefill" else words[choice.kernel]
            yield Check("chosen", f"kernel {name}", word, choice.reason)
    eager = eager_reason(config, device, dtype, window)
    recorded = "recorded at the second step with each number of rows, so that a step is one launch"
    yield Check("chosen", "CUDA graphs", "no" if eager else "yes", eager or recorded)


def fit(
    config: ModelConfig,
    dtype: torch.dtype,
    weights: int,
    layout: StateLayout,
    free: int | None,
    device: str,
    chunk: int | None = None,
) -> Iterator[Check]:
    """Weights, the fixed and the growing state, and what of it the device's free memory holds beside the work space of
    a prefill of `chunk` tokens (None: a page of them). Bytes; tokens."""
    from k3cli.model.pool import Geometry, granules_for, room

    (fixed, row), limit = state_bytes(layout), config.context_limit
    yield Check("fit", "weights", human_bytes(weights), f"in memory on {device}")
    yield Check("fit", "state, fixed", human_bytes(fixed), "KDA layers, whatever the length")
    yield Check(
        "fit", "state, growing", f"{human_bytes(row)} a token", f"MLA layers; {human_bytes(row * limit)} at the limit"
    )
    if free is None:
        yield Check("fit", "room", "unknown", "the system does not tell its free memory")
        return
    geometry = Geometry.of(config, layout.hash_block, dtype)
    try:
        granules = granules_for(config, geometry, free - weights, dtype, chunk)
    except FitError as problem:
        yield Check(
            "fit", "room", f"does not fit: {problem.found}", f"{human_bytes(free)} free on {device}", Exit.NO_FIT
        )
        return
    tokens = min(limit, room(geometry, granules))
    left = f"{human_bytes(free - weights)} are left beside the weights"
    yield Check(
        "fit",
        "room",
        f"{counted(tokens, 'token')} of context",
        "the whole context" if tokens == limit else f"of {limit:,}: {left}",
    )
    size = human_bytes(granules * geometry.granule)
    yield Check("fit", "pool", size, f"for all sequences of a process: {human_bytes(geometry.granule)} a page")


def state_bytes(layout: StateLayout) -> tuple[int, int]:
    """Bytes of one sequence's checkpoint fields, and of the page fields per token."""
    from k3_sessions.types import DTYPES

    sizes = {"checkpoint": 0, "page": 0}
    for field in layout.fields:
        sizes[field.scope] += len(field.layers) * math.prod(field.shape) * DTYPES[field.dtype].itemsize
    return sizes["checkpoint"], sizes["page"]


def store_health(settings: Settings) -> Iterator[Check]:
    """Whether turns can be saved, every session can be listed, and what the store takes. State is not read: `k3 verify`
    does that."""
    from k3_sessions.errors import StoreError

    from k3cli.commands.runtime import open_store

    shut = closed_folder(settings.store_root)
    if shut is not None:
        yield Check("store", "writable", "no", f"{shut} takes no files: no turn can be saved", Exit.FAILED)
    if not settings.store_root.exists():
        yield Check("store", "sessions", "none yet", "the folder is made with the first session")
        return
    try:
        store = open_store(settings)
        usage = store.usage()
        broken = [entry for entry in usage.sessions if entry.error]
        yield Check("store", "sessions", f"{len(usage.sessions)}", "k3 verify reads and hashes every object")
        for entry in broken:
            yield Check("store", entry.name, "cannot be read", entry.error, Exit.DAMAGED)
        quota = "none" if usage.quota is None else human_bytes(usage.quota)
        yield Check("store", "on disk", human_bytes(usage.allocated), f"quota {quota}; k3 du tells more")
        if usage.quarantined:
            yield Check("store", "quarantine", human_bytes(usage.quarantined), "kept by k3 repair")
        low = usage.free < usage.floor
        reason = f"{human_bytes(usage.floor)} are kept free" + ("; saving will be refused" if low else "")
        yield Check("store", "disk free", human_bytes(usage.free), reason, Exit.NO_FIT if low else Exit.OK)
    except StoreError as problem:
        known = as_k3_error(problem)
        assert known is not None
        yield Check("store", "problem", str(known), "", known.exit_code)


def closed_folder(root: Path) -> Path | None:
    """The first folder that saving a turn writes to and this process may not, of a store at `root`; None: all are open.

    Where the store is not there yet, what counts is the folder it will be made in.
    """
    if root.is_dir():
        needed = [
            folder for folder in (root, *(root / name for name in ("objects", "refs", "locks"))) if folder.is_dir()
        ]
    else:
        needed = [next(folder for folder in root.absolute().parents if folder.exists())]
    return next((folder for folder in needed if not os.access(folder, os.W_OK | os.X_OK)), None)
