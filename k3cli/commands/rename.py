"""`k3 rename NAME NEW`."""

from __future__ import annotations

from typing import Annotated

import typer

from k3cli.commands import options as opt
from k3cli.commands.output import Printer


def command(
    name: opt.SessionArgument,
    new: Annotated[str, typer.Argument(metavar="NEW", help="The new name.", show_default=False)],
    json: opt.Json = False,
) -> None:
    """Give a session another name."""
    from k3cli.commands.runtime import open_store
    from k3cli.config import load_settings

    printer = Printer(json=json)
    open_store(load_settings()).rename(name, new)
    printer.notice(f"renamed session {name} to {new}")
    printer.event("renamed", name=new, was=name)
    printer.done(name=new)
