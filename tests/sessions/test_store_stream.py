"""State read while it is copied: the same bits as a restore, within its memory, and no failure passes unseen."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from k3_sessions import DTYPES, HASH_BLOCK, Damaged, SessionChanged, Store, StreamedState, streaming

from tests.sessions.toy import CONFIG, IDENTITY, LAYOUT, check, grow

LENGTHS = [700, 3, 40, 900, 1, 400]
PAGE_FIELDS = [f for f in LAYOUT.fields if f.scope == "page"]


class Copied:
    """What a caller of `stream` has at the end, in steps of so many rows."""

    def __init__(self, state: StreamedState, step: int) -> None:
        self.position = state.position
        fields = [f for f in LAYOUT.fields if f.scope == "checkpoint"]
        self.fields = {f.name: np.zeros((len(f.layers), *f.shape), DTYPES[f.dtype]) for f in fields}
        for name, first, part in state.checkpoint_parts():
            self.fields[name][first : first + len(part)] = part
        rows: dict[str, list[np.ndarray]] = {f.name: [] for f in PAGE_FIELDS}
        for start in range(0, self.position, step):
            for f in PAGE_FIELDS:
                rows[f.name].append(state.page_rows(f.name, start, min(start + step, self.position)).copy())
        self.rows = {name: np.concatenate(parts, axis=1) for name, parts in rows.items()}

    def checkpoint(self) -> dict[str, np.ndarray]:
        return self.fields

    def page_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        return self.rows[name][:, start:stop]


@pytest.fixture
def stored(tmp_path):
    store = Store.open(tmp_path / "s", config=CONFIG)
    tokens, turns = grow(store, "a", LENGTHS)
    return store, tokens, turns


def plan_of(store, turn):
    return store.plan(turn.id, IDENTITY, LAYOUT)


def spoil(store, tmp_path, turn, number):
    """Flip a bit of page `number` of a turn's branch."""
    page = store.catalog.pages(store.catalog.path(turn.id))[number]
    path = tmp_path / "s/objects" / page.blob.id[:2] / page.blob.id[2:]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("step", [HASH_BLOCK, 128, 100, 700, 5000])
def test_a_stream_gives_the_bits_of_a_restore(stored, step):
    store, tokens, turns = stored
    with store.stream(plan_of(store, turns[-1]), IDENTITY, LAYOUT) as state:
        assert isinstance(state, StreamedState)
        check(Copied(state, step), tokens)
    with store.stream(plan_of(store, turns[-1]), IDENTITY, LAYOUT) as state:
        whole = dict(state.checkpoint())
        assert state.checkpoint()["conv"] is whole["conv"]
    assert (
        whole["recurrent"].tobytes()
        == store.restore(plan_of(store, turns[-1]), IDENTITY, LAYOUT).checkpoint()["recurrent"].tobytes()
    )


def test_memory_does_not_grow_with_the_state(tmp_path, monkeypatch):
    made = []
    new = streaming.new_memory
    monkeypatch.setattr(streaming, "new_memory", lambda *args: made.append(args[0]) or new(*args))
    piece = HASH_BLOCK * 2 * (6 * 2 + 3 * 4)
    config = dataclasses.replace(CONFIG, staging_bytes=3 * piece, threads=8)
    store = Store.open(tmp_path / "s", config=config)
    tokens, turns = grow(store, "a", [40 * HASH_BLOCK])
    with store.stream(plan_of(store, turns[-1]), IDENTITY, LAYOUT) as state:
        check(Copied(state, HASH_BLOCK), tokens)
    assert len(made) == 3
    assert max(made) == piece


@pytest.mark.parametrize("number", [0, 3, -1])
def test_damage_anywhere_ends_the_block_with_it(stored, tmp_path, number):
    store, _, turns = stored
    spoil(store, tmp_path, turns[-1], number)
    with (
        pytest.raises(Damaged, match="does not match its hash"),
        store.stream(plan_of(store, turns[-1]), IDENTITY, LAYOUT) as state,
    ):
        Copied(state, HASH_BLOCK)
    with store.alone(wait=0.0):  # the store is free again
        pass
    assert plan_of(store, turns[-1]).damaged


def test_a_caller_that_stops_early_leaves_nothing_behind(stored):
    store, _, turns = stored
    with store.stream(plan_of(store, turns[-1]), IDENTITY, LAYOUT) as state:
        next(iter(state.checkpoint_parts()))
    with store.alone(wait=0.0):
        pass
    with pytest.raises(KeyError), store.stream(plan_of(store, turns[-1]), IDENTITY, LAYOUT) as state:
        raise KeyError
    with store.alone(wait=0.0):
        pass


def test_a_checkpoint_dropped_meanwhile_is_no_damage(stored, tmp_path):
    store, _, turns = stored
    plan = plan_of(store, turns[-1])
    Store.open(tmp_path / "s", config=CONFIG).remove("a")
    with pytest.raises(SessionChanged), store.stream(plan, IDENTITY, LAYOUT) as state:
        Copied(state, HASH_BLOCK)


def test_a_plan_without_a_turn_streams_nothing(stored):
    store, _, turns = stored
    plan = store.plan(turns[0].id, IDENTITY, LAYOUT, upto=0)
    with store.stream(plan, IDENTITY, LAYOUT) as state:
        assert (state.position, dict(state.checkpoint())) == (0, {})
