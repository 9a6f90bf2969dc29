"""The pool against a simple model of the truth: fork, extend, drop or evict, nobody's rows ever change."""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import replace

import numpy as np
import pytest
import torch

from k3cli.commands.doctor_checks import fit
from k3cli.engine.timeline import Timeline
from k3cli.errors import FitError
from k3cli.model.config import ModelConfig
from k3cli.model.fields import state_layout
from k3cli.model.network import K3Model
from k3cli.model.pool import Geometry, Pool, granules_for, room
from k3cli.model.prefixes import ROOT, block_key
from k3cli.model.sizing import workspace
from k3cli.model.state import State
from k3cli.model.weights import load_model

BLOCK = 8


def nothing(state: State) -> None:
    raise AssertionError("no rows are pending in these tests")


class Bench:
    """States over one small pool, written by hand: each row and each KDA state tell which tokens they mean."""

    def __init__(self, config: ModelConfig, granules: int) -> None:
        self.config = config
        self.layout = replace(state_layout(config, torch.float32), hash_block=BLOCK)
        self.pool = Pool(config, BLOCK, torch.device("cpu"), torch.float32, granules)
        self.live: list[tuple[State, list[int]]] = []

    def new(self) -> State:
        return State(self.config, self.layout, self.pool, nothing)

    def rows(self, state: State, tokens: list[int], start: int) -> None:
        for p in range(start, len(tokens)):
            index, row = divmod(p, BLOCK)
            self.pool.blocks[state.pages[index], :, row] = meaning(tokens[: p + 1])

    def mark(self, slot: int, tokens: list[int]) -> None:
        self.pool.recurrent[slot].fill_(meaning(tokens))
        self.pool.conv[slot].fill_(meaning(tokens) + 1)

    def prefill(self, state: State, tokens: list[int], new: list[int]) -> None:
        """As `K3Model.prefill` does it."""
        state.reserve(len(new))
        target = self.pool.slot()
        self.rows(state, tokens + new, len(tokens))
        self.mark(target, tokens + new)
        state.advance(torch.tensor(new), target)
        tokens += new

    def window(self, state: State, tokens: list[int], new: list[int], kept: int) -> None:
        """As `verify` and `commit`: rejected rows stay behind as scratch."""
        state.reserve(len(new))
        state.own_slot()
        self.rows(state, tokens + new, len(tokens))
        tokens += new[:kept]
        self.mark(state.slot, tokens)
        state.position += kept

    def check(self) -> None:
        """Every state reads as its tokens, and every reference is somebody's."""
        holders: Counter[int] = Counter()
        for state, tokens in self.live:
            assert state.position == len(tokens)
            expected = [meaning(tokens[: p + 1]) for p in range(len(tokens))]
            for name in ("kv_latent", "k_pe"):
                found = state.page_rows(name, 0, len(tokens))
                assert np.array_equal(found, np.broadcast_to(np.float32(expected)[:, None], found.shape))
            if tokens:
                parts = state.checkpoint()
                assert (parts["recurrent"] == meaning(tokens)).all()
                assert (parts["conv_k"] == meaning(tokens) + 1).all()
            holders.update([*state.pages, state.slot])
        pages, slots = self.pool.prefixes.pages_and_slots()
        holders.update([*pages, *slots])
        run, taken = self.pool.geometry.run, 0
        starts = {state.slot for state, _ in self.live} | set(slots)
        assert self.pool.free >= 0
        for granule, refs in enumerate(self.pool._refs):
            assert refs == holders[granule], granule
            taken += 0 if not refs else run if granule in starts else 1
        assert taken == self.pool.granules - self.pool.free


def meaning(tokens: list[int]) -> float:
    """A number that two different prefixes don't share (exact in fp32)."""
    return float(int.from_bytes(block_key(b"test", np.int64(tokens).tobytes())[:3], "little"))


@pytest.fixture
def config(k3_config: dict) -> ModelConfig:
    return ModelConfig.from_dict(k3_config)


