"""A disk that refuses: the conversation goes on in memory and the next save holds everything. Shared prefixes."""

from __future__ import annotations

import errno
import os

import pytest
from k3_sessions.config import StoreConfig
from k3_sessions.fs import RealFS
from k3_sessions.store import Store

from k3cli.engine import events as ev
from k3cli.engine.conversation import Conversation
from k3cli.engine.replay import replay
from k3cli.errors import DamagedError, SessionError

SYSTEM = "You are a careful helper. " * 60  # three hash blocks of bytes


class SickFS(RealFS):
    """Refuses every write while `error` is set."""

    error: int | None = None

    def write(self, handle, data):
        if self.error is not None:
            raise OSError(self.error, os.strerror(self.error))
        return super().write(handle, data)


@pytest.fixture
def sick(tmp_path):
    fs = SickFS(tmp_path / "sick")
    store = Store.open(tmp_path / "sick", fs=fs, config=StoreConfig(free_floor_bytes=0, free_floor_share=0.0))
    yield fs, store
    store.close()


def of(events, kind):
    return [event for event in events if isinstance(event, kind)]


def said(turn):
    return turn.meta["given"]["messages"][0]["content"]


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EROFS])
@pytest.mark.parametrize("healthy_turns", [0, 1])
def test_turns_wait_in_memory_and_the_next_save_holds_them_all(
    make_fake_engine, sick, store, talk, state_bytes, error, healthy_turns
) -> None:
    fs, sick_store = sick
    texts = [f"Turn {n}" for n in range(healthy_turns + 3)]
    with Conversation.open(make_fake_engine(), store, "a", mode="create") as whole:
        for text in texts:
            talk(whole, text)
        want, bits = list(whole._timeline.tokens), state_bytes(whole._timeline)
    with Conversation.open(make_fake_engine(), sick_store, "a", mode="create") as conversation:
        for text in texts[:healthy_turns]:
            talk(conversation, text)
        fs.error = error
        for number, text in enumerate(texts[healthy_turns:-1], 1):
            events = talk(conversation, text)
            (notice,) = of(events, ev.Notice)
            assert notice.code == "not-saved"
            assert os.strerror(error) in notice.message
            assert of(events, ev.NotSaved)[0].queued == conversation.queued == number
            assert events[-1].saved is False
        with pytest.raises(SessionError, match="in memory only"):
            conversation.fork("b")
        assert [e.type for e in conversation.save()] == ["notice", "not_saved"]
        fs.error = None
        events = talk(conversation, texts[-1])
        report = of(events, ev.Saved)[0]
        assert report.turns == 3
        assert conversation.queued == 0
        assert list(conversation.save()) == []
    assert len(sick_store.log("a")) == len(texts)
    with Conversation.open(make_fake_engine(), sick_store, "a", mode="resume") as again:
        assert again._timeline.tokens == want
        assert state_bytes(again._timeline) == bits
    assert not of(list(replay(make_fake_engine(), sick_store, "a")), ev.Difference)


def test_saving_again_on_request(make_fake_engine, sick, talk) -> None:
    fs, sick_store = sick
    with Conversation.open(make_fake_engine(), sick_store, "a", mode="create") as conversation:
        fs.error = errno.ENOSPC
        talk(conversation, "One")
        fs.error = None
        (event,) = conversation.save()
        assert isinstance(event, ev.Saved)
        assert event.turns == 1
        assert conversation.turn_id == sick_store.session("a").head
        talk(conversation, "Two")
    assert len(sick_store.log("a")) == 2


def test_a_failing_device_does_not_lose_turns_that_wait(make_fake_engine, sick, talk, state_bytes) -> None:
    fs, sick_store = sick
    engine = make_fake_engine()
    with Conversation.open(engine, sick_store, "a", mode="create") as conversation:
        fs.error = errno.EIO
        talk(conversation, "One")
        bits = state_bytes(conversation._timeline)
        engine.model.fail_at = 0
        with pytest.raises(RuntimeError, match="device failed"):
            talk(conversation, "Two")
        engine.model.fail_at = None
        fs.error = None
        (event,) = conversation.save()
        assert event.turns == 1
        engine.model.fail_at = 0
        with pytest.raises(RuntimeError, match="device failed"):
            talk(conversation, "Two")
        engine.model.fail_at = None
        conversation._recover()
        assert state_bytes(conversation._timeline) == bits
        talk(conversation, "Two")
    assert len(sick_store.log("a")) == 2


