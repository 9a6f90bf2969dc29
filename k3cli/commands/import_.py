"""`k3 import FILE`: a session from an exported file."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from k3cli.commands import options as opt
from k3cli.commands.output import Printer, human_bytes
from k3cli.config import path_of


def command(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A file made by k3 export.", show_default=False)],
    name: Annotated[str | None, typer.Option("--name", metavar="NEW", help="Default: the name it had.")] = None,
    json: opt.Json = False,
) -> None:
    """Add the session of an exported file; every byte is checked again, and a refused file leaves nothing behind.

    With the same weights it resumes bit for bit; with others, k3 replay NAME --into NEW evaluates it again.
    """
    from k3cli.commands.runtime import open_store
    from k3cli.config import load_settings

    printer = Printer(json=json)
    report = open_store(load_settings()).import_(path_of(file), name)
    known = f", {human_bytes(report.known)} known already" if report.known else ""
    printer.line(report.name)
    printer.notice(f"imported session {report.name}: {human_bytes(report.written)} written{known}")
    printer.event("imported", **asdict(report))
    printer.done(name=report.name)