@pytest.mark.parametrize("seed", range(4))
def test_random_life(config: ModelConfig, seed: int):
    dice, bench = random.Random(seed), Bench(config, 120)
    assert bench.pool.geometry.run > 2
    refused = matched = evicted = 0
    for _ in range(600):
        act = dice.choices(
            ("new", "match", "fork", "prefill", "window", "drop", "evict"), (1, 4, 3, 10, 6, 3 + 2 * len(bench.live), 1)
        )[0]
        try:
            if act == "new" or not bench.live:
                bench.live.append((bench.new(), []))
            elif act == "match":
                # Sequences that begin alike: two choices a block, so that they meet.
                wanted = [dice.randrange(2)] * BLOCK + [dice.randrange(2)] * BLOCK + [5] * dice.randrange(20)
                state = bench.new()
                if state.begin_with(torch.tensor(wanted)):
                    matched += 1
                    assert state.position % BLOCK == 0
                    assert 0 < state.position <= len(wanted)
                bench.live.append((state, wanted[: state.position]))
                for first in range(state.position, 2 * BLOCK, BLOCK):
                    bench.prefill(*bench.live[-1], wanted[first : first + BLOCK])
            elif act == "fork":
                state, tokens = dice.choice(bench.live)
                bench.live.append((state.fork(), tokens.copy()))
            elif act == "prefill":
                state, tokens = dice.choice(bench.live)
                whole = BLOCK - len(tokens) % BLOCK
                bench.prefill(state, tokens, [dice.randrange(2)] * dice.choice((whole, whole, 1, 3, 11)))
            elif act == "window":
                n = dice.randint(1, BLOCK)
                bench.window(*dice.choice(bench.live), [dice.randrange(9) for _ in range(n)], dice.randint(0, n))
            elif act == "drop":
                bench.live.pop(dice.randrange(len(bench.live)))
            else:
                evicted += bench.pool.prefixes.evict_page() + bench.pool.prefixes.evict_slot()
        except FitError:
            refused += 1
            bench.live.pop(dice.randrange(len(bench.live)))
        state = tokens = None
        bench.check()
    assert refused
    assert matched > 3
    assert evicted
    bench.live.clear()
    while bench.pool.prefixes.evict_page():
        bench.check()
    assert len(bench.pool.prefixes) == 0
    assert bench.pool.free == bench.pool.granules


def fill(bench: Bench) -> None:
    while True:
        state: State = bench.new()
        bench.live.append((state, []))
        bench.prefill(*bench.live[-1], [2] * BLOCK)


def test_a_match_survives_the_need_for_room(config: ModelConfig):
    """What was matched is pinned: filling the pool afterwards gives up everything but that."""
    bench = Bench(config, 100)
    tokens: list[int] = []
    state = bench.new()
    for _ in range(3):
        bench.prefill(state, tokens, [1] * BLOCK)
    del state
    found = bench.new()
    assert found.begin_with(torch.tensor(tokens))
    bench.live.append((found, tokens))
    with pytest.raises(FitError, match=r"no room for another|of the pool"):
        fill(bench)
    bench.check()


def test_a_block_is_found_only_when_it_is_written(config: ModelConfig):
    bench = Bench(config, 100)
    done: set[str] = set()

    class Event:
        def __init__(self, name: str) -> None:
            self.name = name

        def query(self) -> bool:
            return self.name in done

    pool, index = bench.pool, bench.pool.prefixes
    first, second = block_key(ROOT, b"a"), block_key(block_key(ROOT, b"a"), b"b")
    pages, slots = [pool.page(), pool.page()], [pool.slot(), pool.slot()]
    assert not index.add(first, second, pages[1], None), "its predecessor is unknown"
    assert index.add(ROOT, first, pages[0], Event("page 1"))
    assert index.keep_slot(first, slots[0], Event("slot 1"))
    assert index.add(first, second, pages[1], Event("page 2"))
    assert index.keep_slot(second, slots[1], Event("slot 2"))
    for name, reach in (("slot 2", 0), ("page 2", 0), ("slot 1", 0), ("page 1", 2)):
        done.add(name)
        assert len(index.match([first, second]).pages) == reach, name
    done.remove("slot 2")
    match = index.match([first, second])
    assert match.pages == (pages[0],)
    assert match.slot == slots[0]


def test_going_back_to_the_last_state_and_asking_for_one(config: ModelConfig):
    """A second prompt that parts inside the first one finds pages but no state; from the third on there is one."""
    bench = Bench(config, 200)
    head, texts = [7] * (2 * BLOCK), ([1] * BLOCK * 3, [2] * BLOCK * 3, [3] * BLOCK * 3)
    reached = []
    for text in texts:
        state, ids = bench.new(), head + text
        state.begin_with(torch.tensor(ids))
        reached.append(state.position)
        tokens = ids[: state.position]
        while len(tokens) < len(ids):
            bench.prefill(state, tokens, ids[len(tokens) : len(tokens) + BLOCK])
        bench.live.append((state, tokens))
        bench.check()
    assert reached == [0, 0, len(head)]


def test_only_whole_blocks_from_the_start_become_known(config: ModelConfig):
    bench = Bench(config, 200)
    tokens: list[int] = []
    state = bench.new()
    for size in (BLOCK, 3, BLOCK - 3, BLOCK):
        bench.prefill(state, tokens, [4] * size)
    assert len(bench.pool.prefixes) == 1
    other = bench.new()
    assert other.begin_with(torch.tensor(tokens))
    assert other.position == BLOCK


