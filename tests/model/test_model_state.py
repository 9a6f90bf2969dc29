"""State across the store's boundary: bits come back, half a state never does."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from k3cli.errors import DamagedError
from k3cli.model.network import K3Model
from k3cli.model.state import State
from k3cli.model.weights import load_model
from tests.model.states import Stored, decode


def misaligned(array: np.ndarray) -> np.ndarray:
    raw = np.empty(array.nbytes + array.itemsize, np.uint8)
    shifted = np.frombuffer(raw.data, array.dtype, array.size, array.itemsize).reshape(array.shape)
    shifted[...] = array
    return shifted


def stored(state: State) -> Stored:
    return Stored(state, misaligned)


def run(model: K3Model, state: State, count: int, seed: int) -> torch.Tensor:
    ids = torch.randint(0, model.config.vocab, (count,), generator=torch.Generator().manual_seed(seed))
    return decode(model, ids, state)


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
    assert stored(state) == before


class Streamed(Stored):
    """What a store hands over while it is still reading: the checkpoint in parts, and at the end perhaps damage."""

    def __init__(self, state: State, broken_from: int = 1 << 30) -> None:
        super().__init__(state, misaligned)
        self._broken_from = broken_from

    def checkpoint_parts(self) -> Iterator[tuple[str, int, np.ndarray]]:
        for name, array in self.fields.items():
            for first in range(len(array)):
                yield name, first, array[first : first + 1]

    def page_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        if stop > self._broken_from:
            raise DamagedError("the last page")
        return super().page_rows(name, start, stop)


def test_a_streamed_state_is_taken_over_whole_or_not_at_all(model: K3Model):
    state, other = model.new_state(), model.new_state()
    model.prefill(torch.arange(20), state)
    model.prefill((torch.arange(1100) + 5) % model.config.vocab, other)
    before, free = stored(state), model.pool.free
    short = Streamed(other)
    short.fields["recurrent"] = short.fields["recurrent"][:-1]
    for broken_from in (1050, 3):
        with pytest.raises(DamagedError, match="last page"):
            state.load(Streamed(other, broken_from))
        with pytest.raises(DamagedError, match="layers"):
            state.load(short)
        assert model.pool.free == free
        assert stored(state) == before
    state.load(Streamed(other))
    assert stored(state) == stored(other)


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
        assert stored(other) == kept
    del forks, other
    assert pool.free == before
