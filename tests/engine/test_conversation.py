"""Turns over a real store and chat format with a fake model: what is evaluated, saved, resumed, forked and refused."""

from __future__ import annotations

import json

import pytest
from k3_sessions.errors import IdentityMismatch, SessionExists, SessionLocked

from k3cli.engine import events as ev
from k3cli.engine.conversation import Conversation
from k3cli.engine.replay import replay
from k3cli.engine.sampling import Sampling
from k3cli.errors import ContextError, SessionError, UsageError

LONG = "word " * 300


def of(events, kind):
    return [event for event in events if isinstance(event, kind)]


def saved(events) -> ev.Saved:
    (event,) = of(events, ev.Saved)
    return event


def text_of(events) -> str:
    return "".join(event.text for event in of(events, ev.Text))


def opened(engine, store, name, mode, **options):
    events: list[ev.Event] = []
    conversation = Conversation.open(engine, store, name, mode=mode, emit=events.append, **options)
    return conversation, events


def test_a_turn_ends_with_saved_and_done(fake_engine, store, talk) -> None:
    conversation, events = opened(fake_engine, store, "a", "create", head={"effort": "low"})
    assert isinstance(events[-1], ev.SessionOpened)
    assert events[-1].how == "created"
    with conversation:
        events = talk(conversation, "Hello", "Good day.", sampling=Sampling(seed=1))
        assert text_of(events) == "Good day."
        assert [e.type for e in events if not isinstance(e, ev.Text)] == [
            "prompt",
            "stopped",
            "speculation",
            "saved",
            "done",
        ]
        done = events[-1]
        assert isinstance(done, ev.Done)
        assert (done.reason, done.saved, done.turn) == ("stop", True, conversation.turn_id)
        report = saved(events)
        prompt = of(events, ev.Prompt)[0].prefill
        assert (report.reused, report.replayed, report.prefilled, report.pending) == (0, 0, prompt, 1)
        assert report.position == prompt + report.generated - 1
        assert report.bytes_written > 0
    turn = store.log("a")[0]
    assert len(turn.tokens) == prompt + report.generated
    assert turn.meta["answer"]["content"] == "Good day."
    assert turn.meta["given"]["messages"] == [{"role": "user", "content": "Hello"}]
    assert turn.meta["sampling"]["seed"] == 1
    for event in events:
        shape = json.loads(json.dumps(event.to_json()))
        assert shape["v"] == 1
        assert shape["type"] == event.type


def test_only_new_messages_are_evaluated(fake_engine, store, talk) -> None:
    conversation, _ = opened(fake_engine, store, "a", "create")
    with conversation:
        first = saved(talk(conversation, "One", "uno"))
        fake_engine.model.calls.clear()
        second = saved(talk(conversation, "Two", "dos"))
    assert second.reused == first.position
    assert second.replayed == 0
    renderer = fake_engine.renderer
    context = renderer.new_context(True)
    new = renderer.render_messages([{"role": "user", "content": "Two"}], context) + renderer.generation_prompt(True)
    assert second.prefilled == 1 + len(new), "the pending token and the new message"
    assert fake_engine.model.calls[0] == ("prefill", 1 + len(new))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_resume_goes_on_as_if_it_had_never_stopped(make_fake_engine, store, talk, state_bytes, temperature) -> None:
    sampling = Sampling(temperature=temperature, seed=3, max_tokens=64)
    texts = ["One", LONG, "Three", "Four"]
    whole, _ = opened(make_fake_engine(), store, "whole", "create", head={"system": "s"})
    with whole:
        for text in texts:
            talk(whole, text, sampling=sampling)
        tokens, bits = list(whole._timeline.tokens), state_bytes(whole._timeline)
    for number, text in enumerate(texts):
        engine = make_fake_engine()
        mode = "resume" if number else "create"
        part, events = opened(engine, store, "parts", mode, head={"system": "s"})
        with part:
            if number:
                opening = of(events, ev.SessionOpened)[0]
                assert (opening.replayed, opening.pending) == (0, 1)
                assert opening.reused == opening.tokens - 1
                assert not engine.model.calls, "nothing is evaluated before the next turn"
            talk(part, text, sampling=sampling)
            if number == 3:
                assert part._timeline.tokens == tokens
                assert state_bytes(part._timeline) == bits


