"""`k3 bench`: how fast this machine runs a model, beside what the machine can do; `k3 bench compare` two results."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from k3cli.commands import options as opt
from k3cli.commands.output import Printer, human_bytes, table
from k3cli.errors import Exit, FitError, UsageError

if TYPE_CHECKING:
    import torch

    from k3cli.bench.record import Results, Row
    from k3cli.config import Settings
    from k3cli.model.config import ModelConfig
    from k3cli.model.network import K3Model

RUNGS = (0, 4 << 10, 32 << 10, 128 << 10, 256 << 10, 512 << 10, 1 << 20)
WINDOWS = (1, 2, 4, 8)
WIDTHS = (8, 11, 7, 9, 9, 9, 9, 6, 9, 9, 8)
"""Columns of the table as it grows; rows come one by one, so the widths are fixed."""

app = typer.Typer(
    help="How fast a model runs here, beside what the machine can do.",
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def command(
    ctx: typer.Context,
    model: opt.Model = None,
    layers: Annotated[
        int | None,
        typer.Option("--slice", metavar="N", help="N layers of the model's true width, random weights; default k3."),
    ] = None,
    context: Annotated[
        str | None, typer.Option("--context", "-c", metavar="N", help="Climb to this depth, as 128k or 1m (1,048,576).")
    ] = None,
    depths: Annotated[
        str | None, typer.Option("--depths", metavar="LIST", help="Exactly these depths, as 0,4k,32k.")
    ] = None,
    prompt: Annotated[str | None, typer.Option("--prompt-tokens", metavar="N", help="Tokens of a prefill row.")] = None,
    kernels: Annotated[bool, typer.Option("--kernels", help="The operators alone, beside their peers.")] = False,
    cache: Annotated[
        str, typer.Option("--cache", metavar="cold|warm", help="Empty the GPU's L2 before every sample, or not.")
    ] = "cold",
    stored: Annotated[bool, typer.Option("--stored/--no-stored", help="Also save and restore at each depth.")] = True,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="JSON lines; an existing file is gone on with."),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE.png", help="Draw decode and prefill by depth.")
    ] = None,
    window: Annotated[str | None, typer.Option("--window", metavar="N", help="Rows of a step.")] = None,
    device: opt.Device = None,
    dtype: opt.Dtype = None,
    json: opt.Json = False,
) -> None:
    """Prefill, decode and verify at a ladder of depths, each beside the bytes and operations it needs.

    Rows go to -o FILE (or, with --json, to stdout) as they are finished, a table to stderr. Exit 1 when a row failed.
    """
    if ctx.invoked_subcommand is not None:
        return
    from k3cli.commands.runtime import settings_from

    given = {"model": model, "device": device, "dtype": dtype, "window": window}
    settings = settings_from(given)
    printer = Printer(json=json)
    if cache not in ("cold", "warm"):
        raise UsageError(f"--cache is {cache!r}", "cold or warm")
    if plot is not None and kernels:
        raise UsageError("--plot with --kernels", "a ladder to draw")
    if kernels:
        results = _kernels(printer, output)
    else:
        results = _ladder(printer, settings, layers, context, depths, prompt, cache, stored, output)
    if plot is not None:
        from k3cli.bench.show import plot as draw

        run = results.run
        draw(results.rows, plot, f"{run['model']} on {run['device']}, {run['dtype']}, {run['commit']}")
    failed = len(results.failed)
    printer.done(rows=len(results.rows), failed=failed)
    if failed:
        printer.notice(f"{failed} row{'s' * (failed > 1)} failed")
        raise typer.Exit(int(Exit.FAILED))


@app.command("compare")
def compare_command(
    first: Annotated[Path, typer.Argument(metavar="A", show_default=False)],
    second: Annotated[Path, typer.Argument(metavar="B", show_default=False)],
    json: opt.Json = False,
) -> None:
    """Two results row by row. Exit 2 when conditions or rows differ: such figures say nothing side by side."""
    from k3cli.bench.record import compare
    from k3cli.bench.show import duration

    printer = Printer(json=json)
    found = compare(first, second)
    rows = []
    for row in found:
        printer.event("compared", **{key: value for key, value in row.items() if key != "v"})
        name = f"{row['row']} {row.get('op', '')}".strip()
        where = f"{row['depth']:,}" if "depth" in row else str(row.get("shape", ""))
        a, b = (duration(seconds) for seconds in row["seconds"])
        verdict = "within noise" if row["within_noise"] else "B is slower" if row["ratio"] > 1 else "B is faster"
        rows.append((name, where, str(row.get("tokens", "")), a, b, f"{row['ratio']:.3f}", verdict))
    for line in table(("ROW", "DEPTH OR SHAPE", "TOKENS", "A", "B", "B/A", ""), rows, "<>>>>><"):
        printer.line(line)
    printer.done(rows=len(rows))


def _ladder(
    printer: Printer,
    settings: Settings,
    layers: int | None,
    context: str | None,
    depths: str | None,
    prompt: str | None,
    cache: str,
    stored: bool,
    output: Path | None,
) -> Results:
    from k3cli.bench.ceilings import ceilings
    from k3cli.bench.ladder import Ladder, Plan
    from k3cli.bench.record import Results, run_row
    from k3cli.engine.timeline import PREFILL_CHUNK

    name, whole, config, build = _subject(settings, layers)
    rungs = _rungs(config, context, depths, "cuda" in settings.device or _cuda(settings.device))
    place, kind = _place(settings, config)
    tokens = _count("--prompt-tokens", prompt) if prompt else (8192 if place.type == "cuda" else PREFILL_CHUNK)
    if rungs[-1] + tokens > config.context_limit:
        # The last prefill row would leave the context: it measures the last tokens that fit.
        rungs = (*rungs[:-1], config.context_limit - max(tokens, max(WINDOWS) * 32))
    windows = settings.window or 8
    planned = _fit(printer, config, kind, place, rungs[-1] + tokens)
    model = build(place, kind, windows)
    limits = ceilings(place, kind)
    plan = Plan(rungs, tokens, tuple(n for n in WINDOWS if n <= windows), PREFILL_CHUNK, cold=cache == "cold")
    run = run_row(
        model=name,
        config=_digest(config),
        layers=len(config.layers),
        device=_device_name(place),
        dtype=str(kind).removeprefix("torch."),
        window=windows,
        chunk=plan.chunk,
        cache=cache,
        kernels=_kernel_choice(place),
        bandwidth=limits[0],
        matrix_rate=limits[1],
    )
    results = Results.open(run, output)
    printer.event("run", **_told(run))
    _head(printer, run)
    ladder = Ladder(model, config, plan, limits)
    climber = ladder.climb(results)
    for row in _with_extras(climber, ladder, results, whole, config, settings, stored and place is not None):
        printer.event("row", **_told(row))
        _show(printer, row)
    if results.done(row="memory") is None:
        whose = "" if place.type == "cuda" else "the peak is the whole process's"
        memory = results.add({"row": "memory", "planned": planned, "peak": _peak(place), "note": whose})
        printer.event("row", **_told(memory))
        _show(printer, memory)
    return results


def _with_extras(
    climber: Iterator[Row],
    ladder: Any,
    results: Results,
    whole: ModelConfig,
    config: ModelConfig,
    settings: Settings,
    stored: bool,
) -> Iterator[Row]:
    """The ladder's rows; behind the last of each depth: shares, what follows for the model, save and restore."""
    last = ladder.plan.windows[-1]
    for row in climber:
        yield row
        if row["row"] not in ("decode", "verify") or row["tokens"] != last or "error" in row:
            continue
        depth = row["depth"]
        if results.done(row="shares", depth=depth) is None:
            yield from _shares(ladder, results, whole, config, depth)
        if stored and results.done(row="restore", depth=depth) is None and depth:
            from k3cli.bench.stored import save_and_restore

            try:
                saved, restored = save_and_restore(ladder.model, ladder.state, settings.home)
            except Exception as problem:  # whatever the disk says belongs into the table
                yield results.add({"row": "save", "depth": depth, "error": f"{type(problem).__name__}: {problem}"})
                continue
            yield results.add({"row": "save", "depth": depth, **saved})
            yield results.add({"row": "restore", "depth": depth, **restored})


