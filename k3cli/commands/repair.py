"""`k3 repair`: set damaged files aside and let sessions fall back to what is whole."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from k3cli.commands import options as opt
from k3cli.commands.names import short_id
from k3cli.commands.output import Printer


def command(
    dry_run: Annotated[bool, typer.Option("--dry-run", "-n", help="Tell what would be done; change nothing.")] = False,
    json: opt.Json = False,
) -> None:
    """Move damaged files into quarantine, let each session fall back to what is good, and list what is lost.

    Deletes nothing. Sessions whose file was lost come back as recovered-ID, as far as their turns are whole.
    """
    from k3cli.commands.runtime import open_store
    from k3cli.config import load_settings

    printer = Printer(json=json)
    report = open_store(load_settings()).repair(dry_run=dry_run)
    for path in report.quarantined:
        printer.event("quarantined", path=path)
        printer.line(f"quarantine {path}")
    for entry in report.sessions:
        printer.event("repaired", **asdict(entry))
        moved = entry.head_before != entry.head_after
        head = f"back to turn {short_id(entry.head_after)}" if moved else "all turns kept"
        lost = ", ".join(f"{position:,}" for position in entry.lost_checkpoints) or "none"
        printer.line(f"session {entry.name}: {head}; checkpoints lost at {lost}; resumes from {entry.boundary:,}")
    for name in report.recovered:
        printer.event("recovered", name=name)
        printer.line(f"session {name}: recovered from turns whose session file was lost")
    for name in report.lost:
        printer.event("lost", name=name)
        printer.line(f"session {name}: nothing readable is left")
    if not (report.quarantined or report.sessions or report.recovered or report.lost):
        printer.notice("nothing to repair")
    elif dry_run:
        printer.notice("nothing was changed (--dry-run)")
    printer.done(
        dry_run=report.dry_run,
        quarantined=len(report.quarantined),
        repaired=len(report.sessions),
        recovered=len(report.recovered),
        lost=len(report.lost),
    )
