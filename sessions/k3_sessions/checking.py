"""Looking at everything a session needs, and setting aside what is broken.

Checking reads each needed object through the same code as a restore: size, hash, header, and what it claims to
describe. Repairing moves what is proven bad into quarantine and lets each session fall back to what is good; it
deletes nothing.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from k3_sessions import restoring, upkeep
from k3_sessions.blobs import Blobs, path_of
from k3_sessions.catalog import Catalog, check_name
from k3_sessions.common import new_tree, now
from k3_sessions.errors import Damaged, FormatUnsupported, StoreError, os_errors
from k3_sessions.identity import PrefixDigest, identity_digest
from k3_sessions.objects import Kind
from k3_sessions.records import Kept, Ref, Root, TurnRecord
from k3_sessions.staging import Slots
from k3_sessions.state_objects import fields_of, group_claims, groups_of, open_state, page_claims

if TYPE_CHECKING:
    from k3_sessions.store import Store


@dataclass(frozen=True)
class Problem:
    """path: the file below the root. what: one line. sessions: who needs it."""

    path: str
    what: str
    sessions: tuple[str, ...]


@dataclass(frozen=True)
class VerifyReport:
    """sessions, objects, bytes: how much was checked, in stored bytes. problems: by path."""

    sessions: int
    objects: int
    bytes: int
    seconds: float
    problems: tuple[Problem, ...]


@dataclass(frozen=True)
class SessionRepair:
    """What one session lost. head_before and head_after differ where turns could not be read any more.

    lost_checkpoints: positions that can no longer be restored. boundary: the newest position that can, 0 if none.
    """

    name: str
    head_before: str
    head_after: str
    lost_checkpoints: tuple[int, ...]
    boundary: int


@dataclass(frozen=True)
class RepairReport:
    """quarantined: files set aside, by their old path. recovered: sessions rebuilt from turns whose ref was lost.

    lost: sessions of which nothing readable is left. All of it is only foretold when `dry_run`.
    """

    dry_run: bool
    quarantined: tuple[str, ...]
    sessions: tuple[SessionRepair, ...]
    recovered: tuple[str, ...]
    lost: tuple[str, ...]


@dataclass
class _Findings:
    """What a check saw. `wrong`: path -> what. `needs`: path -> sessions."""

    catalog: Catalog
    slots: Slots
    wrong: dict[str, str] = field(default_factory=dict)
    needs: dict[str, set[str]] = field(default_factory=dict)
    jobs: dict[str, tuple[int, Callable[[], object]]] = field(default_factory=dict)

    def want(self, key: str, name: str, size: int, job: Callable[[], object]) -> None:
        path = path_of(key)
        self.needs.setdefault(path, set()).add(name)
        self.jobs.setdefault(path, (size, job))

    def bad(self, path: str, what: str, name: str) -> None:
        self.wrong.setdefault(path, what)
        self.needs.setdefault(path, set()).add(name)


def _inspect(store: Store, names: Collection[str] | None) -> tuple[_Findings, list[Ref], int]:
    """Read everything afresh; returns findings, the readable refs, and the bytes read."""
    blobs = Blobs(store.fs)
    findings = _Findings(Catalog(blobs), Slots(store.config.staging_bytes))
    refs, broken = findings.catalog.refs()
    for entry in broken if names is None else ():
        findings.bad(entry.name, entry.error, entry.name)
    for ref in refs:
        if names is None or ref.name in names:
            _inspect_session(blobs, findings, ref)

    def run(path: str, job: Callable[[], object]) -> None:
        try:
            job()
        except (Damaged, FormatUnsupported) as error:
            findings.wrong.setdefault(path, str(error))

    restoring.run_all(store, [partial(run, path, job) for path, (_, job) in findings.jobs.items()])
    return findings, refs, sum(size for size, _ in findings.jobs.values())


def _inspect_session(blobs: Blobs, findings: _Findings, ref: Ref) -> None:
    catalog = findings.catalog
    heads = [ref.head, *(entry.turn for entry in ref.keep), *ref.marks.values()]
    seen: set[str] = set()
    for head in heads:
        current: str | None = head
        while current is not None and current not in seen:
            seen.add(current)
            try:
                turn = catalog.turn(current)
            except (Damaged, FormatUnsupported) as error:
                findings.bad(path_of(current), str(error), ref.name)
                break
            findings.want(current, ref.name, turn.size, partial(blobs.get, current))
            current = turn.parent
    try:
        root = catalog.root(ref.root)
        findings.want(ref.root, ref.name, catalog.root_size(ref.root), partial(blobs.get, ref.root))
    except (Damaged, FormatUnsupported) as error:
        findings.bad(path_of(ref.root), str(error), ref.name)
        return
    for entry in ref.keep:
        try:
            _inspect_boundary(blobs, findings, ref, root, entry)
        except (Damaged, FormatUnsupported) as error:
            path = error.object if isinstance(error, Damaged) else path_of(entry.turn)
            findings.bad(path, str(error), ref.name)


def _inspect_boundary(blobs: Blobs, findings: _Findings, ref: Ref, root: Root, entry: Kept) -> None:
    """Queue the checks of one kept boundary. Raises Damaged where the turns themselves are wrong."""
    catalog = findings.catalog
    path = catalog.path(entry.turn)
    turn = path[-1]
    seed = identity_digest(root.identity)
    digest = PrefixDigest(seed, catalog.tokens(path))
    at = (turn.position, digest.at(turn.position))
    if at != (entry.position, entry.prefix) or at[1] != turn.prefix:
        raise Damaged(f"turn {turn.id[:12]} does not describe its own tokens", object=path_of(turn.id))
    groups = groups_of(root.layout)
    if len(groups) != len(turn.checkpoint):
        raise Damaged(f"turn {turn.id[:12]} lacks checkpoint objects", object=path_of(turn.id))

    def check(key: str, size: int, kind: Kind, scope: str, claims: Mapping[str, object]) -> None:
        with findings.slots.slot(size) as slot:
            open_state(blobs.get(key, size, slot), key, kind, fields_of(root.layout, scope), claims)

    for page in catalog.pages(path):
        claims = page_claims(page, seed, digest.at(page.stop))
        blob = page.blob
        findings.want(blob.id, ref.name, blob.size, partial(check, blob.id, blob.size, Kind.PAGE, "page", claims))
    for group, blob in zip(groups, turn.checkpoint, strict=True):
        claims = group_claims(group, seed, at)
        job = partial(check, blob.id, blob.size, Kind.CHECKPOINT, "checkpoint", claims)
        findings.want(blob.id, ref.name, blob.size, job)


def verify(store: Store, names: Sequence[str] | None) -> VerifyReport:
    """See Store.verify."""
    began = time.perf_counter()
    chosen = None if names is None else {store.catalog.ref(name).name for name in names}
    with store.using():
        findings, refs, size = _inspect(store, chosen)
    problems = [Problem(path, what, tuple(sorted(findings.needs[path]))) for path, what in findings.wrong.items()]
    return VerifyReport(
        sessions=len(refs if chosen is None else chosen),
        objects=len(findings.jobs),
        bytes=size,
        seconds=time.perf_counter() - began,
        problems=tuple(sorted(problems, key=lambda problem: problem.path)),
    )


def repair(store: Store, *, dry_run: bool) -> RepairReport:
    """See Store.repair."""
    with store.alone(), store.changing_refs():
        findings, refs, _ = _inspect(store, None)
        catalog = findings.catalog
        broken = {entry.name for entry in catalog.refs()[1]}
        moved = sorted(path for path in findings.wrong if store.fs.info(path) is not None)
        moved += _broken_refs(store, refs) if broken else []
        repaired: list[SessionRepair] = []
        lost: list[str] = []
        survivors: list[Ref] = []
        for ref in refs:
            after = _fall_back(findings, ref)
            if after is None:
                lost.append(ref.name)
                continue
            survivors.append(after)
            if after != ref:
                staying = {entry.turn for entry in after.keep}
                gone = tuple(entry.position for entry in ref.keep if entry.turn not in staying)
                boundary = max((entry.position for entry in after.keep), default=0)
                repaired.append(SessionRepair(ref.name, ref.head, after.head, gone, boundary))
                if not dry_run:
                    store.save_ref(after)
        found = _orphans(store, findings, survivors) if broken else []
        if not dry_run:
            with os_errors("setting damaged files aside"):
                for path in moved:
                    store.fs.replace(path, f"quarantine/{path.replace('/', '-')}.{secrets.token_hex(4)}")
                store.fs.sync_dir("quarantine")
            for ref in found:
                store.save_ref(ref)
            store.blobs.bad.clear()
            store.catalog.forget(upkeep.object_id(path) for path in moved)
        return RepairReport(
            dry_run, tuple(moved), tuple(repaired), tuple(ref.name for ref in found), (*lost, *sorted(broken))
        )


def _broken_refs(store: Store, refs: Sequence[Ref]) -> list[str]:
    good = {upkeep.file_id(ref.name) for ref in refs}
    with os_errors("listing the sessions"):
        return [f"refs/{name}" for name, info in store.fs.entries("refs") if info.kind == "file" and name not in good]


def _boundary_good(findings: _Findings, turn: TurnRecord, path: Sequence[TurnRecord]) -> bool:
    blobs = [page.blob for page in findings.catalog.pages(path)] + list(turn.checkpoint)
    return all(path_of(blob.id) not in findings.wrong for blob in blobs)


def _readable(findings: _Findings, key: str) -> list[TurnRecord] | None:
    """The turns up to `key`, or None if one of them is damaged."""
    try:
        path = findings.catalog.path(key)
        findings.catalog.root(path[0].root)
    except (Damaged, FormatUnsupported):
        return None
    return None if any(path_of(turn.id) in findings.wrong for turn in path) else path


def _fall_back(findings: _Findings, ref: Ref) -> Ref | None:
    """The ref with what is still good: its head if its turns are whole, else the newest turn it kept that is."""
    keep: list[Kept] = []
    for entry in ref.keep:
        path = _readable(findings, entry.turn)
        if path is not None and _boundary_good(findings, path[-1], path):
            keep.append(entry)
    marks = {label: turn for label, turn in ref.marks.items() if _readable(findings, turn) is not None}
    head: str | None = ref.head
    if _readable(findings, ref.head) is None:
        candidates = [entry.turn for entry in sorted(ref.keep, key=lambda e: e.position)] + list(marks.values())
        readable = [turn for turn in candidates if _readable(findings, turn) is not None]
        head = readable[-1] if readable else None
    if head is None:
        return None
    if (head, tuple(keep), marks) == (ref.head, ref.keep, dict(ref.marks)):
        return ref
    return replace(ref, head=head, keep=tuple(keep), marks=marks, updated=now())


def _orphans(store: Store, findings: _Findings, refs: Sequence[Ref]) -> list[Ref]:
    """New refs for the ends of branches no readable session reaches: what is left of sessions whose ref was lost."""
    reached: set[str] = set()
    for ref in refs:
        reached.update(turn.id for turn in findings.catalog.path(ref.head))
    found: dict[str, TurnRecord] = {}
    for path, _ in upkeep.files(store):
        key = upkeep.object_id(path)
        if key and key not in reached and store.fs.read(path, 10, 2) == Kind.TURN.to_bytes(2, "little"):
            turns = _readable(findings, key)
            if turns is not None:
                found[key] = turns[-1]
    parents = {turn.parent for turn in found.values()}
    made: list[Ref] = []
    for key in sorted(set(found) - parents):
        turns = findings.catalog.path(key)
        keep = tuple(
            Kept(turn.id, turn.position, turn.prefix)
            for number, turn in enumerate(turns)
            if turn.checkpoint and _all_there(store, findings, turns[: number + 1])
        )
        stamp = now()
        name = check_name(f"recovered-{key[:12]}")
        made.append(Ref(name, turns[0].root, new_tree(), stamp, stamp, key, keep))
    return made


def _all_there(store: Store, findings: _Findings, path: Sequence[TurnRecord]) -> bool:
    try:
        blobs = [page.blob for page in findings.catalog.pages(path)] + list(path[-1].checkpoint)
    except StoreError:
        return False
    return all(path_of(blob.id) not in findings.wrong and not store.blobs.check(blob) for blob in blobs)
