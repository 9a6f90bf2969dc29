"""`k3 plan`: whether a model, its sessions and their contexts fit a machine, and what they weigh; nothing is loaded."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from k3cli.commands import options as opt
from k3cli.commands.output import Printer, human_bytes, human_seconds, table
from k3cli.commands.plan_fit import PAGE, Demand, nearest, shortage, state_room
from k3cli.errors import FitError, UsageError
from k3cli.words import counted

if TYPE_CHECKING:
    import torch

    from k3cli.model.config import ModelConfig
    from k3cli.model.machine import Machine
    from k3cli.model.sizing import Weighed

USUAL = (4 << 10, 32 << 10, 128 << 10, 1 << 20)


def command(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL", help="Model folder, config.json, hub id, or k3: its shape alone.", show_default=False
        ),
    ] = None,
    gpus: Annotated[
        str | None, typer.Option("--gpus", metavar="NxKIND", help="8xB300, 2x96GB, 0 for the CPU. Default: detected.")
    ] = None,
    ram: Annotated[str | None, typer.Option("--ram", metavar="SIZE", help="Main memory. Default: free now.")] = None,
    disk: Annotated[str | None, typer.Option("--disk", metavar="SIZE", help="For sessions. Default: free now.")] = None,
    disk_rate: Annotated[
        str | None, typer.Option("--disk-rate", metavar="SIZE", help="Read per second. Default: measured or 2 GB.")
    ] = None,
    context: Annotated[
        list[str] | None, typer.Option("--context", "-c", metavar="N", help="Tokens, as 128000, 32k or 1m; repeatable.")
    ] = None,
    sessions: Annotated[int, typer.Option("--sessions", metavar="N", min=1, help="Sessions live at once.")] = 1,
    forks: Annotated[
        int, typer.Option("--forks", metavar="N", min=0, help="Forks live beside them, sharing full pages.")
    ] = 0,
    checkpoints: Annotated[
        int | None,
        typer.Option(
            "--checkpoints", metavar="N", min=1, help="KDA checkpoints kept of a session. Default: the store's."
        ),
    ] = None,
    dtype: opt.Dtype = None,
    json: opt.Json = False,
) -> None:
    """What weights and sessions weigh here, and whether they fit. Exit 4 when not, with the nearest plan that does.

    GB means 10^9 bytes, k and m of tokens 1,024 and 1,048,576. State on disk is counted uncompressed.
    """
    from k3cli.commands.runtime import settings_from, store_config
    from k3cli.model.machine import describe
    from k3cli.model.parallel import check_world
    from k3cli.model.placement import DTYPES
    from k3cli.model.sizing import weigh

    settings = settings_from({"model": model, "dtype": dtype})
    printer = Printer(json=json)
    path, config = configuration(settings.model_ref)
    folder = path.parent if path.suffix == ".json" else path
    shards = [file for file in folder.glob("*.safetensors") if os.path.isfile(file)] if folder.is_dir() else []
    sizes = (_size("--ram", ram), _size("--disk", disk), _size("--disk-rate", disk_rate))
    if sizes[2] == 0:
        raise UsageError(f"--disk-rate is {disk_rate!r}", "more than 0 bytes a second")
    there = describe(gpus, *sizes, settings.home, max(shards, key=os.path.getsize, default=None))
    check_world(config, there.count)
    kind = DTYPES[settings.dtype if settings.dtype != "auto" else _default_dtype(there, config)]
    asked = sorted({parse_tokens("--context", text) for text in context or []})
    beyond = [tokens for tokens in asked if tokens > config.context_limit]
    if beyond:
        raise UsageError(
            f"--context {counted(beyond[-1], 'token')}", f"at most the model's limit of {config.context_limit:,}"
        )
    kept = checkpoints or store_config(settings).thinning.max_kept
    contexts = asked or [tokens for tokens in USUAL if tokens <= config.context_limit] or [config.context_limit]

    _show_machine(printer, there)
    parts = weigh(config, kind, there.count)
    _show_weights(printer, parts, there)
    _show_contexts(printer, config, kind, there, contexts, kept)
    demand = Demand(contexts[-1], sessions, forks, kept)
    short = shortage(config, kind, there, demand)
    printer.event("verdict", fits=short is None, context=demand.tokens, shortage=short)
    if short is None:
        printer.line(f"yes: {demand}")
        printer.done(fits=True)
        return
    raise FitError(short, f"room for {demand}", nearest(config, kind, there, demand))


def configuration(ref: str) -> tuple[Path, ModelConfig]:
    """(where, configuration) of a model folder, a config.json of any name, a hub id, or `k3` for K3's own shape."""
    from k3cli.config import K3_SHAPE, path_of
    from k3cli.model.config import ModelConfig
    from k3cli.model.hub import resolve_model

    path = K3_SHAPE if ref == "k3" else path_of(ref)
    if ref != "k3" and path.suffix != ".json":
        path = resolve_model(ref)
    return path, ModelConfig.from_path(path)