def test_forks_go_their_own_way_and_share_pages(make_fake_engine, store, talk, tmp_path) -> None:
    engine = make_fake_engine()
    parent, _ = opened(engine, store, "parent", "create")
    talk(parent, LONG)
    child, events = opened(engine, store, "parent", "fork", new="child")
    assert of(events, ev.SessionOpened)[0].source == "parent"
    lone, events = opened(engine, store, "parent", "ephemeral")
    assert of(events, ev.SessionOpened)[0].name is None
    turns = [["p1", "p2"], ["c1", "c2"], ["p1", "c2"]]
    for step in range(2):
        for conversation, said in zip((parent, child, lone), turns, strict=True):
            talk(conversation, said[step])
    want: dict[str, list[int]] = {}
    for name, said in zip(("parent", "child", "lone"), turns, strict=True):
        fresh, _ = opened(make_fake_engine(), store, f"check-{name}", "create", head={"effort": "max"})
        with fresh:
            for text in (LONG, *said):
                talk(fresh, text)
            want[name] = fresh._timeline.tokens
    assert parent._timeline.tokens == want["parent"]
    assert child._timeline.tokens == want["child"]
    assert lone._timeline.tokens == want["lone"]
    assert {s.name for s in store.sessions()} == {"parent", "child", "check-parent", "check-child", "check-lone"}
    for conversation in (parent, child, lone):
        conversation.close()


def test_an_ephemeral_fork_writes_nothing(fake_engine, store, talk, tmp_path) -> None:
    parent, _ = opened(fake_engine, store, "parent", "create")
    with parent:
        talk(parent, "Hello")
    before = sorted((p, p.stat().st_mtime_ns) for p in (tmp_path / "store").rglob("*") if p.is_file())
    lone, _ = opened(fake_engine, store, "parent", "ephemeral")
    with lone:
        events = talk(lone, "Question", "Answer")
        assert of(events, ev.NotSaved)[0].reason == "ephemeral"
        assert events[-1].saved is False
        talk(lone, "Again", "Sure")
    after = sorted((p, p.stat().st_mtime_ns) for p in (tmp_path / "store").rglob("*") if p.is_file())
    assert after == before


def test_fork_in_memory_shares_state_without_evaluating(fake_engine, store, talk) -> None:
    parent, _ = opened(fake_engine, store, "parent", "create")
    with parent:
        talk(parent, "Hello", "Hi")
        fake_engine.model.calls.clear()
        with parent.fork("child") as child:
            assert not fake_engine.model.calls
            report = saved(talk(child, "Next", "Yes"))
            assert report.reused == report.position - report.prefilled - report.generated + 1
        again = saved(talk(parent, "Other", "No"))
        assert again.session == "parent"
    assert store.log("child")[0].id == store.log("parent")[0].id
    assert len(store.log("child")) == len(store.log("parent")) == 2


def test_the_head_is_fixed(fake_engine, store, talk) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    conversation, _ = opened(fake_engine, store, "a", "create", head={"system": "Be brief.", "tools": tools})
    with conversation:
        talk(conversation, "Hello", "Hi")
    same, _ = opened(fake_engine, store, "a", "resume", head={"system": "Be brief.", "tools": tools, "effort": None})
    same.close()
    with pytest.raises(SessionError, match=r"another system and effort.*replay a --into"):
        opened(fake_engine, store, "a", "resume", head={"system": "Be long.", "effort": "low"})
    with pytest.raises(SessionError, match="another tools"):
        opened(fake_engine, store, "a", "fork", new="b", head={"tools": []})
    assert not store.exists("b")


def test_names_that_exist_or_do_not(fake_engine, store, talk) -> None:
    conversation, _ = opened(fake_engine, store, "a", "create")
    with conversation:
        talk(conversation)
        with pytest.raises(SessionLocked):
            opened(fake_engine, store, "a", "resume")
    with pytest.raises(SessionExists):
        opened(fake_engine, store, "a", "create")
    with pytest.raises(SessionError, match="exists"):
        opened(fake_engine, store, "a", "fork", new="a")
    again, _ = opened(fake_engine, store, "a", "resume")
    again.close()


def test_another_model_is_refused(fake_engine, make_fake_engine, store, talk) -> None:
    conversation, _ = opened(fake_engine, store, "a", "create")
    with conversation:
        talk(conversation)
    other = make_fake_engine(weights="sha256:other")
    for mode, new in (("resume", None), ("fork", "b"), ("ephemeral", None)):
        with pytest.raises(IdentityMismatch, match="weights"):
            opened(other, store, "a", mode, new=new)
    assert not store.exists("b")


