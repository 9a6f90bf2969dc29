"""What the policy makes of a clock that is made up: turns decoded in steps of one row, drafts that cost and win some.

Nothing is timed here, so the figures hold on any machine.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from k3cli.engine.drafting.costs import DOUBT, LEAP, UNKNOWN, WARM, Costs
from k3cli.engine.drafting.drafter import Draft
from k3cli.engine.drafting.policy import DEAR, DEBT, FREE, HICCUP, MATCH_FREE, MATCH_SHARE, PEEK, SHARE, Policy
from k3cli.engine.drafting.rehearsal import FIRST, TIMED, time_steps
from k3cli.engine.drafting.speculator import Speculator
from k3cli.errors import FitError

STEP = 0.02
"""Seconds of a step of one row."""
WINDOW = 8


@dataclass
class Text:
    """How a draft model fares: at `easy` of the places each draft is right with 0.93, elsewhere with 0.15.

    claimed: confidence it has in every draft, None: as much as is due.
    """

    easy: float
    claimed: float | None = None


GOOD = Text(0.5)
"""Wrong at the first draft every other time, as k3-nano's own is while code is edited."""
BAD = Text(0.0, claimed=0.6)


@dataclass
class Clock:
    """Steps on made-up time. price: of asking, in steps of one row. slope: cost of a further row, in such steps.

    rehearsed: steps and drafts were timed before the first turn. worst: by how many steps all turns together were
    behind (1 + SHARE) times plain decoding, at the worst of all tokens.
    """

    price: float
    slope: float = 0.13
    seed: int = 1
    rehearsed: bool = False
    worst: float = 0.0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.policy = Policy(Costs(WINDOW), WINDOW)
        self.asks = int(self.rehearsed)
        self.behind = 0.0
        if self.rehearsed:
            seconds = {rows: STEP * (1 + self.slope * (rows - 1)) for rows in range(1, WINDOW + 1)}
            self.policy.costs.rehearsed(seconds, self.price * STEP)

    def turn(self, tokens: int, text: Text, always: bool = False) -> float:
        """Steps of one row that a turn took; plain decoding takes `tokens`. always: whatever it costs."""
        self.policy.begin()
        if always:
            self.policy.models.free = math.inf
        spent, done = 0.0, 0
        while done < tokens:
            asked = always or not self.policy.resting()
            rows, right, drafting = 1, 0, 0.0
            if asked:
                self.asks += 1
                drafting = self.price * (10 if self.asks == 1 else 1)  # the first one warms up
                chance = 0.93 if self.random.random() < text.easy else 0.15
                claimed = [text.claimed or chance] * (WINDOW - 1)
                rows = self.policy.choose(WINDOW - 1, claimed, True, drafting * STEP)
                while right < WINDOW - 1 and self.random.random() < chance:
                    right += 1
            used = min(1 + min(right, rows - 1), tokens - done)
            cost = 1 + self.slope * (rows - 1)
            self.policy.costs.note(rows, cost * STEP)
            self.policy.note(rows, used, min(rows - 1, used), min(right, rows - 1), drafting * STEP, asked)
            step = cost + (drafting if self.asks > 1 else min(drafting, WARM))
            spent += step
            done += used
            self.behind += step - (1 + SHARE) * used
            self.worst = max(self.worst, self.behind)
        return spent


@pytest.mark.parametrize("price", [0.05, 0.22, 0.6, 3.0])
def test_text_that_drafts_say_nothing_about_costs_three_percent_at_most(price: float) -> None:
    clock = Clock(price)
    assert clock.turn(400, BAD) <= 400 * 1.03
    assert clock.asks >= 2


SURE = Text(0.0, claimed=0.99)
"""Sure of itself, and hardly ever right."""


