"""Hints beside a checkpoint: there as long as the boundary is, and nothing depends on them."""

from __future__ import annotations

import numpy as np
import pytest
from k3_sessions import BadDraft, Damaged, Store, StoreConfig, ThinningPolicy
from k3_sessions.blobs import path_of
from k3_sessions.hints import HINT_BYTES
from k3_sessions.records import read_turn

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
