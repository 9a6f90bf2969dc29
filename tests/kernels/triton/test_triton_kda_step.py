"""The Triton kernel of `kda.step` and `kda.commit`: the definition, and the bits of plain decoding for any windows.

Interpreted in fp32 at small shapes, compiled in fp32 and bf16 at K3's head size where a CUDA device is.
"""

from __future__ import annotations

import os
import random
from dataclasses import replace
from functools import partial

import pytest
import torch
from k3_kernels.kda import step_cases as cases
from k3_kernels.kda import step_triton as kernel
from k3_kernels.kda.step_reference import StepWeights
from k3_kernels.ops import error

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
F32, BF16 = torch.float32, torch.bfloat16
LONG = CUDA or os.environ.get("K3_LONG") == "1"
WIDTHS = [1, 2, 3, 4, 5, 6, 7, 8, 16] if LONG else [1, 3, 8]
K3, SMALL = (5, 128, 128), (3, 64, 32)
HOPPER = CUDA and torch.cuda.get_device_capability()[0] == 9
# Heads, K, V; activations; state; form (Gluon is not interpreted). The interpreter multiplies bf16 wrongly,
# but storing the state in it works.
KINDS = (
    [
        (K3, *types, form)
        for form in ["hopper", "triton"][not HOPPER :]
        for types in ((F32, F32), (BF16, F32), (BF16, BF16))
    ]
    + [(SMALL, F32, F32, "triton"), (SMALL, BF16, BF16, "triton")]
    if CUDA
    else [((2, 32, 16), F32, F32, "triton"), ((2, 32, 16), F32, BF16, "triton")]
)
NAMES = [f"{form}-{shape[1]}-{str(dtype)[6:]}-{str(state)[6:]}" for shape, dtype, state, form in KINDS]
FORMS = ["hopper", "triton"] if HOPPER else ["triton"]


def tokens(T: int, shape: tuple[int, int, int], dtype: torch.dtype, seed: int, bound: float | None = -5.0):
    return cases.draw(T, *shape, dtype=dtype, seed=seed, bound=bound, device=DEVICE)


def tile(form: str, shape: tuple[int, int, int]) -> kernel.Tile:
    plain = kernel.tile(*shape[1:])
    return replace(plain, hopper=form == "hopper")


def stepping(form: str, shape: tuple[int, int, int]) -> cases.Step:
    return partial(kernel.step, cut=tile(form, shape))


def settle(form: str, run: cases.Run, *layers: cases.Tokens) -> None:
    stacked = StepWeights(*(torch.stack([t.w[i] for t in layers]) for i in range(4)), *layers[0].w[4:])
    shape = (run.recurrent.shape[2], run.recurrent.shape[4], run.recurrent.shape[3])
    kernel.commit(run.recurrent, run.conv, run.log, stacked, run.cursor, tile(form, shape))
    run.cursor[1] = 0
    cases.check_untouched(run)


def plain(
    form: str, t: cases.Tokens, W: int, state: torch.dtype, T: int, position: int
) -> tuple[torch.Tensor, cases.Run]:
    shape = (t.f.shape[1], t.f.shape[2], t.gate.shape[2])
    run = cases.begin(stepping(form, shape), t, W, state, position=position)
    rows = []
    for i in range(T):
        rows.append(cases.window(run, t, [i])[0])
        cases.moved(run, 1)
    settle(form, run, t)
    return torch.stack(rows) if rows else t.x[:0], run


@pytest.mark.parametrize("bound", [-5.0, None])
@pytest.mark.parametrize(("shape", "dtype", "state", "form"), KINDS, ids=NAMES)
def test_the_recurrence(
    shape: tuple[int, int, int], dtype: torch.dtype, state: torch.dtype, form: str, bound: float | None
):
    """From a random state, full windows and then a part of one, all accepted: nothing drifts."""
    H, K, V = shape
    T = 4096 if CUDA else 1000 if LONG else 21
    t = tokens(T, shape, dtype, 1, bound)
    initial = torch.randn(H, V, K, generator=torch.Generator().manual_seed(7)).to(state).to(DEVICE)
    run = cases.begin(stepping(form, shape), t, 8, state, initial=initial, position=3)
    found = []
    for start in range(0, T, 8):
        rows = range(start, min(start + 8, T))
        found.append(cases.window(run, t, rows))
        cases.moved(run, len(rows))
    settle(form, run, t)
    expected, last = cases.definition(t, initial, torch.zeros_like(run.conv[0, 0]))
    limit = 2e-5 if dtype is F32 and state is F32 else 2e-2
    assert error(torch.cat(found), expected) < limit
    assert error(run.recurrent[0, 0], last) < limit
    assert torch.equal(run.conv[0, 0], t.x[-3:])
    relative = (torch.cat(found).double() - expected).norm() / expected.norm()
    assert relative < (1e-6 if limit == 2e-5 else 5e-3 if state is F32 else 1e-2), float(relative)