def test_sizes(config: ModelConfig):
    geometry = Geometry.of(config, 512, torch.float32)
    assert geometry.page == 2 * 512 * 26 * 4
    assert geometry.slot == geometry.conv + 4 * 3 * 3 * 80 * 4
    assert geometry.granule % 512 == 0
    assert (geometry.run - 1) * geometry.granule < geometry.slot <= geometry.run * geometry.granule
    contexts = granules_for(config, geometry, None, torch.float32)
    assert contexts == 2 * (4096 // 512 + 1) + 8 * geometry.run
    some = granules_for(config, geometry, 20_000_000, torch.float32)
    assert 2 * geometry.run < some * 1 <= 20_000_000 // geometry.granule
    with pytest.raises(FitError, match="one sequence needs") as refusal:
        granules_for(config, geometry, 1_000_000, torch.float32)
    assert refusal.value.exit_code == 4


@pytest.fixture(scope="module", params=["k3", "linear"])
def model(request: pytest.FixtureRequest, checkpoints) -> K3Model:
    return load_model(checkpoints[request.param]).model


def test_known_prefixes_have_the_bits_of_a_prefill(model: K3Model):
    ids = torch.randint(0, model.config.vocab, (1200,), generator=torch.Generator().manual_seed(3))
    first, cold = model.new_state(), model.new_state()
    for part in ids.split(512):
        model.prefill(part, first)
    del first
    known = model.known_prefix(ids[:1150])
    assert known is not None
    assert known.position == 1024
    rest = ids[1024:1150]
    model.pool.prefixes.give_up_slot(known.chain[-1])
    for part in ids[:1024].split(512):
        model.prefill(part, cold)
    assert torch.equal(model.prefill(rest, known), model.prefill(rest, cold))
    left, right = known.checkpoint(), cold.checkpoint()
    assert all(np.array_equal(left[name], right[name]) for name in left)
    assert np.array_equal(known.page_rows("kv_latent", 0, 1150), cold.page_rows("kv_latent", 0, 1150))
    assert model.known_prefix(ids[:500]) is None
    assert model.known_prefix(ids.flip(0)) is None


def test_a_full_pool_refuses_and_leaves_the_state(model: K3Model):
    small = K3Model(model.config, model.weights, model.device, model.dtype)
    small.pool = Pool(model.config, 512, model.device, model.dtype, 3 + 2 * model.pool.geometry.run)
    state = small.new_state()
    ids = torch.arange(600) % 90
    small.prefill(ids, state)
    before = state.checkpoint()
    with pytest.raises(FitError, match="of the pool"):
        deque((small.prefill(ids, state) for _ in range(9)), maxlen=0)
    logits, log = small.verify(ids[:1], state)
    small.commit(state, log, 1)
    assert torch.isfinite(logits).all()
    assert before["recurrent"].shape == state.checkpoint()["recurrent"].shape


def test_a_prompt_that_can_not_fit_is_refused_before_anything_is_evaluated(model: K3Model):
    small = K3Model(model.config, model.weights, model.device, model.dtype)
    small.pool = Pool(model.config, 512, model.device, model.dtype, 3 + 2 * model.pool.geometry.run)
    timeline = Timeline(small, small.new_state(), [5] * 1700, limit=4096)
    with pytest.raises(FitError, match=r"1,700 more tokens need .* at most [12],") as refusal:
        list(timeline.prefill())
    assert refusal.value.exit_code == 4
    assert timeline.position == 0
    del timeline.tokens[1000:]
    assert list(timeline.prefill()) == [512, 1000]


def test_the_doctor_counts_the_room_of_the_pool(config: ModelConfig):
    layout, geometry = state_layout(config, torch.float32), Geometry.of(config, 512, torch.float32)
    weights = 10**6
    rows = {row.name: row for row in fit(config, torch.float32, weights, layout, 10**9, "cpu")}
    assert (rows["room"].value, rows["room"].code) == ("4,096 tokens of context", 0)
    for pages in (5, 0, -1):
        granules = pages + 2 * geometry.run
        free = weights + (workspace(config, torch.float32, 512) + granules * geometry.granule) * 10 // 9 + 1000
        row = {row.name: row for row in fit(config, torch.float32, weights, layout, free, "cpu")}["room"]
        assert room(geometry, granules) == max(pages, 0) * 512
        assert row.code == (0 if pages > 0 else 4)
        assert row.value.startswith("2,560 tokens" if pages > 0 else "does not fit")


def test_chunks_of_several_pages_are_shared_at_their_ends(checkpoints):
    """Two sequences that part inside a chunk share nothing of it; behind whole chunks they start from one state."""
    model = load_model(checkpoints["k3"]).model
    model.prefill_chunk = 1024
    ids = torch.randint(0, 131, (2048 + 40,), generator=torch.Generator().manual_seed(1))
    first = model.new_state()
    rows = [model.prefill(ids[at : at + 1024], first) for at in (0, 1024, 2048)]
    assert model.known_prefix(ids[:1000]) is None
    assert model.known_prefix(ids[:1600]) is None, "the one KDA state kept is that of the last whole chunk"
    again = model.new_state()
    model.prefill(ids[:1024], again)
    known = model.known_prefix(ids[:1600])
    assert known is not None
    assert known.position == 1024
    longest = model.known_prefix(ids)
    assert longest is not None
    assert longest.position == 2048
    tail = model.prefill(ids[2048:], longest)
    assert tail is not None
    assert rows[-1] is not None
    assert torch.equal(tail, rows[-1])
