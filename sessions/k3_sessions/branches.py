"""Sessions as names of branches: fork, rename, mark. Each writes refs alone; what they point to stays as it is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from k3_sessions.catalog import check_name
from k3_sessions.common import now
from k3_sessions.errors import BadName, SessionExists, SessionMissing
from k3_sessions.opened import OpenStore
from k3_sessions.records import Kept, Ref
from k3_sessions.types import Session


def fork(store: OpenStore, name: str, new: str, *, at: str | None) -> Session:
    """See Store.fork."""
    new = check_name(new)
    with store.owning(new), store.using(), store.changing_refs():
        source = store.catalog.ref(name)
        if store.catalog.find(new) is not None:
            raise SessionExists(f"session {new} exists", do="choose another name for the fork")
        head = source.head if at is None else store.record(at).id
        keep = _kept_up_to(store, source, head)
        stamp = now()
        ref = replace(
            source,
            name=new,
            head=head,
            keep=keep,
            created=stamp,
            updated=stamp,
            marks={},
            origin=(source.name, head),
            pinned=False,
            unknown={},
        )
        store.save_ref(ref)
    return store.catalog.session(ref)


def _kept_up_to(store: OpenStore, ref: Ref, head: str) -> tuple[Kept, ...]:
    """Boundaries of `ref` at or before its turn `head`. Reads only the turns after `head`."""
    later: set[str] = set()
    current: str | None = ref.head
    while current != head:
        if current is None:
            raise SessionMissing(f"session {ref.name} has no turn {head[:10]}", do=f"`k3 log {ref.name}` lists them")
        later.add(current)
        current = store.catalog.turn(current).parent
    return tuple(entry for entry in ref.keep if entry.turn not in later)


def rename(store: OpenStore, name: str, new: str) -> Session:
    """See Store.rename."""
    new = check_name(new)
    with store.owning(check_name(name), new), store.changing_refs():
        ref = store.catalog.ref(name)
        if store.catalog.find(new) is not None:
            raise SessionExists(f"session {new} exists", do="choose another name")
        ref = replace(ref, name=new, updated=now())
        store.save_ref(ref)
        store.drop_ref(name)
    return store.catalog.session(ref)


def mark(store: OpenStore, name: str, turn_id: str, label: str) -> Session:
    """See Store.mark."""
    if (label := check_name(label, "mark")).removeprefix("-").isdigit():
        raise BadName(f"mark {label!r}", "a name that is not a number")
    with store.changing_refs():
        ref = store.catalog.ref(name)
        if turn_id not in {turn.id for turn in store.catalog.path(ref.head)}:
            raise SessionMissing(f"session {name} has no turn {turn_id[:10]}", do=f"`k3 log {name}` lists them")
        ref = replace(ref, marks={**ref.marks, label: turn_id}, updated=now())
        store.save_ref(ref)
    return store.catalog.session(ref)


def unmark(store: OpenStore, name: str, label: str) -> Session:
    """See Store.unmark."""
    with store.changing_refs():
        ref = store.catalog.ref(name)
        if label not in ref.marks:
            marks = ", ".join(sorted(ref.marks))
            raise BadName(
                f"session {name} has no mark {label!r}",
                f"one of {marks}" if marks else None,
                None if marks else f"it has none; `k3 mark {name} LABEL` sets one",
            )
        ref = replace(ref, marks={key: turn for key, turn in ref.marks.items() if key != label}, updated=now())
        store.save_ref(ref)
    return store.catalog.session(ref)


def change(store: OpenStore, name: str, **changes: Any) -> Session:
    """Replace fields of a ref."""
    with store.changing_refs():
        ref = replace(store.catalog.ref(name), updated=now(), **changes)
        store.save_ref(ref)
    return store.catalog.session(ref)
