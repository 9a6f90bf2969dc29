"""Removing what nothing needs: after thinning, with a removed session, and by `gc`. Nothing here runs on a read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from k3_sessions.blobs import TEMP_PREFIX, is_id, path_of
from k3_sessions.catalog import file_id
from k3_sessions.disk import FileInfo
from k3_sessions.errors import Damaged, StoreBusy, StoreError, os_errors
from k3_sessions.opened import OpenStore
from k3_sessions.records import Ref, TurnRecord


@dataclass(frozen=True)
class GcReport:
    """removed: paths below the root. bytes: allocated bytes they took. leftovers: how many were unfinished files.

    blocked: why objects were left alone although some may not be needed, "" if nothing stood in the way.
    """

    removed: tuple[str, ...]
    bytes: int
    leftovers: int
    dry_run: bool
    blocked: str = ""


@dataclass(frozen=True)
class RemoveReport:
    """name: the session that is gone. bytes: stored bytes freed with it. notices: what could not be freed, and why."""

    name: str
    bytes: int
    objects: int
    notices: tuple[str, ...] = ()


def files(store: OpenStore) -> Iterator[tuple[str, FileInfo]]:
    """Every file (and link, and stray thing) below the root, by path."""
    pending = [""]
    while pending:
        folder = pending.pop()
        for name, info in store.fs.entries(folder):
            path = f"{folder}/{name}" if folder else name
            if info.kind == "dir":
                pending.append(path)
            else:
                yield path, info


def object_id(path: str) -> str:
    """Id of the object at a path, "" if the path is not that of an object."""
    parts = path.split("/")
    if len(parts) != 3 or parts[0] != "objects":
        return ""
    key = parts[1] + parts[2]
    return key if is_id(key) and len(parts[1]) == 2 else ""


def needed(store: OpenStore, refs: Iterable[Ref]) -> dict[str, int]:
    """All objects these sessions need: id -> stored bytes. Raises Damaged if one cannot be read."""
    found: dict[str, int] = {}
    for ref in refs:
        found.update(store.catalog.need(ref).all())
    return found


def fork_points(store: OpenStore, ref: Ref, ids: Sequence[str]) -> set[str]:
    """Turns among `ids` (the branch of `ref`) at which another session of the tree branches off, or stands."""
    own = set(ids)
    points: set[str] = set()
    seen: set[str] = set()
    for other in store.catalog.refs()[0]:
        if other.tree != ref.tree or other.name == ref.name:
            continue
        current: str | None = other.head
        try:
            while current is not None and current not in own and current not in seen:
                seen.add(current)
                current = store.catalog.turn(current).parent
        except StoreError:
            continue  # a broken relative protects nothing, and must not stop this session from saving
        # Where the walk ended in `seen`, another session's walk found the point already.
        if current is not None and current in own:
            points.add(current)
    return points


def _delete(store: OpenStore, ids: Iterable[str]) -> tuple[int, int]:
    """Remove objects; returns bytes and count of those that were there."""
    freed = count = 0
    with os_errors("removing from the session store"):
        for key in ids:
            info = store.fs.info(path_of(key))
            if info is None:
                continue
            store.fs.remove(path_of(key))
            freed += info.size
            count += 1
    return freed, count


def delete_unneeded(store: OpenStore, candidates: Iterable[str]) -> tuple[int, int]:
    """Remove those of `candidates` no session needs; the caller holds `alone`. Returns bytes and count.

    Raises Damaged, removing nothing, if some session's needs cannot be told.
    """
    refs, broken = store.catalog.refs()
    if broken:
        raise Damaged(f"a session cannot be read ({broken[0].error})", do="run `k3 verify`", object=broken[0].name)
    unneeded = set(candidates) - set(needed(store, refs))
    freed = _delete(store, unneeded)
    store.catalog.forget(unneeded)
    return freed


def drop_checkpoints(store: OpenStore, turns: Sequence[TurnRecord]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Remove the checkpoints of turns a session gave up, unless another session keeps them.

    Returns ids of the turns that have no checkpoint any more, and notices. Never raises for want of the lock or of
    another session's data: what stays is collected later.
    """
    turns = [*store.postponed, *turns]
    if not turns:
        return (), ()
    store.postponed = []
    try:
        with store.alone(wait=0.0):
            refs, broken = store.catalog.refs()
            if broken:
                return (), ("thinned checkpoints stay on disk: a session cannot be read; run `k3 verify`",)
            kept = {entry.turn for ref in refs for entry in ref.keep}
            gone = [turn for turn in turns if turn.id not in kept]
            wanted = {blob.id for turn in kept for blob in store.catalog.turn(turn).boundary()}
            _delete(store, {blob.id for turn in gone for blob in turn.boundary()} - wanted)
            return tuple(turn.id for turn in gone), ()
    except StoreBusy:
        store.postponed = turns
        return (), ()
    except StoreError as error:
        return (), (f"thinned checkpoints stay on disk: {error}",)


