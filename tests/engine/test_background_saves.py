"""A save that takes its time: the conversation goes on meanwhile, and what is stored is the turn as it ended."""

from __future__ import annotations

import errno
import os
import threading
from contextlib import nullcontext

import pytest
import torch
from k3_sessions.config import StoreConfig
from k3_sessions.errors import SessionMissing, StoreFull
from k3_sessions.fs import RealFS
from k3_sessions.store import Store

from k3cli.engine import events as ev
from k3cli.engine.conversation import Conversation
from k3cli.engine.engine import Engine
from k3cli.engine.evaluate import replay_into
from k3cli.engine.sampling import Sampling
from k3cli.engine.snapshot import Snapshot

LONG = "word " * 300
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class SlowFS(RealFS):
    """Holds every sync until `gate` is set; then refuses it if `error` is. The fixture holds the copy, too."""

    def __init__(self, root):
        super().__init__(root)
        self.gate = threading.Event()
        self.gate.set()
        self.error: int | None = None

    def sync(self, handle):
        assert self.gate.wait(10)
        if self.error is not None:
            raise OSError(self.error, os.strerror(self.error))
        super().sync(handle)


@pytest.fixture
def slow(tmp_path, monkeypatch):
    fs = SlowFS(tmp_path / "slow")
    read = Snapshot.checkpoint

    def held(self):
        assert threading.current_thread().name != "k3-save" or fs.gate.wait(10)
        return read(self)

    monkeypatch.setattr(Snapshot, "checkpoint", held)
    store = Store.open(tmp_path / "slow", fs=fs, config=StoreConfig(free_floor_bytes=0, free_floor_share=0.0))
    yield fs, store
    fs.gate.set()
    store.close()


def of(events, kind):
    return [event for event in events if isinstance(event, kind)]


def all_bits(engine, timeline):
    source = timeline.snapshot()
    found = {name: array.tobytes() for name, array in source.checkpoint().items()}
    for field in engine.layout.fields:
        if field.scope == "page":
            found[field.name] = source.page_rows(field.name, 0, source.position).tobytes()
    return found


@pytest.fixture(params=["fake", "real", pytest.param("cuda", marks=needs_cuda)])
def engine(request):
    """The fake model, and a tiny K3 on each kind of device."""
    if request.param == "fake":
        return request.getfixturevalue("make_fake_engine")()
    if request.param == "real":
        return request.getfixturevalue("tiny_engine")
    return Engine.load(request.getfixturevalue("tiny_model"), device="cuda")


def test_the_next_turn_runs_while_the_last_is_being_saved(engine, slow, talk) -> None:
    fs, store = slow
    sampling = Sampling(seed=7, max_tokens=40)
    with Conversation.open(engine, store, "a", mode="create") as conversation:
        fs.gate.clear()
        events = talk(conversation, "One", sampling=sampling, wait=False)
        assert of(events, ev.Stopped), "the answer has ended"
        assert not of(events, (ev.Saved, ev.NotSaved, ev.Done)), "and nothing is said of a save"
        assert conversation.saving
        assert conversation.settle(0.05) == []
        assert (conversation.turn_id, conversation.queued) == (None, 0)
        first = list(conversation._timeline.tokens), all_bits(engine, conversation._timeline)
        seen: list[ev.Event] = []
        for event in conversation.turn([{"role": "user", "content": LONG}], sampling, wait=False):
            seen.append(event)
            if isinstance(event, (ev.Thinking, ev.Text)) and not fs.gate.is_set():
                assert not store.exists("a"), "prefill and the first tokens of turn 2 came before turn 1 was on disk"
                fs.gate.set()
        second = list(conversation._timeline.tokens), all_bits(engine, conversation._timeline)
        told = [*seen, *conversation.settle()]
        assert [e.type for e in told if isinstance(e, (ev.Stopped, ev.Saved, ev.Done))] == [
            "stopped", "saved", "done", "saved", "done",
        ]  # fmt: skip
        one, two = of(told, ev.Saved)
        assert [d.turn for d in of(told, ev.Done)] == [one.turn, two.turn]
        assert all(d.saved for d in of(told, ev.Done))
        assert (one.generated, one.prefilled) == (len(first[0]) - one.prefilled, one.position - one.generated + 1)
        assert (two.reused, two.replayed) == (one.position, 0)
        assert conversation.turn_id == two.turn
    assert [t.id for t in store.log("a")] == [one.turn, two.turn]
    for turn, (tokens, bits) in ((one.turn, first), (two.turn, second)):
        with Conversation.open(engine, store, "a", mode="ephemeral", at=turn) as again:
            assert again._timeline.tokens == tokens
            assert all_bits(engine, again._timeline) == bits