@pytest.mark.parametrize("W", WIDTHS)
@pytest.mark.parametrize(("shape", "dtype", "state", "form"), KINDS, ids=NAMES)
def test_windows_give_the_bits_of_plain_decoding(
    shape: tuple[int, int, int], dtype: torch.dtype, state: torch.dtype, form: str, W: int
):
    """Random windows, rejected rows of other tokens, commits in between; the state is in the last of three slots."""
    T = 120 if LONG else 12
    t = tokens(2 * T, shape, dtype, W, None if W == 3 else -5.0)
    expected, alone = plain(form, t, W, state, T, 5)
    dice = random.Random(W)
    run = cases.begin(stepping(form, shape), t, W, state, position=5, slots=3, slot=2)
    done = 0
    while done < T:
        n = dice.randint(1, W)
        keep = min(dice.randint(0, n), T - done)
        rows = [done + i if i < keep else T + dice.randrange(T) for i in range(n)]
        found = cases.window(run, t, rows)
        assert torch.equal(found[:keep], expected[done : done + keep]), (done, n, keep)
        cases.moved(run, keep)
        done += keep
        if dice.random() < 0.1:
            settle(form, run, t)
    settle(form, run, t)
    assert torch.equal(run.recurrent[2], alone.recurrent[0])
    assert torch.equal(run.conv[2], alone.conv[0])


@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
def test_a_whole_layer_gives_the_bits_of_plain_decoding():
    """96 heads: several programs share a processor, and those of a head don't run in step."""
    test_windows_give_the_bits_of_plain_decoding((96, 128, 128), BF16, F32, "hopper", 8)


@pytest.mark.parametrize("accepted", range(9) if LONG else [0, 1, 4, 8])
@pytest.mark.parametrize("form", FORMS)
def test_commit_replays_every_layer(accepted: int, form: str):
    """More heads in all layers than programs run at once; every layer with weights of its own."""
    shape = KINDS[0][0]
    depth = 70 if CUDA else 2
    layers = [tokens(8, shape, KINDS[1][1], 10 + i) for i in range(depth)]
    run = cases.begin(stepping(form, shape), layers[0], 8, F32, layers=depth, slots=2, slot=1, position=3)
    for i, t in enumerate(layers):
        cases.window(run, t, range(8), layer=i)
    cases.moved(run, accepted)
    settle(form, run, *layers)
    for i in range(0, depth, 1 if depth < 9 else 23):
        _, alone = plain(form, layers[i], 8, F32, accepted, 3)
        assert torch.equal(run.recurrent[1, i], alone.recurrent[0, 0])
        assert torch.equal(run.conv[1, i], alone.conv[0, 0])


@pytest.mark.parametrize("decay", [-1e4, 1e4])
@pytest.mark.parametrize("bound", [-5.0, None])
@pytest.mark.parametrize("form", FORMS)
def test_gate_extremes(decay: float, bound: float | None, form: str):
    """Log decays at the bound (or of -1e5) and at 0, for every row of full windows."""
    shape = KINDS[0][0]
    t = tokens(16, shape, F32, 2, bound)
    t.f.fill_(decay)
    run = cases.begin(stepping(form, shape), t, 8, F32, initial=torch.randn(shape[0], shape[2], shape[1]).to(DEVICE))
    initial = run.recurrent[0, 0].clone()
    found = []
    for rows in (range(8), range(8, 16)):
        found.append(cases.window(run, t, rows))
        cases.moved(run, 8)
    settle(form, run, t)
    expected, last = cases.definition(t, initial, torch.zeros_like(run.conv[0, 0]))
    assert error(torch.cat(found), expected) < 2e-5
    assert error(run.recurrent[0, 0], last) < 2e-5


@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("W", [8, 16])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_both_forms_agree(dtype: torch.dtype, W: int):
    """The interpreted form and the one that runs on Hopper: the same numbers but for the order of sums."""
    t = tokens(6 * W, K3, dtype, 4)
    found = []
    for form in FORMS:
        run = cases.begin(stepping(form, K3), t, W, F32, position=3)
        rows = []
        for start in range(0, 6 * W, W):
            rows.append(cases.window(run, t, range(start, start + W)))
            cases.moved(run, W - start % 3)
        settle(form, run, t)
        found.append((torch.cat(rows).double(), run.recurrent.double(), run.conv))
    (out, state, conv), (other, expected, window) = found
    limit = 1e-6 if dtype is F32 else 2e-3
    assert (out - other).norm() / other.norm() < limit
    assert (state - expected).norm() / expected.norm() < limit
    assert torch.equal(conv, window)