def test_tool_calls_end_the_turn_and_wait_for_results(fake_engine, store, talk) -> None:
    renderer = fake_engine.renderer
    call = {"id": "x", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    ids = renderer.render_message(message, renderer.new_context(True))[len(renderer.generation_prompt(True)) :]
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    conversation, _ = opened(fake_engine, store, "a", "create", head={"tools": tools})
    with conversation:
        events = talk(conversation, "Add", ids, sampling=Sampling(seed=1))
        (made,) = of(events, ev.ToolCall)
        assert (made.name, made.arguments, made.index) == ("add", '{"a": 1}', 1)
        assert events[-1].reason == "tool_calls"
    conversation, _ = opened(fake_engine, store, "a", "resume")
    with conversation:
        (open_call,) = conversation.open_calls()
        assert (open_call["id"], open_call["name"]) == (made.id, "add")
        wrong = [{"role": "tool", "tool_call_id": "nobody", "content": "2"}]
        with pytest.raises(UsageError, match="nobody"):
            conversation.turn(wrong)
        result = {"role": "tool", "tool_call_id": made.id, "content": "2"}
        with pytest.raises(UsageError, match="2 tool results for 1 open"):
            conversation.turn([result, result])
        events = talk(conversation, messages=[result], reply="It is 2.")
        assert text_of(events) == "It is 2."
        assert conversation.open_calls() == []
        with pytest.raises(UsageError, match="1 tool result for 0 open"):
            conversation.turn([result])
        shown = [(m["role"], m.get("content")) for m in conversation.transcript() if m["kind"] == "message"]
    assert shown == [("user", "Add"), ("assistant", ""), ("tool", "2"), ("assistant", "It is 2.")]


@pytest.mark.parametrize("declared", [[], ["other"]], ids=["none", "another"])
def test_a_call_of_a_tool_nobody_declared_is_said_to_be(fake_engine, store, talk, declared) -> None:
    """A small model may invent a tool; without the notice a user is asked for a result of nothing."""
    renderer = fake_engine.renderer
    call = {"id": "x", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    ids = renderer.render_message(message, renderer.new_context(True))[len(renderer.generation_prompt(True)) :]
    tools = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in declared]
    conversation, _ = opened(fake_engine, store, "a", "create", head={"tools": tools})
    with conversation:
        events = talk(conversation, "Add", ids, sampling=Sampling(seed=1))
        (notice,) = of(events, ev.Notice)
        assert notice.code == "undeclared-tool"
        assert f"declared: {declared[0] if declared else 'none'}" in notice.message
        assert text_of(talk(conversation, "Never mind", "Fine.")) == "Fine."


def test_tools_can_be_added_later(fake_engine, store, talk) -> None:
    tools = [{"type": "function", "function": {"name": "late", "parameters": {}}}]
    conversation, _ = opened(fake_engine, store, "a", "create")
    with conversation:
        talk(conversation, "Hello", "Hi")
        talk(conversation, "Use it", "Yes", tools=tools)
        assert conversation.info()["tools"] == ["late"]
        with pytest.raises(UsageError, match="declares late again"):
            conversation.turn([{"role": "user", "content": "x"}], tools=tools)
        kinds = [m["kind"] for m in conversation.transcript()]
    assert kinds.count("tool-declare") == 1


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([], "without input"),
        ([{"role": "user", "content": ""}], "without input"),
        ([{"role": "system", "content": "x"}], "without input"),
        ([{"role": "assistant", "content": "x"}], "the model answers"),
        ([{"role": "robot", "content": "x"}], "role"),
    ],
)
def test_turns_that_say_nothing_are_refused(fake_engine, store, messages, complaint) -> None:
    conversation, _ = opened(fake_engine, store, "a", "create")
    with conversation, pytest.raises(UsageError, match=complaint):
        conversation.turn(messages)
    assert not fake_engine.model.calls
    assert not store.exists("a")


