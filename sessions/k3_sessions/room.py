"""Room: what everything takes, whether more fits, and what gives way when it does not.

With a quota, state of sessions nobody works on gives way, least recently used first: first all but the newest
checkpoint, then the rest. Turns and marked checkpoints stay, so an evicted session can be computed again. A disk that
is short of space for other reasons evicts nothing: the commit is refused instead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace

from k3_sessions import upkeep
from k3_sessions.blobs import path_of
from k3_sessions.common import now
from k3_sessions.errors import StoreError, StoreFull, os_errors
from k3_sessions.opened import OpenStore
from k3_sessions.records import Kept, Ref


@dataclass(frozen=True)
class SessionUsage:
    """Stored bytes of one session. shared: also needed by another session. other: turns, token ids, fixed data."""

    name: str
    tree: str
    turns: int
    tokens: int
    checkpoints: int
    mla_own: int
    mla_shared: int
    kda_own: int
    kda_shared: int
    other: int
    error: str = ""


@dataclass(frozen=True)
class TreeUsage:
    """A session and all its forks; every object counted once."""

    tree: str
    sessions: tuple[str, ...]
    mla: int
    kda: int
    other: int


@dataclass(frozen=True)
class Usage:
    """allocated: bytes on disk of everything under the root. unneeded: objects and leftovers `gc` would remove.

    quota: None if there is none. floor: bytes that must stay free on the disk.
    """

    sessions: tuple[SessionUsage, ...]
    trees: tuple[TreeUsage, ...]
    allocated: int
    unneeded: int
    quarantined: int
    quota: int | None
    free: int
    floor: int


def allocated(store: OpenStore) -> int:
    """Allocated bytes of everything under the root, foreign files included."""
    return sum(info.allocated for _, info in upkeep.files(store))


def floor(store: OpenStore) -> int:
    """Bytes that have to stay free."""
    return int(min(store.config.free_floor_bytes, store.config.free_floor_share * store.fs.space().total))


def short(store: OpenStore, more: int) -> tuple[int, int]:
    """Bytes by which `more` would pass the quota, and those by which it would enter the free-space floor."""
    quota = store.config.quota_bytes
    over = 0 if quota is None else max(0, allocated(store) + more - quota)
    return over, max(0, floor(store) + more - store.fs.space().free)


def make(
    store: OpenStore, more: int, name: str, beside: int = 0, *, what: str = "this turn"
) -> tuple[tuple[str, ...], bool]:
    """Make sure `more` bytes fit, for a commit of session `name`. Returns sessions whose state gave way.

    what: takes them, in words.
    beside: bytes on top of them for which nothing gives way; second comes whether they fit, too.
    Raises StoreFull naming both numbers.
    """
    with os_errors("measuring the session store"):
        over, low = short(store, more + beside)
        whole = not over and not low
        if beside and not whole:
            over, low = short(store, more)
    if not over and not low:
        return (), whole
    upkeep.gc(store, dry_run=False)
    evicted: list[str] = []
    over, low = short(store, more)
    if over and over <= _evictable(store, name):
        evicted = _evict(store, more, name)
        over, low = short(store, more)
    if over:
        raise StoreFull(
            f"{what} needs {more:,} bytes and would pass the quota of {store.config.quota_bytes:,} by {over:,}",
            "room for it",
            "raise the quota, or remove sessions: `k3 du` shows what they take",
        )
    if low:
        raise StoreFull(
            f"{what} needs {more:,} bytes; only {store.fs.space().free:,} are free on the disk of {store.fs.where}",
            f"that much, with {floor(store):,} left over",
            "free disk space, or lower the free-space floor",
        )
    return tuple(evicted), not beside


def _evictable(store: OpenStore, name: str) -> int:
    """Bytes on disk that would be free if every session gave what it may. 0 while one of them cannot be read, since
    nothing is removed then: where it would not be enough, or be for nothing, nobody gives anything."""
    refs, broken = store.catalog.refs()
    if broken:
        return 0
    gives = [ref for ref in refs if ref.name == name or (not ref.pinned and _idle(store, ref.name))]
    left = [replace(ref, keep=_staying(ref, ref.name == name)) if ref in gives else ref for ref in refs]
    try:
        freed = set(upkeep.needed(store, refs)) - set(upkeep.needed(store, left))
    except StoreError:
        return 0
    with os_errors("measuring the session store"):
        return sum(info.allocated for key in freed if (info := store.fs.info(path_of(key))) is not None)


def _idle(store: OpenStore, name: str) -> bool:
    try:
        with store.owning(name):
            return True
    except StoreError:
        return False


def _staying(ref: Ref, newest: bool) -> tuple[Kept, ...]:
    """Joint boundaries that a session never gives: marked ones, and the newest where it is asked for."""
    return tuple(entry for entry in ref.keep if entry.turn in ref.marks.values() or (newest and entry.turn == ref.head))


def _evict(store: OpenStore, more: int, name: str) -> list[str]:
    """Take state from sessions, least recently used first, until the quota allows `more`. Names of those that gave."""
    refs = sorted(store.catalog.refs()[0], key=lambda ref: ref.updated)
    touched: list[str] = []
    for newest_only in (True, False):
        for ref in refs:
            if not short(store, more)[0]:
                return touched
            if ref.pinned or (ref.name == name and not newest_only):
                continue
            if _shrink(store, ref.name, newest_only, own=ref.name == name) and ref.name not in touched:
                touched.append(ref.name)
    return touched


def _shrink(store: OpenStore, name: str, newest_only: bool, *, own: bool) -> bool:
    """Drop joint boundaries of one session; False if it is open or has none to give."""
    try:
        with nullcontext() if own else store.owning(name), store.alone(), store.changing_refs():
            ref = store.catalog.ref(name)
            keep = _staying(ref, newest_only)
            if keep == ref.keep:
                return False
            evicted = ref.evicted if newest_only else now()
            before = store.catalog.need(ref).all()
            store.save_ref(replace(ref, keep=keep, evicted=evicted))
            upkeep.delete_unneeded(store, before)
            return True
    except StoreError:
        return False  # open, or unreadable: it has nothing to give that could be judged


def usage(store: OpenStore) -> Usage:
    """See Store.usage."""
    refs, broken = store.catalog.refs()
    needs = {}
    sessions: list[SessionUsage] = []
    for ref in refs:
        try:
            needs[ref.name] = store.catalog.need(ref)
        except StoreError as error:
            sessions.append(SessionUsage(ref.name, ref.tree, 0, 0, 0, 0, 0, 0, 0, 0, str(error)))
    sessions += [SessionUsage(entry.name, "", 0, 0, 0, 0, 0, 0, 0, 0, entry.error) for entry in broken]
    holders = Counter(key for need in needs.values() for key in need.all())
    readable = [ref for ref in refs if ref.name in needs]
    for ref in readable:
        need = needs[ref.name]
        path = store.catalog.path(ref.head)
        mla_own, mla_shared = _split(need.pages, holders)
        kda_own, kda_shared = _split({**need.checkpoints, **need.hints}, holders)
        sessions.append(
            SessionUsage(
                ref.name,
                ref.tree,
                len(path),
                path[-1].total,
                len(ref.keep),
                mla_own,
                mla_shared,
                kda_own,
                kda_shared,
                sum(need.other.values()),
            )
        )
    with os_errors("measuring the session store"):
        found = list(upkeep.files(store))
        space = store.fs.space()
    garbage = (
        0
        if len(readable) < len(refs) or broken
        else sum(info.allocated for path, info in found if (key := upkeep.object_id(path)) and key not in holders)
    )
    return Usage(
        sessions=tuple(sorted(sessions, key=lambda entry: entry.name)),
        trees=_trees(store, readable),
        allocated=sum(info.allocated for _, info in found),
        unneeded=garbage,
        quarantined=sum(info.allocated for path, info in found if path.startswith("quarantine/")),
        quota=store.config.quota_bytes,
        free=space.free,
        floor=floor(store),
    )


def _split(objects: Mapping[str, int], holders: Mapping[str, int]) -> tuple[int, int]:
    shared = sum(size for key, size in objects.items() if holders[key] > 1)
    return sum(objects.values()) - shared, shared


def _trees(store: OpenStore, refs: list[Ref]) -> tuple[TreeUsage, ...]:
    trees: list[TreeUsage] = []
    for tree in sorted({ref.tree for ref in refs}):
        members = [ref for ref in refs if ref.tree == tree]
        needs = [store.catalog.need(ref) for ref in members]
        parts = [
            sum({key: size for need in needs for key, size in getattr(need, part).items()}.values())
            for part in ("pages", "checkpoints", "hints", "other")
        ]
        mla, kda, hints, other = parts
        trees.append(TreeUsage(tree, tuple(ref.name for ref in members), mla, kda + hints, other))
    return tuple(trees)
