"""The same promises on a CUDA device: golden data, and bits that depend on a token and its position alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from k3cli.model.choices import READS_ON_HOST, kernel_choices
from k3cli.model.network import K3Model
from k3cli.model.random_weights import write_random_checkpoint
from k3cli.model.state import State
from k3cli.model.weights import load_model
from tests.model.states import Stored, decode, windowed

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

START, TOTAL = 490, 60
"""Decoding over the page boundary at 512."""


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
        steps = decode(model, ids, model.new_state())
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


@pytest.fixture(scope="module")
def base(model: K3Model, ids: torch.Tensor) -> State:
    state = model.new_state()
    model.prefill(ids[:START], state)
    return state


@pytest.fixture(scope="module")
def decoded(model: K3Model, ids: torch.Tensor, base: State) -> tuple[torch.Tensor, State]:
    """Plain decoding: its logits and the state behind it."""
    state = base.fork()
    return decode(model, ids[START:], state), state


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
        assert torch.equal(decode(model, ids[START:], again), rows)
    assert Stored(again) == Stored(state)


@pytest.mark.parametrize("seed", range(3))
def test_random_windows_give_the_bits_of_plain_decoding(
    model: K3Model, ids: torch.Tensor, base: State, decoded, seed: int
):
    expected, state = decoded
    assert Stored(windowed(model, ids, base.fork(), expected, seed)) == Stored(state)


def test_the_last_token_alone_in_a_window_and_after_a_resume(model: K3Model, ids: torch.Tensor, base: State, decoded):
    expected, _ = decoded
    W = model.window
    at = START + 20
    live = base.fork()
    decode(model, ids[START:at], live)
    window, _ = model.verify(ids[at : at + W], live.fork())
    assert torch.equal(window, expected[20 : 20 + W])

    source = Stored(live)
    # Other pages, another slot, another pool, nothing recorded yet.
    other = K3Model(model.config, model.weights, model.device, model.dtype, W)
    spare = [other.new_state() for _ in range(2)]
    for one in (model, other):
        back = one.new_state()
        back.load(source)
        assert torch.equal(decode(one, ids[at : at + W], back.fork()), expected[20 : 20 + W])
        rows, log = one.verify(ids[at : at + W], back)
        assert torch.equal(rows, expected[20 : 20 + W])
        one.commit(back, log, 3)
        assert torch.equal(decode(one, ids[at + 3 : at + 6], back), expected[23:26])
    del spare


def test_two_states_take_turns(model: K3Model, ids: torch.Tensor, base: State, decoded):
    expected, state = decoded
    left, right = base.fork(), model.new_state()
    model.prefill(ids[: START // 2], right)
    alone = right.fork()
    other = decode(model, ids[:20], alone)
    for i in range(20):
        assert torch.equal(decode(model, ids[START + i : START + i + 1], left)[0], expected[i])
        assert torch.equal(decode(model, ids[i : i + 1], right)[0], other[i])
    assert Stored(right) == Stored(alone)
    decode(model, ids[START + 20 :], left)
    assert Stored(left) == Stored(state)


def test_a_prefill_repeats_bit_for_bit(model: K3Model):
    ids = torch.randint(0, model.config.vocab, (1100,), generator=torch.Generator().manual_seed(2))
    runs = []
    for _ in range(2):
        state = model.new_state()
        for part in ids.split(512):
            model.prefill(part, state)
        runs.append(state)
    assert Stored(runs[0]) == Stored(runs[1])
    known = model.known_prefix(ids[:1050])
    assert known is not None
    assert known.position == 1024
    model.prefill(ids[1024:], known)
    assert Stored(known) == Stored(runs[0])
