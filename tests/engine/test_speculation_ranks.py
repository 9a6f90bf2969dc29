"""Drafts of a model that is cut over ranks: rank 0 drafts, and nothing but the number of steps differs.

Two processes on a CPU (gloo); on two GPUs (NCCL, recorded steps) where they are there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from k3_sessions.config import StoreConfig
from k3_sessions.store import Store

from k3cli.config import NANO
from k3cli.engine.conversation import Conversation
from k3cli.engine.drafting.choose import OFF, choose
from k3cli.engine.engine import Engine
from k3cli.engine.events import Notice, Speculation
from k3cli.engine.sampling import Sampling
from tests.engine.test_speculation_cells import SAMPLINGS, asked, cell, ended

CUDA = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
PLACED = range(1, 9) if os.environ.get("K3_LONG") == "1" else (2, 5)
"""Tokens behind which a turn ends; windows have up to eight."""
PLACES = ["cpu", pytest.param("cuda-float32", marks=CUDA), pytest.param("cuda-bfloat16", marks=CUDA)]


@pytest.fixture(scope="module", params=PLACES)
def two(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """k3-nano over two ranks. Its draft is only loaded with the first test that asks for it: steps were made before."""
    device, _, dtype = request.param.partition("-")
    before = torch.get_num_threads()
    engine = Engine.load(NANO, device=device, dtype=dtype or "float32", gpus="2")
    yield engine
    engine.model.close()
    torch.set_num_threads(before)


@pytest.mark.parametrize("kind", ["greedy", "filtered"])
def test_every_drafter_gives_the_tokens_and_state_of_plain_decoding(kind: str, two: Engine, reckless) -> None:
    """With a fork in the middle of a window, and going on from the bytes of a saved state."""
    prompt, sampling = asked(two), SAMPLINGS[kind]
    two.speculate(OFF)
    plain = cell(two, sampling, prompt)[0]
    for spec in ("suffix", "dspark", "both"):
        two.speculate(choose(spec, model=two.folder))
        found, steps, tokens = cell(two, sampling, prompt)
        assert found == plain, spec
        if spec == "dspark":
            assert tokens > 1.5 * steps
    two.speculate(OFF)
    if two.device.type == "cuda":  # with the layers that are tapped since, too
        steps_of = two.model._replica.model._steps
        assert steps_of.eager == ""
        assert sorted(steps_of._graphs) == list(range(1, two.model.window + 1))


def test_every_way_to_end_inside_a_window(two: Engine, reckless) -> None:
    """A stop id, the length, the context's end, a cancel: the draft knows what follows, and goes on behind it."""
    prompt, sampling = asked(two), SAMPLINGS["greedy"]
    two.speculate(OFF)
    full = two.timeline(prompt)
    list(full.generate(sampling, (), 12))
    ends = [(way, n) for way in ("stop", "length", "context", "cancel") for n in PLACED]
    plain = {key: ended(two, sampling, prompt, full.tokens, *key) for key in ends}
    for spec in ("dspark", "both"):
        two.speculate(choose(spec, model=two.folder))
        for key in ends:
            assert ended(two, sampling, prompt, full.tokens, *key) == plain[key], (spec, key)
    two.speculate(OFF)


def test_a_session_drafted_over_ranks_goes_on_in_one_process_and_back(two: Engine, tmp_path: Path, reckless) -> None:
    """Turn by turn on two ranks, alone, and on two ranks again; with `auto` and without drafts."""
    kind = {"device": str(two.device), "dtype": two.dtype}
    alone = Engine.load(NANO, **kind)
    found: list[Any] = []
    for spec in ("off", "auto"):
        store = Store.open(tmp_path / spec, config=StoreConfig(free_floor_bytes=0, free_floor_share=0.0))
        rows = []
        for n, engine in enumerate((two, alone, two)):
            engine.speculate(choose(spec, model=engine.folder))
            assert engine.speculation.kind == {"off": "off", "auto": "both"}[spec]
            with Conversation.open(engine, store, "a", mode="resume" if n else "create") as conversation:
                text = ("How do I fork a session?", "Who are you?", "What is a turn?")[n]
                events = list(conversation.turn([{"role": "user", "content": text}], Sampling(max_tokens=24, seed=3)))
            assert not [event for event in events if isinstance(event, Notice)]
            (told,) = [event for event in events if isinstance(event, Speculation)]
            assert told.failed is None
            rows.append(told.tokens / told.steps)
            engine.speculate(OFF)
        if spec == "auto":
            assert min(rows) > 1, rows
        records = store.catalog.path(store.session("a").head)
        states = [([page.blob.id for page in r.pages], [blob.id for blob in r.checkpoint]) for r in records]
        found.append(([list(r.tokens) for r in records], [r.meta["schedule"] for r in records], states))
        store.close()
    assert found[0] == found[1]