def test_context_overflow_is_refused_before_anything_is_evaluated(make_fake_engine, store, talk) -> None:
    engine = make_fake_engine(limit=700)
    conversation, _ = opened(engine, store, "a", "create", head={"effort": "low"})
    with conversation:
        talk(conversation, "Hello", "Hi")
        engine.model.calls.clear()
        before = list(conversation._timeline.tokens)
        with pytest.raises(ContextError, match=rf"holds {len(before):,} tokens and \d+ more .*at most 700"):
            conversation.turn([{"role": "user", "content": "x" * 700}])
        assert not engine.model.calls
        assert conversation._timeline.tokens == before
        # what is left is used to the last token, and said to be
        events = talk(conversation, "Go on", sampling=Sampling(seed=1, max_tokens=600))
        assert [n.code for n in of(events, ev.Notice)] == ["clipped"]
        assert of(events, ev.Stopped)[0].reason in ("length", "stop")
        assert len(conversation._timeline.tokens) <= 700


def test_length_limit_closes_the_message_with_the_next_turn(fake_engine, store, talk) -> None:
    conversation, _ = opened(fake_engine, store, "a", "create")
    with conversation:
        events = talk(conversation, "Hello", "A long answer", sampling=Sampling(seed=1, max_tokens=12))
        assert events[-1].reason == "length"
        close = store.log("a")[0].meta["close"]
        assert close
        talk(conversation, "Next", "Fine")
        entries = [m for m in conversation.transcript() if m["kind"] == "message"]
    assert [m["role"] for m in entries] == ["user", "assistant", "user", "assistant"]
    assert all(m["complete"] and not m["problems"] for m in entries)


def test_cancel_at_every_token_leaves_a_good_session(make_fake_engine, store, talk, answer) -> None:
    engine = make_fake_engine()
    renderer = engine.renderer
    call = {"id": "x", "type": "function", "function": {"name": "add", "arguments": '{"a": "é"}'}}
    message = {"role": "assistant", "content": "So:", "reasoning_content": "hm", "tool_calls": [call]}
    ids = renderer.render_message(message, renderer.new_context(True))[len(renderer.generation_prompt(True)) :]
    for stop_after in range(len(ids) + 2):
        name = f"s{stop_after}"
        conversation, _ = opened(engine, store, name, "create", head={"effort": "low"})
        bases: list[int] = []

        def cancel(conversation=conversation, bases=bases, stop_after=stop_after) -> bool:
            return bool(bases) and len(conversation._timeline.tokens) - bases[0] >= stop_after

        with conversation:
            engine.model.script.clear()
            events = []
            asked = [{"role": "user", "content": "Hi"}]
            for event in conversation.turn(asked, Sampling(seed=1, max_tokens=400), cancel=cancel):
                if isinstance(event, ev.Prompt):
                    bases.append(event.reused + event.prefill)
                    engine.model.reply_at(bases[0], ids)
                events.append(event)
            drawn = of(events, ev.Stopped)[0].generated
            assert events[-1].saved
            assert drawn == min(stop_after, len(ids))
            assert events[-1].reason == ("tool_calls" if drawn == len(ids) else "cancelled"), stop_after
        engine.model.script.clear()
        conversation, _ = opened(engine, store, name, "resume")
        with conversation:
            assert conversation._timeline.tokens[bases[0] : bases[0] + drawn] == ids[:drawn]
            talk(conversation, "Next", "Fine")
            entries = [m for m in conversation.transcript() if m["kind"] == "message"]
            assert [m["role"] for m in entries] == ["user", "assistant", "user", "assistant"], stop_after
            assert all(m["complete"] for m in entries)
            assert entries[-1]["content"] == "Fine"
            assert entries[-1]["problems"] == []


def test_a_cancelled_prefill_keeps_what_was_evaluated(make_fake_engine, store, talk, state_bytes) -> None:
    results = []
    for reopen in (False, True):
        weights = f"sha256:{reopen}"  # so that the second session shares nothing with the first
        engine = make_fake_engine(weights=weights)
        name = f"reopen-{reopen}"
        conversation, _ = opened(engine, store, name, "create", head={"effort": "low"})
        done: list[int] = []
        for event in conversation.turn(
            [{"role": "user", "content": LONG}], Sampling(seed=1), cancel=lambda done=done: len(done) >= 2
        ):
            if isinstance(event, ev.Progress):
                done.append(event.done)
        assert done == [512, 1024]
        (turn,) = store.log(name)
        assert (turn.position, turn.meta["stop"], turn.meta["answer"]["content"]) == (1024, "cancelled", "")
        if reopen:
            conversation.close()
            conversation, events = opened(engine, store, name, "resume")
            assert of(events, ev.SessionOpened)[0].pending == turn.total - 1024
        report = saved(talk(conversation, "Next"))
        assert (report.reused, report.replayed) == (1024, 0)
        results.append((list(conversation._timeline.tokens), state_bytes(conversation._timeline)))
        shown = [(m["role"], m["complete"]) for m in conversation.transcript() if m["kind"] == "message"]
        assert shown[:3] == [("user", True), ("assistant", True), ("user", True)]
        conversation.close()
        assert not of(list(replay(make_fake_engine(weights=weights), store, name)), ev.Difference)
    assert results[0] == results[1]


