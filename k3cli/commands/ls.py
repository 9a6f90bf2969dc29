"""`k3 ls`: the sessions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from k3cli.commands import options as opt
from k3cli.commands.output import Printer, human_bytes, table

if TYPE_CHECKING:
    from k3_sessions.types import Session


def command(json: opt.Json = False) -> None:
    """List sessions, forks below the session they came from, with turns, tokens, and MLA and KDA bytes apart.

    Bytes count what a session needs, shared parts included; `k3 du` tells shared and own apart.
    """
    from k3cli.commands.runtime import open_store
    from k3cli.config import load_settings

    printer = Printer(json=json)
    store = open_store(load_settings())
    sessions = store.sessions()
    sizes = {entry.name: entry for entry in store.usage().sessions}
    rows = []
    for depth, session in as_tree(sessions):
        used = sizes.get(session.name)
        error = session.error or (used.error if used is not None else "")
        mla, kda = (used.mla_own + used.mla_shared, used.kda_own + used.kda_shared) if used is not None else (0, 0)
        printer.event(
            "session_info",
            name=session.name,
            turn=session.head,
            tree=session.tree,
            origin=None if session.origin is None else {"session": session.origin[0], "turn": session.origin[1]},
            turns=used.turns if used is not None else 0,
            tokens=used.tokens if used is not None else 0,
            mla_bytes=mla,
            kda_bytes=kda,
            created=session.created,
            updated=session.updated,
            marks=dict(session.marks),
            pinned=session.pinned,
            evicted=session.evicted,
            error=error or None,
        )
        if error:
            printer.notice(f"session {session.name} cannot be read: {error}")
            rows.append(("  " * depth + session.name, "-", "-", "-", "-", "damaged"))
        elif used is not None:
            state = session.updated[:16].replace("T", " ") + (" evicted" if session.evicted else "")
            counts = (f"{used.turns:,}", f"{used.tokens:,}", human_bytes(mla), human_bytes(kda))
            rows.append(("  " * depth + session.name, *counts, state))
    if rows:
        for line in table(("NAME", "TURNS", "TOKENS", "MLA", "KDA", "UPDATED (UTC)"), rows, "<>>>><"):
            printer.line(line)
    else:
        printer.notice("no sessions yet: k3 chat starts one")
    printer.done(sessions=len(sessions))


def as_tree(sessions: list[Session]) -> list[tuple[int, Session]]:
    """(depth, session): each fork below its origin, newest session first among the roots."""
    names = {session.name for session in sessions}
    children: dict[str, list[Session]] = {}
    roots = []
    for session in sessions:
        if session.origin is not None and session.origin[0] in names and session.origin[0] != session.name:
            children.setdefault(session.origin[0], []).append(session)
        else:
            roots.append(session)
    found: list[tuple[int, Session]] = []

    def walk(session: Session, depth: int) -> None:
        found.append((depth, session))
        for child in children.pop(session.name, []):
            walk(child, depth + 1)

    for root in sorted(roots, key=lambda session: session.updated, reverse=True):
        walk(root, 0)
    # Renames can make origins point in a circle; nobody may vanish from the list for that.
    listed = {session.name for _, session in found}
    found += [(0, session) for session in sessions if session.name not in listed]
    return found
