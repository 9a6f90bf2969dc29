"""Looking at everything a session needs, through the same code as a restore: size, hash, header, and what each object
claims to describe.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from k3_sessions import restoring
from k3_sessions.blobs import Blobs, path_of
from k3_sessions.catalog import Catalog
from k3_sessions.errors import Damaged, StoreError
from k3_sessions.hints import read_hints
from k3_sessions.identity import PrefixDigest, identity_digest
from k3_sessions.objects import Blob, Kind
from k3_sessions.opened import OpenStore
from k3_sessions.records import Kept, Ref, Root
from k3_sessions.state_objects import fields_of, group_claims, groups_of, page_claims, read_state


@dataclass(frozen=True)
class Problem:
    """path: the file below the root. what: is wrong there, one line without the path. sessions: who needs it."""

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


@dataclass
class Findings:
    """What a check saw. `wrong`: path -> what is proven bad there. `unsure`: path -> why nothing could be said, because
    it was written by a newer version or may not be read. `needs`: path -> sessions. `roots`: roots that cannot be read,
    by id, from the copy in a first turn. `hints`: paths of hints, of which nothing depends on what is said.
    """

    catalog: Catalog
    blobs: Blobs
    wrong: dict[str, str] = field(default_factory=dict)
    unsure: dict[str, str] = field(default_factory=dict)
    needs: dict[str, set[str]] = field(default_factory=dict)
    jobs: dict[str, tuple[int, Callable[[], object]]] = field(default_factory=dict)
    done: set[str] = field(default_factory=set)
    roots: dict[str, Root] = field(default_factory=dict)
    hints: set[str] = field(default_factory=set)

    def want(self, key: str, name: str, size: int, job: Callable[[], object]) -> None:
        path = path_of(key)
        self.needs.setdefault(path, set()).add(name)
        self.jobs.setdefault(path, (size, job))

    def fault(self, path: str, error: StoreError, name: str | None = None) -> None:
        """`error` came up at `path`, in what session `name` needs."""
        if isinstance(error, Damaged):
            # What to do about damage is told once, at the end, by whoever lists it.
            self.wrong.setdefault(path, "; expected ".join(filter(None, (error.found, error.expected))))
        else:
            self.unsure.setdefault(path, str(error))
        if name is not None:
            self.needs.setdefault(path, set()).add(name)


def inspect(store: OpenStore, names: Collection[str] | None) -> tuple[Findings, list[Ref], int]:
    """Read everything afresh; returns findings, the readable refs, and the bytes read."""
    blobs = Blobs(store.fs)
    findings = Findings(Catalog(blobs), blobs)
    refs, faults = findings.catalog.refs_and_faults()
    for path, error in faults if names is None else ():
        findings.fault(path, error, f"?{path[5:13]}")
    look(store, findings, [ref for ref in refs if names is None or ref.name in names])
    return findings, refs, sum(size for size, _ in findings.jobs.values())


def look(store: OpenStore, findings: Findings, refs: Iterable[Ref]) -> None:
    """Read everything these sessions need that was not read before."""
    for ref in refs:
        _inspect_session(findings.blobs, findings, ref)

    def run(path: str, job: Callable[[], object]) -> None:
        try:
            job()
        except StoreError as error:
            findings.fault(path, error)

    new = {path: job for path, (_, job) in findings.jobs.items() if path not in findings.done}
    restoring.run_all(store, [partial(run, path, job) for path, job in new.items()])
    findings.done.update(new)


def _inspect_session(blobs: Blobs, findings: Findings, ref: Ref) -> None:
    catalog = findings.catalog
    heads = [ref.head, *(entry.turn for entry in ref.keep), *ref.marks.values()]
    seen: set[str] = set()
    for head in heads:
        current: str | None = head
        while current is not None and current not in seen:
            seen.add(current)
            try:
                turn = catalog.turn(current)
            except StoreError as error:
                findings.fault(path_of(current), error, ref.name)
                break
            findings.want(current, ref.name, turn.size, partial(blobs.get, current))
            current = turn.parent
    try:
        root = catalog.root(ref.root)
        findings.want(ref.root, ref.name, catalog.root_size(ref.root), partial(blobs.get, ref.root))
    except StoreError as error:
        findings.fault(path_of(ref.root), error, ref.name)
        return
    for entry in ref.keep:
        try:
            _inspect_boundary(blobs, findings, ref, root, entry)
        except StoreError as error:
            path = error.object if isinstance(error, Damaged) else path_of(entry.turn)
            findings.fault(path, error, ref.name)


def _inspect_boundary(blobs: Blobs, findings: Findings, ref: Ref, root: Root, entry: Kept) -> None:
    """Queue the checks of one kept boundary. Raises Damaged where the turns themselves are wrong."""
    catalog = findings.catalog
    path = catalog.path(entry.turn)
    turn = path[-1]
    seed = identity_digest(root.identity)
    digest = PrefixDigest(seed, catalog.tokens(path))
    at = (turn.position, digest.at(turn.position))
    if at != (entry.position, entry.prefix) or at[1] != turn.prefix:
        raise Damaged(f"turn {turn.id[:10]} does not describe its own tokens", object=path_of(turn.id))
    groups = groups_of(root.layout)
    if len(groups) != len(turn.checkpoint):
        raise Damaged(f"turn {turn.id[:10]} lacks checkpoint objects", object=path_of(turn.id))

    def check(blob: Blob, kind: Kind, scope: str, claims: Mapping[str, object]) -> None:
        read_state(blobs, blob, kind, fields_of(root.layout, scope), claims, None)

    for page in catalog.pages(path):
        claims = page_claims(page, seed, digest.at(page.stop))
        blob = page.blob
        findings.want(blob.id, ref.name, blob.size, partial(check, blob, Kind.PAGE, "page", claims))
    for group, blob in zip(groups, turn.checkpoint, strict=True):
        claims = group_claims(group, seed, at)
        job = partial(check, blob, Kind.CHECKPOINT, "checkpoint", claims)
        findings.want(blob.id, ref.name, blob.size, job)
    if (hints := catalog.hints(turn)) is not None:
        findings.hints.add(path_of(hints.id))
        findings.want(hints.id, ref.name, hints.size, partial(read_hints, blobs, hints, seed, turn))


def verify(store: OpenStore, names: Sequence[str] | None) -> VerifyReport:
    """See Store.verify."""
    began = time.perf_counter()
    chosen = None if names is None else {store.catalog.ref(name).name for name in names}
    with store.using():
        findings, refs, size = inspect(store, chosen)
    found = {**findings.unsure, **findings.wrong}
    problems = [
        Problem(path, what.removeprefix(f"{path} "), tuple(sorted(findings.needs[path])))
        for path, what in found.items()
    ]
    return VerifyReport(
        sessions=len(refs if chosen is None else chosen),
        objects=len(findings.jobs),
        bytes=size,
        seconds=time.perf_counter() - began,
        problems=tuple(sorted(problems, key=lambda problem: problem.path)),
    )
