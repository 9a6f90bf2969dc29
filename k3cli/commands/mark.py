"""`k3 mark NAME LABEL`: name a turn, and keep its checkpoint."""

from __future__ import annotations

from typing import Annotated

import typer

from k3cli.commands import options as opt
from k3cli.commands.names import find_turn, short_id
from k3cli.commands.output import Printer


def command(
    name: opt.SessionArgument,
    label: Annotated[str, typer.Argument(metavar="LABEL", help="Name of the mark.", show_default=False)],
    at: opt.At = None,
    remove: Annotated[bool, typer.Option("--remove", help="Forget the mark.")] = False,
    json: opt.Json = False,
) -> None:
    """Name a turn (the newest, or --at TURN). The checkpoint of a marked turn is never thinned; --at takes the mark."""
    from k3cli.commands.runtime import open_store
    from k3cli.config import load_settings
    from k3cli.errors import UsageError

    printer = Printer(json=json)
    store = open_store(load_settings())
    if remove:
        if at is not None:
            raise UsageError("--remove with --at", "only the label")
        store.unmark(name, label)
        printer.notice(f"removed mark {label} from session {name}")
        printer.event("mark_removed", name=name, label=label)
        printer.done()
        return
    turn = find_turn(store, name, at or "-1")
    before = store.session(name).marks.get(label, turn.id)
    store.mark(name, turn.id, label)
    if before != turn.id:
        printer.notice(f"mark {label} was at turn {short_id(before)}, whose checkpoint may now be thinned")
    if not turn.has_checkpoint:
        printer.notice(
            f"the checkpoint of turn {short_id(turn.id)} is gone already: resuming there replays from an earlier one"
        )
    printer.notice(f"marked turn {short_id(turn.id)} of session {name} as {label}")
    printer.event("marked", name=name, label=label, turn=turn.id, has_checkpoint=turn.has_checkpoint)
    printer.done()
