"""Drafts on real models (a tiny random one, and k3-nano): the same tokens, and the same objects on disk, bit for bit.

Objects are named by the hash of their bytes, so equal names are equal states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from k3_sessions.config import StoreConfig
from k3_sessions.store import Store
from safetensors.torch import load_file, save_file

from k3cli.commands.drafts import Drafts
from k3cli.config import NANO
from k3cli.engine import events as ev
from k3cli.engine.conversation import Conversation
from k3cli.engine.drafting.choose import OFF, choose
from k3cli.engine.engine import Engine
from k3cli.engine.replay import replay
from k3cli.engine.sampling import Sampling
from k3cli.errors import FitError
from k3cli.model.dspark import weights

SAMPLINGS = {
    "greedy": {"temperature": 0, "seed": 1},
    "cool": {"temperature": 0.3, "seed": 2},
    "warm": {"temperature": 1.0, "seed": 3},
    "filtered": {"temperature": 1.0, "seed": 4, "top_p": 0.9, "top_k": 40, "min_p": 0.02},
}
CODE = "Rename rate to price:\n```\ndef report(rate, total):\n    fee = rate + total\n    return fee\n```"
TEXTS = (CODE, "Repeat my last message.", "Once more")
MANY = (21, 34, 11)
"""Tokens of each turn: they end inside windows."""


@pytest.fixture(scope="module")
def nano() -> Iterator[Engine]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Engine.load(NANO, device="cpu")
    torch.set_num_threads(before)


@pytest.fixture
def session(tmp_path) -> Iterator[Callable[..., tuple[list[int], Any]]]:
    """Runs a session with a resume and a fork in its middle: (its tokens, what the store has of both branches)."""
    stores: list[Store] = []

    def turn(conversation: Conversation, n: int, sampling: dict[str, Any]) -> None:
        drawn = Sampling(max_tokens=MANY[n], **sampling)
        events = list(conversation.turn([{"role": "user", "content": TEXTS[n]}], drawn))
        assert not [event for event in events if isinstance(event, ev.Notice)], events
        assert isinstance(events[-1], ev.Done)

    def run(
        engine: Engine, sampling: dict[str, Any], make: Any = None, rows: int | None = None, spec: str = "suffix"
    ) -> Any:
        engine.speculate(OFF if make is None and spec == "suffix" else choose(spec), rows, make=make)
        config = StoreConfig(free_floor_bytes=0, free_floor_share=0.0)
        store = Store.open(tmp_path / f"store-{len(stores)}", config=config)
        stores.append(store)
        with Conversation.open(engine, store, "a", mode="create") as conversation:
            turn(conversation, 0, sampling)
        with Conversation.open(engine, store, "a", mode="resume") as conversation:
            turn(conversation, 1, sampling)
            with conversation.fork("b") as child:
                turn(child, 2, sampling)
            turn(conversation, 2, sampling)
        engine.speculate(OFF)
        found: list[Any] = []
        for name in ("a", "b"):
            for record in store.catalog.path(store.session(name).head):
                pages = [(page.start, page.stop, page.blob.id) for page in record.pages]
                states = [blob.id for blob in record.checkpoint]
                assert states
                found.append((list(record.tokens), record.position, record.meta["schedule"], pages, states))
        return [int(token) for token in store.tokens(store.session("a").head)], found

    run.stores = stores  # type: ignore[attr-defined]
    yield run
    for store in stores:
        store.close()


def special(engine: Engine) -> list[int]:
    return [*sorted(engine.renderer.stop_ids), *engine.renderer.generation_prompt(True)]


@pytest.mark.parametrize("kind", SAMPLINGS)
def test_tiny_any_drafter(kind, tiny_engine, session, hostile, reckless) -> None:
    truth, plain = session(tiny_engine, SAMPLINGS[kind])
    for name, make in hostile(truth, 512, special(tiny_engine)).items():
        assert session(tiny_engine, SAMPLINGS[kind], make)[1] == plain, name


@pytest.mark.parametrize("window", [1, 3, 5, 8, 16])
def test_tiny_any_window(window, tiny_model, session, hostile, reckless) -> None:
    engine = Engine.load(tiny_model, device="cpu", window=window)
    truth, plain = session(engine, SAMPLINGS["cool"])
    for rows in {2, window} & set(range(1, window + 1)):
        make = hostile(truth, 512, special(engine))["half"]
        assert session(engine, SAMPLINGS["cool"], make, rows)[1] == plain, rows


@pytest.mark.parametrize("kind", ["greedy", "filtered"])
def test_nano_identity(kind, nano, session, hostile, reckless) -> None:
    truth, plain = session(nano, SAMPLINGS[kind])
    drafters = hostile(truth, nano.tokenizer.n_vocab, special(nano))
    for name in ("suffix", "half"):
        assert session(nano, SAMPLINGS[kind], drafters[name])[1] == plain, name
    for spec in ("dspark", "both"):
        assert session(nano, SAMPLINGS[kind], spec=spec)[1] == plain, spec
    # What was drafted is replayed without drafts.
    assert not [event for event in replay(nano, session.stores[-1], "b") if isinstance(event, ev.Difference)]


@pytest.mark.parametrize("kind", ["greedy", "warm"])
def test_nano_has_a_draft_model_that_is_right_more_often_than_not(kind, nano) -> None:
    """Sampled answers too: it draws with the target's own noise."""
    nano.speculate(choose("dspark"))
    renderer, timeline = nano.renderer, nano.timeline()
    context = renderer.new_context(True)
    ids = renderer.render_messages([{"role": "user", "content": "How does k3 keep sessions?"}], context)
    timeline.extend([*ids, *renderer.generation_prompt(True)])
    list(timeline.generate(Sampling(**SAMPLINGS[kind]), renderer.stop_ids, 60))
    nano.speculate(OFF)
    tested, accepted = timeline.decoding.tested, timeline.decoding.accepted
    assert sum(tested) >= 6
    assert sum(accepted) > 0.5 * sum(tested), (tested, accepted)


