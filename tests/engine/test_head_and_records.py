"""Heads, records, loading: what is fixed, what is read back, and what is refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest

from k3cli.chat.renderer import renderer_of
from k3cli.chat.tokenizer import Tokenizer
from k3cli.engine import events as ev
from k3cli.engine import record
from k3cli.engine.conversation import Conversation
from k3cli.engine.engine import Engine
from k3cli.engine.head import Head
from k3cli.engine.transcript import load_renderer, transcript
from k3cli.errors import DamagedError, ModelError, SessionError, UsageError


def test_a_new_head_takes_defaults_and_a_fresh_seed() -> None:
    one = Head.new({"system": "s"}, thinking=True, effort="max")
    two = Head.new(None, thinking=True, effort="max")
    assert (one.system, one.thinking, one.effort) == ("s", True, "max")
    assert one.seed != two.seed
    assert Head.from_json(json.loads(json.dumps(one.to_json()))) == one
    quiet = Head.new({"thinking": False}, thinking=True, effort="max")
    assert (quiet.thinking, quiet.effort) == (False, None)
    with pytest.raises(UsageError, match="without thinking"):
        Head.new({"thinking": False, "effort": "low"}, thinking=True, effort="max")
    with pytest.raises(UsageError, match="unknown head option mood"):
        Head.new({"mood": "good"})


def test_a_head_that_cannot_be_read_is_damage() -> None:
    whole = Head.new().to_json()
    for data in ({}, whole | {"extra": 1}, {k: v for k, v in whole.items() if k != "seed"}):
        with pytest.raises(DamagedError, match="head has the keys"):
            Head.from_json(data)


def test_order_of_keys_in_tools_does_not_make_another_head() -> None:
    head = Head.new({"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]})
    head.require({"tools": [{"function": {"parameters": {}, "name": "f"}, "type": "function"}]}, "a")
    with pytest.raises(SessionError, match="another tools"):
        head.require({"tools": []}, "a")


def test_records_of_another_version_or_with_holes_are_refused(fake_engine, store, talk) -> None:
    with Conversation.open(fake_engine, store, "a", mode="create") as conversation:
        talk(conversation)
    (turn,) = store.log("a")
    assert record.recorded_schedule([turn], 0, turn.position).stop == turn.position
    bad = [
        (turn.meta | {"v": 99}, "record of version 99"),
        ({k: v for k, v in turn.meta.items() if k != "close"}, "lacks close"),
        (turn.meta | {"prompt": 10**6}, "prompt of 1000000 ids"),
        (turn.meta | {"schedule": turn.meta["schedule"][:-1]}, "schedule of turn .* ends at"),
    ]
    for meta, complaint in bad:
        with pytest.raises(DamagedError, match=complaint):
            record.recorded_schedule([replace(turn, meta=meta)], 0, turn.position)


def test_a_session_from_another_machine_says_so(make_fake_engine, store, talk) -> None:
    with Conversation.open(make_fake_engine(), store, "a", mode="create") as conversation:
        talk(conversation)
    engine = make_fake_engine()
    then = engine.runtime()
    engine.runtime = lambda: then | {"torch": "9.9", "threads": then["threads"] + 1}
    events: list[ev.Event] = []
    Conversation.open(engine, store, "a", mode="resume", emit=events.append).close()
    (notice,) = [event for event in events if isinstance(event, ev.Notice)]
    assert notice.code == "runtime-changed"
    assert "now torch 9.9, threads" in notice.message
    assert "device" not in notice.message


def test_the_other_chat_format_works_the_same_way(make_fake_engine, byte_vocab, tmp_path, store, talk) -> None:
    shutil.copy(byte_vocab / "tiktoken.model", tmp_path / "tiktoken.model")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "kimi_linear"}))
    tokenizer = Tokenizer.from_dir(tmp_path)
    engine = Engine(
        make_fake_engine().model,
        tokenizer,
        renderer_of(tokenizer),
        weights_digest="sha256:linear",
        name="linear",
        context_limit=4096,
    )
    end = sorted(engine.renderer.stop_ids)
    reply = [*b"Hi there", tokenizer.special("<|im_end|>")]
    with pytest.raises(UsageError, match="thinking"):
        Conversation.open(engine, store, "a", mode="create", head={"thinking": True})
    with Conversation.open(engine, store, "a", mode="create", head={"system": "Be brief."}) as conversation:
        events = talk(conversation, "Hello", reply)
        assert "".join(event.text for event in events if isinstance(event, ev.Text)) == "Hi there"
        assert conversation._timeline.tokens[-1] in end
    with Conversation.open(engine, store, "a", mode="resume") as conversation:
        talk(conversation, "Again", reply)
        said = [(m["role"], m["content"]) for m in conversation.transcript()]
    assert said == [
        ("system", "Be brief."),
        *[("user", "Hello"), ("assistant", "Hi there")],
        *[("user", "Again"), ("assistant", "Hi there")],
    ]


def test_a_transcript_needs_no_weights(byte_vocab, fake_engine, store, talk) -> None:
    with Conversation.open(fake_engine, store, "a", mode="create", head={"system": "s"}) as conversation:
        talk(conversation, "Hello", "Hi")
    entries = transcript(load_renderer(byte_vocab), [int(i) for i in store.tokens(store.session("a").head)])
    assert [(m["kind"], m["role"]) for m in entries] == [
        ("thinking-effort", "system"),
        ("message", "system"),
        ("message", "user"),
        ("message", "assistant"),
    ]
    assert entries[-1]["content"] == "Hi"


def test_loading_refuses_what_does_not_belong_together(tiny_model, tmp_path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    with pytest.raises(UsageError, match="window is 0; expected 1 to 64"):
        Engine.load(folder, window=0)
    whole = (folder / "tiktoken.model").read_text()
    (folder / "tiktoken.model").write_text(whole + "YWI= 256\n")
    with pytest.raises(ModelError, match=r"tokenizer has 513 ids, config.json a vocab_size of 512"):
        Engine.load(folder)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["vocab_size"] += 1  # or a vocabulary that lost its last line
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tiktoken.model").write_text(whole)
    with pytest.raises(ModelError, match=r"has 512 ids, config\.json a vocab_size of 513; expected as many ids"):
        Engine.load(folder)
    with pytest.raises(ModelError, match="no folder"):
        Engine.load(tmp_path / "nowhere")
