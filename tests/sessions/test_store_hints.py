"""Hints beside a checkpoint: there as long as the boundary is, and nothing depends on them."""

from __future__ import annotations

import errno
import shutil
from dataclasses import replace

import numpy as np
import pytest
from k3_sessions import BadDraft, Damaged, FormatUnsupported, Store, StoreConfig, ThinningPolicy
from k3_sessions.blobs import path_of
from k3_sessions.hints import HINT_BYTES
from k3_sessions.records import TurnRecord, read_turn

from tests.sessions.sim_fs import SimFS, failing
from tests.sessions.toy import CONFIG, IDENTITY, LAYOUT, Toy, check, draft, ids

ROWS = {"draft.0": np.arange(700, dtype="<f4").reshape(2, 350), "draft.1": np.arange(9, dtype="<u2")}


@pytest.fixture
def store(tmp_path) -> Store:
    return Store.open(tmp_path / "s", config=CONFIG)


def turn(store: Store, name: str, tokens: list[int], beside=None, n: int = 40, create: bool = False) -> None:
    """One more turn, its state restored from the newest one."""
    plan = None if create else store.plan(store.session(name).head, IDENTITY, LAYOUT)
    new = ids(n, len(tokens))
    tokens += new
    with store.writer(name, create=create, identity=IDENTITY, layout=LAYOUT) as writer:
        source = Toy(tokens, len(tokens) - 1, beside={} if beside is None else beside)
        writer.commit(draft(new, len(tokens) - 1, restored=plan), source)


def found(store: Store, name: str) -> dict[str, np.ndarray]:
    return dict(store.hints(store.plan(store.session(name).head, IDENTITY, LAYOUT), IDENTITY, LAYOUT))


def same(found: dict[str, np.ndarray], beside: dict[str, np.ndarray] = ROWS) -> bool:
    return found.keys() == beside.keys() and all(
        found[name].dtype == array.dtype and np.array_equal(found[name], array) for name, array in beside.items()
    )


def objects(store: Store, name: str) -> set[str]:
    return set(store.catalog.need(store.catalog.ref(name)).all())


def head(store: Store, name: str):
    return store.catalog.turn(store.session(name).head)


def test_they_come_back_forks_share_them_and_exports_carry_them(store, tmp_path):
    tokens: list[int] = []
    turn(store, "a", tokens, ROWS, create=True)
    assert same(found(store, "a"))
    store.fork("a", "b")
    assert same(found(store, "b"))
    assert head(store, "a").hints.id in objects(store, "a") & objects(store, "b")
    turn(store, "a", tokens)
    assert found(store, "a") == {}
    assert same(found(store, "b"))
    store.export("b", tmp_path / "b.k3s")
    other = Store.open(tmp_path / "other", config=CONFIG)
    other.import_(tmp_path / "b.k3s")
    assert same(found(other, "b"))
    assert other.verify().problems == ()
    store.remove("a")
    assert same(found(store, "b"))
    freed = store.catalog.turn(store.session("b").head).hints.id
    store.remove("b")
    assert not (tmp_path / "s" / path_of(freed)).exists()


def test_state_objects_are_the_same_with_and_without(store):
    for name, beside in (("a", ROWS), ("b", None)):
        turn(store, name, [], beside, create=True)
    first, second = head(store, "a"), head(store, "b")
    assert first.checkpoint == second.checkpoint
    assert first.pages == second.pages
    assert second.hints is None


def test_they_go_with_the_boundary(tmp_path):
    config = StoreConfig(free_floor_bytes=0, threads=2, thinning=ThinningPolicy(last=1, max_kept=1, log_spaced=False))
    store = Store.open(tmp_path / "s", config=config)
    tokens: list[int] = []
    turn(store, "a", tokens, ROWS, create=True)
    first = head(store, "a")
    turn(store, "a", tokens, {"draft.0": np.ones(3, dtype="<f4")})
    assert not (tmp_path / "s" / path_of(first.checkpoint[0].id)).exists()
    assert not (tmp_path / "s" / path_of(first.hints.id)).exists()
    assert found(store, "a")["draft.0"].tolist() == [1, 1, 1]
    assert store.gc(dry_run=True).removed == ()


def test_where_they_are_gone_all_goes_on_without(store, tmp_path):
    """As a collection by an older version leaves it."""
    tokens: list[int] = []
    turn(store, "a", tokens, ROWS, create=True)
    (tmp_path / "s" / path_of(head(store, "a").hints.id)).unlink()
    plan = store.plan(store.session("a").head, IDENTITY, LAYOUT)
    assert (plan.boundary, plan.damaged) == (plan.target, "")
    check(store.restore(plan, IDENTITY, LAYOUT), tokens)
    assert found(store, "a") == {}
    assert store.verify().problems == ()
    store.export("a", tmp_path / "a.k3s")
    other = Store.open(tmp_path / "other", config=CONFIG)
    other.import_(tmp_path / "a.k3s")
    assert found(other, "a") == {}
    turn(store, "a", tokens, ROWS)
    assert same(found(store, "a"))


