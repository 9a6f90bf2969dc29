"""What goes in comes out, bit for bit, whatever the lengths, dtypes and number of turns."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from k3_sessions import FieldSpec, StateLayout, Store
from k3_sessions.errors import BadDraft, BadName, SessionExists, SessionMissing

from tests.sessions.toy import CONFIG, IDENTITY, LAYOUT, Toy, check, draft, grow, identity_for, ids


@pytest.fixture
def store(tmp_path):
    return Store.open(tmp_path / "store", config=CONFIG)


def reopened(store):
    return Store.open(store.fs.where, config=store.config)


@pytest.mark.parametrize("length", [0, 1, 511, 512, 513, 1024, 5120])
@pytest.mark.parametrize("pending", [0, 1])
def test_one_turn_of_any_length(store, length, pending):
    tokens, turns = grow(store, "a", [length], pending=pending)
    again = reopened(store)
    plan = again.plan(turns[-1].id, IDENTITY, LAYOUT)
    assert (plan.boundary, plan.replay, plan.reason) == (len(tokens) - min(pending, length), (), "")
    check(again.restore(plan, IDENTITY, LAYOUT), tokens)
    assert again.tokens(turns[-1].id).tolist() == tokens


def test_many_turns_of_odd_lengths(store):
    tokens, turns = grow(store, "a", [3, 0, 509, 1, 1, 700, 1500, 2])
    again = reopened(store)
    log = again.log("a")
    assert [t.id for t in log] == [t.id for t in turns]
    assert [t.meta["turn"] for t in log] == list(range(8))
    assert [i for t in log for i in t.tokens] == tokens
    for turn in log:
        plan = again.plan(turn.id, IDENTITY, LAYOUT)
        if plan.turn is not None:
            check(again.restore(plan, IDENTITY, LAYOUT), tokens)
        assert list(plan.replay) == tokens[plan.boundary : turn.position]


@pytest.mark.parametrize(
    "layout",
    [
        StateLayout((FieldSpec("s", "checkpoint", (0,), (3,), "float32"),)),
        StateLayout((FieldSpec("kv", "page", (1,), (3,), "bfloat16"),)),
        StateLayout(
            (FieldSpec("s", "checkpoint", (), (3,), "float32"), FieldSpec("kv", "page", (0,), (0,), "float32"))
        ),
        StateLayout(
            (FieldSpec("s", "checkpoint", (0, 2), (), "float32"), FieldSpec("kv", "page", (1,), (2, 3), "float32"))
        ),
        StateLayout(()),
    ],
    ids=["no pages", "no checkpoint", "empty arrays", "scalars", "no field"],
)
def test_layouts_with_something_missing(store, layout):
    tokens, turns = grow(store, "a", [700, 5], layout=layout)
    plan = store.plan(turns[-1].id, identity_for(layout), layout)
    assert plan.boundary == 704
    check(store.restore(plan, identity_for(layout), layout), tokens, layout)


def test_groups_of_a_big_checkpoint_come_back_in_place(store, monkeypatch):
    monkeypatch.setattr("k3_sessions.state_objects.GROUP_BYTES", 200)
    tokens, turns = grow(store, "a", [600])
    assert len(store.catalog.turn(turns[0].id).checkpoint) == 2
    check(store.restore(store.plan(turns[0].id, IDENTITY, LAYOUT), IDENTITY, LAYOUT), tokens)


def test_page_rows_of_any_range(store):
    tokens, turns = grow(store, "a", [100, 500, 1000])
    state = store.restore(store.plan(turns[-1].id, IDENTITY, LAYOUT), IDENTITY, LAYOUT)
    toy = Toy(tokens, state.position)
    for start, stop in [(0, 0), (0, 512), (5, 6), (100, 1100), (511, 513), (1598, 1599), (1599, 1599), (1024, 1536)]:
        for name in ("kv_latent", "k_pe"):
            rows = state.page_rows(name, start, stop)
            assert rows.flags.c_contiguous
            assert rows.shape == toy.page_rows(name, start, stop).shape
            assert rows.tobytes() == toy.page_rows(name, start, stop).tobytes(), (start, stop)
    with pytest.raises(BadDraft):
        state.page_rows("k_pe", 0, 1600)


def test_restoring_twice_and_going_on_is_the_same_as_never_stopping(tmp_path):
    straight = Store.open(tmp_path / "a", config=CONFIG)
    tokens, turns = grow(straight, "s", [300, 300, 300])
    stopped = Store.open(tmp_path / "b", config=CONFIG)
    grow(stopped, "s", [300])
    for _ in range(2):
        again = reopened(stopped)
        plan = again.plan(again.session("s").head, IDENTITY, LAYOUT)
        check(again.restore(plan, IDENTITY, LAYOUT), tokens)
        new = tokens[plan.target + 1 :][:300]
        done = tokens[: plan.target + 301]
        with again.writer("s", create=False, identity=IDENTITY, layout=LAYOUT) as writer:
            writer.commit(draft(new, len(done) - 1, restored=plan), Toy(done, len(done) - 1))
    one, two = straight.catalog.turn(turns[-1].id), stopped.catalog.turn(stopped.session("s").head)
    assert one.pages == two.pages
    assert one.checkpoint == two.checkpoint


def test_a_planned_position_inside_a_turn_starts_from_the_boundary_before(store):
    tokens, turns = grow(store, "a", [600, 600])
    plan = store.plan(turns[1].id, IDENTITY, LAYOUT, upto=900)
    assert (plan.turn, plan.boundary, plan.target) == (turns[0].id, 599, 900)
    assert list(plan.replay) == tokens[599:900]
    assert "no checkpoint between 599 and 900" in plan.reason
    assert store.plan(turns[1].id, IDENTITY, LAYOUT, upto=100).turn is None
    with pytest.raises(BadDraft, match="0 to 1199"):
        store.plan(turns[1].id, IDENTITY, LAYOUT, upto=1200)


def test_rows_before_the_restored_boundary_are_not_asked_for_again(store):
    tokens, turns = grow(store, "a", [1000])
    plan = store.plan(turns[0].id, IDENTITY, LAYOUT)
    source = Toy(tokens + ids(50, 9), 1049)
    with store.writer("a", create=False, identity=IDENTITY, layout=LAYOUT) as writer:
        writer.commit(draft(source.tokens[1000:], 1049, restored=plan), source)
    assert min(start for _, start, _ in source.calls) == 999


def test_rows_computed_again_with_other_bits_replace_the_stored_ones(store):
    """Replay on another device may differ in the last bits: the pages must be those of the state saved with them."""
    tokens, turns = grow(store, "a", [700, 700])
    source = Toy(tokens + ids(10, 9), 1409, noise=5)
    with store.writer("a", create=False, identity=IDENTITY, layout=LAYOUT) as writer:
        report = writer.commit(draft(source.tokens[1400:], 1409), source)
    check(store.restore(store.plan(report.turn.id, IDENTITY, LAYOUT), IDENTITY, LAYOUT), source.tokens, noise=5)
    check(store.restore(store.plan(turns[1].id, IDENTITY, LAYOUT), IDENTITY, LAYOUT), tokens)


@pytest.mark.parametrize(
    ("tokens", "position", "meta"),
    [
        ([1, 2], 3, {}),
        ([1, 2], -1, {}),
        ([-1], 0, {}),
        ([2**32], 0, {}),
        (["x"], 0, {}),
        ([1], 0, {"a": object()}),
        ([1], 0, {1: 2}),
    ],
)
def test_a_turn_that_cannot_be_is_refused_and_leaves_nothing(store, tokens, position, meta):
    with store.writer("a", create=True, identity=IDENTITY, layout=LAYOUT) as writer:
        with pytest.raises(BadDraft):
            writer.commit(draft(tokens, position, meta=meta), Toy([], 0))
        assert writer.unsaved == 0
    assert store.sessions() == []


@pytest.mark.parametrize("change", ["missing", "undeclared", "shape", "dtype"])
def test_state_that_is_not_what_the_layout_declares_is_refused(store, change):
    toy = Toy([1, 2, 3], 2)
    arrays = toy.checkpoint()
    if change == "missing":
        del arrays["conv"]
    elif change == "undeclared":
        arrays["extra"] = arrays["conv"]
    elif change == "shape":
        arrays["conv"] = arrays["conv"][:, :2]
    else:
        arrays["conv"] = arrays["conv"].astype(np.float32)
    toy.checkpoint = lambda: arrays  # type: ignore[method-assign]
    with store.writer("a", create=True, identity=IDENTITY, layout=LAYOUT) as writer:
        with pytest.raises(BadDraft):
            writer.commit(draft([1, 2, 3], 2), toy)
        assert writer.unsaved == 0


def test_page_rows_of_the_wrong_shape_are_refused(store):
    toy = Toy([1, 2, 3], 2)
    toy.page_rows = lambda name, start, stop: np.zeros((2, 1, 6), np.uint16)  # type: ignore[method-assign]
    with store.writer("a", create=True, identity=IDENTITY, layout=LAYOUT) as writer, pytest.raises(BadDraft):
        writer.commit(draft([1, 2, 3], 2), toy)
    assert store.sessions() == []


def test_names(store):
    grow(store, "Ünïcode-1.2_x", [3])
    assert store.session("Ünïcode-1.2_x").name == "Ünïcode-1.2_x"
    # The same name in another Unicode form is the same session.
    assert store.exists("U\u0308ni\u0308code-1.2_x")
    for bad in ["", ".", "../x", "a/b", "-x", "a b", "a\n", "x" * 101, "\u202ea", "a\0"]:
        with pytest.raises(BadName):
            store.session(bad)
        with pytest.raises(BadName):
            store.writer(bad, create=True, identity=IDENTITY, layout=LAYOUT)


def test_create_and_resume_never_stand_in_for_each_other(store):
    grow(store, "a", [3])
    with pytest.raises(SessionExists):
        store.writer("a", create=True, identity=IDENTITY, layout=LAYOUT)
    with pytest.raises(SessionMissing):
        store.writer("b", create=False, identity=IDENTITY, layout=LAYOUT)
    # A session without a turn leaves nothing behind.
    with store.writer("c", create=True, identity=IDENTITY, layout=LAYOUT):
        pass
    assert [s.name for s in store.sessions()] == ["a"]


def test_fixed_data_and_meta(store):
    with store.writer(
        "a", create=True, identity=IDENTITY, layout=LAYOUT, fixed={"system": "s"}, meta={"title": "t"}
    ) as w:
        w.commit(draft([1], 1), Toy([1], 1))
    assert store.session("a").fixed == {"system": "s"}
    store.set_meta("a", {"title": "u"})
    assert store.session("a").meta == {"title": "u"}
    assert store.fork("a", "b").fixed == {"system": "s"}


def test_a_mark_is_no_number(store):
    _, turns = grow(store, "a", [3])
    for label in ("12", "-1"):
        with pytest.raises(BadName):
            store.mark("a", turns[0].id, label)


def test_going_back_to_an_earlier_turn(store):
    tokens, turns = grow(store, "a", [300, 300, 300])
    with store.writer("a", create=False, identity=IDENTITY, layout=LAYOUT) as writer:
        writer.set_head(turns[0].id)
        assert writer.head.id == turns[0].id
        assert [t.id for t in store.log("a")] == [t.id for t in turns]  # looking back loses nothing
        plan = store.plan(turns[0].id, IDENTITY, LAYOUT)
        other = tokens[:300] + ids(20, 77)
        report = writer.commit(draft(other[300:], 319, restored=plan), Toy(other, 319))
    assert [t.id for t in store.log("a")] == [turns[0].id, report.turn.id]
    check(store.restore(store.plan(report.turn.id, IDENTITY, LAYOUT), IDENTITY, LAYOUT), other)


def test_records_are_frozen(store):
    _, turns = grow(store, "a", [3])
    with pytest.raises(dataclasses.FrozenInstanceError):
        turns[0].position = 3
