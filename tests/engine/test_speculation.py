"""Drafts change how many steps a turn takes, and nothing else: whatever they say, wherever the turn is cut."""

from __future__ import annotations

import itertools
from unittest.mock import Mock

import pytest

from k3cli.engine import events as ev
from k3cli.engine.conversation import Conversation
from k3cli.engine.drafting.both import BothDrafter
from k3cli.engine.drafting.choose import choose, draft_folder
from k3cli.engine.drafting.costs import Costs
from k3cli.engine.drafting.drafter import Draft
from k3cli.engine.drafting.policy import Policy
from k3cli.engine.drafting.speculator import Speculator
from k3cli.engine.drafting.suffix import SuffixDrafter
from k3cli.engine.replay import replay
from k3cli.engine.sampling import Sampling
from k3cli.engine.timeline import Timeline
from k3cli.errors import K3Error, UsageError

VOCAB = 512
SPECIAL = (500, 501, 7)
SAMPLINGS = {
    "greedy": Sampling(temperature=0, seed=1),
    "cool": Sampling(temperature=0.3, seed=2),
    "warm": Sampling(temperature=1.0, seed=3),
    "filtered": Sampling(temperature=1.0, seed=4, top_p=0.9, top_k=40, min_p=0.02),
}
PROMPT = [5, 6, 7, 5, 6, 7, 9]
MANY = 40
NAMES = ("right", "wrong", "random", "special", "beyond", "half", "suffix")


def timeline_of(model, make=None, rows=None, limit=4096, tokens=PROMPT) -> Timeline:
    speculator = None
    if make is not None:
        speculator = Speculator(make(), Costs(model.window), rows or model.window, VOCAB)
    return Timeline(model, model.new_state(), tokens, limit=limit, speculator=speculator)


def steps(model) -> int:
    return sum(kind == "verify" for kind, _ in model.calls)


