"""Every drafter x every window x every way to sample, on a real network: the tokens and the state of plain decoding.

Each cell is decoded with a fork in the middle of a window, and goes on from the bytes of a saved state. A small random
network has small random DSpark drafts of both kinds beside it; k3-nano has its own.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from k3_sessions.config import StoreConfig
from k3_sessions.store import Store
from safetensors.torch import save_file

from k3cli.config import NANO
from k3cli.engine.conversation import Conversation
from k3cli.engine.drafting.choose import OFF, choose
from k3cli.engine.drafting.drafter import Draft
from k3cli.engine.drafting.suffix import SuffixDrafter
from k3cli.engine.engine import Engine
from k3cli.engine.events import Speculation, Stopped, ToolCall
from k3cli.engine.sampling import Sampling
from k3cli.engine.timeline import Timeline
from k3cli.model.dspark.config import DraftConfig
from k3cli.model.dspark.weights import expected_shapes

SAMPLINGS = {
    "greedy": Sampling(temperature=0, seed=1),
    "cool": Sampling(temperature=0.3, seed=2),
    "warm": Sampling(temperature=1.0, seed=3),
    "filtered": Sampling(temperature=1.0, seed=4, top_p=0.9, top_k=40, min_p=0.02),
}
PROMPT = [5, 6, 7, 8, 5, 6, 7, 9, 5, 6, 7]
BEFORE, AFTER, LAST = 7, 6, 4
"""Tokens before the fork, behind it on both branches, and from the saved state on."""
SHARED = {
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 512,
    "rms_norm_eps": 1e-5,
    "markov_rank": 8,
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
DRAFTS: dict[str, dict[str, Any]] = {
    "mla": SHARED
    | {
        "model_type": "k3_dspark",
        "q_lora_rank": 16,
        "kv_lora_rank": 12,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "target_layer_ids": [0, 3],
        "target_num_hidden_layers": 4,
        "mask_token_id": 511,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 50.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 8,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    },
    "gqa": SHARED
    | {
        "model_type": "qwen3",
        "architectures": ["DSparkDraftModel"],
        "num_key_value_heads": 2,
        "head_dim": 8,
        "block_size": 7,
        "dflash_config": {"mask_token_id": 511, "target_layer_ids": [1, 2]},
        "num_target_layers": 4,
        "rope_theta": 100.0,
    },
}


class Told:
    """A DSpark drafter that is told the truth for some of its guesses: it would hardly ever be right by itself."""

    needs_hidden = True

    def __init__(self, inner: Any, truth: Sequence[int], rng: random.Random) -> None:
        self.inner, self.truth, self.rng = inner, truth, rng
        self.name = inner.name

    def begin(self, context: Sequence[int], sampling: Sampling) -> None:
        self.inner.begin(context, sampling)

    def propose(self, context: Sequence[int], position: int, k: int) -> Draft:
        ids = list(self.inner.propose(context, position, k).ids)
        for i, token in enumerate(self.truth[position + 1 : position + 1 + len(ids)]):
            if self.rng.random() < 0.75:
                ids[i] = token
        return Draft(ids, [1.0] * len(ids))

    def observe(self, accepted: Sequence[int], position: int, hidden: Any) -> None:
        assert hidden is not None
        self.inner.observe(accepted, position, hidden)

    def fork(self) -> Told:
        return Told(self.inner.fork(), self.truth, self.rng)


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of random drafts for the tiny model."""
    found = {}
    for name, raw in DRAFTS.items():
        folder = found[name] = tmp_path_factory.mktemp(f"draft-{name}")
        (folder / "config.json").write_text(json.dumps(raw))
        maker = torch.Generator().manual_seed(len(name))
        shapes = expected_shapes(DraftConfig.from_dir(folder))
        save_file(
            {key: torch.randn(shape, generator=maker) * 0.2 + ("norm" in key) for key, shape in shapes.items()},
            folder / "model.safetensors",
        )
    return found


