"""Quota and free space: what gives way, what never does, and what is refused without anything giving way."""

from __future__ import annotations

import dataclasses
import re

import pytest
from k3_sessions import Store
from k3_sessions.catalog import file_id
from k3_sessions.errors import StoreFull
from k3_sessions.upkeep import files

from tests.sessions.toy import CONFIG, IDENTITY, LAYOUT, Toy, draft, grow, ids, whole


@pytest.fixture
def store(tmp_path):
    return Store.open(tmp_path / "store", config=CONFIG)


def limited(store, **settings):
    return Store.open(store.fs.where, config=dataclasses.replace(CONFIG, **settings))


def test_quota_takes_state_of_the_oldest_idle_session_but_no_turn(store):
    tokens, _ = grow(store, "old", [900, 5])
    grow(store, "pinned", [900], seed=2)
    store.pin("pinned")
    used = store.usage().allocated
    tight = limited(store, quota_bytes=used + 150_000)
    reports = []
    with tight.writer("new", create=True, identity=IDENTITY, layout=LAYOUT) as writer:
        done: list[int] = []
        for turn in range(3):
            done += ids(700, 50 + turn)
            reports.append(writer.commit(draft(done[-700:], len(done)), Toy(done, len(done))))
    assert [name for r in reports for name in r.evicted] != []
    assert {name for r in reports for name in r.evicted} == {"old"}
    assert store.session("old").evicted
    assert store.tokens(store.session("old").head).tolist() == tokens
    plan = store.plan(store.session("old").head, IDENTITY, LAYOUT)
    assert (plan.turn, len(plan.replay)) == (None, 904)
    assert "evicted" in plan.reason
    assert tight.usage().allocated <= used + 150_000
    whole(store, "pinned")
    whole(store, "new")
    assert not any(info.size for path, info in files(store) if path.startswith("locks/")), "nobody seems to have died"
    # An evicted session that is evaluated again is whole again.
    with store.writer("old", create=False, identity=IDENTITY, layout=LAYOUT) as writer:
        more = tokens + ids(3, 9)
        writer.commit(draft(more[905:], 907, restored=plan), Toy(more, 907))
    assert store.session("old").evicted == ""
    whole(store, "old")


def test_quota_never_touches_an_open_session_and_then_says_no(store):
    grow(store, "open", [900])
    used = store.usage().allocated
    tight = limited(store, quota_bytes=used + 20_000)
    held = store.writer("open", create=False, identity=IDENTITY, layout=LAYOUT)
    with held, tight.writer("new", create=True, identity=IDENTITY, layout=LAYOUT) as writer:
        with pytest.raises(StoreFull, match="quota"):
            writer.commit(draft(ids(900), 900), Toy(ids(900), 900))
        assert writer.unsaved == 1
    whole(store, "open")


def test_the_free_space_floor_refuses_and_evicts_nothing(store):
    grow(store, "a", [900])
    tight = limited(store, free_floor_bytes=1 << 60, free_floor_share=1.0)
    with (
        tight.writer("b", create=True, identity=IDENTITY, layout=LAYOUT) as writer,
        pytest.raises(StoreFull, match="free"),
    ):
        writer.commit(draft([1, 2], 2), Toy([1, 2], 2))
    whole(store, "a")


def refused(store):
    """A commit that the quota refuses; returns by how many bytes it was over."""
    with store.writer("new", create=True, identity=IDENTITY, layout=LAYOUT) as writer:
        with pytest.raises(StoreFull, match="quota") as told:
            writer.commit(draft(ids(900), 900), Toy(ids(900), 900))
        assert writer.unsaved == 1
    return int(re.search(r"by ([\d,]+)", told.value.found)[1].replace(",", ""))


def test_nobody_gives_what_would_not_be_enough(store):
    """A quota that nothing can meet, by a slip of the pen say, once cost every session its state, and the commit was
    refused all the same."""
    for seed, name in enumerate(("a", "b")):
        grow(store, name, [900, 5], seed=seed)
    store.pin("a")
    refused(limited(store, quota_bytes=1))
    refused(limited(store, quota_bytes=store.usage().allocated - store.usage().sessions[1].mla_own))
    for name in ("a", "b"):
        whole(store, name)
        assert len(store.catalog.ref(name).keep) == 2


def test_nobody_gives_while_a_session_cannot_be_read(store):
    """Nothing is removed then, so that nothing would come of it."""
    grow(store, "a", [900, 5])
    grow(store, "b", [30], seed=2)
    used = store.usage().allocated
    with open(f"{store.fs.where}/refs/{file_id('b')}", "r+b") as file:
        file.write(b"?")
    over = refused(limited(store, quota_bytes=used))
    assert refused(limited(store, quota_bytes=used + over - 2000)) == 2000  # which `a` could well give
    assert len(store.catalog.ref("a").keep) == 2
    whole(store, "a")
