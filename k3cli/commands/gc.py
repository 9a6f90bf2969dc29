"""`k3 gc`: remove what no session needs."""

from __future__ import annotations

from typing import Annotated

import typer

from k3cli.commands import options as opt
from k3cli.commands.output import Printer, human_bytes
from k3cli.words import counted


def command(
    dry_run: Annotated[bool, typer.Option("--dry-run", "-n", help="Tell what would go; remove nothing.")] = False,
    json: opt.Json = False,
) -> None:
    """Remove objects no session needs, and leftovers of crashes. Prints the path of each."""
    from k3cli.commands.runtime import open_store
    from k3cli.config import load_settings

    printer = Printer(json=json)
    report = open_store(load_settings()).gc(dry_run=dry_run)
    for path in report.removed:
        printer.event("garbage", path=path)
        printer.line(path)
    if report.blocked:
        printer.notice(f"objects were left alone: {report.blocked}")
    what = "would be removed" if dry_run else "removed"
    files, leftovers = counted(len(report.removed), "file"), counted(report.leftovers, "leftover")
    printer.notice(f"{files} {what} ({leftovers}), {human_bytes(report.bytes)}")
    printer.done(
        files=len(report.removed),
        bytes=report.bytes,
        leftovers=report.leftovers,
        dry_run=report.dry_run,
        blocked=report.blocked or None,
    )