def sweep_leftovers(store: OpenStore) -> int:
    """Collect what crashed processes left, if there are signs of one and no other process is writing now.

    Signs are unfinished files, looked for once per open store, and a writer that died.
    """
    if store.swept and not store.crashed:
        return 0
    try:
        with store.alone(wait=0.0), store.changing_refs(wait=0.0):
            unfinished = any(path.rpartition("/")[2].startswith(TEMP_PREFIX) for path, _ in files(store))
            removed = len(_collect(store, dry_run=False).removed) if unfinished or store.crashed else 0
    except (StoreError, OSError):
        # Nothing depends on it: the next writer tries again, and `gc` tells.
        return 0
    store.swept, store.crashed = True, False
    return removed


def gc(store: OpenStore, *, dry_run: bool) -> GcReport:
    """See Store.gc."""
    # Refs too: an unfinished ref may belong to a process that is writing it right now.
    with store.alone(), store.changing_refs():
        return _collect(store, dry_run=dry_run)


def _collect(store: OpenStore, *, dry_run: bool) -> GcReport:
    blocked = ""
    refs, broken = store.catalog.refs()
    wanted: dict[str, int] = {}
    if broken:
        more = f" (and {len(broken) - 1} more)" if len(broken) > 1 else ""
        blocked = f"a session cannot be read{more}: {broken[0].error}"
    else:
        try:
            wanted = needed(store, refs)
        except StoreError as error:
            blocked = str(error)
    live = {file_id(ref.name) for ref in refs}
    removed: list[str] = []
    size = leftovers = 0
    with os_errors("collecting in the session store"):
        for path, info in list(files(store)):
            folder, _, name = path.rpartition("/")
            key = object_id(path)
            temp = name.startswith(TEMP_PREFIX)
            unneeded = bool(key) and key not in wanted and not blocked
            stale = folder == "locks" and len(name) == 32 and name not in live and not broken
            if not (temp or unneeded or (stale and _unheld(store, path, remove=not dry_run))):
                continue
            if not dry_run and not stale:
                store.fs.remove(path)
            removed.append(path)
            size += info.allocated
            leftovers += temp
    if not dry_run:
        store.catalog.forget(object_id(path) for path in removed)
    return GcReport(tuple(sorted(removed)), size, leftovers, dry_run, blocked)


def _unheld(store: OpenStore, path: str, *, remove: bool) -> bool:
    """Whether nobody holds a session's lock file; removed under its own lock, so that nobody can be taking it."""
    lock = store.fs.lock(path, shared=False, wait=0.0)
    if lock is None:
        return False
    try:
        if remove:
            store.fs.remove(path)
    finally:
        store.fs.unlock(lock)
    return True


def remove(store: OpenStore, name: str) -> RemoveReport:
    """See Store.remove."""
    with store.owning(name), store.alone():
        notices: list[str] = []
        ref = store.catalog.ref(name)
        try:
            own = store.catalog.need(ref).all()
        except StoreError as error:
            own = {}
            notices.append(f"its objects stay until `k3 gc`: {error}")
        with store.changing_refs():
            store.drop_ref(name)
        try:
            freed, count = delete_unneeded(store, own)
        except StoreError as error:
            notices.append(f"its objects stay until `k3 gc`: {error}")
            freed = count = 0
        return RemoveReport(name, freed, count, tuple(notices))
