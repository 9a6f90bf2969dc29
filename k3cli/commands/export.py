"""`k3 export NAME FILE`: a session in one file, to carry it to another machine."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from k3cli.commands import options as opt
from k3cli.commands.output import Printer, human_bytes
from k3cli.config import path_of


def command(
    name: opt.SessionArgument,
    file: Annotated[str, typer.Argument(metavar="FILE", help="A new file.", show_default=False)],
    json: opt.Json = False,
) -> None:
    """Write a session, with all it needs, into one new file. The same session gives the same bytes each time.

    The file reveals the conversation. It appears when it is whole; a killed export leaves .tmp-... beside it.
    """
    from k3cli.commands.runtime import open_store
    from k3cli.config import load_settings

    printer = Printer(json=json)
    report = open_store(load_settings()).export(name, path_of(file))
    printer.notice(f"exported session {report.name} to {report.file}: {human_bytes(report.bytes)}")
    for line in report.notices:
        printer.notice(line)
    printer.event("exported", **asdict(report))
    printer.done()
