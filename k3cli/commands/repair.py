"""`k3 repair`: set damaged files aside and let sessions fall back to what is whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

import typer

from k3cli.commands import options as opt
from k3cli.commands.names import short_id
from k3cli.commands.output import Printer
from k3cli.words import listed


def command(
    dry_run: Annotated[bool, typer.Option("--dry-run", "-n", help="Tell what would be done; change nothing.")] = False,
    json: opt.Json = False,
) -> None:
    """Move damaged files into quarantine, let each session fall back to what is good, and list what is lost.

    Deletes nothing. Whole turns that no session reaches any more come back as sessions recovered-ID. What a newer
    version wrote, or what may not be read, is left alone.
    """
    from k3cli.commands.runtime import open_store
    from k3cli.config import load_settings

    printer = Printer(json=json)
    report = open_store(load_settings(), mend=True).repair(dry_run=dry_run)
    for path in report.quarantined:
        printer.event("quarantined", path=path)
        printer.line(f"quarantine {path}")
    for entry in report.sessions:
        printer.event("repaired", **asdict(entry))
        head = "all turns kept"
        if entry.lost_turns:
            head = f"back to turn {short_id(entry.head_after)}, {', '.join(map(short_id, entry.lost_turns))} lost"
        lost = ", ".join(f"{position:,}" for position in entry.lost_checkpoints) or "none"
        printer.line(f"session {entry.name}: {head}; checkpoints lost at {lost}; resumes from {entry.boundary:,}")
    for name in report.recovered:
        printer.event("recovered", name=name)
        how = "turns that no session reached any more" if name.startswith("recovered-") else "what its file still told"
        printer.line(f"session {name}: recovered from {how}")
    for name in report.lost:
        printer.event("lost", name=name, held_by=list(report.holders.get(name, ())))
        if name.startswith("?"):
            where = _where(report.holders.get(name, ()), report.recovered)
            printer.line(f"session file {name[1:]}...: whose it was can't be read; {where}")
            continue
        printer.line(
            f"session {name}: nothing readable is left; k3 rm {name} forgets it, and until then k3 gc removes no object"
        )
    for name, why in report.untouched:
        printer.event("untouched", name=name, why=why)
        printer.line(f"session {name}: left alone, for it could not be judged: {why}")
    for path in report.written:
        printer.event("written", path=path)
        printer.line(f"{path}: written again")
    found = (report.quarantined, report.sessions, report.recovered, report.lost, report.untouched, report.written)
    if not any(found):
        printer.notice("nothing to repair")
    elif dry_run:
        printer.notice("nothing was changed (--dry-run)")
    printer.done(
        dry_run=report.dry_run,
        quarantined=len(report.quarantined),
        repaired=len(report.sessions),
        recovered=len(report.recovered),
        lost=len(report.lost),
        untouched=len(report.untouched),
        written=len(report.written),
    )


def _where(holders: Sequence[str], recovered: Sequence[str]) -> str:
    """Where the turns are of a session whose file can't be read. holders: the sessions that have its newest turn."""
    if holders:
        return f"its turns are in {listed('session', holders)}"
    made = [name for name in recovered if name.startswith("recovered-")]
    if made:
        return f"which turns it had can't be told; those that no other session has are in {listed('session', made)}"
    return "which turns it had can't be told; there are none that no other session has"