def test_close_waits_and_a_reader_finds_nothing_before(make_fake_engine, slow, talk) -> None:
    fs, store = slow
    conversation = Conversation.open(make_fake_engine(), store, "a", mode="create")
    fs.gate.clear()
    talk(conversation, "One", wait=False)
    with pytest.raises(SessionMissing):
        store.session("a")
    threading.Timer(0.2, fs.gate.set).start()
    conversation.close()
    assert len(store.log("a")) == 1
    Conversation.open(make_fake_engine(), store, "a", mode="resume").close()  # the lock is free


def test_leaving_at_once_does_not_wait_and_the_save_may_still_end(make_fake_engine, slow, talk) -> None:
    fs, store = slow
    conversation = Conversation.open(make_fake_engine(), store, "a", mode="create")
    fs.gate.clear()
    talk(conversation, "One", wait=False)
    conversation.__exit__(SystemExit, SystemExit(), None)
    assert conversation.saving
    fs.gate.set()
    assert [e.type for e in conversation.settle()] == ["saved", "done"]
    assert len(store.log("a")) == 1


@pytest.mark.parametrize("what", ["fork", "undo", "save", "turn"])
def test_what_needs_the_disk_waits_for_it(make_fake_engine, slow, talk, what) -> None:
    fs, store = slow
    with Conversation.open(make_fake_engine(), store, "a", mode="create") as conversation:
        talk(conversation, "One")
        fs.gate.clear()
        talk(conversation, "Two", wait=False)
        threading.Timer(0.2, fs.gate.set).start()
        if what == "fork":
            child = conversation.fork("b")
            assert child.turn_id == conversation.turn_id
            child.close()
            assert len(store.log("b")) == 2
        elif what == "undo":
            assert conversation.undo() == store.log("a")[0].id
        elif what == "save":
            assert [e.type for e in conversation.save()] == ["saved", "done"]
        else:
            assert [e.turns for e in of(talk(conversation, "Three"), ev.Saved)] == [1, 1]
        assert len(store.log("a")) == (3 if what == "turn" else 2)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_a_save_that_fails_behind_the_next_turn_is_told_and_made_up_for(make_fake_engine, slow, talk, error) -> None:
    fs, store = slow
    with Conversation.open(make_fake_engine(), store, "a", mode="create") as conversation:
        fs.gate.clear()
        fs.error = error
        talk(conversation, "One", wait=False)
        assert conversation.queued == 0, "nobody knows yet"
        fs.gate.set()
        told = conversation.settle()
        assert [e.type for e in told] == ["notice", "not_saved", "done"]
        assert os.strerror(error) in told[0].message
        assert (told[2].saved, told[2].turn) == (False, None)
        assert conversation.queued == 1
        fs.error = None
        talk(conversation, "Two", wait=False)
        assert [e.turns for e in of(conversation.settle(), ev.Saved)] == [2]
        tokens, bits = list(conversation._timeline.tokens), all_bits(conversation.engine, conversation._timeline)
    assert len(store.log("a")) == 2
    with Conversation.open(make_fake_engine(), store, "a", mode="resume") as again:
        assert again._timeline.tokens == tokens
        assert all_bits(again.engine, again._timeline) == bits


