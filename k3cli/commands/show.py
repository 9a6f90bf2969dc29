"""`k3 show NAME`: one session, or one of its turns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from k3cli.commands import options as opt
from k3cli.commands.log import turn_json
from k3cli.commands.names import find_turn, short_id
from k3cli.commands.output import Printer, human_bytes
from k3cli.commands.transcript import print_messages, recorded_messages
from k3cli.words import counted, in_words

if TYPE_CHECKING:
    from k3_sessions.store import Store

NAMES = {"v": "record version", "close": "ids that close the answer", "prompt": "prompt tokens", "stop": "stopped by"}
"""Keys of a turn's record that say too little by themselves."""


def command(name: opt.SessionArgument, at: opt.At = None, json: opt.Json = False) -> None:
    """Show a session: head, size, marks, identity. With --at TURN show one turn: what was said and evaluated."""
    from k3cli.commands.runtime import open_store
    from k3cli.config import load_settings

    printer = Printer(json=json)
    store = open_store(load_settings())
    if at is None:
        _session(store, name, printer)
    else:
        _turn(store, name, at, printer)
    printer.done(name=name)


def _session(store: Store, name: str, printer: Printer) -> None:
    session = store.session(name)
    turns = store.log(name)
    used = next((entry for entry in store.usage().sessions if entry.name == name), None)
    printer.event(
        "session_info",
        **asdict(session),
        usage=None if used is None else asdict(used),
        total=turns[-1].total if turns else 0,
    )
    facts: dict[str, Any] = {"session": name, "created": session.created, "updated": session.updated}
    if session.origin is not None:
        facts["forked from"] = f"{session.origin[0]} at turn {short_id(session.origin[1])}"
    if turns:
        newest = turns[-1]
        facts["newest turn"] = f"{len(turns)} {short_id(newest.id)}"
        facts["tokens"] = (
            f"{newest.total:,} ({newest.position:,} evaluated, {newest.total - newest.position:,} pending)"
        )
    if used is not None:
        facts["MLA pages"] = f"{human_bytes(used.mla_own)} own, {human_bytes(used.mla_shared)} shared"
        checkpoints = counted(used.checkpoints, "checkpoint")
        facts["KDA state"] = f"{human_bytes(used.kda_own)} own, {human_bytes(used.kda_shared)} shared, {checkpoints}"
    facts |= {f"mark {label}": short_id(turn_id) for label, turn_id in sorted(session.marks.items())}
    facts |= _fixed(session.fixed)
    if session.identity is not None:
        facts |= {f"identity {key}": value for key, value in asdict(session.identity).items()}
    if session.evicted:
        facts["evicted"] = f"{session.evicted}: its state was dropped to make room; resuming evaluates it again"
    for key, value in facts.items():
        printer.line(f"{key}: {value}")


def _fixed(fixed: Mapping[str, Any]) -> dict[str, str]:
    """What was fixed when the session began, each on a line."""
    head = dict(fixed.get("head", {}))
    tools = [str(tool.get("function", tool).get("name", "?")) for tool in head.pop("tools", [])]
    known = {"model": fixed.get("model"), **head, "tools": ", ".join(tools) or "none"}
    shown = {key: in_words(value) for key, value in known.items()}
    return {key: text if len(text) < 200 else text[:200] + "..." for key, text in shown.items()}


def _turn(store: Store, name: str, at: str, printer: Printer) -> None:
    turn = find_turn(store, name, at)
    ids = list(turn.tokens)
    printer.event("turn", **turn_json(turn), ids=ids)
    kept = "kept" if turn.has_checkpoint else "not kept (resuming here replays from an earlier one)"
    printer.line(f"turn: {turn.id}")
    printer.line(f"parent: {turn.parent or 'none'}")
    printer.line(f"created: {turn.created}")
    printer.line(f"tokens: {turn.start:,} before, {len(ids):,} added, {turn.position:,} evaluated")
    printer.line(f"checkpoint: {kept}")
    for key, value in turn.meta.items():
        if key not in ("given", "answer", "calls", "context"):
            printer.line(f"{NAMES.get(key, key)}: {in_words(value)}")
    print_messages(recorded_messages(turn.meta), printer)
