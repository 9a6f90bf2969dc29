"""Several ranks on a CPU against one process: logits, greedy answers, states to and from the store."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from k3cli.errors import DamagedError, FitError
from k3cli.model import passes
from k3cli.model.blocks import Weights
from k3cli.model.checkpoint import open_checkpoint
from k3cli.model.config import ModelConfig
from k3cli.model.network import K3Model
from k3cli.model.parallel import experts_by_width, held
from k3cli.model.placement import most_memory
from k3cli.model.weights import LoadProgress
from tests.model.states import Stored, greedy

ROUNDING = 2e-3
"""Between one process and several: logits are of order one, and sums over ranks round in another order."""


@pytest.fixture(scope="module", params=["k3-4", "linear-2"])
def pair(request: pytest.FixtureRequest, split_folders: dict[str, Path], load_both) -> Iterator[Any]:
    """K3 over four ranks with every expert cut in four, Kimi-Linear over two that own whole experts."""
    name, size = request.param.split("-")
    assert experts_by_width(ModelConfig.from_dir(split_folders[name]), int(size)) == (name == "k3")
    seen: list[LoadProgress] = []
    found = load_both(split_folders[name], int(size), fresh=name == "linear", progress=seen.append)
    found.seen = seen
    yield found
    found.peers.close()


def tokens(count: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(4, 90, count))


class Broken(Stored):
    """One of its fields can't be had."""

    def __init__(self, state: Any, broken: str) -> None:
        super().__init__(state)
        self.fields.pop(broken, None)
        self._broken = broken

    def page_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        if name == self._broken:
            raise DamagedError(f"page {name}", "one that can be read")
        return super().page_rows(name, start, stop)


def test_digest_and_bytes(pair):
    """The K3 ranks know the digests and read tensors only; the others hash every byte, between them once."""
    assert pair.many.weights_digest == pair.one.weights_digest
    files = open_checkpoint(pair.folder, pair.one.config)
    headers = sum(len(shard.header) for shard in files.shards)
    total = files.bytes_total - (headers if pair.size == 4 else 0)
    assert sum(pair.many.ranks_read) == total
    assert len(pair.many.ranks_read) == pair.size
    assert pair.many.bytes_read == pair.many.ranks_read[0]
    assert pair.one.bytes_read == files.bytes_total - (headers if pair.size == 2 else 0)  # the ranks remembered theirs
    if pair.size == 4:
        assert max(pair.many.ranks_read) < 1.25 * total / pair.size


def test_one_bar_counts_for_all_ranks(pair):
    done = [step.bytes_done for step in pair.seen]
    assert done == sorted(done)
    assert done[-1] == pair.seen[-1].bytes_total == sum(pair.many.ranks_read) > pair.many.bytes_read


def test_logits_greedy_and_state(pair):
    ids, found = tokens(600), []
    for net in (pair.one.model, pair.many.model):
        state = net.new_state()
        logits = [net.prefill(chunk, state, logits="all") for chunk in ids.split([512, 40, 1, 47])]
        rows, log = net.verify(ids[:5], state)
        net.commit(state, log, 3)
        found.append((torch.cat([*logits, rows]), greedy(net, state, 7, 12), Stored(state)))
    (one, answer, state), (many, answer_many, state_many) = found
    assert one.shape == many.shape
    assert (one - many).abs().max() < ROUNDING
    assert answer == answer_many
    for name, field in state.checkpoint().items():
        assert state_many.checkpoint()[name].shape == field.shape
        assert np.abs(state_many.checkpoint()[name] - field).max() < ROUNDING, name
    for name in ("kv_latent", "k_pe"):
        rows = state_many.page_rows(name, 0, state.position)
        assert np.abs(rows - state.page_rows(name, 0, state.position)).max() < ROUNDING


