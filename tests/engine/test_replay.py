"""Replay, scores, and evaluating into a new session; thinned turns come back bit for bit."""

from __future__ import annotations

import math

import pytest
import torch
from k3_sessions.config import StoreConfig, ThinningPolicy
from k3_sessions.errors import IdentityMismatch
from k3_sessions.store import Store

from k3cli.engine import events as ev
from k3cli.engine.conversation import Conversation
from k3cli.engine.replay import replay, replay_into, score, state_difference
from k3cli.engine.sampling import Sampling
from k3cli.errors import ModelError, SessionError, UsageError

LONG = "word " * 300


@pytest.fixture
def sparse_store(tmp_path):
    """Keeps the newest checkpoint and no other."""
    config = StoreConfig(
        free_floor_bytes=0,
        free_floor_share=0.0,
        thinning=ThinningPolicy(last=1, log_spaced=False, max_kept=1),
    )
    found = Store.open(tmp_path / "sparse", config=config)
    yield found
    found.close()


@pytest.fixture
def recorded(fake_engine, talk):
    """A session of four turns: greedy, sampled, filtered, cut by the length limit."""

    def make(store, name="a", each=lambda timeline: None):
        samplings = [
            Sampling(temperature=0, seed=1, max_tokens=30),
            Sampling(seed=2, max_tokens=40),
            Sampling(temperature=0.8, top_p=0.9, top_k=100, min_p=0.001, seed=3, max_tokens=30),
            Sampling(seed=4, max_tokens=5),
        ]
        with Conversation.open(fake_engine, store, name, mode="create", head={"effort": "low"}) as conversation:
            for text, sampling in zip(("One", LONG, "Three", "Four"), samplings, strict=True):
                talk(conversation, text, sampling=sampling)
                each(conversation._timeline)
            return list(conversation._timeline.tokens)

    return make


def of(events, kind):
    return [event for event in events if isinstance(event, kind)]


def test_replay_finds_everything_equal(fake_engine, make_fake_engine, store, recorded) -> None:
    recorded(store)
    events = list(replay(make_fake_engine(), store, "a"))
    assert not of(events, ev.Difference)
    turns = of(events, ev.TurnReplayed)
    log = store.log("a")
    assert [t.turn for t in turns] == [t.id for t in log]
    assert [t.tokens for t in turns] == [len(t.tokens) - t.meta["prompt"] for t in log]
    assert turns[-1].state == "equal"
    assert {t.state for t in turns} <= {"equal", "no checkpoint"}


def test_replay_of_a_part_starts_from_a_joint_boundary(make_fake_engine, store, recorded) -> None:
    recorded(store)
    engine = make_fake_engine()
    events = list(replay(engine, store, "a", first=4))
    assert [t.number for t in of(events, ev.TurnReplayed)] == [4]
    evaluated = sum(n for _, n in engine.model.calls)
    log = store.log("a")
    assert evaluated == log[3].position - log[2].position
    for first, last in ((0, 1), (3, 2), (1, 5)):
        with pytest.raises(UsageError, match="numbers from 1 to 4"):
            list(replay(engine, store, "a", first=first, last=last))


def test_replay_tells_the_first_token_that_differs(make_fake_engine, store, recorded) -> None:
    tokens = recorded(store)
    engine = make_fake_engine()
    turn = store.log("a")[1]
    at = turn.start + turn.meta["prompt"] + 3
    other = (tokens[at] + 1) % 256
    engine.model.script[at] = other
    events = list(replay(engine, store, "a"))
    (found,) = of(events, ev.Difference)
    assert (found.turn, found.number, found.position) == (turn.id, 2, at)
    assert (found.recorded, found.got) == (tokens[at], other)
    assert found.margin is not None
    assert found.margin > 0
    assert of(events, ev.TurnReplayed)[-1].state == "equal", "the recorded ids go on"


def test_replay_tells_the_first_state_that_differs(make_fake_engine, store, recorded) -> None:
    recorded(store)
    engine = make_fake_engine()
    real = engine.model.commit

    def commit(state, log, n):
        real(state, log, n)
        if state.position == store.log("a")[3].position:
            state.rows[700] = state.rows[700] + 0.25

    engine.model.commit = commit
    found = of(list(replay(engine, store, "a")), ev.Difference)
    assert [(d.field, d.layer, d.position) for d in found] == [("kv_latent", 1, 700)]
    assert found[0].max_abs == pytest.approx(0.25)
    assert found[0].recorded is None


def test_state_difference_sees_single_bits_and_negative_zero(fake_engine) -> None:
    one, two = fake_engine.timeline([1, 2, 3]), fake_engine.timeline([1, 2, 3])
    for timeline in (one, two):
        list(timeline.prefill())
    layout = fake_engine.layout
    assert state_difference(layout, one.snapshot(), two.snapshot()) is None
    two._state.recurrent[5] = -two._state.recurrent[5]
    found = state_difference(layout, one.snapshot(), two.snapshot())
    assert found is not None
    assert found[:3] == ("recurrent", 0, 3)
    one._state.recurrent[5], two._state.recurrent[5] = 0.0, -0.0
    assert state_difference(layout, one.snapshot(), two.snapshot()) == ("recurrent", 0, 3, 0.0)


def test_replay_refuses_other_weights(make_fake_engine, store, recorded) -> None:
    recorded(store)
    with pytest.raises(IdentityMismatch):
        list(replay(make_fake_engine(weights="sha256:other"), store, "a"))


