"""The same promises on a CUDA device: golden data, and bits that depend on a token and its position alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from k3cli.model.choices import READS_ON_HOST, kernel_choices
from k3cli.model.network import K3Model
from k3cli.model.random_weights import write_random_checkpoint
from k3cli.model.state import State
from k3cli.model.weights import load_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

START, TOTAL = 490, 60
"""Decoding over the page boundary at 512."""


def state_bytes(state: State) -> dict[str, np.ndarray]:
    pages = {f.name: state.page_rows(f.name, 0, state.position) for f in state.layout.fields if f.scope == "page"}
    return dict(state.checkpoint()) | pages


def assert_same(a: State, b: State) -> None:
    left, right = state_bytes(a), state_bytes(b)
    for name in left:
        assert np.array_equal(left[name], right[name]), name


@dataclass
class Stored:
    position: int
    fields: dict[str, np.ndarray]
    rows: dict[str, np.ndarray]

    def checkpoint(self) -> dict[str, np.ndarray]:
        return self.fields

    def page_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        return np.ascontiguousarray(self.rows[name][:, start:stop])


@pytest.mark.parametrize("name", ["tiny-a", "tiny-linear"])
def test_golden_logits_in_fp32_and_the_error_of_bf16(name: str, shared_dir: Path, capsys: pytest.CaptureFixture):
    folder = shared_dir / "oracle" / name
    golden = dict(np.load(folder / "golden.npz"))
    ids = torch.from_numpy(golden["tokens"])
    errors = {}
    for dtype in ("float32", "bfloat16"):
        model = load_model(folder, device="cuda", dtype=dtype).model
        whole = model.prefill(ids, model.new_state(), logits="all")
        assert whole is not None
        errors[dtype] = float(np.abs(whole.cpu().numpy() - golden["logits"]).max())
        steps = plain(model, ids, model.new_state())
        errors[f"{dtype}, token by token"] = float(np.abs(steps.cpu().numpy() - golden["logits"]).max())
    with capsys.disabled():
        print(f"\n{name} on {torch.cuda.get_device_name()}: largest logit error {errors}")
    assert max(error for kind, error in errors.items() if "float32" in kind) < 2e-3
    assert max(errors.values()) < np.abs(golden["logits"]).max()


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory, k3_config_wide: dict) -> Path:
    """Every kernel takes these sizes, K3's own head sizes among them."""
    return write_random_checkpoint(tmp_path_factory.mktemp("wide"), k3_config_wide, seed=7)


@pytest.fixture(scope="module", params=["wide", "k3", "linear"])
def model(request: pytest.FixtureRequest, checkpoints: dict[str, Path], wide: Path, dtype: str) -> Iterator[K3Model]:
    folder = wide if request.param == "wide" else checkpoints[request.param]
    yield load_model(folder, device="cuda", dtype=dtype).model
    torch.cuda.empty_cache()


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def ids(model: K3Model) -> torch.Tensor:
    return torch.randint(0, model.config.vocab, (START + TOTAL,), generator=torch.Generator().manual_seed(1))


def plain(model: K3Model, ids: torch.Tensor, state: State) -> torch.Tensor:
    rows = []
    for i in range(ids.numel()):
        logits, log = model.verify(ids[i : i + 1], state)
        model.commit(state, log, 1)
        rows.append(logits[0])
    return torch.stack(rows)


@pytest.fixture(scope="module")
def base(model: K3Model, ids: torch.Tensor) -> State:
    state = model.new_state()
    model.prefill(ids[:START], state)
    return state


@pytest.fixture(scope="module")
def decoded(model: K3Model, ids: torch.Tensor, base: State) -> tuple[torch.Tensor, State]:
    """Plain decoding: its logits and the state behind it."""
    state = base.fork()
    return plain(model, ids[START:], state), state


def test_steps_are_recorded_where_every_kernel_runs(model: K3Model, decoded):
    found = kernel_choices(model.config, model.device, model.dtype, model.window)
    steps = model._steps
    if all(found[name].kernel for name in READS_ON_HOST):
        assert steps.eager == ""
        assert list(steps._graphs) == [1]
    else:
        assert "reference" in steps.eager
        assert not steps._graphs


def test_a_recorded_step_has_the_bits_of_a_plain_one(model: K3Model, ids: torch.Tensor, base: State, decoded):
    rows, state = decoded
    again = base.fork()
    with model.eager():
        assert torch.equal(plain(model, ids[START:], again), rows)
    assert_same(again, state)


@pytest.mark.parametrize("seed", range(3))
def test_random_windows_give_the_bits_of_plain_decoding(
    model: K3Model, ids: torch.Tensor, base: State, decoded, seed: int
):
    dice, wrong = random.Random(seed), ids.flip(0)
    expected, state = decoded
    windowed = base.fork()
    while windowed.position < START + TOTAL:
        at = windowed.position
        n = min(dice.choice((1, 2, 3, model.window, model.window)), START + TOTAL - at)
        keep = dice.randint(0, n)
        logits, log = model.verify(torch.cat((ids[at : at + keep], wrong[: n - keep])), windowed)
        assert torch.equal(logits[:keep], expected[at - START : at - START + keep]), at
        model.commit(windowed, log, keep)
        if dice.random() < 0.2:  # settle in between
            windowed = windowed.fork()
    assert_same(windowed, state)


def test_the_last_token_alone_in_a_window_and_after_a_resume(model: K3Model, ids: torch.Tensor, base: State, decoded):
    expected, _ = decoded
    W = model.window
    at = START + 20
    live = base.fork()
    plain(model, ids[START:at], live)
    window, _ = model.verify(ids[at : at + W], live.fork())
    assert torch.equal(window, expected[20 : 20 + W])

    found = state_bytes(live)
    fields = {f.name for f in live.layout.fields if f.scope == "checkpoint"}
    source = Stored(at, {name: found[name] for name in fields}, found)
    # Other pages, another slot, another pool, nothing recorded yet.
    other = K3Model(model.config, model.weights, model.device, model.dtype, W)
    spare = [other.new_state() for _ in range(2)]
    for one in (model, other):
        back = one.new_state()
        back.load(source)
        assert torch.equal(plain(one, ids[at : at + W], back.fork()), expected[20 : 20 + W])
        rows, log = one.verify(ids[at : at + W], back)
        assert torch.equal(rows, expected[20 : 20 + W])
        one.commit(back, log, 3)
        assert torch.equal(plain(one, ids[at + 3 : at + 6], back), expected[23:26])
    del spare


def test_two_states_take_turns(model: K3Model, ids: torch.Tensor, base: State, decoded):
    expected, state = decoded
    left, right = base.fork(), model.new_state()
    model.prefill(ids[: START // 2], right)
    alone = right.fork()
    other = plain(model, ids[:20], alone)
    for i in range(20):
        assert torch.equal(plain(model, ids[START + i : START + i + 1], left)[0], expected[i])
        assert torch.equal(plain(model, ids[i : i + 1], right)[0], other[i])
    assert_same(right, alone)
    plain(model, ids[START + 20 :], left)
    assert_same(left, state)


def test_a_prefill_repeats_bit_for_bit(model: K3Model):
    ids = torch.randint(0, model.config.vocab, (1100,), generator=torch.Generator().manual_seed(2))
    runs = []
    for _ in range(2):
        state = model.new_state()
        for part in ids.split(512):
            model.prefill(part, state)
        runs.append(state)
    assert_same(*runs)
    known = model.known_prefix(ids[:1050])
    assert known is not None
    assert known.position == 1024
    model.prefill(ids[1024:], known)
    assert_same(known, runs[0])