def test_an_error_nobody_expected_is_raised_where_it_is_asked_and_the_turn_is_kept(
    make_fake_engine, slow, talk, monkeypatch
) -> None:
    _, store = slow
    read = threading.Event()

    def broken(_self):
        assert read.wait(60)
        raise RuntimeError("the copy off the device failed")

    with Conversation.open(make_fake_engine(), store, "a", mode="create") as conversation:
        with monkeypatch.context() as patched:
            patched.setattr(Snapshot, "checkpoint", broken)
            talk(conversation, "One", wait=False)
            read.set()
            with pytest.raises(RuntimeError, match="copy off the device"):
                conversation.settle()
            assert conversation.queued == 1
            read.clear()
            talk(conversation, "Two", wait=False)
            threading.Timer(0.1, read.set).start()
            with pytest.raises(RuntimeError, match="copy off the device"):
                talk(conversation, "Three", wait=False)
            with pytest.raises(RuntimeError, match="copy off the device"):
                conversation.settle()
        assert conversation.queued == 3
        (event,) = conversation.save()
        assert (event.type, event.turns, conversation.queued) == ("saved", 3, 0)
        tokens, bits = list(conversation._timeline.tokens), all_bits(conversation.engine, conversation._timeline)
    assert [t.meta["given"]["messages"][0]["content"] for t in store.log("a")] == ["One", "Two", "Three"]
    with Conversation.open(make_fake_engine(), store, "a", mode="resume") as again:
        assert again._timeline.tokens == tokens
        assert all_bits(again.engine, again._timeline) == bits


def test_a_failing_device_goes_back_to_the_turn_that_is_being_saved(make_fake_engine, slow, talk) -> None:
    fs, store = slow
    engine = make_fake_engine()
    with Conversation.open(engine, store, "a", mode="create") as conversation:
        fs.gate.clear()
        talk(conversation, "One", wait=False)
        tokens, bits = list(conversation._timeline.tokens), all_bits(engine, conversation._timeline)
        engine.model.fail_at = 0
        with pytest.raises(RuntimeError, match="device failed"):
            talk(conversation, "Two", wait=False)
        engine.model.fail_at = None
        conversation._recover()
        assert conversation.saving
        assert conversation._timeline.tokens == tokens
        assert all_bits(engine, conversation._timeline) == bits
        fs.gate.set()
        talk(conversation, "Two")
    assert len(store.log("a")) == 2


def test_a_closed_iterator_saves_behind_too(make_fake_engine, slow, talk) -> None:
    fs, store = slow
    with Conversation.open(make_fake_engine(), store, "a", mode="create") as conversation:
        fs.gate.clear()
        events = conversation.turn([{"role": "user", "content": "Hello"}], Sampling(seed=1, max_tokens=50), wait=False)
        while not isinstance(next(events), (ev.Text, ev.Thinking)):
            pass
        events.close()
        assert conversation.saving
        fs.gate.set()
        saved, done = conversation.settle()
        assert (saved.type, done.reason, done.saved) == ("saved", "cancelled", True)
    assert store.log("a")[0].meta["stop"] == "cancelled"


@pytest.mark.parametrize("fails", [False, True])
def test_evaluating_into_a_new_session_saves_behind_the_next_turn(make_fake_engine, slow, talk, fails) -> None:
    fs, store = slow
    engine = make_fake_engine()
    with Conversation.open(engine, store, "a", mode="create") as conversation:
        for text in ("One", "Two", "Three"):
            talk(conversation, text)
        tokens = list(conversation._timeline.tokens)
    first = store.log("a")[0].position
    fs.gate.clear()
    fs.error = errno.ENOSPC if fails else None
    events = []
    with pytest.raises(StoreFull) if fails else nullcontext():
        for event in replay_into(engine, store, "a", "b"):
            events.append(event)
            if isinstance(event, ev.Progress) and event.done > first + 1:
                assert fs.gate.is_set() or not store.exists("b"), "turn 2 is evaluated before turn 1 is on disk"
                fs.gate.set()
    assert len(of(events, ev.Saved)) == (0 if fails else 3)
    assert store.exists("b") is not fails
    if not fails:
        assert [s.turn for s in of(events, ev.Saved)] == [t.id for t in store.log("b")]
        with Conversation.open(engine, store, "b", mode="resume") as again:
            assert again._timeline.tokens == tokens
    fs.error = None
    store.writer("c", create=True, identity=engine.identity, layout=engine.layout).close()