@pytest.fixture
def plain(make_fake_model, state_bytes):
    """A timeline decoded without drafts, its state, and the ids drawn."""

    def run(sampling, window=4, stop=(), many=MANY, limit=4096):
        timeline = timeline_of(make_fake_model(window), limit=limit)
        ids = list(timeline.generate(sampling, stop, many))
        return timeline, state_bytes(timeline), ids

    return run


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", SAMPLINGS)
def test_any_drafter_at_any_window_gives_the_tokens_and_state_of_plain_decoding(
    kind, name, plain, make_fake_model, hostile, reckless, state_bytes
) -> None:
    sampling = SAMPLINGS[kind]
    for window in (1, 2, 3, 8):
        want, state, ids = plain(sampling, window)
        for rows in {1, 2, window} & set(range(1, window + 1)):
            model = make_fake_model(window)
            make = hostile(want.tokens, VOCAB, SPECIAL)[name]
            timeline = timeline_of(model, make, rows)
            assert list(timeline.generate(sampling, (), MANY)) == ids
            assert timeline.tokens == want.tokens
            assert timeline.schedule == want.schedule
            assert state_bytes(timeline) == state
            assert timeline.stop_reason == "length"
            assert timeline.speculator is not None
            assert timeline.speculator.failure == ""
            stats = timeline.decoding
            assert (stats.steps, stats.tokens) == (steps(model), MANY - 1)
            if name == "right":
                # The policy times its steps: on a machine that stumbles it may try a plain one.
                assert stats.steps <= 2 * -(-(MANY - 1) // rows)
                assert set(stats.acceptance()) <= {1.0}
            if name == "wrong":
                assert stats.steps == MANY - 1
                assert set(stats.acceptance()) <= {0.0}


@pytest.mark.parametrize("name", ["right", "half", "suffix"])
def test_asleep_a_drafter_is_left_alone_and_every_token_stays(
    name, plain, make_fake_model, hostile, reckless, state_bytes, monkeypatch
) -> None:
    """Awake for three steps, asleep for the next four, and so on."""
    want, state, ids = plain(SAMPLINGS["cool"])
    nights = itertools.cycle([False] * 3 + [True] * 4)
    monkeypatch.setattr("k3cli.engine.drafting.policy.PEEK", 2)
    monkeypatch.setattr(Policy, "asleep", lambda self: next(nights))
    model = make_fake_model(4)
    timeline = timeline_of(model, hostile(want.tokens, VOCAB, SPECIAL)[name])
    drafter, policy = timeline.speculator.drafter, timeline.speculator.policy
    propose, observe, note = (Mock(wraps=call) for call in (drafter.propose, drafter.observe, policy.note))
    monkeypatch.setattr(drafter, "propose", propose)
    monkeypatch.setattr(drafter, "observe", observe)
    monkeypatch.setattr(policy, "note", note)
    assert list(timeline.generate(SAMPLINGS["cool"], (), MANY)) == ids
    assert (timeline.tokens, state_bytes(timeline)) == (want.tokens, state)
    taken = steps(model)
    awake = sum(1 for n in range(taken) if n % 7 < 3)
    looks = note.call_count - awake
    assert policy.slept == timeline.speculator.describe()["slept"] <= taken - awake
    assert (looks > 0) == (name == "suffix"), "only what costs next to nothing is looked at asleep"
    assert observe.call_count in (awake, awake + 1), "the prompt may be seen, too"
    assert propose.call_count <= awake + looks


@pytest.mark.parametrize("name", ["right", "half", "beyond"])
def test_every_way_to_end_falls_anywhere_in_a_window(
    name, plain, make_fake_model, hostile, reckless, state_bytes
) -> None:
    sampling = SAMPLINGS["warm"]
    truth = plain(sampling, 4, many=60)[0].tokens
    for n in range(1, 14):
        stop = {truth[len(PROMPT) + n]}
        ways = {
            "stop": {"stop": stop},
            "length": {"many": n},
            "context": {"limit": len(PROMPT) + n},
            "cancel": {},
            "close": {},
            "snapshot": {},
        }
        for way, options in ways.items():
            want, state, ids = plain(sampling, 4, **(options or {"many": n}))
            timeline = timeline_of(
                make_fake_model(4), hostile(truth, VOCAB, SPECIAL)[name], limit=options.get("limit", 4096)
            )
            if way == "cancel":
                asked = itertools.count()
                got = list(timeline.generate(sampling, (), MANY, lambda asked=asked, n=n: next(asked) == n + 1))
                assert timeline.stop_reason == "cancelled"
            elif way in ("close", "snapshot"):
                stream = timeline.generate(sampling, (), MANY)
                got = [next(stream) for _ in range(n)]
                if way == "close":
                    stream.close()
            else:
                got = list(timeline.generate(sampling, options.get("stop", ()), options.get("many", MANY)))
                assert timeline.stop_reason == want.stop_reason
            assert got == ids, (way, n)
            assert timeline.position == want.position
            assert timeline.pending == want.pending
            assert timeline.schedule == want.schedule
            assert state_bytes(timeline) == state, (way, n)
            assert timeline.fork().tokens == want.tokens
            if way == "snapshot":
                rest = list(stream)
                assert got + rest == truth[len(PROMPT) : len(PROMPT) + MANY]


def test_a_fork_in_the_middle_of_a_window_goes_on_as_if_alone(
    plain, make_fake_model, hostile, reckless, state_bytes
) -> None:
    sampling = SAMPLINGS["warm"]
    want, state, ids = plain(sampling, 4)
    for n in range(1, 12):
        parent = timeline_of(make_fake_model(4), hostile(want.tokens, VOCAB, SPECIAL)["half"])
        stream = parent.generate(sampling, (), MANY)
        got = [next(stream) for _ in range(n)]
        child = parent.fork()
        assert got + list(stream) == ids
        assert got + list(child.generate(sampling, (), MANY - n)) == ids
        assert state_bytes(parent) == state_bytes(child) == state


def test_a_schedule_made_with_drafts_replays_without_and_the_other_way_round(
    plain, make_fake_model, hostile, reckless, state_bytes
) -> None:
    want, state, _ = plain(SAMPLINGS["warm"], 4)
    drafted = timeline_of(make_fake_model(4), hostile(want.tokens, VOCAB, SPECIAL)["half"])
    list(drafted.generate(SAMPLINGS["warm"], (), MANY))
    for schedule in (want.schedule, drafted.schedule):
        again = timeline_of(make_fake_model(4), tokens=want.tokens)
        list(again.follow(schedule))
        assert state_bytes(again) == state


class Broken:
    """Fails in one of its calls, from the n-th on."""

    name = "broken"
    needs_hidden = False

    def __init__(self, where: str, n: int = 3, bad=None) -> None:
        self.where, self.left, self.bad = where, n, bad

    def _call(self, where: str) -> bool:
        if where == self.where:
            self.left -= 1
            if self.left <= 0:
                if self.bad is None:
                    raise RuntimeError("out of ideas")
                return True
        return False

    def begin(self, context, sampling) -> None:
        self._call("begin")

    def propose(self, context, position, k):
        return self.bad if self._call("propose") else Draft([1] * k, [1.0] * k)

    def observe(self, accepted, position, hidden) -> None:
        self._call("observe")

    def fork(self):
        return self


BAD_DRAFTS = (
    Draft([VOCAB]),
    Draft([-1]),
    Draft([1] * 99),
    Draft([1, 2], [0.5]),
    Draft(["x"]),  # type: ignore[list-item]
    None,
)


@pytest.mark.parametrize("bad", [None, *BAD_DRAFTS])
def test_a_drafter_that_fails_is_turned_off_and_the_turn_goes_on(
    bad, plain, make_fake_model, reckless, state_bytes
) -> None:
    _, state, ids = plain(SAMPLINGS["warm"], 4)
    for where in ("propose",) if bad is not None else ("begin", "propose", "observe"):
        timeline = timeline_of(make_fake_model(4), lambda where=where: Broken(where, 1 if where == "begin" else 3, bad))
        assert list(timeline.generate(SAMPLINGS["warm"], (), MANY)) == ids
        assert state_bytes(timeline) == state
        assert timeline.speculator is not None
        assert timeline.speculator.failure
        assert [loss.left for loss in timeline.speculator.take_losses()] == [""]
        assert timeline.speculator.take_losses() == []
        assert timeline.fork().speculator.failure  # type: ignore[union-attr]


def test_a_failed_verify_tears_the_timeline(make_fake_model, hostile, reckless, monkeypatch) -> None:
    model = make_fake_model(4)
    timeline = timeline_of(model, hostile(PROMPT * 20, VOCAB, SPECIAL)["random"])
    stream = timeline.generate(SAMPLINGS["warm"], (), MANY)
    for _ in range(5):
        next(stream)

    def fail(*_args):
        raise RuntimeError("the device failed")

    monkeypatch.setattr(model, "commit", fail)
    with pytest.raises(RuntimeError, match="device failed"):
        list(stream)
    with pytest.raises(K3Error, match="a decode step at position"):
        timeline.snapshot()


def test_a_conversation_with_drafts_tells_how_it_went(fake_engine, store, talk, hostile, reckless) -> None:
    text = "the same words, the same words, the same words, the same words"
    fake_engine.speculate(choose("suffix"))
    with Conversation.open(fake_engine, store, "a", mode="create") as conversation:
        events = talk(conversation, "Hello", text, sampling=Sampling(seed=1))
    (told,) = [event for event in events if isinstance(event, ev.Speculation)]
    assert told.drafter == "suffix"
    assert told.failed is None
    assert told.window == 4
    assert told.tokens_per_step > 1.5
    assert told.tokens == sum(e.generated for e in events if isinstance(e, ev.Stopped)) - 1
    assert len(told.acceptance) == len(told.tested) == 3
    assert sum(told.rows) == told.steps
    assert set(told.seconds) == {"draft", "verify", "commit"}
    assert len(told.inputs["cost"]) == 4
    assert not [event for event in replay(fake_engine, store, "a") if isinstance(event, ev.Difference)]


def test_a_conversation_tells_of_a_drafter_that_failed(fake_engine, store, talk, reckless) -> None:
    fake_engine.speculate(choose("suffix"), make=lambda: Broken("propose"))
    with Conversation.open(fake_engine, store, "a", mode="create") as conversation:
        events = talk(conversation, "Hello", "Some words", sampling=Sampling(seed=1))
        notices = [event for event in events if isinstance(event, ev.Notice)]
        assert [notice.code for notice in notices] == ["drafter-failed"]
        assert "RuntimeError: out of ideas" in notices[0].message
        assert next(e for e in events if isinstance(e, ev.Speculation)).failed == "RuntimeError: out of ideas"
        assert isinstance(events[-1], ev.Done)
        again = talk(conversation, "More", "Other words", sampling=Sampling(seed=1))
        assert not [event for event in again if isinstance(event, ev.Notice)]


@pytest.mark.parametrize("where", ["keep", "fork"])
def test_a_drafter_that_fails_while_a_turn_is_saved_is_told_with_that_turn(fake_engine, store, talk, where) -> None:
    """A process of one turn has no later one to tell it in."""

    class Forgetful(Broken):
        def keep(self, position):
            self._call("keep")

        def fork(self):
            self._call("fork")
            return self

    fake_engine.speculate(choose("suffix"), make=lambda: Forgetful(where, 1))
    with Conversation.open(fake_engine, store, "a", mode="create") as conversation:
        *_, notice, saved, _ = talk(conversation, "Hello", "Some words", sampling=Sampling(seed=1))
        assert (notice.code, saved.type) == ("drafter-failed", "saved")
        assert "RuntimeError: out of ideas" in notice.message


def test_what_can_be_asked_for(fake_engine) -> None:
    assert choose("auto").kind == choose("suffix").kind == "suffix"
    assert choose("off").kind == "off"
    assert (choose("dspark").folder, choose("dspark:/a/b").folder) == ("", "/a/b")
    for bad in ("suffix:x", "eagle", "", "dspark:"):
        with pytest.raises(UsageError, match=r"auto, off, suffix, dspark\[:DIR\] or both"):
            choose(bad)
    fake_engine.speculate(choose("suffix"), 4)
    for rows in (0, 5):
        with pytest.raises(UsageError, match="1 to 4"):
            fake_engine.speculate(choose("suffix"), rows)
    fake_engine.speculate(choose("off"))
    assert fake_engine.timeline().speculator is None


def test_a_draft_model_is_looked_for_before_anything_is_loaded(tmp_path) -> None:
    model = tmp_path / "some-model"
    with pytest.raises(UsageError, match="some-model has no draft of its own"):
        draft_folder(choose("dspark"), model)
    with pytest.raises(UsageError, match="no draft in"):
        draft_folder(choose(f"dspark:{tmp_path}"), model)
    (model / "dspark").mkdir(parents=True)
    (model / "dspark" / "config.json").write_text("{}")
    assert draft_folder(choose("dspark"), model) == model / "dspark"
    assert choose("auto", model=model).kind == "both"
    assert choose("auto", model=tmp_path).kind == "suffix"
    assert draft_folder(choose(f"dspark:{model / 'dspark'}"), tmp_path) == model / "dspark"


def settled(cost_of_rows) -> Policy:
    """A policy that has timed every row count often: cost_of_rows(n) in steps of one row."""
    costs = Costs(8)
    for n in [1] * 30 + [n for n in range(1, 9) for _ in range(30)]:
        costs.note(n, 0.01 * cost_of_rows(n))
    policy = Policy(costs, 8)
    policy.begin()
    return policy


def test_the_window_follows_cost_and_acceptance() -> None:
    cheap, dear = settled(lambda n: 1 + 0.02 * (n - 1)), settled(lambda n: 1 + 0.5 * (n - 1))
    assert cheap.costs.curve()[8] == pytest.approx(1.14, rel=0.05)
    assert cheap.choose(7, [0.9] * 7) == 8
    assert cheap.choose(3, [0.9] * 7) == 4
    assert cheap.choose(7, [0.01] * 7) == 1
    assert dear.choose(7, [0.3] * 7) == 1
    assert 2 <= dear.choose(7, [0.9] * 7) < 8
    assert cheap.choose(7, [0.9, 0.9, 0.0, 0.9, 0.9, 0.9, 0.9]) == 3
    # Without confidences, what was accepted at each place decides.
    for _ in range(200):
        cheap.note(3, 2, 2, 1, 0.0)
    assert cheap.choose(7, None) == 2


def test_drafts_that_are_never_accepted_lose_little() -> None:
    policy = settled(lambda n: 1 + 0.1 * (n - 1))
    plain = lost = 0.0
    for _ in range(1000):
        rows = policy.choose(7, [0.9] * 7)  # a drafter that is sure of itself and always wrong
        policy.note(rows, 1, rows - 1, 0, 0.0)
        plain += 1
        lost += policy.costs.curve()[rows] - 1
    assert 0 < lost / plain < 0.03


def test_one_slow_step_does_not_rule_a_window_out() -> None:
    policy = settled(lambda n: 1 + 0.05 * (n - 1))
    policy.costs.note(8, 10.0)
    assert policy.choose(7, [0.95] * 7) == 8
    # A machine that is twice as slow for a while is not a reason for smaller windows.
    for n in [8] * 20:
        policy.costs.note(n, 0.02 * 1.35)
    assert policy.choose(7, [0.95] * 7) >= 6


class Fixed:
    """Always the same draft; counts how often it is asked."""

    name, needs_hidden = "fixed", True

    def __init__(self, draft) -> None:
        self.draft, self.asked = draft, 0

    def propose(self, context, position, k):
        self.asked += 1
        return self.draft

    def begin(self, context, sampling) -> None: ...

    def observe(self, accepted, position, hidden) -> None: ...

    def fork(self):
        return Fixed(self.draft)


@pytest.mark.parametrize(
    ("match", "guess", "taken", "asked"),
    [
        (Draft([1, 2], [0.9, 0.9]), Draft([3], [0.99]), [1, 2], 0),
        (Draft([1, 2], [0.5, 0.9]), Draft([3], [0.96]), [3], 1),
        (Draft([1, 2], [0.7, 0.9]), Draft([3], [0.9]), [1, 2], 1),
        (Draft(), Draft([3], [0.1]), [3], 1),
        (Draft([1], [0.5]), Draft([3]), [3], 1),
    ],
)
def test_of_a_match_and_a_guess_the_better_one_is_taken(match, guess, taken, asked) -> None:
    cheap, model = Fixed(match), Fixed(guess)
    drafter = BothDrafter(cheap, model)
    assert drafter.propose([0], 0, 4).ids == taken
    assert (cheap.asked, model.asked) == (1, asked)


def test_while_the_policy_rests_only_the_cheap_half_is_asked(monkeypatch) -> None:
    cheap, model = Fixed(Draft([1], [0.5])), Fixed(Draft([2], [0.9]))
    costs = Costs(4)
    costs.note(1, 0.01)
    speculator = Speculator(BothDrafter(cheap, model), costs, 4, VOCAB)
    assert speculator.propose([0], 3)[0] == [2]
    monkeypatch.setattr(Policy, "resting", lambda self: True)
    monkeypatch.setattr(Policy, "choose", lambda self, drafts, confidence, *_: 1 + drafts)
    assert speculator.propose([0], 3)[0] == [1]
    assert model.asked == 1
    assert speculator.describe()["draft_context"] == 0


class Half(Broken):
    """One of two: not sure of its drafts, and counts what it is asked and shown."""

    def __init__(self, name: str, where: str = "", n: int = 1, bad=None, sure: float = 0.5) -> None:
        super().__init__(where, n, bad)
        self.name, self.sure = name, sure
        self.proposed = self.observed = 0

    def propose(self, context, position, k):
        self.proposed += 1
        return self.bad if self._call("propose") else Draft([2] * k, [self.sure] * k)

    def observe(self, accepted, position, hidden) -> None:
        self.observed += len(accepted)
        self._call("observe")

    def fork(self):
        self._call("fork")
        return self


@pytest.mark.parametrize("bad", [None, *BAD_DRAFTS])
@pytest.mark.parametrize("broken", ["cheap", "model", "resting"])
def test_of_two_drafters_the_one_that_fails_is_turned_off_and_the_other_goes_on(
    broken, bad, plain, make_fake_model, reckless, state_bytes, monkeypatch
) -> None:
    """In every call, with every bad draft, and where the policy asks one half alone; no token changes."""
    if broken == "resting":
        monkeypatch.setattr(Policy, "resting", lambda self: True)
    _, state, ids = plain(SAMPLINGS["warm"], 4)
    for where in ("propose",) if bad is not None or broken == "resting" else ("begin", "propose", "observe", "fork"):
        failing = Half("failing", where, 1 if where in ("begin", "fork") else 3, bad)
        other = Half("whole", sure=0.3)  # less than any bad draft says of itself
        halves = (other, failing) if broken == "model" else (failing, other)
        timeline = timeline_of(make_fake_model(4), lambda halves=halves: BothDrafter(*halves))
        assert list(timeline.generate(SAMPLINGS["warm"], (), MANY)) == ids
        assert state_bytes(timeline) == state
        if where == "fork":
            timeline = timeline.fork()
        speculator = timeline.speculator
        assert speculator is not None
        (loss,) = speculator.take_losses()
        assert (loss.name, loss.left) == ("failing", "whole")
        assert speculator.drafter is other
        assert timeline.fork().speculator.drafter is other  # type: ignore[union-attr]
        assert other.observed == MANY - 1, "nothing is kept from the half that works"
        if broken != "resting":
            assert other.proposed > MANY // 3


def test_two_drafters_that_fail_are_both_told(plain, make_fake_model, reckless) -> None:
    _, _, ids = plain(SAMPLINGS["warm"], 4)
    for first, second in (("begin", "begin"), ("propose", "observe"), ("observe", "propose")):
        timeline = timeline_of(
            make_fake_model(4), lambda first=first, second=second: BothDrafter(Half("a", first), Half("b", second))
        )
        assert list(timeline.generate(SAMPLINGS["warm"], (), MANY)) == ids
        assert timeline.speculator is not None
        losses = timeline.speculator.take_losses()
        assert losses[-1].left == ""
        assert len(losses) == (1 if first == second else 2)


def test_a_conversation_tells_of_a_half_that_failed_and_goes_on_with_the_other(
    fake_engine, store, talk, reckless
) -> None:
    text = "the same words, the same words, the same words, the same words"
    fake_engine.speculate(choose("suffix"), make=lambda: BothDrafter(SuffixDrafter(), Broken("propose")))
    with Conversation.open(fake_engine, store, "a", mode="create") as conversation:
        events = talk(conversation, "Hello", text, sampling=Sampling(seed=1))
    (notice,) = [event for event in events if isinstance(event, ev.Notice)]
    assert notice.message == "the broken drafter failed (RuntimeError: out of ideas): going on with suffix alone"
    told = next(event for event in events if isinstance(event, ev.Speculation))
    assert (told.drafter, told.failed) == ("suffix", "RuntimeError: out of ideas")
    assert told.tokens_per_step > 1.5