@pytest.mark.parametrize("how", ["flip", "cut", "other"])
def test_damaged_ones_are_told_and_set_aside_and_the_boundary_stays(store, tmp_path, how):
    tokens: list[int] = []
    turn(store, "a", tokens, ROWS, create=True)
    turn(store, "b", [], {"draft.0": np.ones(3, dtype="<f4")}, n=30, create=True)
    file = tmp_path / "s" / path_of(head(store, "a").hints.id)
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    other = (tmp_path / "s" / path_of(head(store, "b").hints.id)).read_bytes()
    file.write_bytes({"flip": bytes(data), "cut": bytes(data[:-5]), "other": other}[how])
    with pytest.raises(Damaged):
        found(store, "a")
    again = Store.open(tmp_path / "s", config=CONFIG)
    plan = again.plan(again.session("a").head, IDENTITY, LAYOUT)
    assert plan.boundary == plan.target
    (problem,) = again.verify().problems
    assert problem.path == path_of(head(again, "a").hints.id)
    report = again.repair()
    assert (report.quarantined, report.sessions, report.lost) == ((problem.path,), (), ())
    assert again.verify().problems == ()
    assert found(again, "a") == {}
    check(again.restore(plan, IDENTITY, LAYOUT), tokens)


def test_what_is_no_hint_is_refused_and_nothing_is_kept_of_the_turn(store):
    bad = (
        {"draft.0": np.zeros(3, dtype="<f8")},
        {"draft.0": [1.0]},
        {"a/b": np.zeros(3, dtype="<f4")},
        {"draft.0": np.zeros(HINT_BYTES // 4 + 1, dtype="<f4")},
    )
    with store.writer("a", create=True, identity=IDENTITY, layout=LAYOUT) as writer:
        for beside in bad:
            with pytest.raises(BadDraft if "a/b" not in beside else Exception, match="hint"):
                writer.commit(draft([1, 2], 1), Toy([1, 2], 1, beside=beside))
            assert (writer.unsaved, writer.accepted) == (0, 0)
        writer.commit(draft([1, 2], 1), Toy([1, 2], 1, beside=ROWS))
    assert same(found(store, "a"))


def test_the_record_is_that_of_a_turn_without_them_but_for_one_key(store):
    """Readers of 1.2 know every other key, and pass over this one."""
    turn(store, "a", [], ROWS, create=True)
    record = head(store, "a")
    data = store.blobs.get(record.id)
    assert data.count(b'"hints"') == 1
    plain = read_turn(data.replace(b'"hints"', b'"other"'), record.id, "a turn")
    assert plain.hints is None
    assert (plain.checkpoint, plain.pages, plain.prefix) == (record.checkpoint, record.pages, record.prefix)


@pytest.mark.parametrize("call", ["make_dir", "create", "write", "sync", "replace", "sync_dir"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO], ids=errno.errorcode.get)
def test_a_turn_is_stored_without_them_where_they_cannot_be(code, call, monkeypatch):
    # The same turn in both stores: with another time it might lie in the folder of the hints.
    monkeypatch.setattr("k3_sessions.writer.now", lambda: "2026-11-30T12:00:00.000Z")
    tokens = ids(40)
    probe = Store.open("memory", fs=SimFS(), config=CONFIG)
    turn(probe, "a", [], ROWS, create=True)
    folder = path_of(head(probe, "a").hints.id)[:10]
    assert sum(path_of(key).startswith(folder) for key in objects(probe, "a")) == 1
    fs = SimFS()
    store = Store.open("memory", fs=fs, config=CONFIG)
    refuse = failing(code, (call,))
    fs.fault = lambda name, path, number: refuse(name, path, number) if path.startswith(folder) else None
    with store.writer("a", create=True, identity=IDENTITY, layout=LAYOUT) as writer:
        report = writer.commit(draft(tokens, 39), Toy(tokens, 39, beside=ROWS))
    assert report.stored == 1
    (notice,) = report.notices
    assert "without its hints" in notice
    fs.fault = lambda name, path, number: None
    store = Store.open("memory", fs=fs, config=CONFIG)
    check(store.restore(store.plan(store.session("a").head, IDENTITY, LAYOUT), IDENTITY, LAYOUT), tokens)
    assert found(store, "a") == {}
    assert store.verify().problems == ()
    turn(store, "a", tokens, ROWS)
    assert same(found(store, "a"))


def test_a_turn_is_stored_where_memory_does_not_suffice_for_them(store, monkeypatch):
    def refuse(*_: object) -> None:
        raise MemoryError

    for name, place in (("a", "tests.sessions.toy.Toy.hints"), ("b", "k3_sessions.hints.pack_hints")):
        with monkeypatch.context() as short:
            short.setattr(place, refuse)
            turn(store, name, [], ROWS, create=True)
        assert found(store, name) == {}


def test_nothing_gives_way_for_them_and_no_turn_is_refused(store, tmp_path):
    big = {"draft.0": np.random.default_rng(0).random(1 << 18, dtype="<f4")}
    for name in "ab":
        turn(store, name, tokens := [], None, create=True)
    room = store.usage().allocated + (1 << 19)
    tight = Store.open(tmp_path / "s", config=replace(CONFIG, quota_bytes=room))
    with tight.writer("a", create=False, identity=IDENTITY, layout=LAYOUT) as writer:
        new = ids(9, 9)
        plan = tight.plan(tight.session("a").head, IDENTITY, LAYOUT)
        report = writer.commit(draft(new, 48, restored=plan), Toy(tokens + new, 48, beside=big))
    assert report.evicted == ()
    assert "no room" in report.notices[0]
    assert not tight.session("b").evicted
    assert found(tight, "a") == {}
    turn(store, "a", tokens + new, big)
    assert same(found(store, "a"), big)


def test_a_file_without_them_comes_into_a_store_that_has_them(store, tmp_path):
    """As an older version exports what it had from here."""
    turn(store, "a", [], ROWS, create=True)
    shutil.copytree(tmp_path / "s", tmp_path / "older")
    older = Store.open(tmp_path / "older", config=CONFIG)
    (tmp_path / "older" / path_of(head(older, "a").hints.id)).unlink()
    older.export("a", tmp_path / "a.k3s")
    store.import_(tmp_path / "a.k3s", "back")
    assert same(found(store, "back"))
    assert store.verify().problems == ()
    (tmp_path / "s" / path_of(head(store, "a").hints.id)).write_bytes(b"damaged")
    store.import_(tmp_path / "a.k3s", "again")


def test_an_export_leaves_out_damaged_ones_and_says_so(store, tmp_path):
    tokens: list[int] = []
    turn(store, "a", tokens, ROWS, create=True)
    file = tmp_path / "s" / path_of(head(store, "a").hints.id)
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    report = store.export("a", tmp_path / "a.k3s")
    (notice,) = report.notices
    assert file.name in notice
    other = Store.open(tmp_path / "other", config=CONFIG)
    other.import_(tmp_path / "a.k3s")
    check(other.restore(other.plan(other.session("a").head, IDENTITY, LAYOUT), IDENTITY, LAYOUT), tokens)
    assert (found(other, "a"), other.verify().problems) == ({}, ())


@pytest.mark.parametrize("inside", [True, False])
def test_a_file_that_calls_anothers_state_hints_is_refused(store, tmp_path, monkeypatch, inside):
    """Thinning would take the hints along, and repair would set them aside."""
    turn(store, "victim", [], None, create=True)
    page = head(store, "victim").pages[0].blob
    foul = Store.open(tmp_path / "foul", config=CONFIG)
    plain = TurnRecord.pack
    with monkeypatch.context() as made_up:
        made_up.setattr(TurnRecord, "pack", lambda self, level: plain(replace(self, hints=page), level))
        turn(foul, "foul", [], None, n=40 if inside else 20, create=True)  # with 20 it has no such page itself
    assert (page.id in objects(foul, "foul")) == inside
    foul.export("foul", tmp_path / "foul.k3s")
    with pytest.raises(Damaged, match="no hints object"):
        store.import_(tmp_path / "foul.k3s")
    assert [session.name for session in store.sessions()] == ["victim"]
    assert store.verify().problems == ()


def test_ones_of_a_newer_version_do_not_keep_a_session_from_its_repair(store, tmp_path, monkeypatch):
    tokens: list[int] = []
    turn(store, "a", tokens, ROWS, create=True)
    first = head(store, "a")
    turn(store, "a", tokens, ROWS)
    (tmp_path / "s" / path_of(head(store, "a").checkpoint[0].id)).write_bytes(b"damaged")

    def newer(*_: object) -> None:
        raise FormatUnsupported("of a newer version")

    monkeypatch.setattr("k3_sessions.checking.read_hints", newer)
    report = store.repair()
    assert report.untouched == ()
    (mended,) = report.sessions
    assert mended.boundary == first.position
    assert (tmp_path / "s" / path_of(first.hints.id)).exists()
