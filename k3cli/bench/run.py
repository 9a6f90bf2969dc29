"""A whole run: what is measured, on what, whether it fits, and every row in its order."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from k3cli.bench.behind import allowed, behind, left
from k3cli.bench.ceilings import ceilings
from k3cli.bench.device import device_name, references
from k3cli.bench.kept import Kept
from k3cli.bench.ladder import Ladder, Plan
from k3cli.bench.memory import Meter, planned_peaks
from k3cli.bench.record import Results, Row, run_row
from k3cli.bench.slice import random_model, slice_config
from k3cli.config import K3_SHAPE, Settings
from k3cli.errors import UsageError
from k3cli.model.config import ModelConfig
from k3cli.model.hub import resolve_model
from k3cli.model.launch import Tell, launched
from k3cli.model.network import DEFAULT_WINDOW
from k3cli.model.parallel import check_world
from k3cli.model.placement import choose_device, choose_dtype, prefill_chunk
from k3cli.model.ranks import load_ranks, rank_devices, slice_ranks
from k3cli.model.sizing import weigh
from k3cli.model.weights import load_model

RUNGS = (0, 4 << 10, 32 << 10, 128 << 10, 256 << 10, 512 << 10, 1 << 20)
WINDOWS = (1, 2, 4, 8)
RANDOM = "random, seed 0"
"""The weights of a slice, in place of a digest."""
GPU_DEPTH, CPU_DEPTH = 32 << 10, 4 << 10
"""Deepest rung when none was asked for."""


@dataclass(frozen=True)
class Subject:
    """What runs. whole: the model a slice was cut from, else the same as config. world: ranks that share it, and place:
    where the first one is."""

    name: str
    whole: ModelConfig
    config: ModelConfig
    place: torch.device
    world: int
    build: Callable[[torch.dtype, int], tuple[Any, str, Callable[[], None]]]
    """(dtype, window) -> `K3Model` or its `MirrorModel` over several ranks, the digest of its weights, and what ends
    the ranks."""


@dataclass(frozen=True)
class Ask:
    """What the user wants. top: climb up to it; depths: exactly these; both None: a few low rungs.

    cold: empty a GPU's L2 before every sample; None: where there is one.
    verify: only steps, of every number of rows, and the speed-up they allow.
    """

    settings: Settings
    layers: int | None
    top: int | None
    depths: tuple[int, ...] | None
    prompt: int | None
    cold: bool | None
    stored: bool
    verify: bool = False


def subject(
    settings: Settings,
    layers: int | None,
    configuration: Callable[[str], tuple[Path, ModelConfig]],
    tell: Tell = lambda line: None,
) -> Subject:
    """The configured model with its weights, or `layers` of its layers (of K3's, without one) with random weights.

    tell: that ranks are waited for.
    """
    found, devices = launched(), rank_devices(settings.gpus, settings.device)
    place = torch.device(devices[0]) if devices else choose_device(settings.device)[0]
    world = max(1, len(devices)) if found is None else found[1]
    if layers is None:
        folder = resolve_model(settings.model_ref)
        config = ModelConfig.from_dir(folder)
        check_world(config, world)

        def load(kind: torch.dtype, window: int) -> tuple[Any, str, Callable[[], None]]:
            if world == 1:
                alone = load_model(folder, device=place, dtype=kind, window=window)
                return alone.model, alone.weights_digest, _nothing
            more: Any = {"device": settings.device, "dtype": _word(kind), "window": window, "tell": tell}
            loaded, peers = load_ranks(folder, config, devices, **more)
            return loaded.model, loaded.weights_digest, peers.close

        return Subject(folder.resolve().name, config, config, place, world, load)
    path, whole = configuration(settings.model or "k3")
    part = slice_config(whole, layers)
    check_world(part, world)

    def make(kind: torch.dtype, window: int) -> tuple[Any, str, Callable[[], None]]:
        if world == 1:
            return random_model(part, place, kind, window), RANDOM, _nothing
        more: Any = {"device": settings.device, "dtype": _word(kind), "window": window, "tell": tell}
        model, peers = slice_ranks(path, part, devices, **more)
        return model, RANDOM, peers.close

    folder = path.parent if path.suffix == ".json" else path
    name = "k3" if path == K3_SHAPE else folder.resolve().name
    return Subject(f"{name}, slice of {layers} layers, random weights", whole, part, place, world, make)


def _nothing() -> None:
    """A model in one piece leaves nothing to end."""


def _word(kind: torch.dtype) -> str:
    return str(kind).removeprefix("torch.")


def rungs(ask: Ask, config: ModelConfig, cuda: bool) -> tuple[int, ...]:
    """Depths to measure at, ascending. UsageError beyond the context."""
    if ask.depths is not None:
        found = tuple(sorted(set(ask.depths)))
    elif ask.top is not None:
        found = (*(rung for rung in RUNGS if rung < ask.top), ask.top)
    else:
        found = tuple(rung for rung in RUNGS if rung <= (GPU_DEPTH if cuda else CPU_DEPTH))
    if found[-1] > config.context_limit:
        raise UsageError(f"a depth of {found[-1]:,} tokens", f"at most the model's limit of {config.context_limit:,}")
    return found


def climb(ask: Ask, what: Subject, file: Path | None, tell: Callable[[str], None]) -> Iterator[Row]:
    """The run's conditions as the first row, then every row as it is finished. tell: one line for people."""
    settings, config, place = ask.settings, what.config, what.place
    kind = choose_dtype(settings.dtype, place, config)[0]
    cuda = place.type == "cuda"
    if ask.cold and not cuda:
        raise UsageError("--cache cold on a CPU", "a GPU, whose L2 is emptied, or --cache warm")
    chunk = prefill_chunk(sum(entry.loaded for entry in weigh(config, kind)), place.type)
    tokens = 0 if ask.verify else ask.prompt or chunk
    window = settings.window or DEFAULT_WINDOW
    plan = Plan(
        depths=rungs(ask, config, cuda),
        prompt=tokens,
        windows=tuple(range(1, window + 1)) if ask.verify else tuple(n for n in WINDOWS if n <= window),
        chunk=chunk,
        cold=cuda if ask.cold is None else ask.cold,
    )
    room = max(tokens, max(plan.windows) * (plan.steps + 3))
    deepest = config.context_limit - room
    if deepest < 0:
        raise UsageError(f"a prompt of {room:,} tokens", f"at most the model's limit of {config.context_limit:,}")
    if plan.depths[-1] > deepest:
        tell(f"depths beyond {deepest:,} are measured there: {room:,} tokens more are evaluated at each")
    plan = dataclasses.replace(plan, depths=tuple(sorted({min(depth, deepest) for depth in plan.depths})))
    planned = planned_peaks(config, kind, place, plan, tell, what.world)
    model, weights, end = what.build(kind, window)
    try:
        yield from _measured(ask, what, plan, model, weights, planned, file, tell)
    finally:
        end()


def _measured(
    ask: Ask,
    what: Subject,
    plan: Plan,
    model: Any,
    weights: str,
    planned: Sequence[int],
    file: Path | None,
    tell: Callable[[str], None],
) -> Iterator[Row]:
    meter = Meter(model, what.place)
    limits = ceilings(what.place, model.dtype, what.world)
    meter.begin()
    run = run_row(
        model=what.name,
        config=hashlib.sha256(repr(dataclasses.astuple(what.config)).encode()).hexdigest()[:16],
        layers=len(what.config.layers),
        weights=weights,
        device=device_name(what.place),
        world=what.world,
        dtype=_word(model.dtype),
        window=model.window,
        chunk=plan.chunk,
        cache="cold" if plan.cold else "warm",
        kernels=model.kernels,
        reference=references(what.config, what.place, model.dtype, model.window, what.world),
        bandwidth=limits[0],
        matrix_rate=limits[1],
    )
    results = Results.open(run, file, tell)
    anew = not results.rows
    yield results.run
    home = ask.settings.home if ask.stored and not ask.verify else None
    kept = None
    if home is not None and file is not None and file.is_file():  # nobody goes on with a pipe
        kept = Kept(home, file, results.run["date"], tell)
    earlier = None if kept is None else partial(kept.load, model)
    ladder = Ladder(model, what.config, plan, results.ceilings, earlier)
    last = {"row": "verify" if plan.windows[-1] > 1 else "decode", "tokens": plan.windows[-1]}

    def more(depth: int) -> Iterator[Row]:
        if results.done(depth=depth, **last) is None:
            return
        if ask.verify:
            yield from allowed(plan.windows, results, depth)
        else:
            yield from behind(model, ladder.state, what.whole, results, depth, home, kept)

    yield from ladder.climb(results, lambda depth: not ask.verify and left(results, depth, home), more)
    if not ask.verify and results.done(row="memory") is None:
        yield results.add(meter.row(planned, ladder.own, anew))
    if kept is not None and not results.failed:
        kept.drop()


def operators(file: Path | None, ops: str | None, tell: Callable[[str], None]) -> Iterator[Row]:
    """Every operator at K3's shapes against its floor, and against its peer where that is installed.

    ops: benchmarks to run, with commas between; None: all. tell: one line for people. UsageError for other benchmarks,
    and without a CUDA device.
    """
    from k3_kernels.bench.rows import names, rows

    wanted = [] if ops is None else [part.strip() for part in ops.split(",")]
    if not set(wanted) <= set(names()):
        raise UsageError(f"--ops is {ops!r}", f"some of {', '.join(names())}, with commas between")
    if not torch.cuda.is_available():
        raise UsageError("--kernels without a CUDA device", "one: on a CPU only the reference runs, which is no kernel")
    from k3_kernels.select import for_device

    limits = ceilings(torch.device("cuda", 0), torch.bfloat16)
    run = run_row(
        model="operators at K3's shapes",
        config="",
        device=device_name(torch.device("cuda", 0)),
        world=1,
        dtype="bfloat16",
        window=8,
        chunk=0,
        cache="cold",
        kernels=for_device("cuda").reason,
        reference=references(ModelConfig.from_dir(K3_SHAPE), torch.device("cuda", 0), torch.bfloat16, 8),
        bandwidth=limits[0],
        matrix_rate=limits[1],
    )
    results = Results.open(run, file, tell)
    yield results.run

    def known(op: str, shape: str) -> bool:
        return results.done(row="kernel", op=op, shape=shape) is not None

    for found in rows(results.ceilings, known, wanted):
        yield results.add({"row": "kernel", **found})