@pytest.fixture(scope="module")
def engines() -> Iterator[Callable[..., Engine]]:
    """(folder, window, device, dtype) -> engine, made once. k3-nano's hands out from the start what its draft reads."""
    made: dict[Any, Engine] = {}
    before = torch.get_num_threads()
    torch.set_num_threads(1)

    def load(folder: Path, window: int, device: str = "cpu", dtype: str = "float32") -> Engine:
        key = (folder, window, device, dtype)
        if key not in made:
            made[key] = Engine.load(folder, device=device, dtype=dtype, window=window)
            if folder == NANO:
                made[key].speculate(choose("dspark"))
        return made[key]

    yield load
    made.clear()
    torch.set_num_threads(before)


def whole(timeline: Timeline) -> Any:
    """Tokens, position, path and every bit of the state."""
    saved = timeline.snapshot()
    fields = {name: array.tobytes() for name, array in saved.checkpoint().items()}
    pages = [f.name for f in timeline.model.state_layout().fields if f.scope == "page"]
    rows = {name: saved.page_rows(name, 0, saved.position).tobytes() for name in pages}
    return timeline.tokens, timeline.position, list(timeline.schedule), fields | rows


def stored(timeline: Timeline) -> Any:
    """What a store would give back of a timeline's state: bytes of its own."""
    saved = timeline.snapshot()
    pages = [f.name for f in timeline.model.state_layout().fields if f.scope == "page"]
    rows = {name: saved.page_rows(name, 0, saved.position) for name in pages}
    fields = saved.checkpoint()

    def page_rows(name: str, start: int, stop: int) -> Any:
        return rows[name][:, start:stop]

    return SimpleNamespace(position=saved.position, checkpoint=lambda: fields, page_rows=page_rows)


def cell(engine: Engine, sampling: Sampling, prompt: Sequence[int] = PROMPT) -> tuple[list[Any], int, int]:
    """Both branches of a forked run and the one that goes on from saved bytes; and (steps, tokens) they took."""
    found, steps, tokens = [], 0, 0
    timeline = engine.timeline(prompt)
    stream = timeline.generate(sampling, (), BEFORE + AFTER)
    for _ in range(BEFORE):
        next(stream)
    child = timeline.fork()
    for _ in stream:
        pass
    saved = stored(child)
    child_position = child.position
    again = engine.restored_timeline(saved, child.tokens)
    again.schedule = child.schedule.copy()
    list(child.generate(sampling, (), AFTER))
    list(again.generate(sampling, (), AFTER))
    again.extend(prompt[:3])
    list(again.generate(sampling, (), LAST))
    for one in (timeline, child, again):
        found.append(whole(one))
        steps += one.decoding.steps
        tokens += one.decoding.tokens
        assert one.speculator is None or one.speculator.failure == ""
        drafter = getattr(one.speculator, "drafter", None)
        if drafter is not None and drafter.name == "dspark" and not isinstance(drafter, Told):
            # All that was evaluated in this process was seen: a resumed state has only the new tokens.
            assert drafter.context_rows == one.position - (child_position if one is again else 0)
    return found, steps, tokens


def speculate(
    engine: Engine, name: str, truth: Sequence[int], drafts: dict[str, Path], rows: int | None = None
) -> None:
    """name: "suffix", a kind of DSpark draft, or one of the hostile drafters."""
    rng = random.Random(7)
    if name in drafts:
        engine.speculate(choose(f"dspark:{drafts[name]}"), rows)
        make = engine._make_drafter
        assert make is not None
        engine.speculate(choose("suffix"), rows, make=lambda: Told(make(), truth, rng))
    else:
        engine.speculate(choose("suffix"), rows, make=SuffixDrafter)


