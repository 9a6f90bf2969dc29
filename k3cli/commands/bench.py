"""`k3 bench`: how fast this machine runs a model, beside what it can do; `compare` and `plot` are for its results."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from k3cli.commands import options as opt
from k3cli.commands.combinations import refuse_unused
from k3cli.commands.output import Printer, human_bytes, table
from k3cli.config import path_of
from k3cli.errors import Exit, UsageError
from k3cli.words import counted

if TYPE_CHECKING:
    from k3cli.bench.record import Row

WIDTHS = (8, 11, 7, 9, 9, 9, 9, 6, 9, 9, 8)
"""Columns of the table as it grows; rows come one by one, so the widths are fixed."""

LADDER, STEPS, TALKS, OPERATORS = "", "with --spec and --slice", "with --spec", "with --kernels"
"""What a run measures: a ladder; a ladder of steps only; conversations; operators. Each as its options say it."""

MATTER = (
    (("--ops",), (OPERATORS,), "--kernels"),
    (("--texts", "--rounds", "--temperature"), (TALKS,), "--spec without --slice"),
    (("--prompt-tokens", "--stored", "--plot"), (LADDER,), "a ladder: neither --kernels nor --spec"),
    (("--slice", "--context", "--depths", "--cache"), (LADDER, STEPS), "a ladder, or --spec with --slice N"),
    (
        ("--model", "--window", "--device", "--gpus", "--dtype"),
        (LADDER, STEPS, TALKS),
        "no --kernels: K3's shapes in bfloat16, on the first GPU",
    ),
)
"""Options, the runs that they matter to, and what they go with."""

HOLDS = {
    ("--cache", OPERATORS): ("cold",),
    ("--device", OPERATORS): ("auto", "cuda", "cuda:0"),
    ("--dtype", OPERATORS): ("auto", "bfloat16"),
    ("--gpus", OPERATORS): ("1",),
    ("--cache", TALKS): ("warm",),
}
"""Values that say what such a run does anyhow."""

VERDICTS = {True: "within noise", False: "", None: "noise not known"}
"""Words for `within_noise`."""

app = typer.Typer(
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
    ops: Annotated[
        str | None, typer.Option("--ops", metavar="LIST", help="With --kernels: some of them, as moe,mla; default all.")
    ] = None,
    cache: Annotated[
        str | None,
        typer.Option("--cache", metavar="cold|warm", help="Empty a GPU's L2 before every sample (default), or not."),
    ] = None,
    stored: Annotated[
        bool | None,
        typer.Option("--stored/--no-stored", help="Save and restore at each depth (default), or not."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", parser=path_of, help="JSON lines; an existing file is gone on with."
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE.png", parser=path_of, help="Draw decode and prefill by depth."),
    ] = None,
    window: Annotated[str | None, typer.Option("--window", metavar="N", help="Rows of a step.")] = None,
    spec: Annotated[
        str | None,
        typer.Option(
            "--spec",
            metavar="LIST|all",
            help="Conversations with drafters in turns, as off,suffix,dspark; with --slice, steps by rows.",
        ),
    ] = None,
    texts: Annotated[
        str | None, typer.Option("--texts", metavar="LIST", help="With --spec: of edit,prose,code,noise; default all.")
    ] = None,
    rounds: Annotated[
        int | None, typer.Option("--rounds", metavar="N", help="With --spec: how often each runs; default 3.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option("--temperature", metavar="T", help="With --spec; default 0.")
    ] = None,
    device: opt.Device = None,
    gpus: opt.Gpus = None,
    dtype: opt.Dtype = None,
    json: opt.Json = False,
) -> None:
    """Prefill, decode and verify at a ladder of depths, each beside the bytes and operations it needs.

    Rows go to -o FILE (or, with --json, to stdout) as they are finished, a table to stderr. Exit 1 when a row failed.
    """
    options = {
        "--model": model,
        "--slice": layers,
        "--context": context,
        "--depths": depths,
        "--prompt-tokens": prompt,
        "--ops": ops,
        "--cache": cache,
        "--stored": stored,
        "--plot": plot,
        "--window": window,
        "--texts": texts,
        "--rounds": rounds,
        "--temperature": temperature,
        "--device": device,
        "--gpus": gpus,
        "--dtype": dtype,
    }
    if ctx.invoked_subcommand is not None:
        told = {"--no-stored": stored is False, "--kernels": kernels, "--spec": spec, "--output": output}
        where = f"before {ctx.invoked_subcommand}"
        refuse_unused({**options, **told, "--json": json}, where, f"options behind {ctx.invoked_subcommand}")
        return
    from k3cli.bench.run import Ask, climb, operators, subject
    from k3cli.commands.plan import configuration, parse_tokens
    from k3cli.commands.runtime import one_piece, settings_from

    settings = settings_from({"model": model, "device": device, "gpus": gpus, "dtype": dtype, "window": window})
    printer = Printer(json=json)
    if cache not in (None, "cold", "warm"):
        raise UsageError(f"--cache is {cache!r}", "cold or warm")
    if spec is not None and kernels:
        raise UsageError("--spec with --kernels", "one of them")
    if context is not None and depths is not None:
        raise UsageError("both --context and --depths", "one of them")
    what = OPERATORS if kernels else LADDER if spec is None else TALKS if layers is None else STEPS
    _refuse_ignored(what, options)
    if plot is not None:
        from k3cli.bench.show import can_plot

        can_plot(plot)
    if output is not None:
        from k3cli.bench.record import check_output

        check_output(output)
    if spec is not None:
        from k3cli.bench.spec import conversations, read_request

        request = read_request(spec, texts, rounds, temperature)
        if what == STEPS and request.asked:
            raise UsageError(f"--spec {spec} with --slice", "--spec all: its steps are measured without drafters")
    if what == TALKS:
        rows = conversations(settings, request, output, printer.notice)
    elif what == OPERATORS:
        one_piece(settings, printer)
        rows = operators(output, ops, printer.notice)
    else:
        ask = Ask(
            settings,
            layers,
            top=None if context is None else parse_tokens("--context", context),
            depths=None if depths is None else tuple(_depth(part) for part in depths.split(",")),
            prompt=None if prompt is None else parse_tokens("--prompt-tokens", prompt),
            cold=None if cache is None else cache == "cold",
            stored=stored is not False,
            verify=what == STEPS,
        )
        rows = climb(ask, subject(settings, layers, configuration, printer.notice), output, printer.notice)
    began = time.perf_counter()
    run, done = _report(printer, rows)
    if plot is not None:
        from k3cli.bench.record import read
        from k3cli.bench.show import plot as draw

        # With a file, also what an earlier start has measured.
        drawn = done if output is None else read(output)[1]
        draw(run, drawn, plot)
    failed = sum("error" in row for row in done)
    seconds = time.perf_counter() - began
    printer.notice(f"{counted(len(done), 'row')} in {seconds:.0f} s")
    printer.done(rows=len(done), failed=failed, seconds=round(seconds, 1))
    if failed:
        printer.notice(f"{counted(failed, 'row')} failed")
        raise typer.Exit(int(Exit.FAILED))


@app.command("plot", short_help="Draw results of a ladder.")
def plot_command(
    results: Annotated[
        Path, typer.Argument(metavar="RESULTS", parser=path_of, help="A file of -o.", show_default=False)
    ],
    picture: Annotated[
        Path, typer.Argument(metavar="FILE.png", parser=path_of, help="A new picture.", show_default=False)
    ],
) -> None:
    """Draw decode and prefill by depth from results of a ladder, wherever they were measured."""
    from k3cli.bench.record import read
    from k3cli.bench.show import plot

    plot(*read(results), picture)


@app.command("compare", short_help="Two results row by row.")
def compare_command(
    first: Annotated[Path, typer.Argument(metavar="A", parser=path_of, help="A file of -o.", show_default=False)],
    second: Annotated[Path, typer.Argument(metavar="B", parser=path_of, help="Another.", show_default=False)],
    json: opt.Json = False,
) -> None:
    """Two results row by row. Exit 2 when conditions or rows differ: such figures say nothing side by side."""
    from k3cli.bench.compare import compare
    from k3cli.bench.show import duration

    printer = Printer(json=json)
    found = compare(first, second)
    rows = []
    for row in found:
        printer.event("compared", **{key: value for key, value in row.items() if key != "v"})
        name = " ".join(str(row[key]) for key in ("row", "op", "text", "spec") if key in row)
        where = f"{row['depth']:,}" if "depth" in row else str(row.get("shape", ""))
        a, b = (duration(seconds) for seconds in row["seconds"])
        verdict = VERDICTS[row["within_noise"]] or ("B is slower" if row["ratio"] > 1 else "B is faster")
        rows.append((name, where, str(row.get("tokens", "")), a, b, f"{row['ratio']:.3f}", verdict))
    for line in table(("ROW", "DEPTH OR SHAPE", "TOKENS", "A", "B", "B/A", ""), rows, "<>>>>><"):
        printer.line(line)
    printer.done(rows=len(rows))


def _refuse_ignored(what: str, options: dict[str, Any]) -> None:
    """UsageError for options that a run of this kind would not look at."""
    for names, runs, expected in MATTER:
        if what not in runs:
            there = {name: options[name] for name in names if options[name] not in HOLDS.get((name, what), ())}
            refuse_unused(there, what or f"without {expected.split()[0]}", expected)


def _depth(text: str) -> int:
    from k3cli.commands.plan import parse_tokens

    return 0 if text.strip() == "0" else parse_tokens("--depths", text)


def _report(printer: Printer, rows: Iterator[Row]) -> tuple[Row, list[Row]]:
    """Prints the conditions and each row as it comes. Returns both."""
    from k3cli.bench.show import HEAD, cells, plainly

    run = next(rows)
    printer.event("run", **_told(run))
    ranks = "" if run["world"] == 1 else f"{run['world']} ranks, each "
    printer.notice(
        f"{run['model']} on {ranks}{run['device']}, {run['dtype']}, window {run['window']}; kernels: {run['kernels']}"
    )
    for line in plainly(run):
        printer.notice(line)
    rate = run["matrix_rate"] / 1e12
    printer.notice(f"measured: copy {human_bytes(run['bandwidth'])}/s, products {rate:.3g} T/s; load {run['load']}")
    _aligned(printer, HEAD)
    done = []
    for row in rows:
        printer.event("row", **_told(row))
        _aligned(printer, cells(row))
        done.append(row)
    return run, done


def _told(row: Row) -> Row:
    """A row as an event's fields: the event has its own version."""
    return {key: value for key, value in row.items() if key != "v"}


def _aligned(printer: Printer, row: tuple[str, ...]) -> None:
    *columns, last = row
    sides = "<" + ">" * (len(columns) - 1)
    cells = (f"{cell:{side}{width}}" for cell, side, width in zip(columns, sides, WIDTHS, strict=True))
    printer.aside(f"{'  '.join(cells)}  {last}".rstrip())
