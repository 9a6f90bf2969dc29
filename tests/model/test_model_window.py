"""A window gives the bits of plain decoding, whatever is in it and however much of it is accepted."""

from __future__ import annotations

import random

import pytest
import torch

from k3cli.model.network import K3Model
from k3cli.model.weights import load_model
from tests.model.states import Stored, decode


def ids_of(model: K3Model, count: int, seed: int) -> torch.Tensor:
    return torch.randint(0, model.config.vocab, (count,), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module", params=[("k3", 8), ("k3", 3), ("k3", 1), ("linear", 8), ("linear", 5)], ids=str)
def model(request: pytest.FixtureRequest, checkpoints) -> K3Model:
    name, window = request.param
    return load_model(checkpoints[name], window=window).model


def test_every_length_and_every_accepted_count(model: K3Model):
    prompt, draft = ids_of(model, 13, 0), ids_of(model, model.window, 1)
    base = model.new_state()
    model.prefill(prompt, base)
    plain, states = base.fork(), [base.fork()]
    rows = []
    for i in range(model.window):
        rows.append(decode(model, draft[i : i + 1], plain))
        states.append(plain.fork())
    expected = torch.cat(rows)
    for n in range(1, model.window + 1):
        logits, log = model.verify(draft[:n], base)
        assert torch.equal(logits, expected[:n])
        for accepted in range(n + 1):
            fork = base.fork()
            model.commit(fork, log, accepted)
            assert Stored(fork) == Stored(states[accepted]), (n, accepted)
    assert Stored(base) == Stored(states[0])


def test_chained_random_windows(model: K3Model):
    """Random windows with random accepted counts, rejected drafts thrown in, across a page boundary."""
    dice = random.Random(3)
    start, total = 470, 90
    truth = ids_of(model, start + total, 4)
    wrong = ids_of(model, 4096, 5)
    plain = model.new_state()
    model.prefill(truth[:start], plain)
    windowed = plain.fork()
    expected = decode(model, truth[start:], plain)
    while windowed.position < start + total:
        at = windowed.position
        n = min(dice.randint(1, model.window), start + total - at)
        keep = dice.randint(0, n)
        pick = dice.randrange(4000)
        draft = torch.cat((truth[at : at + keep], wrong[pick : pick + n - keep]))
        logits, log = model.verify(draft, windowed)
        # Row i depends on rows before it only: rows up to the first wrong token are those of plain decoding.
        good = min(keep, n)
        assert torch.equal(logits[:good], expected[at - start : at - start + good])
        model.commit(windowed, log, keep)
    assert Stored(windowed) == Stored(plain)


def test_forks_do_not_see_each_other(model: K3Model):
    start = 509
    state = model.new_state()
    model.prefill(ids_of(model, start, 8), state)
    left, right = state.fork(), state.fork()
    a, b = ids_of(model, 10, 9), ids_of(model, 10, 10)
    for i in range(10):
        decode(model, a[i : i + 1], left)
        decode(model, b[i : i + 1], right)
    alone_left, alone_right = state.fork(), state.fork()
    decode(model, a, alone_left)
    decode(model, b, alone_right)
    assert Stored(left) == Stored(alone_left)
    assert Stored(right) == Stored(alone_right)
    assert Stored(left) != Stored(right)
    assert state.position == start


def test_prefill_repeats_its_bits_whatever_lies_in_memory(model: K3Model):
    ids = ids_of(model, 150, 11)
    results = []
    for shift in range(4):
        junk = [torch.empty(17 * shift + i + 1) for i in range(shift)]
        state = model.new_state()
        rows = [model.prefill(part, state, logits="all") for part in ids.split([64, 1, 85])]
        results.append((torch.cat(rows), state, junk))
    for rows, state, _ in results[1:]:
        assert torch.equal(rows, results[0][0])
        assert Stored(state) == Stored(results[0][1])


def test_empty_prefill_changes_nothing(model: K3Model):
    state = model.new_state()
    model.prefill(ids_of(model, 5, 12), state)
    before = state.fork()
    assert model.prefill(torch.empty(0, dtype=torch.int64), state) is None
    assert Stored(state) == Stored(before)
    assert model.prefill(ids_of(model, 2, 13), state, logits="none") is None
    assert state.position == 7


def test_last_logits_are_those_of_all(model: K3Model):
    ids = ids_of(model, 70, 14)
    every = model.prefill(ids, model.new_state(), logits="all")
    last = model.prefill(ids, model.new_state(), logits="last")
    assert last.shape == every.shape[1:]
    torch.testing.assert_close(last, every[-1], atol=1e-5, rtol=1e-5)


def test_a_failing_prefill_leaves_the_state(model: K3Model):
    state = model.new_state()
    model.prefill(ids_of(model, 9, 15), state)
    before = state.fork()
    with pytest.raises(IndexError):
        model.prefill(torch.tensor([1, model.config.vocab]), state)
    assert Stored(state) == Stored(before)


def test_windows_of_two_states_may_lie_over_each_other(model: K3Model):
    """A window stays good for its commit while another state is verified, forked and prefilled in between."""
    left, right = model.new_state(), model.new_state()
    model.prefill(ids_of(model, 30, 20), left)
    model.prefill(ids_of(model, 40, 21), right)
    plain = {"left": left.fork(), "right": right.fork()}
    draft = {"left": ids_of(model, 60, 22), "right": ids_of(model, 60, 23)}
    expected = {name: decode(model, draft[name], state) for name, state in plain.items()}
    dice, done, size = random.Random(5), 0, model.window
    while done + size < 60:
        n = dice.randint(1, size)
        keep = dice.randint(1, n)
        logs = {}
        for name, state in (("left", left), ("right", right)):
            rows, logs[name] = model.verify(draft[name][done : done + n], state)
            assert torch.equal(rows, expected[name][done : done + n])
        twin = left.fork()
        model.prefill(ids_of(model, 3, 24), twin)
        for name, state in dice.sample((("left", left), ("right", right)), 2):
            model.commit(state, logs[name], keep)
        done += keep
    for name, state in (("left", left), ("right", right)):
        decode(model, draft[name][done:], state)
        assert Stored(state) == Stored(plain[name])