@pytest.mark.parametrize("window", range(1, 9))
@pytest.mark.parametrize("kind", SAMPLINGS)
def test_every_cell_of_the_tiny_model(kind: str, window: int, tiny_model, engines, drafts, hostile, reckless) -> None:
    engine, sampling = engines(tiny_model, window), SAMPLINGS[kind]
    engine.speculate(OFF)
    plain = cell(engine, sampling)[0]
    truth = plain[2][0]
    special = sorted(engine.renderer.stop_ids)
    for name in ("suffix", "mla", "gqa", "half", "beyond"):
        if name in ("suffix", "mla", "gqa"):
            speculate(engine, name, truth, drafts)
        else:
            engine.speculate(choose("suffix"), make=hostile(truth, 512, special)[name])
        found, steps, tokens = cell(engine, sampling)
        assert found == plain, name
        if name in ("mla", "gqa") and window > 2:
            assert tokens > 1.2 * steps, "windows were accepted in part"
    engine.speculate(OFF)


def ended(engine: Engine, sampling: Sampling, prompt: Sequence[int], truth: Sequence[int], way: str, n: int) -> Any:
    """A run that ends `way` at token n: what was drawn, why it ended, and every bit of the state."""
    timeline = engine.timeline(prompt)
    if way == "context":
        timeline.limit = len(prompt) + n
    stop = {truth[len(prompt) + n - 1]} if way == "stop" else ()
    asked = iter(range(1000))
    cancel = (lambda: next(asked) == n + 1) if way == "cancel" else (lambda: False)
    drawn = list(timeline.generate(sampling, stop, n if way == "length" else 20, cancel))
    assert timeline.stop_reason == {"stop": "stop", "cancel": "cancelled"}.get(way, "length")
    return drawn, timeline.stop_reason, whole(timeline)


ENDS = [(way, n) for way in ("stop", "length", "context", "cancel") for n in range(1, 9)]


def test_every_way_to_end_on_the_tiny_model(tiny_model, engines, drafts, reckless) -> None:
    """A stop id, the length, the context's end, a cancel: at every place of a window."""
    engine, sampling = engines(tiny_model, 4), SAMPLINGS["warm"]
    engine.speculate(OFF)
    full = engine.timeline(PROMPT)
    list(full.generate(sampling, (), 12))
    truth = full.tokens
    plain = {key: ended(engine, sampling, PROMPT, truth, *key) for key in ENDS}
    for name in ("suffix", "mla", "gqa"):
        speculate(engine, name, truth, drafts)
        for key in ENDS:
            assert ended(engine, sampling, PROMPT, truth, *key) == plain[key], (name, key)
    engine.speculate(OFF)


def asked(engine: Engine) -> list[int]:
    """A first question, without a head."""
    renderer = engine.renderer
    message = [{"role": "user", "content": "What is a turn?"}]
    return [*renderer.render_messages(message, renderer.new_context(True)), *renderer.generation_prompt(True)]


def nano_cell(engine: Engine, kind: str, hostile: Any) -> None:
    """k3-nano's drafts are right often, so windows are accepted as a whole, in part and not at all."""
    renderer, sampling = engine.renderer, SAMPLINGS[kind]
    prompt = asked(engine)
    engine.speculate(OFF)
    plain = cell(engine, sampling, prompt)[0]
    window = engine.model.window
    for spec, rows in (("dspark", None), ("both", min(2, window)), ("half", None)):
        if spec == "half":
            special = sorted(renderer.stop_ids)
            make = hostile(plain[2][0], engine.tokenizer.n_vocab, special)["half"]
            engine.speculate(choose("suffix"), make=make)
        else:
            engine.speculate(choose(spec), rows)
        found, steps, tokens = cell(engine, sampling, prompt)
        assert found == plain, spec
        assert (tokens > steps) == (window > 1), spec
    engine.speculate(OFF)


@pytest.mark.parametrize(("kind", "window"), [("greedy", 3), ("filtered", 5), ("cool", 8), ("warm", 8)])
def test_windows_of_k3_nano_with_its_own_draft(kind: str, window: int, engines, hostile, reckless) -> None:
    nano_cell(engines(NANO, window), kind, hostile)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("window", range(1, 9))
