"""The suffix drafter: what it finds, what it forgets, what it costs; and the index beneath it against brute force."""

from __future__ import annotations

import random
import time

import pytest

from k3cli.engine.drafting.ngrams import BREAK, NgramIndex
from k3cli.engine.drafting.suffix import SuffixDrafter
from k3cli.engine.sampling import Sampling

SAMPLING = Sampling(temperature=0)


def brute(ids: list[int], n: int) -> list[int]:
    if len(ids) < n or BREAK in ids[-n:]:
        return []
    return [e for e in range(len(ids) - 1, n - 1, -1) if ids[e - n : e] == ids[-n:]]


@pytest.mark.parametrize("seed", range(4))
def test_the_index_finds_every_place_however_it_was_filled(seed: int) -> None:
    rng = random.Random(seed)
    index = NgramIndex((5, 2))
    ids: list[int] = []
    while len(ids) < 6000:
        part = [rng.randrange(rng.choice((2, 6, 1 << 20))) for _ in range(rng.choice((1, 3, 40, 700)))]
        if rng.random() < 0.3:
            part += [BREAK]
        ids += part
        index.extend(part)
        for n in (5, 2):
            assert list(index.places(n, 1 << 30)) == brute(ids, n)
    assert list(index.ids) == ids
    assert index.nbytes < 45 * len(ids)


def test_a_million_tokens_are_ready_in_less_than_two_seconds() -> None:
    rng = random.Random(0)
    base = [rng.randrange(160_000) for _ in range(1 << 16)]
    tokens = base * 16
    drafter = SuffixDrafter()
    # Time of this thread, so that a busy machine does not count.
    began = time.thread_time()
    drafter.begin(tokens, SAMPLING)
    assert time.thread_time() - began < 2
    assert drafter.propose(tokens, len(tokens) - 1, 7).ids == base[:7]
    assert drafter.nbytes <= 28 * len(tokens) + 1024


def hits(drafter: SuffixDrafter, context: list[int], future: list[int], k: int = 7) -> list[int]:
    """How many of its k drafts were right before each of the future tokens."""
    drafter.begin(context, SAMPLING)
    context = list(context)
    found = []
    for i, token in enumerate(future):
        draft = drafter.propose(context, len(context) - 1, k)
        assert len(draft.ids) <= k
        assert draft.confidence is None or all(0 < c < 1 for c in draft.confidence)
        right = 0
        while right < len(draft.ids) and draft.ids[right : right + 1] == future[i + right : i + right + 1]:
            right += 1
        found.append(right)
        context.append(token)
    return found


def test_a_copy_is_followed_from_its_third_token_on() -> None:
    rng = random.Random(1)
    text = [rng.randrange(1000) for _ in range(50)]
    before, after = ([rng.randrange(1000) for _ in range(500)] for _ in range(2))
    found = hits(SuffixDrafter(), [*before, *text, *after], text)
    assert found[:3] == [0, 0, 0]
    assert found[3:] == [min(7, 50 - i) for i in range(3, 50)]


def test_after_an_edit_the_copy_goes_on_and_a_rename_is_learned() -> None:
    rng = random.Random(2)
    words = [[rng.randrange(100, 1000) for _ in range(10)] for _ in range(6)]
    old, new = [7, 8], [21, 22, 23]
    text = [t for word in words for t in (*word, *old)]
    renamed = [t for word in words for t in (*word, *new)]
    found = hits(SuffixDrafter(), text + [5] * 3, renamed)
    first = 10  # where the first old name stood
    assert found[first] == 0
    assert found[first + 4] == 7, "one token after the edit the text is found again"
    for n in range(2, 6):
        at = n * 13 + 10
        assert found[at - 4] == 7, "over the edit, with the new name in it"
        assert found[at] >= min(7, len(renamed) - at), n


def test_tokens_that_came_while_it_slept_are_taken_in_at_once() -> None:
    rng = random.Random(3)
    text = [rng.randrange(1000) for _ in range(60)]
    drafter = SuffixDrafter()
    drafter.begin(context := [5, 6, 7], Sampling())
    drafter.propose(context, 2, 7)
    context += [*text, *(rng.randrange(1000) for _ in range(200)), *text[:20]]
    assert drafter.propose(context, len(context) - 1, 7).ids == text[20:27]
    context += text[20:22]
    assert drafter.propose(context, len(context) - 1, 7).ids == text[22:29]


def test_a_period_is_drafted_beyond_the_end() -> None:
    found = hits(SuffixDrafter(), [1, 2, 3, 4] * 3, [1, 2, 3, 4] * 4)
    assert found[0] == 7


def test_texts_and_old_branches_are_drafted_from() -> None:
    rng = random.Random(3)
    text = [rng.randrange(1000) for _ in range(40)]
    assert hits(SuffixDrafter([text, [1, 2, 3]]), [9, 9], text)[3] == 7
    # An undo: the tokens that were taken back are still known, and the new tail is followed.
    drafter = SuffixDrafter()
    start = [rng.randrange(1000) for _ in range(100)]
    assert hits(drafter, start, text)[3] == 0
    assert hits(drafter, start[:60], text)[3] == 7
    other = [rng.randrange(1000) for _ in range(30)]
    assert hits(drafter, [*start[:70], *other], start[50:100])[4] == 7
    assert hits(drafter, start[:10], start[10:40])[0] == 7
    assert hits(drafter.fork(), start, start)[3] == 7
    assert max(hits(drafter.fork(), [1, 2], text)) == 0, "a fork does not share tokens"


def test_confidence_falls_where_text_does_not_repeat() -> None:
    rng = random.Random(4)
    # Pairs of letters repeat, what follows them does not.
    text = [rng.randrange(4) for _ in range(3000)]
    drafter = SuffixDrafter()
    drafter.begin(text[:100], SAMPLING)
    seen = []
    for i in range(100, 3000):
        draft = drafter.propose(text[:i], i - 1, 7)
        if draft.confidence and i > 1000:
            seen.append(draft.confidence[0])
    assert sum(seen) / len(seen) < 0.4
    rates = drafter.hit_rates()
    assert rates["3"] < 0.4
    assert rates["20+"] == 0.9, "nothing was seen of long matches"


@pytest.mark.parametrize("seed", range(3))
def test_random_edits_undos_and_periods_never_fail(seed: int) -> None:
    rng = random.Random(seed)
    drafter = SuffixDrafter([[rng.randrange(6) for _ in range(50)]])
    context = [1, 2, 3]
    for _ in range(60):
        cut = rng.choice((0, 0, 0, rng.randrange(len(context))))
        context = context[: len(context) - cut] or [1]
        if rng.random() < 0.5:
            start = rng.randrange(len(context))
            context += context[start : start + rng.randrange(40)]
        drafter.begin(context, SAMPLING)
        for _ in range(rng.randrange(30)):
            draft = drafter.propose(context, len(context) - 1, rng.randrange(1, 9))
            assert all(0 <= token < 6 for token in draft.ids)
            step = rng.random()
            context += list(draft.ids[:3]) if step < 0.5 else [rng.randrange(6)] * rng.randrange(1, 3)
