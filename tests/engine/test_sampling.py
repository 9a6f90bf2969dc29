"""Noise is a function of (seed, position, id); draws follow the softmax; filters and ties are deterministic."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from k3cli.engine.sampling import MAX_SEED, Sampling, draw, gumbel, keep_mask, margin, scores, uniform
from k3cli.errors import K3Error, UsageError


def test_uniform_is_splitmix64_in_exact_integers() -> None:
    mask = (1 << 64) - 1

    def mix(z: int) -> int:
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)

    step = 0x9E3779B97F4A7C15
    for seed, position in ((0, 0), (7, 1), (MAX_SEED, 1_048_575)):
        key = mix((mix((seed + step) & mask) + (position + 1) * step) & mask)
        want = [((mix((key + (i + 1) * step) & mask) >> 11) + 0.5) * 2.0**-53 for i in range(50)]
        assert uniform(seed, position, 50).tolist() == want


@given(seed=st.integers(0, MAX_SEED), position=st.integers(0, 1 << 20))
@settings(max_examples=30, deadline=None)
def test_noise_does_not_depend_on_vocabulary_length(seed: int, position: int) -> None:
    assert torch.equal(uniform(seed, position, 300)[:37], uniform(seed, position, 37))


def test_neighbouring_seeds_positions_and_ids_are_uncorrelated() -> None:
    base = uniform(1, 5, 20_000) - 0.5
    for other in (uniform(2, 5, 20_000), uniform(1, 6, 20_000), uniform(1, 5, 20_001)[1:]):
        correlation = float((base * (other - 0.5)).mean() * 12)
        assert abs(correlation) < 0.03
    counts = torch.histc(uniform(3, 9, 100_000).float(), bins=20, min=0, max=1)
    assert float(((counts - 5000) ** 2 / 5000).sum()) < 45  # chi-square, 19 degrees of freedom, p about 0.001


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax(temperature: float) -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5, 1.5])
    n = 6000
    sampling = Sampling(temperature=temperature, seed=11)
    ids = draw(logits.expand(n, -1), range(n), sampling)
    got = torch.bincount(torch.tensor(ids), minlength=6).double()
    want = torch.softmax(logits.double() / temperature, 0) * n
    assert float(((got - want) ** 2 / want).sum()) < 20.5  # 5 degrees of freedom, p about 0.001


def test_a_row_is_the_same_in_any_batch() -> None:
    logits = torch.randn(8, 1003, generator=torch.Generator().manual_seed(0))
    sampling = Sampling(temperature=0.7, top_p=0.9, top_k=50, min_p=0.01, seed=3)
    together = draw(logits, range(100, 108), sampling)
    assert together == [draw(logits[i : i + 1], [100 + i], sampling)[0] for i in range(8)]
    assert together[::-1] == draw(logits.flip(0), list(range(107, 99, -1)), sampling)
    for i in range(8):
        assert torch.equal(scores(logits[i], 100 + i, sampling), scores(logits[i].clone(), 100 + i, sampling))


def test_the_seed_and_the_position_both_matter() -> None:
    logits = torch.zeros(200, 64)
    ids = draw(logits, range(200), Sampling(seed=1))
    assert len(set(ids)) > 30
    assert ids != draw(logits, range(200), Sampling(seed=2))
    assert ids[1:] == draw(logits[1:], range(1, 200), Sampling(seed=1))


def test_greedy_takes_the_lowest_id_of_a_tie() -> None:
    logits = torch.full((1, 500), -1.0)
    logits[0, [490, 77, 200]] = 3.0
    assert draw(logits, [0], Sampling(temperature=0, seed=5)) == [77]
    assert margin(logits[0], 0, Sampling(temperature=0)) == 0.0


def test_filters_keep_what_they_say() -> None:
    logits = torch.log(torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64))

    def kept(**options: float) -> list[int]:
        mask = keep_mask(logits, Sampling(**options))
        return list(range(4)) if mask is None else mask.nonzero()[:, 0].tolist()

    assert kept() == [0, 1, 2, 3]
    assert kept(top_k=2) == [0, 1]
    assert kept(top_p=0.39) == [0]
    assert kept(top_p=0.5) == [0, 1]
    assert kept(top_p=0.71) == [0, 1, 2]
    assert kept(min_p=0.45) == [0, 1, 2]
    assert kept(min_p=1.0) == [0]
    # top_p acts on what top_k left: 0.4 / 0.7 = 0.571
    assert kept(top_k=2, top_p=0.56) == [0]
    assert kept(top_k=2, top_p=0.58) == [0, 1]
    ties = torch.zeros(6, dtype=torch.float64)
    mask = keep_mask(ties, Sampling(top_k=2))
    assert mask is not None
    assert mask.tolist() == [True, True, False, False, False, False]


def test_filtered_ids_are_never_drawn_and_the_rest_keep_their_noise() -> None:
    logits = torch.randn(40, generator=torch.Generator().manual_seed(1))
    full, some = Sampling(seed=9), Sampling(seed=9, top_k=5)
    allowed = set(torch.topk(logits, 5).indices.tolist())
    ids = draw(logits.expand(300, -1), range(300), some)
    assert set(ids) <= allowed
    free = draw(logits.expand(300, -1), range(300), full)
    assert all(a == b for a, b in zip(ids, free, strict=True) if b in allowed)
    assert margin(logits, 0, Sampling(seed=9, top_k=1)) == math.inf


def test_margin_is_the_gap_of_the_perturbed_scores() -> None:
    logits = torch.randn(64, generator=torch.Generator().manual_seed(2))
    sampling = Sampling(temperature=0.5, seed=4)
    perturbed = logits.double() / 0.5 + gumbel(4, 17, 64)
    best = perturbed.sort(descending=True).values
    assert margin(logits, 17, sampling) == pytest.approx(float(best[0] - best[1]))


def test_what_is_drawn_is_waited_for_once() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(2))
    plan, waits = Sampling(seed=5), []
    assert draw(logits, [4, 5, 6], plan, lambda: waits.append(1)) == draw(logits, [4, 5, 6], plan)
    assert waits == [1]

    def lost() -> None:
        raise K3Error("a rank is gone")

    with pytest.raises(K3Error, match="a rank is gone"):
        draw(logits, [4, 5, 6], plan, lost)


def test_not_finite_logits_are_refused() -> None:
    logits = torch.zeros(1, 8)
    logits[0, 3] = math.nan
    for temperature in (0.0, 1.0):
        with pytest.raises(K3Error, match="non-finite logits for position 12"):
            draw(logits, [12], Sampling(temperature=temperature, seed=0))


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_p": math.nan},
        {"top_k": -1},
        {"min_p": -0.1},
        {"min_p": 1.5},
        {"seed": -1},
        {"seed": MAX_SEED + 1},
        {"max_tokens": 0},
    ],
)
def test_values_outside_their_range_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=next(iter(options)).replace("_", "-")):
        Sampling(**options)


def test_the_record_of_a_sampling_reads_back() -> None:
    sampling = Sampling(temperature=0.3, top_p=0.95, top_k=40, min_p=0.05, seed=MAX_SEED, max_tokens=7)
    assert Sampling.from_json(sampling.to_json()) == sampling
    with pytest.raises(K3Error, match="unknown keys mirostat"):
        Sampling.from_json(sampling.to_json() | {"mirostat": 2})