def _shares(ladder: Any, results: Results, whole: ModelConfig, config: ModelConfig, depth: int) -> Iterator[Row]:
    import torch

    from k3cli.bench.shares import derive, shares

    ids = torch.randint(0, config.vocab, (1,)).to(ladder.model.device)
    try:
        found = shares(ladder.model, ladder.state, ids)
    except RuntimeError as problem:
        yield results.add({"row": "shares", "depth": depth, "tokens": 1, "error": str(problem)})
        return
    yield results.add({"row": "shares", "depth": depth, "tokens": 1, **found})
    step = results.done(row="decode", depth=depth, tokens=1)
    if step is not None and len(config.layers) < len(whole.layers):
        seconds = derive(whole, config, step["seconds"], found["shares"])
        yield results.add({"row": "whole", "depth": depth, "tokens": 1, **seconds})


def _subject(settings: Settings, layers: int | None) -> tuple[str, ModelConfig, ModelConfig, Any]:
    """(name, whole configuration, configuration that runs, builder of the model)."""
    from k3cli.config import K3_SHAPE
    from k3cli.model.config import ModelConfig
    from k3cli.model.hub import resolve_model

    if layers is None:
        from k3cli.model.weights import load_model

        folder = resolve_model(settings.model_ref)
        config = ModelConfig.from_dir(folder)

        def load(place: torch.device, kind: torch.dtype, window: int) -> K3Model:
            return load_model(folder, device=place, dtype=kind, window=window).model

        return folder.resolve().name, config, config, load
    from k3cli.bench.slice import random_model, slice_config
    from k3cli.commands.plan import configuration

    source = settings.model or "k3"
    folder, whole = configuration(source)
    part = slice_config(whole, layers)
    name = "k3" if folder == K3_SHAPE else folder.resolve().name

    def make(place: torch.device, kind: torch.dtype, window: int) -> K3Model:
        return random_model(part, place, kind, window)

    return f"{name}, slice of {layers} layers, random weights", whole, part, make