def test_a_thinned_turn_resumes_bit_for_bit(make_fake_engine, sparse_store, recorded, talk, state_bytes) -> None:
    live: dict[int, object] = {}
    recorded(sparse_store, each=lambda timeline: live.update({len(timeline.tokens): state_bytes(timeline)}))
    log = sparse_store.log("a")
    assert [t.has_checkpoint for t in log] == [False, False, False, True]
    for turn in log[:3]:
        engine = make_fake_engine()
        events: list[ev.Event] = []
        with Conversation.open(
            engine, sparse_store, "a", mode="ephemeral", at=turn.id, emit=events.append
        ) as conversation:
            (notice,) = of(events, ev.Notice)
            assert notice.code == "replaying"
            assert f"evaluating {turn.position:,} of {turn.position:,} tokens again" in notice.message
            assert events.index(notice) < events.index(of(events, ev.Progress)[0]), "the cost is told first"
            opened = of(events, ev.SessionOpened)[0]
            assert (opened.reused, opened.replayed) == (0, turn.position)
            report = of(talk(conversation, "Next"), ev.NotSaved)[0]
            assert (report.reused, report.replayed) == (0, turn.position)
            report = of(talk(conversation, "Next"), ev.NotSaved)[0]
            assert report.replayed == 0
        again = Conversation.open(make_fake_engine(), sparse_store, "a", mode="ephemeral", at=turn.id)
        assert state_bytes(again._timeline) == live[turn.total]
    with pytest.raises(SessionError, match=rf"without evaluating {log[1].position:,} old tokens again"):
        Conversation.open(make_fake_engine(), sparse_store, "a", mode="ephemeral", at=log[1].id, require_cached=True)


def test_a_cancelled_replay_leaves_nothing_behind(make_fake_engine, sparse_store, recorded) -> None:
    recorded(sparse_store)
    turn = sparse_store.log("a")[2]
    asked = 0

    def cancel() -> bool:
        nonlocal asked
        asked += 1
        return asked > 3

    with pytest.raises(Exception, match="stopped after"):
        Conversation.open(make_fake_engine(), sparse_store, "a", mode="fork", new="b", at=turn.id, cancel=cancel)
    assert not sparse_store.exists("b")
    Conversation.open(make_fake_engine(), sparse_store, "a", mode="fork", new="b", at=turn.id).close()


def test_scores_are_the_models_own_log_likelihoods(make_fake_engine, store, recorded) -> None:
    tokens = recorded(store)
    for weights, seed in (("sha256:fake", 0), ("sha256:other", 1)):
        from_seed = make_fake_engine(weights=weights)
        if seed:
            from_seed.model.__init__(seed=seed)
        events = list(score(from_seed, store, "a"))
        timeline = from_seed.timeline(tokens)
        rows = torch.cat([rows for _, rows in timeline.evaluate_all()])
        logp = torch.log_softmax(rows.double(), -1)
        for turn, event in zip(store.log("a"), of(events, ev.Score), strict=True):
            begin, end = turn.start + turn.meta["prompt"], turn.total
            want = sum(float(logp[i - 1, tokens[i]]) for i in range(begin, end))
            assert event.nats == pytest.approx(want)
            assert event.tokens == end - begin
            assert event.perplexity == pytest.approx(math.exp(-want / (end - begin)))
            given = range(max(turn.start, 1), begin)
            assert event.prompt_nats == pytest.approx(sum(float(logp[i - 1, tokens[i]]) for i in given))
            assert event.prompt_tokens == len(given)


def test_evaluating_into_a_new_session_keeps_the_ids(make_fake_engine, store, recorded, talk, state_bytes) -> None:
    tokens = recorded(store)
    engine = make_fake_engine(weights="sha256:other")
    engine.model.__init__(seed=1)
    events = list(replay_into(engine, store, "a", "b"))
    assert len(of(events, ev.Saved)) == 4
    assert [int(i) for i in store.tokens(store.session("b").head)] == tokens
    assert [t.meta["kind"] for t in store.log("b")] == ["evaluated"] * 4
    with Conversation.open(engine, store, "b", mode="resume") as conversation:
        assert conversation.head.effort == "low"
        fresh = engine.timeline(tokens)
        list(fresh.follow(conversation._timeline.schedule.__class__(0, _runs(store.log("b")))))
        assert state_bytes(fresh) == state_bytes(conversation._timeline)
        talk(conversation, "Next", "Fine")
    again = list(replay(engine, store, "b"))
    assert not of(again, ev.Difference)
    assert [t.tokens for t in of(again, ev.TurnReplayed)][:4] == [0, 0, 0, 0]


def _runs(log):
    return [tuple(run) for turn in log for run in turn.meta["schedule"]]


def test_another_head_changes_the_head_only(fake_engine, store, recorded, talk) -> None:
    tokens = recorded(store)
    renderer = fake_engine.renderer
    old, new = renderer.render_head((), True, "low", None), renderer.render_head((), True, "high", "Be kind.")
    list(replay_into(fake_engine, store, "a", "b", head={"effort": "high", "system": "Be kind."}))
    assert [int(i) for i in store.tokens(store.session("b").head)] == new + tokens[len(old) :]
    with Conversation.open(fake_engine, store, "b", mode="resume", head={"system": "Be kind."}) as conversation:
        assert conversation.head.seed == store.session("a").fixed["head"]["seed"]
        talk(conversation, "Next", "Fine")
    with pytest.raises(UsageError, match="thinking switched off"):
        list(replay_into(fake_engine, store, "a", "c", head={"thinking": False}))
    assert not store.exists("c")


def test_another_tokenizer_is_refused(fake_engine, store, recorded) -> None:
    recorded(store)
    from dataclasses import replace

    fake_engine.identity = replace(fake_engine.identity, tokenizer="sha256:else")
    for work in (score(fake_engine, store, "a"), replay_into(fake_engine, store, "a", "b")):
        with pytest.raises(ModelError, match="its ids would mean other text"):
            list(work)
