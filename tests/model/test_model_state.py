"""State across the store's boundary: bits come back, half a state never does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from k3cli.errors import DamagedError
from k3cli.model.network import K3Model
from k3cli.model.state import State
from k3cli.model.weights import load_model


@dataclass
class Stored:
    """What a store hands back: plain arrays, as misaligned as arrays can be."""

    position: int
    fields: dict[str, np.ndarray]
    rows: dict[str, np.ndarray]

    def checkpoint(self) -> dict[str, np.ndarray]:
        return self.fields

    def page_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        return self.rows[name][:, start:stop]


def misaligned(array: np.ndarray) -> np.ndarray:
    raw = np.empty(array.nbytes + array.itemsize, np.uint8)
    shifted = np.frombuffer(raw.data, array.dtype, array.size, array.itemsize).reshape(array.shape)
    shifted[...] = array
    return shifted


def stored(state: State) -> Stored:
    names = [field.name for field in state.layout.fields if field.scope == "page"]
    return Stored(
        state.position,
        {name: misaligned(array) for name, array in state.checkpoint().items()},
        {name: misaligned(state.page_rows(name, 0, state.position)) for name in names},
    )


def run(model: K3Model, state: State, count: int, seed: int) -> torch.Tensor:
    ids = torch.randint(0, model.config.vocab, (count,), generator=torch.Generator().manual_seed(seed))
    rows = []
    for i in range(count):
        logits, log = model.verify(ids[i : i + 1], state)
        model.commit(state, log, 1)
        rows.append(logits)
    return torch.cat(rows)


@pytest.fixture(
    scope="module", params=[("k3", torch.float32), ("k3", torch.bfloat16), ("linear", torch.float32)], ids=str
)
def model(request: pytest.FixtureRequest, checkpoints) -> K3Model:
    name, dtype = request.param
    return load_model(checkpoints[name], dtype=dtype).model


@pytest.mark.parametrize("position", [1, 7, 511, 512, 513, 1030])
def test_round_trip_continues_bit_for_bit(model: K3Model, position: int):
    live = model.new_state()
    ids = torch.randint(0, model.config.vocab, (position,), generator=torch.Generator().manual_seed(1))
    model.prefill(ids, live)
    back = model.new_state()
    back.load(stored(live))
    assert back.position == position
    for name, array in live.checkpoint().items():
        assert np.array_equal(array, back.checkpoint()[name]), name
    assert torch.equal(run(model, live, 5, 2), run(model, back, 5, 2))
    more = ids[: min(position, 40)]
    assert torch.equal(model.prefill(more, live), model.prefill(more, back))


def test_arrays_fit_the_layout(model: K3Model):
    state = model.new_state()
    model.prefill(torch.arange(20), state)
    for field in state.layout.fields:
        if field.scope == "checkpoint":
            array = state.checkpoint()[field.name]
            assert array.shape == (len(field.layers), *field.shape)
        else:
            array = state.page_rows(field.name, 3, 17)
            assert array.shape == (len(field.layers), 14, *field.shape)
        assert array.dtype == (np.uint16 if field.dtype == "bfloat16" else np.float32)
        assert array.flags.c_contiguous
    with pytest.raises(ValueError, match="position 20"):
        state.page_rows("k_pe", 0, 21)


def test_host_copies_do_not_change(model: K3Model):
    state = model.new_state()
    model.prefill(torch.arange(20), state)
    held = {**state.checkpoint(), "k_pe": state.page_rows("k_pe", 0, 20)}
    copies = {name: array.copy() for name, array in held.items()}
    run(model, state, 4, 3)
    assert all(np.array_equal(held[name], copies[name]) for name in held)


@pytest.mark.parametrize("damage", ["missing", "unknown", "shape", "dtype", "rows"])
def test_load_is_all_or_nothing(model: K3Model, damage: str):
    state = model.new_state()
    model.prefill(torch.arange(20), state)
    other = model.new_state()
    model.prefill(torch.arange(30) + 5, other)
    broken = stored(other)
    if damage == "missing":
        del broken.fields["conv_k"]
    elif damage == "unknown":
        broken.fields["mystery"] = broken.fields["recurrent"]
    elif damage == "shape":
        broken.fields["recurrent"] = broken.fields["recurrent"][:, :-1]
    elif damage == "dtype":
        broken.fields["recurrent"] = broken.fields["recurrent"].astype(np.float64)
    else:
        broken.rows["k_pe"] = broken.rows["k_pe"][:, :-1]
    before = stored(state)
    with pytest.raises(DamagedError):
        state.load(broken)
    after = stored(state)
    assert after.position == before.position
    assert all(np.array_equal(after.fields[name], before.fields[name]) for name in before.fields)
    assert all(np.array_equal(after.rows[name], before.rows[name]) for name in before.rows)


@dataclass
class Streamed(Stored):
    """What a store hands over while it is still reading: the checkpoint in parts, and at the end perhaps damage."""

    broken_from: int = 1 << 30

    def checkpoint_parts(self) -> Iterator[tuple[str, int, np.ndarray]]:
        for name, array in self.fields.items():
            for first in range(len(array)):
                yield name, first, array[first : first + 1]

    def page_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        if stop > self.broken_from:
            raise DamagedError("the last page")
        return super().page_rows(name, start, stop)


def test_a_streamed_state_is_taken_over_whole_or_not_at_all(model: K3Model):
    state, other = model.new_state(), model.new_state()
    model.prefill(torch.arange(20), state)
    model.prefill((torch.arange(1100) + 5) % model.config.vocab, other)
    source = stored(other)
    before, free = stored(state), model.pool.free
    for broken_from in (1050, 3):
        with pytest.raises(DamagedError, match="last page"):
            state.load(Streamed(source.position, source.fields, source.rows, broken_from))
        parts = dict(source.fields)
        parts["recurrent"] = parts["recurrent"][:-1]
        with pytest.raises(DamagedError, match="layers"):
            state.load(Streamed(source.position, parts, source.rows))
        assert model.pool.free == free
        assert stored(state).position == before.position
        assert all(np.array_equal(stored(state).fields[name], before.fields[name]) for name in before.fields)
    state.load(Streamed(source.position, source.fields, source.rows))
    after = stored(state)
    assert all(np.array_equal(after.fields[name], source.fields[name]) for name in source.fields)
    assert all(np.array_equal(after.rows[name], source.rows[name]) for name in source.rows)


def test_forks_share_everything_until_they_write(model: K3Model):
    state, pool = model.new_state(), model.pool
    ids = torch.arange(1100) % model.config.vocab
    model.prefill(ids, state)
    before = pool.free
    forks = [state.fork() for _ in range(3)]
    assert pool.free == before
    assert all(fork.pages == state.pages and fork.slot == state.slot for fork in forks)
    old, kept = state.pages.copy(), stored(state)
    run(model, forks[0], 2, 4)
    assert forks[0].pages[:2] == old[:2]
    assert forks[0].pages[2] != old[2]
    assert forks[0].slot != state.slot
    assert pool.free == before - 1 - pool.geometry.run
    for other in (state, *forks[1:]):
        again = stored(other)
        assert all(np.array_equal(again.fields[name], kept.fields[name]) for name in kept.fields)
        assert all(np.array_equal(again.rows[name], kept.rows[name]) for name in kept.rows)
    del forks, other
    assert pool.free == before