def test_a_draft_that_breaks_turns_itself_off(nano, session, monkeypatch) -> None:
    _, plain = session(nano, SAMPLINGS["greedy"])
    nano.speculate(choose("dspark"))
    model = nano.timeline().speculator.drafter.model
    monkeypatch.setattr(type(model), "extend", lambda *_: (_ for _ in ()).throw(RuntimeError("out of memory")))
    timeline = nano.timeline(plain[0][0][:40])
    drawn = list(timeline.generate(Sampling(**SAMPLINGS["greedy"]), (), 5))
    assert len(drawn) == 5
    assert "out of memory" in timeline.speculator.take_losses()[0].why
    nano.speculate(OFF)


def test_a_draft_of_damaged_numbers_turns_itself_off(nano, tmp_path) -> None:
    """Shapes and types are right, so that it loads."""
    tensors = load_file(NANO / "dspark" / "model.safetensors")
    save_file({name: tensor.fill_(torch.nan) for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((NANO / "dspark" / "config.json").read_bytes())
    prompt, drawn = nano.tokenizer.encode_text("How does k3 keep sessions?"), []
    for spec in ("off", f"dspark:{tmp_path}", f"both:{tmp_path}"):
        nano.speculate(choose(spec))
        timeline = nano.timeline(prompt)
        drawn.append(list(timeline.generate(Sampling(**SAMPLINGS["warm"]), (), 12)))
        if spec != "off":
            (loss,) = timeline.speculator.take_losses()
            assert (loss.name, loss.why) == ("dspark", "ValueError: the draft model's logits are not finite")
            assert loss.left == ("suffix" if spec.startswith("both") else "")
    nano.speculate(OFF)
    assert drawn[1] == drawn[2] == drawn[0]


def test_a_draft_that_memory_has_no_room_for(nano, monkeypatch) -> None:
    """Asked for, it is refused; a model's own, which nobody asked for, is done without."""

    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(weights, "load_draft", full)
    with pytest.raises(FitError, match="memory ran out for the draft"):
        nano.speculate(choose("dspark"))
    told = Drafts(choose("auto"), None, (), (), auto=True).apply(nano, None)
    assert "memory ran out for the draft" in told
    assert nano.timeline().speculator.drafter.name == "suffix"
    nano.speculate(OFF)


def test_nano_drafts_pay_where_text_repeats(nano) -> None:
    nano.speculate(choose("auto", model=NANO))
    renderer, counts = nano.renderer, []
    timeline, context = nano.timeline(), renderer.new_context(True)
    for text in (CODE, CODE):
        ids = [
            *renderer.render_messages([{"role": "user", "content": text}], context),
            *renderer.generation_prompt(True),
        ]
        timeline.extend(ids)
        drawn = list(timeline.generate(Sampling(temperature=0), renderer.stop_ids, 80))
        assert drawn[-1] in renderer.stop_ids
        counts.append(timeline.decoding.tokens / timeline.decoding.steps)
    nano.speculate(OFF)
    assert counts[1] > 2.5, counts


@pytest.mark.parametrize("call", ["verify", "commit"])
def test_a_crash_inside_a_window_leaves_the_session_as_plain_decoding_would(
    call, tiny_engine, session, hostile, reckless, monkeypatch, tmp_path
) -> None:
    truth, plain = session(tiny_engine, SAMPLINGS["cool"])
    assert [len(turn[0]) > MANY[n] for n, turn in enumerate(plain[:2])] == [True, True]
    model = tiny_engine.model
    whole = getattr(model, call)
    for n in (1, 3, 6):
        left = n

        def broken(*args: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                whole(*args)  # the work is done, and its result never arrives
                raise RuntimeError("the device failed")
            return whole(*args)

        tiny_engine.speculate(choose("suffix"), make=hostile(truth, 512, special(tiny_engine))["half"])
        store = Store.open(tmp_path / f"crash-{n}", config=StoreConfig(free_floor_bytes=0, free_floor_share=0.0))
        sampling = SAMPLINGS["cool"]
        message = [[{"role": "user", "content": text}] for text in TEXTS]
        with Conversation.open(tiny_engine, store, "a", mode="create") as conversation:
            list(conversation.turn(message[0], Sampling(max_tokens=MANY[0], **sampling)))
            monkeypatch.setattr(model, call, broken)
            with pytest.raises(RuntimeError, match="device failed"):
                list(conversation.turn(message[1], Sampling(max_tokens=MANY[1], **sampling)))
            monkeypatch.setattr(model, call, whole)
            list(conversation.turn(message[1], Sampling(max_tokens=MANY[1], **sampling)))
        records = store.catalog.path(store.session("a").head)
        for record, (tokens, position, _, pages, states) in zip(records, plain[:2], strict=True):
            assert list(record.tokens) == tokens
            assert record.position == position
            assert [(page.start, page.stop, page.blob.id) for page in record.pages] == pages
            assert [blob.id for blob in record.checkpoint] == states
        store.close()
        tiny_engine.speculate(OFF)