def test_same_world_same_bits(pair):
    """Run again, and a window of several rows against one row at a time."""
    net, ids = pair.many.model, tokens(70, 1)
    kept = []
    for widths in ([8, 8, 5], [1] * 21, [3] * 7):
        state, rows = net.new_state(), []
        rows.append(net.prefill(ids[:49], state, logits="all"))
        for window in ids[49:].split(widths):
            found, log = net.verify(window, state)
            net.commit(state, log, window.numel())
            rows.append(found)
        kept.append((torch.cat(rows), state.checkpoint()))
    for logits, fields in kept[1:]:
        assert torch.equal(logits, kept[0][0])
        assert all(np.array_equal(field, kept[0][1][name]) for name, field in fields.items())


def test_a_step_that_is_begun_is_the_same_step(pair):
    """What comes before `ready` may be another call, or a commit, which waits for nothing."""
    net, ids = pair.many.model, tokens(60, 4)
    state, other = net.new_state(), net.new_state()
    for each in (state, other):
        net.prefill(ids[:40], each)
    for token in ids[40:48].split(1):
        want, log = net.verify(token, state)
        net.commit(state, log, 1)
        found, log = net.begin(token, other)
        net.commit(other, log, 1)
        net.ready()
        net.ready()
        assert torch.equal(found, want)
    first, _ = net.begin(ids[48:52], state)
    second, _ = net.begin(ids[48:52], other)
    net.ready()
    assert torch.equal(first, second)


def test_ready_waits_for_what_is_launched_behind_a_step_that_was_waited_for(pair, monkeypatch: pytest.MonkeyPatch):
    """As a draw from a window's second row, or from a prefill: its copy to the host is read behind `ready`."""
    net, ids = pair.many.model, tokens(12, 7)
    state, waits = net.new_state(), []
    net.prefill(ids, state)
    monkeypatch.setattr(net.world, "settled", lambda: waits.append(1))
    for launch in (lambda: None, lambda: net.begin(ids[:3], state), lambda: net.verify(ids[:3], state), lambda: None):
        launch()
        waits.clear()
        net.ready()
        assert waits == [1]


@pytest.mark.parametrize("way", ["there", "back", "same"])
def test_a_state_goes_from_one_world_to_another(pair, way: str):
    one, many = pair.one.model, pair.many.model
    source, target = {"there": (many, one), "back": (one, many), "same": (many, many)}[way]
    ids, state, other = tokens(530, 2), source.new_state(), target.new_state()
    for chunk in ids.split(512):
        source.prefill(chunk, state, logits="none")
    stored = Stored(state)
    other.load(stored)
    assert other.position == 530
    after = Stored(other)
    for name, field in stored.checkpoint().items():
        assert np.array_equal(after.checkpoint()[name], field), name
    a, _ = source.verify(ids[:4], state)
    b, _ = target.verify(ids[:4], other)
    assert torch.equal(a, b) if way == "same" else (a - b).abs().max() < ROUNDING
    assert greedy(source, state, 9, 10) == greedy(target, other, 9, 10)


def test_every_rank_tells_the_memory_of_its_own_process(pair):
    net, ids = pair.many.model, tokens(40, 9)
    before = net.memory()
    net.prefill(ids, net.new_state())
    found = net.memory()
    assert [device for device, _ in found] == ["cpu"] * pair.size
    # Between the two readings a process may have had a little more, and Linux counts it in batches.
    little = 16 << 20
    assert abs(most_memory(net.device) - found[0][1]) < little
    sizes = [size for _, size in found]
    assert len(set(sizes)) > 1
    assert all(after > size - little > 50 << 20 for after, (_, size) in zip(sizes, before, strict=True))


def test_what_is_refused_is_refused_everywhere_and_work_goes_on(pair):
    net, ids = pair.many.model, tokens(20, 3)
    state = net.new_state()
    net.prefill(ids, state)
    before = state.checkpoint()
    with pytest.raises(FitError):
        state.reserve(1 << 40)
    for broken in ("conv_k", "k_pe"):
        with pytest.raises(DamagedError, match=broken):
            state.load(Broken(state, broken))
    assert state.position == 20
    assert all(np.array_equal(field, before[name]) for name, field in state.checkpoint().items())
    assert len(greedy(net, state, 5, 3)) == 3


