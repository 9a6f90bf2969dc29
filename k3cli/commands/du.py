"""`k3 du`: what sessions take on disk."""

from __future__ import annotations

from dataclasses import asdict

from k3cli.commands import options as opt
from k3cli.commands.output import Printer, human_bytes, table


def command(json: opt.Json = False) -> None:
    """Bytes of each session and of each tree of forks: MLA and KDA apart, own and shared."""
    from k3cli.commands.runtime import open_store
    from k3cli.config import load_settings

    printer = Printer(json=json)
    usage = open_store(load_settings()).usage()
    rows = []
    for entry in usage.sessions:
        printer.event("usage", **asdict(entry))
        if entry.error:
            printer.notice(f"session {entry.name} cannot be measured: {entry.error}")
            continue
        sizes = (entry.mla_own, entry.mla_shared, entry.kda_own, entry.kda_shared, entry.other)
        rows.append((entry.name, f"{entry.checkpoints}", *(human_bytes(size) for size in sizes)))
    for line in table(("SESSION", "CHECKPOINTS", "MLA OWN", "SHARED", "KDA OWN", "SHARED", "OTHER"), rows, "<>>>>>>"):
        printer.line(line)
    trees = []
    for tree in usage.trees:
        printer.event("tree", **asdict(tree))
        if len(tree.sessions) > 1:
            parts = (tree.mla, tree.kda, tree.other)
            trees.append((tree.tree[:10], f"{len(tree.sessions)}", *(human_bytes(size) for size in parts)))
    if trees:
        printer.line()
        for line in table(("TREE OF FORKS", "SESSIONS", "MLA", "KDA", "OTHER"), trees, "<>>>>"):
            printer.line(line)
    quota = "none" if usage.quota is None else human_bytes(usage.quota)
    printer.line()
    printer.line(
        f"on disk {human_bytes(usage.allocated)}, of which {human_bytes(usage.unneeded)} nobody needs (k3 gc) and "
        f"{human_bytes(usage.quarantined)} in quarantine; quota {quota}; disk {human_bytes(usage.free)} free, "
        f"{human_bytes(usage.floor)} of it kept free"
    )
    totals = {key: value for key, value in asdict(usage).items() if key not in ("sessions", "trees")}
    printer.done(**totals)
