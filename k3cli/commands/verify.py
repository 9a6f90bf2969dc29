"""`k3 verify [NAME...]`: read and hash what sessions need."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from k3cli.commands import options as opt
from k3cli.commands.output import Printer, human_bytes
from k3cli.errors import DamagedError
from k3cli.words import counted


def command(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME", help="Sessions; all of them if absent.", autocompletion=opt.session_names),
    ] = None,
    json: opt.Json = False,
) -> None:
    """Check every object that sessions need, through the same reader as a resume. Changes nothing.

    Prints a line for each damaged file, and exits with 8 if there is one.
    """
    from k3cli.commands.runtime import open_store
    from k3cli.config import load_settings

    printer = Printer(json=json)
    report = open_store(load_settings()).verify(names or None)
    for problem in report.problems:
        printer.event("problem", **asdict(problem))
        told = ("a session whose name can't be read" if name.startswith("?") else name for name in problem.sessions)
        needed = ", ".join(told)
        printer.line(f"{problem.path}: {problem.what} (needed by {needed})")
    rate = report.bytes / report.seconds if report.seconds > 0 else 0.0
    checked = (
        f"{counted(report.sessions, 'session')}, {counted(report.objects, 'object')}, {human_bytes(report.bytes)} "
        f"in {report.seconds:.2f} s ({human_bytes(rate)}/s)"
    )
    if report.problems:
        raise DamagedError(
            f"{counted(len(report.problems), 'damaged file')} in {checked}",
            "none",
            "k3 repair --dry-run shows what can be saved",
        )
    printer.notice(f"all is well: {checked}")
    printer.done(sessions=report.sessions, objects=report.objects, bytes=report.bytes, seconds=report.seconds)