@pytest.mark.parametrize("turns", [1, 16])
@pytest.mark.parametrize("slope", [0.02, 0.13, 0.25, 0.5, 1.0])
@pytest.mark.parametrize("price", [0.05, 0.22, 0.6, 3.0])
def test_at_no_token_more_is_lost_than_promised(price: float, slope: float, turns: int) -> None:
    """From the first token on, whatever drafts claim: SHARE and FREE steps. What nobody has timed yet may cost more
    once: rows that are dearer than any that were seen, and a draft."""
    for text in (BAD, SURE, GOOD):
        for seed in range(3):
            known, unknown = (Clock(price, slope, seed, rehearsed) for rehearsed in (True, False))
            for clock in (known, unknown):
                for _ in range(turns):
                    clock.turn(400 // turns, text)
            assert known.worst <= FREE + (0.1 if slope <= 0.13 else 0.7)
            surprise = max(0.0, 4 * (slope - UNKNOWN)) + (price if price > 1 else 0.0)
            assert unknown.worst <= FREE + 0.2 + surprise


def test_the_first_step_is_a_plain_one_and_more_rows_come_by_and_by() -> None:
    policy = Policy(Costs(WINDOW), WINDOW)
    assert policy.choose(7, [0.99] * 7, True) == 1
    policy.costs.note(1, STEP)
    assert policy.choose(7, [0.99] * 7, True) == 1 + LEAP < 1 + FREE / UNKNOWN
    policy.costs.note(3, 1.5 * STEP)  # a row is dearer than it may have been thought
    assert policy.costs.ceiling(3) == pytest.approx(1.5)
    assert policy.costs.ceiling(5) == pytest.approx(1 + 4 * DOUBT * 0.25)
    assert policy.choose(7, [0.99] * 7, True) == 5
    assert policy.choose(7, [0.99] * 7, True, 0.5 * STEP) == 4


def test_a_draft_of_which_only_the_seconds_are_known_waits_for_the_first_step() -> None:
    policy = Policy(Costs(WINDOW), WINDOW)
    policy.costs.rehearsed({}, 0.1 * STEP)
    assert policy.resting()
    policy.costs.note(1, STEP)
    assert not policy.resting()


def test_what_a_turn_owes_and_knows_is_owed_and_known_by_the_process_that_goes_on() -> None:
    first = Clock(0.22)
    first.turn(40, BAD)
    kept = first.policy.keep()
    then = Policy(Costs(WINDOW), WINDOW)
    then.recall(kept)
    assert then.models.room() == pytest.approx(FREE - first.policy.models.owed()) != FREE
    assert then.asking.mean == first.policy.asking.mean
    assert then.costs.measured() == first.policy.costs.measured() != {}
    # What was measured here stays; what is of another window or makes no sense is passed over.
    then.recall([*kept[:4], *[9.0] * (WINDOW - 1), *kept[4 + WINDOW - 1 :]])
    assert then.costs.measured() == first.policy.costs.measured()
    fresh = Policy(Costs(4), 4)
    whole = fresh.keep()
    for bad in (kept, [math.nan] * 10, [], [*whole[:3], 0.0, *whole[4:]], [*whole[:-1], -3.0], [0.0, -9.0, *whole[2:]]):
        fresh.recall(bad)
        assert fresh.keep() == whole
    one = sum(Clock(0.22, seed=seed, rehearsed=True).turn(25, BAD) for seed in range(40))
    spent, account = 0.0, []
    for seed in range(40):  # every turn in a process of its own
        clock = Clock(0.22, seed=seed, rehearsed=True)
        clock.policy.recall(account)
        spent += clock.turn(25, BAD)
        account = clock.policy.keep()
    assert spent <= 1000 * (1 + SHARE) + FREE + 1 < one


def test_steps_are_rehearsed_with_every_number_of_rows(make_fake_model, monkeypatch) -> None:
    model = make_fake_model(4)
    found = time_steps(model, 3)
    assert [n for kind, n in model.calls if kind == "verify"] == [n for n in (1, 2, 3) for _ in range(FIRST + TIMED)]
    assert list(found) == [1, 2, 3]
    costs = Costs(4)
    costs.rehearsed({1: 0.01, 2: 0.012, 3: 0.015}, 0.004)
    assert costs.measured() == pytest.approx({2: 1.2, 3: 1.5}, rel=0.01)
    assert costs.price == pytest.approx(0.4, rel=0.1)

    def full() -> None:
        raise FitError("no room", "room")

    monkeypatch.setattr(model, "new_state", full)
    assert time_steps(model, 3) == {}


def test_many_short_turns_owe_what_the_ones_before_them_lost() -> None:
    clock = Clock(0.22)
    spent = sum(clock.turn(25, BAD) for _ in range(40))
    assert spent <= 1000 * (1 + SHARE) + FREE + 1


@pytest.mark.parametrize("price", [0.05, 0.22, 0.4])
def test_a_draft_that_is_wrong_every_other_time_is_asked_all_the_same(price: float) -> None:
    """Two tokens a step at a quarter of a step: a single miss is no reason to stop asking."""
    always = [Clock(price, seed=seed).turn(400, GOOD, always=True) for seed in range(12)]
    assert max(always) < 400 / 1.2
    ours = [Clock(price, seed=seed).turn(400, GOOD) for seed in range(12)]
    # Where asking is dear, what may be lost at the beginning is soon used up, and comes back slowly.
    assert sum(ours) < (1.12 if price > 0.3 else 1.05) * sum(always)


def test_text_that_becomes_predictable_is_noticed() -> None:
    ours = always = 0.0
    for seed in range(12):
        clock = Clock(0.22, seed=seed)
        clock.turn(400, BAD)
        assert clock.asks < 60
        ours += clock.turn(400, GOOD)
        always += Clock(0.22, seed=seed).turn(400, GOOD, always=True)
    assert ours < 1.15 * always


def test_a_profit_is_not_gambled_away() -> None:
    """Tokens won early in a turn do not pay for drafts that lose ever after."""
    clock = Clock(0.22)
    clock.turn(400, GOOD)
    before = clock.asks
    assert clock.turn(400, BAD) <= 400 * 1.03 + 1
    assert clock.asks - before < 40


def matched(policy: Policy, right: bool, confidence: float = 0.99) -> int:
    """A step behind a match; its rows."""
    rows = policy.choose(WINDOW - 1, [confidence] * (WINDOW - 1))
    policy.costs.note(rows, STEP * (1 + 0.13 * (rows - 1)))
    policy.note(rows, rows if right else 1, rows - 1, rows - 1 if right else 0, 0.001 * STEP)
    return rows


def test_sure_matches_do_not_starve_for_what_asking_lost_nor_for_a_busy_machine() -> None:
    clock = Clock(0.22)
    clock.turn(400, BAD)
    policy = clock.policy
    assert policy.resting()
    assert policy.models.room() < 0.4
    for _ in range(200):
        policy.spend(50 * STEP)
    assert policy.models.room() < -10
    policy.begin()
    assert [matched(policy, right=True) for _ in range(3)][1:] == [WINDOW, WINDOW]
    # Nor do they need what they won: it pays for asking, within the turn.
    assert policy.models.room() < 0
    policy.models.lost = 100.0
    assert matched(policy, right=True) == WINDOW


@pytest.mark.parametrize("ahead", [False, True])
def test_a_few_misses_do_not_end_asking_in_a_turn_that_is_ahead(ahead: bool) -> None:
    """Four answers of eight rows in vain, as an ordinary second turn of one-shot commands began."""
    clock = Clock(0.4, rehearsed=True)
    policy = clock.policy
    for _ in range(3 if ahead else 0):
        policy.note(8, 8, 7, 7, 0.0)
    for _ in range(4):
        policy.note(8, 1, 1, 0, 0.4 * STEP, asked=True)
    assert policy.models.room() < 0
    assert policy.asking.mean > 0
    assert policy.resting() == (not ahead)
    policy.begin()
    assert policy.resting(), "the next turn has nothing of it"


def test_matches_that_are_sure_and_wrong_lose_what_they_may_and_leave_asking_alone() -> None:
    policy = Policy(Costs(WINDOW), WINDOW)
    cost = tokens = 0.0
    for _ in range(1000):
        rows = matched(policy, right=False)
        cost, tokens = cost + 1 + 0.13 * (rows - 1), tokens + 1
        assert cost <= tokens * (1 + MATCH_SHARE) + MATCH_FREE + 0.1
    assert cost > 1000 + 0.8 * MATCH_FREE, "they are tried"
    assert policy.models.room() == pytest.approx(FREE + 1000 * (SHARE - 0.001), abs=0.1), "looking alone"
    before = policy.models.room()
    policy.note(1, 1, 0, 0, 50 * STEP)
    assert policy.models.room() == pytest.approx(before - HICCUP + SHARE), "looking counts, an interruption little"


def test_what_drafts_cost_besides_is_on_the_account_and_an_interruption_counts_little() -> None:
    policy = Policy(Costs(WINDOW), WINDOW)
    policy.spend(STEP)  # nothing is known yet of what that is in steps
    assert policy.models.room() == FREE
    policy.costs.note(1, STEP)
    policy.spend(0.01 * STEP)
    assert policy.models.room() == pytest.approx(FREE - 0.01)
    policy.spend(50 * STEP)
    assert policy.models.room() == pytest.approx(FREE - 0.01 - HICCUP)


def test_what_keeping_up_costs_is_bounded_by_sleeping() -> None:
    """Steps are so short that looking for matches takes 3 % of one, and keeping up 5 %."""
    policy = Policy(Costs(WINDOW), WINDOW)
    policy.costs.note(1, STEP)
    lost, naps, before = 0.0, 0, False
    for token in range(1, 4001):
        asleep = policy.asleep()
        naps, before = naps + (asleep and not before), asleep
        if asleep:
            policy.doze(1)
        else:
            policy.note(1, 1, 0, 0, 0.03 * STEP)
            policy.spend(0.05 * STEP)
            lost += 0.08
        assert lost <= SHARE * token + FREE + DEBT + 0.1
    assert 5 < naps < 30, "it sleeps long at a time"
    assert lost > 0.9 * SHARE * 4000, "it wakes up as often as may be"
    assert policy.slept == 4000 - round(lost / 0.08)
    policy.begin()
    assert policy.slept == 0


def test_asleep_a_match_is_looked_for_at_times_and_followed() -> None:
    policy = Policy(Costs(WINDOW), WINDOW)
    policy.costs.note(1, STEP)
    while not policy.asleep():
        policy.note(1, 1, 0, 0, 0.0)
        policy.spend(0.1 * STEP)
    looks = []
    for _ in range(60):
        looks.append(policy.peeks())
        if looks[-1]:
            policy.note(1, 1, 0, 0, 0.0)
        else:
            policy.doze(1)
    assert [n for n, look in enumerate(looks) if look] == [PEEK, 2 * PEEK + 1, 3 * PEEK + 2]
    assert policy.asleep()
    while not policy.peeks():
        policy.doze(1)
    policy.note(4, 4, 3, 3, 0.0)
    assert policy.peeks(), "while it goes on"
    for _ in range(3):
        matched(policy, right=True)
    assert not policy.asleep(), "what repeats wakes it up"


def test_what_matches_win_keeps_drafts_awake() -> None:
    """Keeping up takes 9 % of a step, and a match in every twenty steps wins six."""
    policy = Policy(Costs(WINDOW), WINDOW)
    lost, tokens = 0.0, 0
    for step in range(1000):
        assert not policy.asleep()
        rows = matched(policy, right=True, confidence=0.99 if step % 20 == 0 else 0.01)
        policy.spend(0.09 * STEP)
        lost, tokens = lost + 1.09 + 0.13 * (rows - 1) - rows, tokens + rows
    assert lost < -200
    while not policy.asleep():
        policy.note(1, 1, 0, 0, 0.0)
        policy.spend(0.09 * STEP)
        lost, tokens = lost + 0.09, tokens + 1
    assert 0 < lost < FREE + DEBT + tokens * SHARE + 0.1, "what was won is used up, and no more"


def test_another_drafter_is_not_taken_for_as_quick_as_the_one_before() -> None:
    costs = Costs(WINDOW)
    costs.rehearsed({1: STEP}, 0.001 * STEP)
    assert costs.price == pytest.approx(0.001)
    costs.rehearsed({}, 0.4 * STEP)
    assert costs.price == pytest.approx(0.4)
    costs.rehearsed({}, 0.0)
    assert costs.price == 0
    assert costs.note_draft(50 * STEP) == WARM


def test_a_first_draft_that_has_to_warm_up_is_no_reason_to_stop() -> None:
    costs = Costs(WINDOW)
    costs.note(1, STEP)
    assert costs.note_draft(50 * STEP) == WARM
    assert costs.price == 0
    assert costs.note_draft(0.2 * STEP) == pytest.approx(0.2)
    assert costs.price == pytest.approx(0.2)
    # One interruption counts as three drafts, and the price hardly moves.
    assert costs.note_draft(50 * STEP) == pytest.approx(0.6)
    assert costs.price < 0.3
    for _ in range(60):
        costs.note_draft(2 * STEP)
    assert costs.price == pytest.approx(2, rel=0.1), "a draft that became slow is seen for what it is"


def test_a_fork_knows_what_its_parent_measured_and_owes_nothing() -> None:
    clock = Clock(0.22)
    clock.turn(200, BAD)
    child = clock.policy.fork()
    assert child.asking.mean == clock.policy.asking.mean < 0
    assert child.costs is clock.policy.costs
    assert child.models.room() == FREE


class Model:
    """A drafter that takes time, with a part that does not. Counts how often each is asked."""

    name, needs_hidden = "model", False

    def __init__(self, drafts: Iterator[Draft], tick: Callable[[], None] = lambda: None) -> None:
        self.drafts, self.tick, self.asked = drafts, tick, 0
        self.cheap: Model | None = None

    def propose(self, context, position, k):
        self.asked += 1
        self.tick()
        return next(self.drafts)


def test_what_was_promised_for_nothing_is_no_merit_of_the_model(monkeypatch) -> None:
    """The match alone would have given as much: the model is left alone, though every draft is right."""
    now = 0.0

    def tick() -> None:
        nonlocal now
        now += 0.3 * STEP

    monkeypatch.setattr("k3cli.engine.drafting.speculator.time.perf_counter", lambda: now)
    for promised, fewest, most in ((2.0, 0, 30), (0.0, 95, 100)):
        draft = Draft([1, 2], [0.8, 0.8], instead=promised)
        model = Model(draft for _ in range(200))
        model.cheap = Model(Draft([1, 2], [0.8, 0.8], asked=False) for _ in range(200))
        model.tick = tick
        costs = Costs(WINDOW)
        speculator = Speculator(model, costs, WINDOW, 10)  # type: ignore[arg-type]
        for _ in range(100):
            drafts, seconds = speculator.propose([0], 7)
            rows = 1 + len(drafts)
            speculator.account(rows, rows, rows - 1, rows - 1, seconds, STEP * (1 + 0.1 * (rows - 1)))
        assert costs.price > DEAR
        assert fewest <= model.asked <= most, promised