def test_an_undo_that_can_not_be_written_waits_too(make_fake_engine, sick, talk) -> None:
    fs, sick_store = sick
    with Conversation.open(make_fake_engine(), sick_store, "a", mode="create") as conversation:
        for text in ("One", "Two"):
            talk(conversation, text)
        conversation.undo()
        fs.error = errno.ENOSPC
        for text in ("Three", "Four"):
            assert of(talk(conversation, text), ev.NotSaved)
        assert [said(t) for t in sick_store.log("a")] == ["One", "Two"]
        assert conversation.queued == 2
        fs.error = None
        talk(conversation, "Five")
    assert [said(t) for t in sick_store.log("a")] == ["One", "Three", "Four", "Five"]
    assert not of(list(replay(make_fake_engine(), sick_store, "a")), ev.Difference)


def test_a_shared_head_is_kept_the_second_time_and_reused_from_then_on(
    make_fake_engine, store, talk, state_bytes
) -> None:
    engine = make_fake_engine()
    head = {"system": SYSTEM}
    reports = []
    for name, text in (("one", "First"), ("two", "Second"), ("three", "Third")):
        with Conversation.open(engine, store, name, mode="create", head=head) as conversation:
            engine.model.calls.clear()
            events = talk(conversation, text)
            reports.append((of(events, ev.Saved)[0], of(events, ev.Notice)))
    shared = len(engine.renderer.render_head((), True, "max", SYSTEM)) // 512 * 512
    assert shared >= 1536
    assert [report.reused for report, _ in reports] == [0, 0, shared]
    assert [[n.code for n in notices] for _, notices in reports] == [[], [], ["shared-prefix"]]
    assert sum(n for _, n in engine.model.calls) == reports[2][0].position - shared
    assert [t.meta["kind"] for t in store.log("two")] == ["prompt", "chat"]
    assert store.log("two")[0].position == shared
    assert [t.meta["shared"] for t in store.log("three")] == [shared]
    # the shared start changes nothing: same tokens, same state as a session that found nothing to share
    with Conversation.open(make_fake_engine(), store, "three", mode="resume") as resumed:
        tokens, bits = list(resumed._timeline.tokens), state_bytes(resumed._timeline)
    alone = make_fake_engine(weights="sha256:twin")
    with Conversation.open(alone, store, "alone", mode="create", head=head) as conversation:
        talk(conversation, "Third")
        assert conversation._timeline.tokens == tokens
        assert state_bytes(conversation._timeline) == bits
    for name in ("one", "two", "three"):
        events = list(replay(make_fake_engine(), store, name))
        assert not of(events, ev.Difference)
        assert of(events, ev.TurnReplayed)[-1].tokens > 0
    # undo never stops at a prompt without its answer
    with Conversation.open(engine, store, "two", mode="resume") as conversation:
        with pytest.raises(SessionError, match="one turn only"):
            conversation.undo()
        talk(conversation, "More", "Yes")


def test_a_longer_shared_prompt_grows_from_a_shorter_one(make_fake_engine, store, talk) -> None:
    engine = make_fake_engine()
    document = "A line of the document.\n" * 50
    reused = []
    for number, text in enumerate(["Hello", "Hallo", *[document + end for end in ("Why?", "How?", "When?")]]):
        with Conversation.open(engine, store, f"s{number}", mode="create", head={"system": SYSTEM}) as conversation:
            engine.model.calls.clear()
            events = talk(conversation, text)
            report = of(events, ev.Saved)[0]
            reused.append(report.reused)
            assert sum(n for _, n in engine.model.calls) == report.position - report.reused
    head = len(engine.renderer.render_head((), True, "max", SYSTEM)) // 512 * 512
    assert reused[:4] == [0, 0, head, head]
    assert reused[4] > head + 1024
    assert reused[4] % 512 == 0
    assert [[t.meta["kind"] for t in store.log(f"s{n}")] for n in (2, 3, 4)] == [["chat"], ["prompt", "chat"], ["chat"]]
    for number in range(5):
        events = list(replay(make_fake_engine(), store, f"s{number}"))
        assert not of(events, ev.Difference)
        assert of(events, ev.TurnReplayed)[-1].state == "equal"


