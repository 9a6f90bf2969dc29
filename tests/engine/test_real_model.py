"""The whole way on a real (tiny, random) model: processes that stop, die and come back, forks, pages on disk."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from k3_sessions.config import StoreConfig, ThinningPolicy
from k3_sessions.store import Store

from k3cli.engine import events as ev
from k3cli.engine.conversation import Conversation
from k3cli.engine.engine import Engine
from k3cli.engine.replay import replay, state_difference
from k3cli.engine.sampling import Sampling

LONG = "Once more. " * 60
TEXTS = ("Hello there", LONG, "And then?")
SAMPLINGS = {"greedy": Sampling(temperature=0, seed=1, max_tokens=40), "warm": Sampling(seed=2, max_tokens=40)}
NEXT = {
    name: Sampling(temperature=s.temperature, top_p=1.0, seed=s.seed, max_tokens=64) for name, s in SAMPLINGS.items()
}

CHILD = """
import hashlib, json, sys
import torch
torch.set_num_threads(1)
from pathlib import Path
from k3_sessions.config import StoreConfig, ThinningPolicy
from k3_sessions.store import Store
from k3cli.engine.conversation import Conversation
from k3cli.engine.engine import Engine
from k3cli.engine.sampling import Sampling

job = json.loads(sys.argv[1])
engine = Engine.load(job["model"], device="cpu")
first = []
prefill = engine.model.prefill
def watched(ids, state, *, logits="last"):
    out = prefill(ids, state, logits=logits)
    first.append(hashlib.sha256(out.numpy().tobytes()).hexdigest())
    return out
engine.model.prefill = watched
store = Store.open(job["store"], config=StoreConfig(free_floor_bytes=0, free_floor_share=0.0))
out = {}
open_ones = {}
for step in job["steps"]:
    name = step["name"]
    if name not in open_ones:
        open_ones[name] = Conversation.open(engine, store, step.get("from", name), mode=step["mode"],
                                            new=name if step["mode"] == "fork" else None)
    conversation = open_ones[name]
    events = []
    for event in conversation.turn([{"role": "user", "content": step["text"]}], Sampling(**step["sampling"])):
        events.append(event.to_json())
        if job.get("chatty"):
            print(json.dumps(event.to_json()), flush=True)
    out.setdefault(name, []).append({"tokens": list(conversation._timeline.tokens), "first": first[-1],
        "saved": next(e for e in events if e["type"] == "saved")})
for conversation in open_ones.values():
    conversation.close()