@pytest.mark.parametrize("kind", SAMPLINGS)
def test_windows_of_k3_nano_on_a_gpu(kind: str, window: int, dtype: str, engines, hostile, reckless) -> None:
    """Recorded steps and kernels, too: the same bits with drafts and without."""
    nano_cell(engines(NANO, window, "cuda", dtype), kind, hostile)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_way_to_end_on_a_gpu(dtype: str, engines, reckless) -> None:
    """As on a CPU: with the draft of k3-nano, whose windows are often accepted as a whole."""
    engine, sampling = engines(NANO, 8, "cuda", dtype), SAMPLINGS["greedy"]
    prompt = asked(engine)
    engine.speculate(OFF)
    full = engine.timeline(prompt)
    list(full.generate(sampling, (), 12))
    plain = {key: ended(engine, sampling, prompt, full.tokens, *key) for key in ENDS}
    for spec in ("dspark", "both"):
        engine.speculate(choose(spec))
        for key in ENDS:
            assert ended(engine, sampling, prompt, full.tokens, *key) == plain[key], (spec, key)
    engine.speculate(OFF)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_every_number_of_rows_is_recorded_before_the_first_turn_on_a_gpu(engines) -> None:
    """And again when drafts begin to read other layers."""
    engine = Engine.load(NANO, device="cuda", window=4)
    engine.speculate(choose("suffix"))
    assert sorted(engine.model._steps._graphs) == [1, 2, 3, 4]
    engine.speculate(choose("dspark"))
    assert sorted(engine.model._steps._graphs) == [1, 2, 3, 4]
    assert set(engine._costs.measured()) == {2, 3, 4}
    timeline = engine.timeline(PROMPT)
    list(timeline.generate(SAMPLINGS["greedy"], (), 12))
    assert timeline.speculator is not None
    assert timeline.speculator.drafter.context_rows == timeline.position  # type: ignore[attr-defined]


@pytest.mark.parametrize("rows", [2, 3, 4])
def test_the_end_of_a_tool_call_inside_a_window(rows: int, fake_engine, tmp_path, talk, hostile, reckless) -> None:
    """The drafts know the call and go on behind its end; the turn ends there, on disk too."""
    renderer = fake_engine.renderer
    call = {"id": "x", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    ids = renderer.render_message(message, renderer.new_context(True))[len(renderer.generation_prompt(True)) :]
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    records, truth = [], []
    for name in ("plain", "drafted"):
        if name == "plain":
            fake_engine.speculate(OFF)
        else:
            special = [*sorted(renderer.stop_ids), *renderer.generation_prompt(True)]
            fake_engine.speculate(choose("suffix"), rows, make=hostile(truth, 512, special)["beyond"])
        store = Store.open(tmp_path / name, config=StoreConfig(free_floor_bytes=0, free_floor_share=0.0))
        with Conversation.open(fake_engine, store, "a", mode="create", head={"tools": tools}) as conversation:
            events = talk(conversation, "Add", ids, sampling=Sampling(seed=1))
            assert [type(event) for event in events if isinstance(event, ToolCall | Stopped)] == [ToolCall, Stopped]
            (told,) = [event for event in events if isinstance(event, Speculation)]
            # All of it was drafted, and the last window reaches behind the end of the call.
            assert (told.steps < told.tokens) == (name == "drafted")
            talk(conversation, messages=[{"role": "tool", "content": "2"}], reply="It is 2.")
        truth = [int(token) for token in store.tokens(store.session("a").head)]
        records.append(
            [
                (
                    list(r.tokens),
                    r.position,
                    r.meta["schedule"],
                    [p.blob.id for p in r.pages],
                    [b.id for b in r.checkpoint],
                )
                for r in store.catalog.path(store.session("a").head)
            ]
        )
        store.close()
    assert records[0] == records[1]
    fake_engine.speculate(OFF)
