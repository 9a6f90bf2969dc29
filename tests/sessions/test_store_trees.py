"""Forks, thinning, removal and gc: nothing is written twice, and nobody loses what another gives up."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from k3_sessions import Store, StoreConfig, ThinningPolicy
from k3_sessions.errors import SessionExists, SessionLocked, SessionMissing
from k3_sessions.records import Kept
from k3_sessions.thinning import choose, log_spaced
from k3_sessions.upkeep import files, object_id

from tests.sessions.toy import CONFIG, IDENTITY, LAYOUT, Toy, check, draft, grow, ids, whole


@pytest.fixture
def store(tmp_path):
    return Store.open(tmp_path / "store", config=CONFIG)


def objects(store):
    return {key for path, _ in files(store) if (key := object_id(path))}


def go_on(store, name, length, seed):
    head = store.session(name).head
    plan = store.plan(head, IDENTITY, LAYOUT)
    tokens = store.tokens(head).tolist() + ids(length, seed)
    with store.writer(name, create=False, identity=IDENTITY, layout=LAYOUT) as writer:
        return writer.commit(draft(tokens[-length:], len(tokens) - 1, restored=plan), Toy(tokens, len(tokens) - 1))


def test_a_fork_writes_one_small_file_and_shares_every_page(store):
    tokens, _ = grow(store, "a", [800, 800])
    before, size = objects(store), sum(info.size for _, info in files(store))
    store.fork("a", "b")
    assert objects(store) == before
    assert sum(info.size for _, info in files(store)) - size < 4096
    report = go_on(store, "b", 20, 7)
    # The child wrote its own rows only.
    assert [p.start for p in store.catalog.turn(report.turn.id).pages] == [1599]
    go_on(store, "a", 20, 8)
    assert whole(store, "a")[:1600] == whole(store, "b")[:1600] == tokens


def test_a_fork_at_an_earlier_turn(store):
    tokens, turns = grow(store, "a", [100, 100, 100])
    child = store.fork("a", "b", at=turns[1].id)
    assert (child.head, child.origin) == (turns[1].id, ("a", turns[1].id))
    assert whole(store, "b") == tokens[:200]
    with pytest.raises(SessionExists):
        store.fork("a", "b")
    _, other = grow(store, "z", [5], seed=9)
    with pytest.raises(SessionMissing):
        store.fork("a", "c", at=other[0].id)


@pytest.mark.parametrize("first", ["a", "b"])
def test_removing_either_relative_leaves_the_other_whole(store, first):
    grow(store, "a", [700, 300])
    store.fork("a", "b")
    go_on(store, "a", 30, 1)
    go_on(store, "b", 30, 2)
    other = "b" if first == "a" else "a"
    report = store.remove(first)
    assert report.bytes > 0
    assert report.notices == ()
    whole(store, other)
    with pytest.raises(SessionMissing):
        store.session(first)
    store.remove(other)
    assert objects(store) == set()
    assert [path for path, _ in files(store) if path.startswith(("refs", "objects"))] == []


def test_removing_frees_what_nothing_else_needs_and_no_more(store):
    grow(store, "a", [700], seed=1)
    grow(store, "b", [700], seed=1)  # the same tokens: pages, checkpoint and root are shared by content
    both = objects(store)
    store.remove("a")
    assert len(both - objects(store)) <= 1  # at most the turn itself (created at another time)
    whole(store, "b")


def test_runs_again_write_no_page_twice(store):
    grow(store, "a", [700, 700], seed=1)
    with store.writer("b", create=True, identity=IDENTITY, layout=LAYOUT) as writer:
        tokens = store.tokens(store.session("a").head).tolist()
        report = writer.commit(draft(tokens[:700], 699), Toy(tokens, 699))
    assert (report.bytes_pages, report.bytes_checkpoint) == (0, 0)


def test_fifty_turns_write_each_row_once(store):
    lengths = [30] * 50
    tokens, turns = grow(store, "a", lengths)
    pages = sum(turn.bytes_pages for turn in turns)
    rows = (len(tokens) - 1) * (2 * 6 * 2 + 2 * 3 * 4)
    assert sum(p.stop - p.start for t in turns for p in store.catalog.turn(t.id).pages) == len(tokens) - 1
    assert pages - rows < 500 * (50 + len(tokens) // 512)  # framing only


def test_log_spacing_never_wants_a_turn_it_let_go():
    """A turn kept at some age was kept at every younger age."""
    for index in range(200):
        ages = [log_spaced(index, index + age) for age in range(300)]
        assert ages == sorted(ages, reverse=True)
    assert sum(log_spaced(index, 999) for index in range(1000)) <= 12


def test_choose_keeps_last_marks_and_bound():
    path = [str(i) for i in range(100)]
    kept = [Kept(turn, 10 * int(turn), "") for turn in path]
    stay = choose(path, kept, {"50", "99"}, ThinningPolicy(last=3, log_spaced=False))
    assert [k.turn for k in stay] == ["50", "97", "98", "99"]
    stay = choose(path, kept, {"99"}, ThinningPolicy(last=2, max_kept=4))
    assert len(stay) == 5
    assert {"98", "99"} <= {k.turn for k in stay}


def test_thinning_drops_checkpoints_and_resume_replays_from_the_one_before(store):
    tokens, turns = grow(store, "a", [20] * 40)
    kept = [t for t in store.log("a") if t.has_checkpoint]
    assert len(kept) < 12
    assert kept[0].id == turns[0].id
    assert [t.id for t in kept[-2:]] == [t.id for t in turns[-2:]]
    on_disk = {blob.id for t in turns for blob in store.catalog.turn(t.id).checkpoint if not store.blobs.check(blob)}
    assert len(on_disk) == len(kept)
    for turn in turns:
        plan = store.plan(turn.id, IDENTITY, LAYOUT)
        assert plan.boundary == max(k.position for k in kept if k.position <= turn.position)
        assert list(plan.replay) == tokens[plan.boundary : turn.position]
        assert bool(plan.reason) == bool(plan.replay)
        check(store.restore(plan, IDENTITY, LAYOUT), tokens)


def test_a_fork_point_survives_the_thinning_of_both_sides(store):
    _, turns = grow(store, "a", [20] * 4)
    store.fork("a", "b")
    grow(store, "a", [20] * 30, create=False, seed=4)
    grow(store, "b", [20] * 30, create=False, seed=5)
    assert store.plan(turns[-1].id, IDENTITY, LAYOUT).replay == ()
    whole(store, "a")
    whole(store, "b")
    store.remove("b")
    grow(store, "a", [20] * 3, create=False, seed=6)
    whole(store, "a")


def test_marked_turn_is_never_thinned(store):
    _, turns = grow(store, "a", [20] * 3)
    store.mark("a", turns[1].id, "here")
    grow(store, "a", [20] * 40, create=False, seed=4)
    assert store.turn(store.session("a").marks["here"]).has_checkpoint
    store.unmark("a", "here")
    grow(store, "a", [20], create=False, seed=5)
    assert not store.turn(turns[1].id).has_checkpoint


def test_gc_removes_exactly_what_its_dry_run_says(store):
    grow(store, "a", [700])
    grow(store, "b", [700], seed=2)
    store.drop_ref("b")
    root = Path(store.fs.where)
    (root / "refs/.tmp-x").touch()
    stray = root / "objects/notes.txt"
    stray.write_text("mine")
    foretold = store.gc(dry_run=True)
    before = {path for path, _ in files(store)}
    done = store.gc()
    assert dataclasses.replace(foretold, dry_run=False) == done
    assert done.bytes > 0
    assert done.leftovers == 1
    assert before - {path for path, _ in files(store)} == set(done.removed)
    assert stray.read_text() == "mine"
    whole(store, "a")
    assert store.gc().removed == ()


def test_gc_touches_no_object_while_a_session_cannot_be_read(store):
    grow(store, "a", [700])
    grow(store, "b", [700], seed=2)
    before = objects(store)
    ref = next(path for path, _ in files(store) if path.startswith("refs/"))
    with open(f"{store.fs.where}/{ref}", "r+b") as file:
        file.write(b"?")
    report = store.gc()
    assert "cannot be read" in report.blocked
    assert objects(store) == before
    assert [bool(s.error) for s in store.sessions()] == [False, True]
    survivor = store.sessions()[0].name
    assert "cannot be read" in " ".join(store.remove(survivor).notices)
    assert objects(store) == before


def test_usage_tells_shared_from_own(store):
    grow(store, "a", [700])
    store.fork("a", "b")
    go_on(store, "b", 300, 3)
    usage = store.usage()
    a, b = usage.sessions
    assert (a.mla_own, a.kda_own) == (0, 0)
    assert a.mla_shared == b.mla_shared > 0
    assert b.mla_own > 0
    assert b.kda_own > 0
    assert usage.trees[0].sessions == ("a", "b")
    assert usage.trees[0].mla == b.mla_own + b.mla_shared
    assert usage.unneeded == 0
    assert usage.allocated == sum(info.allocated for _, info in files(store))
    store.drop_ref("b")
    assert store.usage().unneeded > 0


def test_rename(store):
    tokens, _ = grow(store, "a", [30])
    grow(store, "taken", [3], seed=4)
    with pytest.raises(SessionExists):
        store.rename("a", "taken")
    store.rename("a", "b")
    assert whole(store, "b") == tokens
    assert [s.name for s in store.sessions()] == ["b", "taken"]


def test_a_session_that_is_being_written_is_not_removed_or_renamed(store):
    grow(store, "a", [30])
    with store.writer("a", create=False, identity=IDENTITY, layout=LAYOUT):
        for change in (lambda: store.remove("a"), lambda: store.rename("a", "b"), lambda: store.fork("b", "a")):
            with pytest.raises(SessionLocked, match="process"):
                change()
        store.fork("a", "c")
        store.mark("a", store.session("a").head, "m")
    whole(store, "a")
    assert store.session("a").marks


def test_a_mark_set_while_the_writer_is_open_survives_its_next_commit(store):
    tokens, turns = grow(store, "a", [30])
    with store.writer("a", create=False, identity=IDENTITY, layout=LAYOUT) as writer:
        store.mark("a", turns[0].id, "m")
        more = [*tokens, 1, 2]
        writer.commit(draft([1, 2], 31), Toy(more, 31))
    assert store.session("a").marks == {"m": turns[0].id}


def test_default_config_is_the_documented_one():
    assert StoreConfig() == StoreConfig(
        None, 10 << 30, 0.05, 1, 0, 1 << 28, 30.0, False, ThinningPolicy(last=2, log_spaced=True, max_kept=12)
    )


def test_thinning_one_session_leaves_the_checkpoints_another_one_keeps(store):
    """Both a fork, which keeps the same turns, and a stranger, whose equal state is the same objects."""
    tokens, turns = grow(store, "a", [20] * 4)
    store.fork("a", "fork")
    with store.writer("stranger", create=True, identity=IDENTITY, layout=LAYOUT) as writer:
        same = [
            writer.commit(draft(tokens[20 * n : 20 * n + 20], 20 * n + 19), Toy(tokens, 20 * n + 19)).turn
            for n in range(4)
        ]
    theirs = [k.turn for name in ("fork", "stranger") for k in store.catalog.ref(name).keep]
    grow(store, "a", [20] * 20, create=False, seed=4)
    assert len({k.turn for k in store.catalog.ref("a").keep} & {t.id for t in turns}) < len(turns)
    assert {t.id for t in (*turns, *same)} & set(theirs)
    for turn in theirs:
        plan = store.plan(turn, IDENTITY, LAYOUT)
        assert plan.replay == ()
        check(store.restore(plan, IDENTITY, LAYOUT), tokens)
    assert store.verify().problems == ()