print(json.dumps(out), flush=True)
"""


@pytest.fixture
def child(repo_root: Path, tiny_model: Path, tmp_path: Path):
    """Runs steps in a new process: (name, mode, text, sampling) each; returns what it printed last."""

    def command(steps, **job):
        job |= {"model": str(tiny_model), "store": str(tmp_path / "store"), "steps": steps}
        return [sys.executable, "-c", CHILD, json.dumps(job)]

    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}

    def run(steps):
        done = subprocess.run(command(steps), env=environment, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    def start(steps):
        return subprocess.Popen(command(steps, chatty=True), env=environment, stdout=subprocess.PIPE, text=True)

    run.start = start
    return run


def step(name, mode, text, sampling, **more):
    return {"name": name, "mode": mode, "text": text, "sampling": sampling.to_json(), **more}


def unbroken(engine, store, name, texts, samplings):
    """Tokens after each turn, and a digest of the logits that the first token of the last turn was drawn from."""
    digests = []
    prefill = engine.model.prefill

    def watched(ids, state, *, logits="last"):
        out = prefill(ids, state, logits=logits)
        digests.append(hashlib.sha256(out.numpy().tobytes()).hexdigest())
        return out

    engine.model.prefill = watched
    try:
        with Conversation.open(engine, store, name, mode="create") as conversation:
            for text, sampling in zip(texts, samplings, strict=True):
                list(conversation.turn([{"role": "user", "content": text}], sampling))
            return list(conversation._timeline.tokens), digests[-1]
    finally:
        engine.model.prefill = prefill


@pytest.fixture
def other_store(tmp_path: Path):
    found = Store.open(tmp_path / "other", config=StoreConfig(free_floor_bytes=0, free_floor_share=0.0))
    yield found
    found.close()


def test_a_new_process_goes_on_as_if_nothing_had_stopped(child, tiny_engine, other_store) -> None:
    child([step(kind, "create", text, SAMPLINGS[kind]) for kind in SAMPLINGS for text in TEXTS])
    resumed = child([step(kind, "resume", "Go on", NEXT[kind]) for kind in SAMPLINGS])
    for kind, sampling in SAMPLINGS.items():
        tokens, first = unbroken(
            tiny_engine, other_store, kind, [*TEXTS, "Go on"], [sampling] * len(TEXTS) + [NEXT[kind]]
        )
        (got,) = resumed[kind]
        assert got["first"] == first, "the logits of the first token, bit for bit"
        assert got["tokens"] == tokens
        saved = got["saved"]
        assert saved["replayed"] == 0
        assert saved["reused"] == saved["position"] - saved["prefilled"] - saved["generated"] + 1
        assert saved["generated"] == 64 or tokens[-1] in tiny_engine.renderer.stop_ids


def test_forks_in_a_new_process_interleaved(child, tiny_engine, other_store) -> None:
    warm = SAMPLINGS["warm"]
    child([step("parent", "create", text, warm) for text in TEXTS])
    got = child(
        [
            step("child", "fork", "Left", warm, **{"from": "parent"}),
            step("parent", "resume", "Right", warm),
            step("child", "fork", "Left again", NEXT["warm"]),
            step("parent", "resume", "Right again", NEXT["warm"]),
        ]
    )
    for name, side in (("parent", "Right"), ("child", "Left")):
        texts = [*TEXTS, side, f"{side} again"]
        tokens, first = unbroken(tiny_engine, other_store, name, texts, [warm] * 4 + [NEXT["warm"]])
        assert got[name][-1]["tokens"] == tokens
        assert got[name][-1]["first"] == first


def test_kill_9_during_a_turn_leaves_the_last_saved_turn(child, tiny_engine, store) -> None:
    long = Sampling(seed=3, max_tokens=4000)
    child([step("a", "create", "Hello", SAMPLINGS["warm"])])
    (before,) = store.log("a")
    for wait in (0.0, 0.05, 0.3):
        process = child.start([step("a", "resume", LONG, long)])
        assert process.stdout is not None
        for line in process.stdout:
            if json.loads(line)["type"] in ("thinking", "text", "malformed"):
                break
        time.sleep(wait)
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=30)
        process.stdout.close()
        log = store.log("a")
        if len(log) == 1:
            assert [turn.id for turn in log] == [before.id]
        else:
            assert log[1].meta["stop"] == "stop", "only a turn that had ended may be there"
            break
        assert [s.name for s in store.sessions()] == ["a"]
    with Conversation.open(tiny_engine, store, "a", mode="resume") as conversation:
        assert conversation._timeline.tokens[: before.total] == list(before.tokens)
        events = list(conversation.turn([{"role": "user", "content": "Go on"}], SAMPLINGS["warm"]))
        assert isinstance(events[-1], ev.Done)
        assert events[-1].saved


def test_pages_of_a_shared_prefix_are_on_disk_once(tiny_engine, store) -> None:
    with Conversation.open(tiny_engine, store, "parent", mode="create") as parent:
        list(parent.turn([{"role": "user", "content": LONG * 2}], SAMPLINGS["warm"]))
        with parent.fork("child") as child:
            list(child.turn([{"role": "user", "content": "Left"}], SAMPLINGS["warm"]))
        list(parent.turn([{"role": "user", "content": "Right"}], SAMPLINGS["warm"]))
    with Conversation.open(
        tiny_engine, store, "parent", mode="fork", new="third", at=store.log("parent")[0].id
    ) as third:
        list(third.turn([{"role": "user", "content": "Middle"}], SAMPLINGS["warm"]))
    pages = {}
    for name in ("parent", "child", "third"):
        path = store.catalog.path(store.session(name).head)
        pages[name] = {(page.start, page.stop): page.blob.id for page in store.catalog.pages(path)}
    whole = [span for span in pages["parent"] if span[1] <= store.log("parent")[0].position and span[1] % 512 == 0]
    assert len(whole) >= 2
    for span in whole:
        assert len({pages[name][span] for name in pages}) == 1
    tails = {pages[name][max(pages[name])] for name in pages}
    assert len(tails) == 3, "what differs is apart"


def test_replay_on_the_real_model_is_equal_bit_for_bit(tiny_engine, store) -> None:
    with Conversation.open(tiny_engine, store, "a", mode="create") as conversation:
        for text, kind in zip(TEXTS, ("warm", "greedy", "warm"), strict=True):
            list(conversation.turn([{"role": "user", "content": text}], SAMPLINGS[kind]))
    events = list(replay(tiny_engine, store, "a"))
    assert not [event for event in events if isinstance(event, ev.Difference)]
    turns = [event for event in events if isinstance(event, ev.TurnReplayed)]
    assert [turn.state for turn in turns].count("equal") >= 2
    assert sum(turn.tokens for turn in turns) > 0


def test_a_thinned_turn_comes_back_bit_for_bit(tiny_engine, tmp_path) -> None:
    thin = ThinningPolicy(last=1, log_spaced=False, max_kept=1)
    config = StoreConfig(free_floor_bytes=0, free_floor_share=0.0, thinning=thin)
    sparse = Store.open(tmp_path / "sparse", config=config)
    live = []
    with Conversation.open(tiny_engine, sparse, "a", mode="create") as conversation:
        for text in TEXTS:
            list(conversation.turn([{"role": "user", "content": text}], SAMPLINGS["warm"]))
            live.append(conversation._timeline.snapshot())
    log = sparse.log("a")
    assert [turn.has_checkpoint for turn in log] == [False, False, True]
    for turn, then in zip(log, live, strict=True):
        with Conversation.open(tiny_engine, sparse, "a", mode="ephemeral", at=turn.id) as again:
            # decode runs come back in whole windows, and were made one token at a time
            assert state_difference(tiny_engine.layout, then, again._timeline.snapshot()) is None
    sparse.close()


def test_the_engine_tells_what_it_chose(tiny_engine, tiny_model) -> None:
    rows = {row["what"]: row for row in tiny_engine.describe()}
    assert rows["window"]["choice"] == "8 rows"
    assert rows["device"]["choice"] == "cpu"
    assert all(row["reason"] for row in rows.values())
    assert tiny_engine.context_limit == 8192
    assert tiny_engine.identity.compute == "float32"
    assert tiny_engine.name == tiny_model.name
    assert set(tiny_engine.runtime()) == {"k3", "torch", "device", "dtype", "window", "kernels", "ranks", "threads"}


def test_a_shared_head_is_taken_from_memory_where_this_process_has_it(tiny_model, store, monkeypatch) -> None:
    """Read once from the store, then found in the pool: the same events, the same bits, nothing read."""
    read: list[int] = []
    stream = type(store).stream

    def counted(self, plan, *args):
        read.append(plan.boundary)
        return stream(self, plan, *args)

    monkeypatch.setattr(type(store), "stream", counted)
    short, head = Sampling(seed=3, max_tokens=4), {"system": "Be brief. " * 110}
    told: dict[str, tuple] = {}
    engines = [Engine.load(tiny_model, device="cpu") for _ in range(2)]
    for name, engine in (("one", 0), ("two", 0), ("three", 1), ("four", 1), ("five", 1)):
        with Conversation.open(engines[engine], store, name, mode="create", head=head) as conversation:
            events = list(conversation.turn([{"role": "user", "content": "Well?"}], short))
            source = conversation._timeline.snapshot()
            bits = {key: value.tobytes() for key, value in source.checkpoint().items()}
            bits["rows"] = source.page_rows("kv_latent", 0, source.position).tobytes()
            saved = next(event for event in events if isinstance(event, ev.Saved))
            told[name] = (saved.reused, conversation._timeline.tokens, bits)
    boundary = told["three"][0]
    assert boundary % 512 == 0
    assert boundary >= 1024
    assert [told[name][0] for name in told] == [0, 0, boundary, boundary, boundary]
    assert read == [boundary], "the second engine read it once"
    assert all(told[name][1:] == told["one"][1:] for name in told)
    assert not [event for event in replay(engines[0], store, "five") if isinstance(event, ev.Difference)]
