"""The same promises on a CUDA device: golden data, windows bit for bit, states that move between devices."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from k3cli.model.network import K3Model
from k3cli.model.state import State
from k3cli.model.weights import load_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def state_bytes(state: State) -> dict[str, np.ndarray]:
    pages = {f.name: state.page_rows(f.name, 0, state.position) for f in state.layout.fields if f.scope == "page"}
    return dict(state.checkpoint()) | pages


def assert_same(a: State, b: State) -> None:
    left, right = state_bytes(a), state_bytes(b)
    for name in left:
        assert np.array_equal(left[name], right[name]), name


@pytest.mark.parametrize("name", ["tiny-a", "tiny-linear"])
def test_golden_logits_in_fp32_and_the_error_of_bf16(name: str, shared_dir: Path, capsys: pytest.CaptureFixture):
    folder = shared_dir / "oracle" / name
    golden = dict(np.load(folder / "golden.npz"))
    ids = torch.from_numpy(golden["tokens"])
    errors = {}
    for dtype in ("float32", "bfloat16"):
        model = load_model(folder, device="cuda", dtype=dtype).model
        state = model.new_state()
        logits = model.prefill(ids, state, logits="all")
        assert logits is not None
        errors[dtype] = float(np.abs(logits.cpu().numpy() - golden["logits"]).max())
    with capsys.disabled():
        print(f"\n{name} on {torch.cuda.get_device_name()}: largest logit error {errors}")
    assert errors["float32"] < 2e-3
    assert errors["bfloat16"] < np.abs(golden["logits"]).max()


@pytest.fixture(params=[("k3", "float32"), ("k3", "bfloat16"), ("linear", "float32"), ("linear", "bfloat16")], ids=str)
def model(request: pytest.FixtureRequest, checkpoints: dict[str, Path]) -> K3Model:
    name, dtype = request.param
    return load_model(checkpoints[name], device="cuda", dtype=dtype).model


def test_random_windows_give_the_bits_of_plain_decoding(model: K3Model):
    dice = random.Random(7)
    ids = torch.randint(0, model.config.vocab, (560,), generator=torch.Generator().manual_seed(1))
    wrong = ids.flip(0)
    start, total = 490, 60  # over the page boundary at 512
    plain = model.new_state()
    model.prefill(ids[:start], plain)
    windowed = plain.fork()
    expected = []
    for i in range(start, start + total):
        logits, log = model.verify(ids[i : i + 1], plain)
        model.commit(plain, log, 1)
        expected.append(logits[0])
    while windowed.position < start + total:
        at = windowed.position
        n = min(dice.randint(1, model.window), start + total - at)
        keep = dice.randint(0, n)
        logits, log = model.verify(torch.cat((ids[at : at + keep], wrong[: n - keep])), windowed)
        for i in range(keep):
            assert torch.equal(logits[i], expected[at - start + i]), (at, i)
        model.commit(windowed, log, keep)
    assert_same(windowed, plain)


def test_a_prefill_repeats_bit_for_bit(model: K3Model):
    ids = torch.randint(0, model.config.vocab, (700,), generator=torch.Generator().manual_seed(2))
    runs = []
    for _ in range(2):
        state = model.new_state()
        for part in ids.split(512):
            model.prefill(part, state)
        runs.append(state)
    assert_same(*runs)