def _rungs(config: ModelConfig, context: str | None, depths: str | None, cuda: bool) -> tuple[int, ...]:
    from k3cli.commands.plan import parse_tokens

    if context is not None and depths is not None:
        raise UsageError("both --context and --depths", "one of them")
    if depths is not None:
        found = sorted({0 if part.strip() == "0" else parse_tokens("--depths", part) for part in depths.split(",")})
    elif context is not None:
        top = parse_tokens("--context", context)
        found = [*(rung for rung in RUNGS if rung < top), top]
    else:
        found = [rung for rung in RUNGS if rung <= (32 << 10 if cuda else 4 << 10)]
    if found[-1] > config.context_limit:
        raise UsageError(f"a depth of {found[-1]:,} tokens", f"at most the model's limit of {config.context_limit:,}")
    return tuple(found)


def _count(option: str, text: str) -> int:
    from k3cli.commands.plan import parse_tokens

    return parse_tokens(option, text)


def _cuda(device: str) -> bool:
    import torch

    return device == "auto" and torch.cuda.is_available()


def _place(settings: Settings, config: ModelConfig) -> tuple[torch.device, torch.dtype]:
    from k3cli.model.placement import choose_device, choose_dtype

    place, _ = choose_device(settings.device)
    return place, choose_dtype(settings.dtype, place, config)[0]