def _default_dtype(there: Machine, config: ModelConfig) -> str:
    return "float32" if there.device == "CPU" else config.stored_dtype


def _size(option: str, text: str | None) -> int | None:
    from k3cli.config import parse_bytes

    if text is None:
        return None
    try:
        return parse_bytes(text)
    except ValueError as problem:
        raise UsageError(f"{option} is {text!r}", str(problem)) from None


def parse_tokens(option: str, text: str) -> int:
    """`128000`, `32k` (32,768) or `1m` (1,048,576) -> tokens. Raises UsageError naming the option."""
    match = re.fullmatch(r"([\d_,]+)([km]?)", text.strip().lower())
    count = int(re.sub("[_,]", "", match[1]) or 0) * {"": 1, "k": 1 << 10, "m": 1 << 20}[match[2]] if match else 0
    if count < 1:
        raise UsageError(f"{option} is {text!r}", "tokens, as 128000, 32k or 1m")
    return count


def _show_machine(printer: Printer, there: Machine) -> None:
    room = human_bytes(there.memory)
    printer.line(f"machine: {there.count} x {there.device}, {room} each  ({there.sources['device']})")
    ram, disk = ("unknown" if size is None else human_bytes(size) for size in (there.ram, there.disk))
    printer.line(f"  RAM {ram} ({there.sources['ram']}), disk {disk} ({there.sources['disk']})")
    printer.line(f"  disk reads {human_bytes(there.rate)}/s ({there.sources['rate']})")
    printer.event(
        "machine",
        device=there.device,
        count=there.count,
        memory=there.memory,
        ram=there.ram,
        disk=there.disk,
        rate=there.rate,
        sources=there.sources,
    )


def _show_weights(printer: Printer, parts: Sequence[Weighed], there: Machine) -> None:
    rows = []
    for entry in parts:
        most = max(entry.ranks)
        printer.event("weights", component=entry.name, disk=entry.disk, loaded=entry.loaded, ranks=list(entry.ranks))
        rows.append((entry.name, *(human_bytes(size) for size in (entry.disk, entry.loaded, most))))
    disk, loaded = sum(entry.disk for entry in parts), sum(entry.loaded for entry in parts)
    most = max(sum(entry.ranks[rank] for entry in parts) for rank in range(there.count))
    rows.append(("all", *(human_bytes(size) for size in (disk, loaded, most))))
    printer.line()
    for line in table(("WEIGHTS", "ON DISK", "LOADED", "FULLEST DEVICE"), rows, "<>>>"):
        printer.line(line)
    seconds = disk / there.rate
    printer.line(f"reading them takes {human_seconds(seconds)} at that rate")
    printer.event("weights", component="all", disk=disk, loaded=loaded, fullest=most, read_seconds=seconds)


def _show_contexts(
    printer: Printer, config: ModelConfig, kind: torch.dtype, there: Machine, contexts: list[int], kept: int
) -> None:
    import torch

    from k3cli.model.sizing import state_size

    full, half = state_size(config, kind), state_size(config, kind, torch.bfloat16)
    rank = state_size(config, kind, world=there.count)
    room = state_room(config, kind, there)
    page = rank.row * PAGE
    rows = []
    for tokens in contexts:
        stored = tokens * full.row + kept * full.checkpoint
        live = max(0, room // rank.session(tokens)) if room > 0 else 0
        left = room - rank.session(tokens)
        forks = max(0, left // (rank.checkpoint + page)) if left > 0 and rank.checkpoint + page else 0
        on_disk = None if there.disk is None or not stored else there.disk // stored
        restore = full.session(tokens) / there.rate
        printer.event(
            "context",
            tokens=tokens,
            mla=tokens * full.row,
            recurrent_fp32=full.recurrent,
            recurrent_bf16=half.recurrent,
            conv=full.conv,
            session=full.session(tokens),
            per_device=rank.session(tokens),
            stored=stored,
            live=live,
            forks=forks,
            stored_sessions=on_disk,
            restore_seconds=restore,
        )
        sizes = (tokens * full.row, full.recurrent, half.recurrent, full.conv, stored)
        many = "unknown" if on_disk is None else f"{on_disk:,}"
        rows.append(
            (f"{tokens:,}", *(human_bytes(s) for s in sizes), f"{live:,}", f"{forks:,}", many, human_seconds(restore))
        )
    head = (
        "TOKENS",
        "MLA",
        "KDA FP32",
        "BF16",
        "CONV",
        f"DISK, {kept} KEPT",
        "LIVE",
        "FORKS OF ONE",
        "STORED",
        "RESTORE",
    )
    printer.line()
    for line in table(head, rows, ">>>>>>>>>>"):
        printer.line(line)
    printer.line()
