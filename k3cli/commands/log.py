"""`k3 log NAME`: the turns of a session, or of its whole tree of forks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from k3cli.commands import options as opt
from k3cli.commands.names import short_id
from k3cli.commands.output import Printer, human_bytes, table
from k3cli.commands.transcript import prompt_line

if TYPE_CHECKING:
    from k3_sessions.store import Store
    from k3_sessions.types import Session, Turn


def command(
    name: opt.SessionArgument,
    tree: Annotated[bool, typer.Option("--tree", help="Every branch of the tree the session belongs to.")] = False,
    stats: Annotated[
        bool, typer.Option("--stats", help="Counts, rates (tokens a second) and bytes of each turn.")
    ] = False,
    json: opt.Json = False,
) -> None:
    """List the turns of a session from the first to the newest.

    A `*` says that the turn has a checkpoint: resuming there evaluates nothing again.
    """
    from k3cli.commands.runtime import open_store
    from k3cli.config import load_settings

    printer = Printer(json=json)
    store = open_store(load_settings())
    session = store.session(name)
    turns = store.log(name)
    branches = _branches(store, session, printer)
    leaving = _leaving(name, branches)
    rows = []
    for depth, number, turn, names in _walk(turns, branches if tree else {name: turns}):
        labels = sorted(label for label, marked in session.marks.items() if marked == turn.id)
        here = [other for other in leaving.get(turn.id, []) if other not in names]
        printer.event("turn", number=number, sessions=names, marks=labels, forks=here, **turn_json(turn))
        notes = [f"[{label}]" for label in labels] + [f"({other})" for other in names if tree or other != name]
        notes += [f"(fork: {other})" for other in here if not tree]
        rows.append(
            (
                "  " * depth + f"{number}",
                short_id(turn.id) + (" *" if turn.has_checkpoint else ""),
                *(_stats(turn) if stats else (f"{turn.total:,}", f"+{len(turn.tokens):,}")),
                turn.created[:16].replace("T", " "),
                " ".join([*notes, prompt_line(turn.meta)])[:100],
            )
        )
    measured = ("TOKENS", "REUSED", "REPLAYED", "PREFILLED", "T/S", "GENERATED", "T/S", "MLA", "KDA")
    head: tuple[str, ...] = measured if stats else ("TOKENS", "NEW")
    align = "<<" + ">" * len(head) + "<<"
    for line in table(("TURN", "ID", *head, "TIME (UTC)", "PROMPT"), rows, align):
        printer.line(line)
    printer.done(name=name, turns=len(rows))


def turn_json(turn: Turn) -> dict[str, Any]:
    """A turn for scripts. Token ids are left out: `k3 show --json` has them."""
    return {
        "id": turn.id,
        "parent": turn.parent,
        "start": turn.start,
        "tokens": len(turn.tokens),
        "total": turn.total,
        "position": turn.position,
        "created": turn.created,
        "has_checkpoint": turn.has_checkpoint,
        "mla_bytes": turn.bytes_pages,
        "kda_bytes": turn.bytes_checkpoint,
        "meta": dict(turn.meta),
    }


def _stats(turn: Turn) -> tuple[str, ...]:
    counts = turn.meta.get("counts", {})
    # A prompt that is kept as a turn of its own was evaluated with the rest of it: the times are those of both.
    seconds = {} if turn.meta.get("kind") == "prompt" else turn.meta.get("seconds", {})
    told: list[str] = []
    for key, timed in (("reused", ""), ("replayed", ""), ("prefilled", "prefill"), ("generated", "decode")):
        count, took = counts.get(key), seconds.get(timed)
        told.append("-" if count is None else f"{count:,}")
        if timed:
            told.append(f"{count / took:,.0f}" if count and took else "-")
    return (f"{turn.total:,}", *told, human_bytes(turn.bytes_pages), human_bytes(turn.bytes_checkpoint))


def _branches(store: Store, session: Session, printer: Printer) -> dict[str, list[Turn]]:
    """Turns of every session in the same tree. One that cannot be read is said and left out."""
    from k3_sessions.errors import StoreError

    found: dict[str, list[Turn]] = {}
    for other in store.sessions():
        if other.tree != session.tree and not other.error:
            continue
        try:
            if other.error:
                printer.notice(f"session {other.name} cannot be read: {other.error}")
            else:
                found[other.name] = store.log(other.name)
        except StoreError as problem:
            printer.notice(f"session {other.name} cannot be read: {problem}")
    return found


def _leaving(name: str, branches: dict[str, list[Turn]]) -> dict[str, list[str]]:
    """Turn id -> sessions whose last turn in common with session `name` it is."""
    own = {turn.id for turn in branches.get(name, [])}
    found: dict[str, list[str]] = {}
    for other, line in branches.items():
        common = [turn.id for turn in line if turn.id in own]
        if other != name and common:
            found.setdefault(common[-1], []).append(other)
    return found


def _walk(turns: list[Turn], branches: dict[str, list[Turn]]) -> list[tuple[int, int, Turn, list[str]]]:
    """(depth, number, turn, sessions that end there) of all branches, each turn once, children below parents."""
    by_id: dict[str, Turn] = {}
    children: dict[str | None, list[str]] = {}
    heads: dict[str, list[str]] = {}
    for name, line in branches.items():
        for turn in line:
            if turn.id not in by_id:
                by_id[turn.id] = turn
                children.setdefault(turn.parent, []).append(turn.id)
        if line:
            heads.setdefault(line[-1].id, []).append(name)
    main = {turn.id for turn in turns}
    found: list[tuple[int, int, Turn, list[str]]] = []
    # A stack, not recursion: a session may have thousands of turns.
    pending = [(0, 1, turn_id) for turn_id in reversed(children.get(None, []))]
    while pending:
        depth, number, turn_id = pending.pop()
        found.append((depth, number, by_id[turn_id], sorted(heads.get(turn_id, []))))
        # Side branches first and indented, the asked-for line last and straight on.
        below = sorted(children.get(turn_id, []), key=lambda child: child in main)
        straight = below[-1] if below else None
        for child in reversed(below):
            pending.append((depth if child == straight else depth + 1, number + 1, child))
    return found
