"""Setting aside what is broken: proven bad files move into quarantine, and each session falls back to what is good.

Deletes nothing, and touches no session of which something could not be judged: files of a newer version, or ones this
user may not read.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import orjson

from k3_sessions import upkeep
from k3_sessions.blobs import Batch, path_of, write_file
from k3_sessions.catalog import check_name
from k3_sessions.checking import Findings, inspect, look
from k3_sessions.common import new_tree, now
from k3_sessions.errors import BadName, Damaged, StoreError, os_errors
from k3_sessions.objects import Kind
from k3_sessions.opened import OpenStore
from k3_sessions.records import Kept, Ref, TurnRecord, copied_root

_NAME = re.compile(rb'"name":("[^"]*")')
_HEAD = re.compile(rb'"head":"([0-9a-f]{64})"')


@dataclass(frozen=True)
class SessionRepair:
    """What one session lost. head_before and head_after differ where turns could not be read any more.

    lost_checkpoints: positions that can no longer be restored. boundary: the newest position that can, 0 if none.
    lost_turns: ids of the turns after head_after that are known by name, newest first; the last one is where the chain
    broke, and turns before that one may be lost as well.
    """

    name: str
    head_before: str
    head_after: str
    lost_checkpoints: tuple[int, ...]
    boundary: int
    lost_turns: tuple[str, ...] = ()


@dataclass(frozen=True)
class RepairReport:
    """quarantined: files set aside, by their old path. recovered: sessions rebuilt, from a ref that still told its name
    and head, or from turns no session reached any more. lost: sessions of which nothing readable is left, and refs
    ("?" and digits of the file's name) that no longer tell whose they were. untouched: sessions and refs that could
    not be judged, each with the reason. written: files that were written again: FORMAT, which holds no more than a
    constant, and roots, from the copy in a first turn. holders: by the name that a lost ref has in `lost`, the sessions
    that have its newest turn; absent where the file no longer says which that was.
    All of it is only foretold when `dry_run`.
    """

    dry_run: bool
    quarantined: tuple[str, ...]
    sessions: tuple[SessionRepair, ...]
    recovered: tuple[str, ...]
    lost: tuple[str, ...]
    untouched: tuple[tuple[str, str], ...] = ()
    written: tuple[str, ...] = ()
    holders: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def repair(store: OpenStore, *, dry_run: bool) -> RepairReport:
    """See Store.repair."""
    with store.alone(), store.changing_refs():
        findings, refs, _ = inspect(store, None)
        if _roots_from_copies(findings, refs):
            look(store, findings, refs)
        broken = sorted(path for path in findings.wrong if path.startswith("refs/"))
        unsure = {path: what for path, what in sorted(findings.unsure.items()) if path not in findings.hints}
        mended = ("FORMAT",) if store.format_fault and not unsure else ()
        untouched = {name: what for path, what in unsure.items() for name in sorted(findings.needs[path])}
        repaired: list[SessionRepair] = []
        lost: list[str] = []
        survivors: list[Ref] = []
        for ref in refs:
            after = ref if ref.name in untouched else _fall_back(findings, ref)
            if after is None:
                lost.append(ref.name)
                continue
            survivors.append(after)
            if after != ref:
                repaired.append(_told(findings, ref, after))
        fell = broken or lost or any(entry.lost_turns for entry in repaired)
        named = {path: new for path in broken if (new := _named(store, findings, path)) is not None}
        orphans = _orphans(store, findings, [*survivors, *named.values()]) if fell else []
        # What the sessions made anew need was not read yet: their refs could not be.
        look(store, findings, [*named.values(), *orphans])
        named = {path: _fall_back(findings, ref) or ref for path, ref in named.items()}
        orphans = [_fall_back(findings, ref) or ref for ref in orphans]
        nameless = [path for path in broken if path not in named]
        reached = [*survivors, *named.values(), *orphans]
        holders = {f"?{path[5:13]}": found for path in nameless if (found := _holders(store, findings, path, reached))}
        rewritten = sorted(path_of(key) for key in findings.roots)
        findings.wrong.update((path, store.format_fault) for path in mended)
        moved = sorted(path for path in findings.wrong if store.fs.info(path) is not None)
        if not dry_run:
            # What is broken goes last: until what comes in its place is there, it keeps `gc` from taking objects, and
            # a repair that died is begun again as if it had not been.
            _write_roots(store, findings, moved)
            for entry in (*orphans, *(ref for ref in survivors if ref not in refs)):
                store.save_ref(entry)
            for path, ref in named.items():
                _set_aside(store, path, copy=True)
                store.save_ref(ref)
            for path in sorted(set(moved) - set(named) - set(rewritten), key=lambda path: (path in broken, path)):
                _set_aside(store, path)
            if mended:
                store.write_format()
            store.blobs.bad.clear()
            store.catalog.forget(upkeep.object_id(path) for path in moved)
        return RepairReport(
            dry_run=dry_run,
            quarantined=tuple(moved),
            sessions=tuple(repaired),
            recovered=tuple(ref.name for ref in (*named.values(), *orphans)),
            lost=(*lost, *(f"?{path[5:13]}" for path in nameless)),
            untouched=tuple(untouched.items()),
            written=(*rewritten, *mended),
            holders=holders,
        )


def _roots_from_copies(findings: Findings, refs: Sequence[Ref]) -> bool:
    """Roots that cannot be read, from the first turns of these sessions. Whether there were any."""
    for ref in refs:
        for key in (ref.head, *(entry.turn for entry in ref.keep)):
            _readable(findings, key)
    return bool(findings.roots)


def _write_roots(store: OpenStore, findings: Findings, moved: Sequence[str]) -> None:
    batch = Batch()
    for key, root in findings.roots.items():
        if path_of(key) in moved:
            _set_aside(store, path_of(key), copy=True)
        store.blobs.put(root.pack(), batch)
    store.blobs.settle(batch)


def _set_aside(store: OpenStore, path: str, *, copy: bool = False) -> None:
    """Move a file into quarantine, or copy it where another one takes its place at once."""
    target = f"quarantine/{path.replace('/', '-')}.{secrets.token_hex(4)}"
    with os_errors("setting damaged files aside"):
        if copy:
            write_file(store.fs, target, [store.fs.read(path)])
        else:
            store.fs.replace(path, target)
        store.fs.sync_dir("quarantine")


def _boundary_good(findings: Findings, turn: TurnRecord, path: Sequence[TurnRecord]) -> bool:
    blobs = [page.blob for page in findings.catalog.pages(path)] + list(turn.checkpoint)
    return all(path_of(blob.id) not in findings.wrong for blob in blobs)


def _readable(findings: Findings, key: str) -> list[TurnRecord] | None:
    """The turns up to `key`, or None if one of them is damaged, or their root, of which there is no copy either."""
    try:
        path = findings.catalog.path(key)
    except StoreError:
        return None
    try:
        findings.catalog.root(path[0].root)
    except Damaged:
        root = copied_root(path[0])
        if root is None:
            return None
        findings.roots[path[0].root] = root
        findings.catalog.learn(path[0].root, root)
    except StoreError:
        return None
    return None if any(path_of(turn.id) in findings.wrong for turn in path) else path


def _fall_back(findings: Findings, ref: Ref) -> Ref | None:
    """The ref with what is still good: its head if its turns are whole, else the longest branch it names that is."""
    keep: list[Kept] = []
    for entry in ref.keep:
        path = _readable(findings, entry.turn)
        if path is not None and _boundary_good(findings, path[-1], path):
            keep.append(entry)
    marks = {label: turn for label, turn in ref.marks.items() if _readable(findings, turn) is not None}
    head = ref.head
    if _readable(findings, head) is None:
        paths = (_readable(findings, turn) for turn in (*(entry.turn for entry in ref.keep), *marks.values()))
        known = [path for path in paths if path is not None]
        if not known:
            return None
        head = max(known, key=lambda path: (path[-1].total, len(path)))[-1].id
    if (head, tuple(keep), marks) == (ref.head, ref.keep, dict(ref.marks)):
        return ref
    dropped = (entry.turn for entry in ref.keep if entry not in keep and entry.turn not in ref.lost)
    return replace(ref, head=head, keep=tuple(keep), marks=marks, lost=(*ref.lost, *dropped), updated=now())


def _told(findings: Findings, ref: Ref, after: Ref) -> SessionRepair:
    staying = {entry.turn for entry in after.keep}
    still = {turn.id for turn in findings.catalog.path(after.head)}
    lost: list[str] = []
    current: str | None = ref.head
    while current is not None and current not in still:
        lost.append(current)
        try:
            current = findings.catalog.turn(current).parent
        except StoreError:
            break
    return SessionRepair(
        name=ref.name,
        head_before=ref.head,
        head_after=after.head,
        lost_checkpoints=tuple(entry.position for entry in ref.keep if entry.turn not in staying),
        boundary=max((entry.position for entry in after.keep), default=0),
        lost_turns=tuple(lost),
    )


def _remains(store: OpenStore, path: str) -> bytes:
    """What a damaged ref still holds; nothing where it cannot be read."""
    try:
        return store.fs.read(path, 0, 1 << 24) if store.fs.info(path) is not None else b""
    except OSError:
        return b""


def _holders(store: OpenStore, findings: Findings, path: str, refs: Sequence[Ref]) -> tuple[str, ...]:
    """Those of `refs` that have the turn which a damaged ref still names as its newest."""
    heads = {found.decode() for found in _HEAD.findall(_remains(store, path))}
    names = []
    for ref in refs:
        with suppress(StoreError):  # one that could not be judged
            if any(turn.id in heads for turn in findings.catalog.path(ref.head)):
                names.append(ref.name)
    return tuple(names)


def _named(store: OpenStore, findings: Findings, path: str) -> Ref | None:
    """A new ref in place of a damaged one that still tells whose it was: its file's name proves the session's name."""
    data = _remains(store, path)
    names = [name for found in _NAME.findall(data) if (name := _spelled(found)) and upkeep.file_id(name) == path[5:]]
    heads = [turns for found in _HEAD.findall(data) if (turns := _readable(findings, found.decode())) is not None]
    return _ref_at(store, findings, names[0], heads[0]) if names and heads else None


def _spelled(name: bytes) -> str:
    try:
        return check_name(orjson.loads(name))
    except (orjson.JSONDecodeError, BadName, TypeError):
        return ""


def _ref_at(store: OpenStore, findings: Findings, name: str, turns: Sequence[TurnRecord]) -> Ref:
    """A new ref whose head is the last of `turns`, with every joint boundary that is whole."""
    keep = tuple(
        Kept(turn.id, turn.position, turn.prefix)
        for number, turn in enumerate(turns)
        if turn.checkpoint and _all_there(store, findings, turns[: number + 1])
    )
    stamp = now()
    return Ref(name, turns[0].root, new_tree(), stamp, stamp, turns[-1].id, keep)


def _orphans(store: OpenStore, findings: Findings, refs: Sequence[Ref]) -> list[Ref]:
    """New refs for the ends of branches no readable session reaches: what is left where a ref or a turn was lost."""
    reached: set[str] = set()
    for ref in refs:
        with suppress(StoreError):  # one that could not be judged
            reached.update(turn.id for turn in findings.catalog.path(ref.head))
    found: dict[str, TurnRecord] = {}
    for path, _ in upkeep.files(store):
        key = upkeep.object_id(path)
        if key and key not in reached and _is_turn(store, path):
            turns = _readable(findings, key)
            if turns is not None:
                found[key] = turns[-1]
    parents = {turn.parent for turn in found.values()}
    ends = sorted(set(found) - parents)
    return [_ref_at(store, findings, f"recovered-{key[:10]}", findings.catalog.path(key)) for key in ends]


def _is_turn(store: OpenStore, path: str) -> bool:
    try:
        return store.fs.read(path, 10, 2) == Kind.TURN.to_bytes(2, "little")
    except OSError:
        return False


def _all_there(store: OpenStore, findings: Findings, path: Sequence[TurnRecord]) -> bool:
    try:
        blobs = [page.blob for page in findings.catalog.pages(path)] + list(path[-1].checkpoint)
    except StoreError:
        return False
    return all(path_of(blob.id) not in findings.wrong and not store.blobs.check(blob) for blob in blobs)
