"""`k3 rm NAME...`: delete sessions."""

from __future__ import annotations

from typing import Annotated

import typer

from k3cli.commands import options as opt
from k3cli.commands.output import Printer, human_bytes


def command(
    names: Annotated[
        list[str], typer.Argument(metavar="NAME", help="Session names.", autocompletion=opt.session_names)
    ],
    json: opt.Json = False,
) -> None:
    """Delete sessions. What no other session needs is freed at once; forks stay whole."""
    from k3cli.commands.runtime import open_store
    from k3cli.config import load_settings

    printer = Printer(json=json)
    store = open_store(load_settings())
    for name in names:
        store.catalog.ref(
            name
        )  # all names are looked up before anything goes; a session too damaged to show can go too
    for name in dict.fromkeys(names):
        report = store.remove(name)
        printer.notice(f"removed session {name}: {human_bytes(report.bytes)} freed")
        for notice in report.notices:
            printer.notice(notice)
        printer.event("removed", name=name, bytes=report.bytes, objects=report.objects, notices=report.notices)
    printer.done()