def test_closing_the_iterator_saves_like_a_cancel(fake_engine, store, talk) -> None:
    conversation, _ = opened(fake_engine, store, "a", "create")
    with conversation:
        stream = conversation.turn([{"role": "user", "content": "Hi"}], Sampling(seed=1))
        for event in stream:
            if isinstance(event, ev.Prompt):
                fake_engine.model.reply_at(event.prefill, [ord(c) for c in "thinking aloud"])
            if isinstance(event, ev.Thinking):
                break
        stream.close()
        (turn,) = store.log("a")
        assert turn.meta["stop"] == "cancelled"
        assert turn.meta["answer"]["reasoning_content"] == "t"
        talk(conversation, "Next", "Fine")
        assert len(store.log("a")) == 2


def test_closing_before_anything_happened_leaves_nothing(fake_engine, store, talk) -> None:
    conversation, _ = opened(fake_engine, store, "a", "create")
    with conversation:
        conversation.turn([{"role": "user", "content": "Hi"}]).close()
        assert not store.exists("a")
        talk(conversation, "Hi", "Ho")
        assert len(store.log("a")) == 1


def test_a_failing_device_costs_the_turn_and_no_more(fake_engine, store, talk) -> None:
    conversation, _ = opened(fake_engine, store, "a", "create")
    with conversation:
        fake_engine.model.fail_at = 0
        with pytest.raises(RuntimeError, match="device failed"):
            talk(conversation, "Zero")
        fake_engine.model.fail_at = None
        talk(conversation, "One", "uno")
        tokens = list(conversation._timeline.tokens)
        fake_engine.model.fail_at = len(tokens)
        with pytest.raises(RuntimeError, match="device failed"):
            talk(conversation, LONG)
        fake_engine.model.fail_at = None
        assert len(store.log("a")) == 1
        events = talk(conversation, "Two", "dos")
        assert conversation._timeline.tokens[: len(tokens)] == tokens
        assert text_of(events) == "dos"
        assert saved(events).replayed == 0


def test_undo_and_older_turns(fake_engine, store, talk) -> None:
    conversation, _ = opened(fake_engine, store, "a", "create")
    notices: list[ev.Event] = []
    with conversation:
        with pytest.raises(SessionError, match="no turn yet"):
            conversation.undo()
        talk(conversation, "One", "uno")
        with pytest.raises(SessionError, match="one turn only"):
            conversation.undo()
        first = conversation.turn_id
        talk(conversation, "Two", "dos")
        second = conversation.turn_id
        assert conversation.undo(emit=notices.append) == first
        assert [n.code for n in of(notices, ev.Notice)] == ["older-turn"]
        assert store.session("a").head == second, "the session moves only with the next saved turn"
        talk(conversation, "Three", "tres")
        assert [t.meta["answer"]["content"] for t in store.log("a")] == ["uno", "tres"]
    again, events = opened(fake_engine, store, "a", "resume", at=first)
    with again:
        assert "older-turn" in [n.code for n in of(events, ev.Notice)]
        talk(again, "Four", "cuatro")
    assert [t.meta["answer"]["content"] for t in store.log("a")] == ["uno", "cuatro"]


def test_seed_is_the_sessions_own_unless_given(fake_engine, store, talk) -> None:
    conversation, _ = opened(fake_engine, store, "a", "create")
    with conversation:
        talk(conversation, sampling=Sampling(max_tokens=3))
        talk(conversation, sampling=Sampling(max_tokens=3, seed=5))
        assert [t.meta["sampling"]["seed"] for t in store.log("a")] == [conversation.head.seed, 5]


def test_a_second_turn_at_the_same_time_is_refused(fake_engine, store, talk) -> None:
    conversation, _ = opened(fake_engine, store, "a", "create")
    with conversation:
        stream = conversation.turn([{"role": "user", "content": "Hi"}], Sampling(seed=1, max_tokens=3))
        next(stream)
        with pytest.raises(Exception, match="still running"):
            conversation.turn([{"role": "user", "content": "Hi"}])
        list(stream)
        talk(conversation)