def test_a_prompt_kept_for_sharing_can_be_resumed_by_itself(make_fake_engine, store, talk) -> None:
    engine = make_fake_engine()
    for name in ("one", "two"):
        with Conversation.open(engine, store, name, mode="create", head={"system": SYSTEM}) as conversation:
            talk(conversation, "Hello", "Fine")
    prompt = store.log("two")[0]
    with Conversation.open(engine, store, "two", mode="fork", new="three", at=prompt.id) as conversation:
        talk(conversation, "Again", "Here")
        shown = [(m["role"], m["content"]) for m in conversation.transcript() if m["kind"] == "message"]
    assert shown[1:] == [("user", "Hello"), ("assistant", ""), ("user", "Again"), ("assistant", "Here")]


def test_damaged_shared_state_costs_a_prefill_and_says_so(make_fake_engine, store, talk, tmp_path) -> None:
    engine = make_fake_engine()
    for name in ("one", "two"):
        with Conversation.open(engine, store, name, mode="create", head={"system": SYSTEM}) as conversation:
            talk(conversation, "Hello", "Fine")
    boundary = store.catalog.turn(store.log("two")[0].id)
    for blob in boundary.checkpoint:
        path = tmp_path / "store" / "objects" / blob.id[:2] / blob.id[2:]
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    with Conversation.open(make_fake_engine(), store, "three", mode="create", head={"system": SYSTEM}) as conversation:
        events = talk(conversation, "Hello", "Fine")
        assert [n.code for n in of(events, ev.Notice)] == ["shared-prefix-unusable"]
        assert of(events, ev.Saved)[0].reused == 0


@pytest.mark.parametrize("how", ["byte", "cut", "missing", "link", "directory"])
def test_a_damaged_turn_is_refused_with_the_cost_of_the_next_best(make_fake_engine, store, talk, tmp_path, how) -> None:
    engine = make_fake_engine()
    with Conversation.open(engine, store, "a", mode="create") as conversation:
        for text in ("One", "Two", "Three"):
            talk(conversation, text)
    log = store.log("a")
    for blob in store.catalog.turn(log[2].id).checkpoint:
        path = tmp_path / "store" / "objects" / blob.id[:2] / blob.id[2:]
        data = bytearray(path.read_bytes())
        path.unlink()
        if how == "byte":
            data[-1] ^= 1
            path.write_bytes(data)
        elif how == "cut":
            path.write_bytes(data[:-1])
        elif how == "link":
            (tmp_path / "elsewhere").write_bytes(data)
            path.symlink_to(tmp_path / "elsewhere")
        elif how == "directory":
            path.mkdir()
    cost = log[2].position - log[1].position
    offer = rf"joint boundary at {log[1].position}, evaluating {cost:,} tokens again"
    before = sorted(path for path in (tmp_path / "store").rglob("*") if "locks" not in path.parts)
    for _ in range(2):
        with pytest.raises(DamagedError, match=offer):
            Conversation.open(make_fake_engine(), store, "a", mode="resume")
    assert sorted(path for path in (tmp_path / "store").rglob("*") if "locks" not in path.parts) == before
    Conversation.open(make_fake_engine(), store, "a", mode="ephemeral", at=log[1].id).close()
    # After the repair it is as if that checkpoint had been thinned.
    (repaired,) = store.repair().sessions
    assert (repaired.lost_checkpoints, repaired.boundary) == ((log[2].position,), log[1].position)
    events: list[ev.Event] = []
    Conversation.open(make_fake_engine(), store, "a", mode="resume", emit=events.append).close()
    assert "replaying" in [notice.code for notice in of(events, ev.Notice)]
    assert store.verify().problems == ()
