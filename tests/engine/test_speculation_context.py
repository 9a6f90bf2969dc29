"""What a draft model has read is kept with a turn: after a resume or a fork it drafts as if nothing had ended."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from k3_sessions.blobs import path_of
from k3_sessions.config import StoreConfig, ThinningPolicy
from k3_sessions.hints import HINT_BYTES
from k3_sessions.store import Store

from k3cli.config import NANO
from k3cli.engine import events as ev
from k3cli.engine.conversation import Conversation
from k3cli.engine.drafting import dspark
from k3cli.engine.drafting.choose import OFF, choose
from k3cli.engine.drafting.dspark import KEPT_BYTES, KEPT_ROWS, DSparkDrafter
from k3cli.engine.drafting.policy import Policy
from k3cli.engine.engine import Engine
from k3cli.engine.sampling import Sampling
from k3cli.engine.timeline import Timeline

TEXTS = ("How does k3 keep sessions?", "What is a turn?", "How do I fork a session?")
MANY = 28


@pytest.fixture(scope="module")
def nano() -> Iterator[Engine]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    engine = Engine.load(NANO, device="cpu")
    engine.speculate(choose("dspark"))
    yield engine
    torch.set_num_threads(before)


@pytest.fixture
def drafted(nano: Engine, reckless) -> Iterator[Engine]:
    """Every draft is verified, so that the number of steps does not depend on a clock."""
    nano.speculate(choose("dspark"))
    yield nano
    nano.speculate(OFF)


def new_store(folder: Path, **more: Any) -> Store:
    return Store.open(folder, config=StoreConfig(free_floor_bytes=0, free_floor_share=0.0, **more))


def say(conversation: Conversation, n: int) -> tuple[int, int, int]:
    """(steps, tokens, rows of context) of turn n; nothing but the answer is told."""
    drawn = Sampling(temperature=0, max_tokens=MANY, seed=1)
    events = list(conversation.turn([{"role": "user", "content": TEXTS[n]}], drawn))
    assert not [event for event in events if isinstance(event, ev.Notice)]
    (told,) = [event for event in events if isinstance(event, ev.Speculation)]
    return told.steps, told.tokens, told.inputs["draft_context"]


def ids(store: Store, name: str) -> list[int]:
    return [int(token) for token in store.tokens(store.session(name).head)]


def drafter_of(timeline: Timeline) -> Any:
    assert timeline.speculator is not None
    return timeline.speculator.drafter


@pytest.fixture(scope="module")
def made() -> dict[str, Any]:
    """What is made once: see `unbroken`."""
    return {}


@pytest.fixture
def unbroken(drafted: Engine, tmp_path: Path, made: dict[str, Any]) -> tuple[list[tuple[int, int, int]], list[int]]:
    """The three turns in one piece: (steps, tokens, rows of context) of each, and all ids."""
    if made:
        return made["rows"], made["ids"]
    store = new_store(tmp_path / "unbroken")
    with Conversation.open(drafted, store, "a", mode="create") as conversation:
        rows = [say(conversation, n) for n in range(3)]
        assert rows[-1][2] == conversation._timeline.position < KEPT_ROWS
    made.update(rows=rows, ids=ids(store, "a"))
    return rows, made["ids"]


def test_after_a_resume_and_a_fork_it_takes_the_steps_of_a_session_that_never_ended(drafted, unbroken, tmp_path):
    rows, tokens = unbroken
    store = new_store(tmp_path / "s")
    with Conversation.open(drafted, store, "a", mode="create") as conversation:
        assert say(conversation, 0) == rows[0]
    with Conversation.open(drafted, store, "a", mode="fork", new="b") as conversation:
        assert say(conversation, 1) == rows[1]
    with Conversation.open(drafted, store, "a", mode="resume") as conversation:
        assert say(conversation, 1) == rows[1]
    for name in ("a", "b"):
        with Conversation.open(drafted, store, name, mode="resume") as conversation:
            assert say(conversation, 2) == rows[2]
        assert ids(store, name) == tokens
    with Conversation.open(drafted, store, "a", mode="resume") as conversation:
        conversation.undo()
        assert say(conversation, 2) == rows[2]


def test_what_came_while_it_slept_is_a_gap_in_its_context(drafted, unbroken, tmp_path, monkeypatch):
    """Three steps of five asleep: fewer of the drafts are right, and the tokens are the same."""
    rows, tokens = unbroken
    nights = itertools.cycle([False, False, True, True, True])
    monkeypatch.setattr(Policy, "asleep", lambda self: next(nights))
    store = new_store(tmp_path / "s")
    with Conversation.open(drafted, store, "a", mode="create") as conversation:
        found = [say(conversation, n) for n in range(3)]
        assert conversation._timeline.speculator.failure == ""
    assert ids(store, "a") == tokens
    before, after = (sum(steps for steps, _, _ in turns) for turns in (rows, found))
    assert before < after < sum(many for _, many, _ in found) - 20, "drafts come after a sleep"
    assert rows[-1][2] - 40 < found[-1][2] < rows[-1][2]


def test_rows_on_both_sides_of_a_gap_keep_their_places():
    places = []
    model: Any = SimpleNamespace(
        new_cache=lambda: SimpleNamespace(count=0),
        extend=lambda cache, rows, start: places.append((start, len(rows))),
    )
    drafter = DSparkDrafter(model)
    for start, rows in ((0, 3), (3, 1), (10, 2)):
        drafter.observe([7] * rows, start, torch.zeros(rows, 4))
    assert drafter.context_rows == 2, "the others are in the cache, which counts for itself"
    drafter._flush()
    assert places == [(0, 4), (10, 2)]


def test_only_the_newest_rows_are_kept(drafted, unbroken, tmp_path, monkeypatch):
    rows, tokens = unbroken
    monkeypatch.setattr(dspark, "KEPT_ROWS", 32)
    store = new_store(tmp_path / "s")
    for n in range(3):
        with Conversation.open(drafted, store, "a", mode="resume" if n else "create") as conversation:
            before = conversation._timeline.position
            steps, count, context = say(conversation, n)
            assert context == min(before, 32) + conversation._timeline.position - before
            assert count == rows[n][1]
            assert steps <= 1.25 * rows[n][0]
    assert ids(store, "a") == tokens


def test_they_are_bounded_whatever_a_draft_weighs(nano, monkeypatch):
    nano.speculate(choose("dspark"))
    drafter = drafter_of(nano.timeline())
    layers, width = drafter.model.config.layers, drafter.model.width
    drafter._cache, drafter._end = dspark.DraftCache(torch.zeros(layers, 300, width), 300), 300
    for most, rows in ((KEPT_BYTES, KEPT_ROWS), (10 * layers * width * 4 + 7, 10)):
        monkeypatch.setattr(dspark, "KEPT_BYTES", most)
        (kept,) = drafter.keep(300).values()
        assert kept.shape == (layers, rows, width)
        assert kept.nbytes <= most <= HINT_BYTES
    nano.speculate(OFF)


def test_a_turn_whose_state_was_thinned_is_replayed_with_what_its_boundary_kept(drafted, unbroken, tmp_path):
    rows, tokens = unbroken
    store = new_store(tmp_path / "s", thinning=ThinningPolicy(last=1, max_kept=1, log_spaced=False))
    with Conversation.open(drafted, store, "a", mode="create") as conversation:
        say(conversation, 0)
        store.mark("a", conversation.turn_id, "kept")
        say(conversation, 1)
        second = conversation.turn_id
        say(conversation, 2)
    told: list[ev.Event] = []
    with Conversation.open(drafted, store, "a", mode="resume", at=second, emit=told.append) as conversation:
        (opened,) = [event for event in told if isinstance(event, ev.SessionOpened)]
        assert min(opened.reused, opened.replayed) > 0
        assert drafter_of(conversation._timeline).context_rows == conversation._timeline.position
        assert say(conversation, 2) == rows[2]
    assert ids(store, "a") == tokens


@pytest.mark.parametrize("call", ["verify", "commit"])
def test_after_a_crash_inside_a_window_it_drafts_as_if_nothing_had_happened(
    call, drafted, unbroken, tmp_path, monkeypatch
):
    rows, tokens = unbroken
    store = new_store(tmp_path / "s")
    whole, left = getattr(drafted.model, call), 3

    def broken(*args: Any) -> Any:
        nonlocal left
        left -= 1
        found = whole(*args)
        if left == 0:
            raise RuntimeError("the device failed")
        return found

    with Conversation.open(drafted, store, "a", mode="create") as conversation:
        assert say(conversation, 0) == rows[0]
        monkeypatch.setattr(drafted.model, call, broken)
        with pytest.raises(RuntimeError, match="device failed"):
            say(conversation, 1)
        monkeypatch.setattr(drafted.model, call, whole)
        assert say(conversation, 1) == rows[1]
        assert say(conversation, 2) == rows[2]
    assert ids(store, "a") == tokens


def test_another_draft_passes_them_over(drafted, unbroken, tmp_path, monkeypatch):
    _, tokens = unbroken
    store = new_store(tmp_path / "s")
    with Conversation.open(drafted, store, "a", mode="create") as conversation:
        say(conversation, 0)
    monkeypatch.setattr(drafter_of(drafted.timeline()).model, "digest", "0" * 64)
    with Conversation.open(drafted, store, "a", mode="resume") as conversation:
        assert drafter_of(conversation._timeline).context_rows == 0
        say(conversation, 1)
        say(conversation, 2)
    assert ids(store, "a") == tokens


def test_damaged_ones_are_told_and_cost_no_token(drafted, unbroken, tmp_path):
    _, tokens = unbroken
    store = new_store(tmp_path / "s")
    with Conversation.open(drafted, store, "a", mode="create") as conversation:
        say(conversation, 0)
    hints = store.catalog.turn(store.session("a").head).hints
    assert hints is not None
    file = tmp_path / "s" / path_of(hints.id)
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    told: list[ev.Event] = []
    with Conversation.open(drafted, store, "a", mode="resume", emit=told.append) as conversation:
        assert [event.code for event in told if isinstance(event, ev.Notice)] == ["draft-context-unusable"]
        assert drafter_of(conversation._timeline).context_rows == 0
        say(conversation, 1)
        say(conversation, 2)
    assert ids(store, "a") == tokens


def test_without_drafts_nothing_is_kept_and_nothing_is_needed(drafted, unbroken, tmp_path):
    rows, tokens = unbroken
    store = new_store(tmp_path / "s")
    drafted.speculate(OFF)
    with Conversation.open(drafted, store, "a", mode="create") as conversation:
        list(conversation.turn([{"role": "user", "content": TEXTS[0]}], Sampling(temperature=0, max_tokens=MANY)))
    assert store.catalog.turn(store.session("a").head).hints is None
    drafted.speculate(choose("dspark"))
    with Conversation.open(drafted, store, "a", mode="resume") as conversation:
        _, count, context = say(conversation, 1)
        assert count == rows[1][1]
        assert context < rows[1][2]
        say(conversation, 2)
    assert ids(store, "a") == tokens


def test_rows_of_a_narrow_type_come_back_as_they_were(tmp_path):
    engine = Engine.load(NANO, device="cpu", dtype="bfloat16")
    engine.speculate(choose("both"))
    timeline = engine.timeline([5, 6, 7, 8, 9])
    for _ in timeline.prefill():
        pass
    kept = timeline.snapshot().hints()
    rows, account = (kept[name] for name in sorted(kept))
    assert (rows.dtype, account.dtype) == ("uint16", "float32")
    again = engine.timeline([5, 6, 7, 8, 9])
    assert again.speculator is not None
    again.speculator.recall(kept, 5)
    mine, other = drafter_of(timeline).model, drafter_of(again).model
    assert isinstance(mine, DSparkDrafter)
    assert other.context_rows == 5
    assert torch.equal(mine._cache.last(9), other._cache.last(9))
    mine._end = 4  # its context does not reach the state
    assert timeline.snapshot().hints() == {}