def test_forks_drops_and_known_prefixes(pair):
    """At random; each state stands for its tokens, and all pools take the same decisions (else a rank ends)."""
    rng, net, one = random.Random(4), pair.many.model, pair.one.model
    head = tokens(512, 5)
    first = net.new_state()
    net.prefill(head, first)
    held = [(first, head.tolist())]
    assert net.known_prefix(tokens(512, 6)) is None
    for step in range(40):
        state, ids = rng.choice(held)
        act = rng.choice(("fork", "extend", "extend", "drop", "known"))
        if act == "fork":
            held.append((state.fork(), ids.copy()))
        elif act == "extend":
            new = [rng.randrange(4, 90) for _ in range(rng.randint(1, 8))]
            _, log = net.verify(torch.tensor(new), state)
            n = rng.randint(0, len(new))
            net.commit(state, log, n)
            ids += new[:n]
        elif act == "drop" and len(held) > 1:
            held.remove((state, ids))
            del state
        elif act == "known":
            found = net.known_prefix(torch.cat((head, torch.tensor([5, 6, step + 4]))))
            assert found is not None
            assert found.position == 512
            held.append((found, head.tolist()))
    for state, ids in held[:3]:
        assert state.position == len(ids)
        twin = one.new_state()
        for chunk in torch.tensor(ids).split([512] + [1] * (len(ids) - 512)):
            one.prefill(chunk, twin, logits="none")
        a, _ = net.verify(torch.tensor([8]), state)
        b, _ = one.verify(torch.tensor([8]), twin)
        assert (a - b).abs().max() < ROUNDING


def test_a_call_of_another_thread_while_a_state_goes(pair, monkeypatch: pytest.MonkeyPatch):
    """As a save's, when the thread is switched between the news that a handle went and its end: no rank may hold on to
    the state for longer than the others, whose pool would then differ (a rank ends at that)."""
    net, ids, failed = pair.many.model, tokens(20, 8), []
    kept = net.new_state()
    net.prefill(ids, kept)

    def call() -> None:
        try:
            kept.checkpoint()
        except BaseException as error:
            failed.append(error)

    class Switched(deque):
        def append(self, number: int) -> None:
            super().append(number)
            thread = Thread(target=call)
            thread.start()
            thread.join()

    monkeypatch.setattr(net, "_dropped", Switched())
    gone = net.new_state()
    net.prefill(ids, gone)
    _, log = net.verify(ids[:2], gone)
    del log
    del gone
    assert not failed
    assert len(greedy(net, kept, 5, 3)) == 3


def test_what_a_rank_does_not_hold_has_weight_zero(split_configs: dict[str, dict], monkeypatch: pytest.MonkeyPatch):
    """One expert of zeros stands in for all of them: a row may then name it several times, which operators take only
    with weights of 0."""
    whole = ModelConfig.from_dict(split_configs["linear"])
    weights = Weights(whole, torch.device("cpu"), torch.float32, 1, 2)
    dice = torch.Generator().manual_seed(3)
    for sink in weights.sinks().values():
        sink.copy_(torch.randn(sink.shape, generator=dice) / 8)
    weights.finish()
    alone: Any = SimpleNamespace(
        sum=lambda part: part,
        sum_both=lambda *parts: parts,
        gather=lambda part, _dim: torch.cat([part, part], 1),
    )
    net = K3Model(held(whole, 2), weights, torch.device("cpu"), torch.float32, 8, alone)
    seen = []
    window = passes.moe.experts_window
    monkeypatch.setattr(passes.moe, "experts_window", lambda *call: (seen.append(call[1:3]), window(*call))[1])
    net.verify(torch.arange(8), net.new_state())
    spare = weights.layers[-1].mlp.count - 1
    assert len(seen) == sum(whole.moe_layers)
    for ids, shares in seen:
        assert ((shares == 0) == (ids == spare)).all()
    assert any((ids == spare).sum(1).max() > 1 for ids, _ in seen)