def _fit(printer: Printer, config: ModelConfig, kind: torch.dtype, place: torch.device, tokens: int) -> int:
    """Planned peak bytes; FitError before anything is made when they aren't there."""
    from k3cli.engine.timeline import PREFILL_CHUNK
    from k3cli.model.placement import available_memory
    from k3cli.model.sizing import state_size, weigh, workspace

    state = state_size(config, kind)
    weights = sum(entry.loaded for entry in weigh(config, kind))
    # The ladder measures on forks: a second checkpoint and tail page beside the state itself.
    need = weights + workspace(config, kind, PREFILL_CHUNK) + state.session(tokens) + state.checkpoint + 512 * state.row
    free = available_memory(place)
    told = "unknown" if free is None else human_bytes(free)
    printer.notice(f"plan: weights {human_bytes(weights)}, peak {human_bytes(need)} of {told} free on {place}")
    if free is not None and need > free:
        raise FitError(
            f"{human_bytes(need)} are needed on {place}, {told} are free", "room", "a lower --context or --slice"
        )
    return need


def _peak(place: torch.device) -> int:
    import torch

    if place.type == "cuda":
        return int(torch.cuda.max_memory_allocated(place))
    import resource

    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


def _device_name(place: torch.device) -> str:
    import torch

    return torch.cuda.get_device_name(place) if place.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"


def _kernel_choice(place: torch.device) -> str:
    from k3_kernels.select import for_device

    found = for_device(place.type)
    return f"{'triton' if found.kernel else 'reference'}: {found.reason}"


def _digest(config: ModelConfig) -> str:
    import hashlib

    return hashlib.sha256(repr(dataclasses.astuple(config)).encode()).hexdigest()[:16]


def _kernels(printer: Printer, output: Path | None) -> Results:
    """Every operator against its floor, and against its peer where that is installed."""
    import torch

    from k3cli.bench.record import Results, run_row

    if not torch.cuda.is_available():
        raise UsageError("--kernels without a CUDA device", "one: on a CPU only the reference runs, which is no kernel")
    from k3_kernels.bench.rows import rows

    place = torch.device("cuda", 0)
    from k3cli.bench.ceilings import ceilings

    limits = ceilings(place, torch.bfloat16)
    run = run_row(
        model="operators at K3's shapes",
        config="",
        device=_device_name(place),
        dtype="bfloat16",
        window=8,
        chunk=0,
        cache="cold",
        kernels=_kernel_choice(place),
        bandwidth=limits[0],
        matrix_rate=limits[1],
    )
    results = Results.open(run, output)
    printer.event("run", **_told(run))
    _head(printer, run)
    for found in rows(limits, lambda op, shape: results.done(row="kernel", op=op, shape=shape) is not None):
        row = results.add({"row": "kernel", **found})
        printer.event("row", **_told(row))
        _show(printer, row)
    return results


def _head(printer: Printer, run: Row) -> None:
    from k3cli.bench.show import HEAD

    printer.notice(f"{run['model']} on {run['device']}, {run['dtype']}, window {run['window']}, {run['kernels']}")
    rate = run["matrix_rate"] / 1e12
    printer.notice(f"measured: copy {human_bytes(run['bandwidth'])}/s, products {rate:.3g} T/s; load {run['load']}")
    _aligned(printer, HEAD)


def _show(printer: Printer, row: Row) -> None:
    from k3cli.bench.show import cells

    _aligned(printer, cells(row))


def _told(row: Row) -> Row:
    """A row as an event's fields: the event has its own version."""
    return {key: value for key, value in row.items() if key != "v"}


def _aligned(printer: Printer, row: tuple[str, ...]) -> None:
    *columns, last = row
    text = "  ".join(
        f"{cell:<{w}}" if i == 0 else f"{cell:>{w}}" for i, (cell, w) in enumerate(zip(columns, WIDTHS, strict=True))
    )
    printer.err.write(f"{text}  {last}".rstrip() + "\n")
    printer.err.flush()
