"""The Triton kernel of `kda.step` and `kda.commit`: the definition, and the bits of plain decoding for any windows.

Interpreted in fp32 at small shapes, compiled in fp32 and bf16 at K3's head size where a CUDA device is.
"""

from __future__ import annotations

import os
import random

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
# Heads, K, V; activations; state. The interpreter multiplies bf16 wrongly, but storing the state in it works.
KINDS = (
    [(K3, F32, F32), (K3, BF16, F32), (K3, BF16, BF16), (SMALL, F32, F32), (SMALL, BF16, BF16)]
    if CUDA
    else [((2, 32, 16), F32, F32), ((2, 32, 16), F32, BF16)]
)
NAMES = [f"{shape[1]}-{str(dtype)[6:]}-{str(state)[6:]}" for shape, dtype, state in KINDS]


def tokens(T: int, shape: tuple[int, int, int], dtype: torch.dtype, seed: int, bound: float | None = -5.0):
    return cases.draw(T, *shape, dtype=dtype, seed=seed, bound=bound, device=DEVICE)


def settle(run: cases.Run, *layers: cases.Tokens) -> None:
    stacked = StepWeights(*(torch.stack([t.w[i] for t in layers]) for i in range(4)), *layers[0].w[4:])
    kernel.commit(run.recurrent, run.conv, run.log, stacked, run.cursor)
    run.cursor[1] = 0
    cases.check_untouched(run)


def plain(t: cases.Tokens, W: int, state: torch.dtype, T: int, position: int) -> tuple[torch.Tensor, cases.Run]:
    run = cases.begin(kernel.step, t, W, state, position=position)
    rows = []
    for i in range(T):
        rows.append(cases.window(run, t, [i])[0])
        cases.moved(run, 1)
    settle(run, t)
    return torch.stack(rows) if rows else t.x[:0], run


@pytest.mark.parametrize("bound", [-5.0, None])
@pytest.mark.parametrize(("shape", "dtype", "state"), KINDS, ids=NAMES)
def test_the_recurrence(shape: tuple[int, int, int], dtype: torch.dtype, state: torch.dtype, bound: float | None):
    """From a random state, full windows and then a part of one, all accepted."""
    H, K, V = shape
    T = 1000 if LONG else 21
    t = tokens(T, shape, dtype, 1, bound)
    initial = torch.randn(H, V, K, generator=torch.Generator().manual_seed(7)).to(state).to(DEVICE)
    run = cases.begin(kernel.step, t, 8, state, initial=initial, position=3)
    found = []
    for start in range(0, T, 8):
        rows = range(start, min(start + 8, T))
        found.append(cases.window(run, t, rows))
        cases.moved(run, len(rows))
    settle(run, t)
    expected, last = cases.definition(t, initial, torch.zeros_like(run.conv[0, 0]))
    limit = 2e-5 if dtype is F32 and state is F32 else 2e-2
    assert error(torch.cat(found), expected) < limit
    assert error(run.recurrent[0, 0], last) < limit
    assert torch.equal(run.conv[0, 0], t.x[-3:])
    relative = (torch.cat(found).double() - expected).norm() / expected.norm()
    assert relative < (1e-6 if limit == 2e-5 else 5e-3 if state is F32 else 1e-2), float(relative)


@pytest.mark.parametrize("W", WIDTHS)
@pytest.mark.parametrize(("shape", "dtype", "state"), KINDS, ids=NAMES)
def test_windows_give_the_bits_of_plain_decoding(
    shape: tuple[int, int, int], dtype: torch.dtype, state: torch.dtype, W: int
):
    """Random windows, rejected rows of other tokens, commits in between; the state is in the last of three slots."""
    T = 120 if LONG else 12
    t = tokens(2 * T, shape, dtype, W, None if W == 3 else -5.0)
    expected, alone = plain(t, W, state, T, 5)
    dice = random.Random(W)
    run = cases.begin(kernel.step, t, W, state, position=5, slots=3, slot=2)
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
            settle(run, t)
    settle(run, t)
    assert torch.equal(run.recurrent[2], alone.recurrent[0])
    assert torch.equal(run.conv[2], alone.conv[0])


@pytest.mark.parametrize("accepted", range(9) if LONG else [0, 1, 4, 8])
def test_commit_replays_every_layer(accepted: int):
    """More heads in all layers than programs run at once; every layer with weights of its own."""
    shape = KINDS[0][0]
    depth = 70 if CUDA else 2
    layers = [tokens(8, shape, KINDS[1][1], 10 + i) for i in range(depth)]
    run = cases.begin(kernel.step, layers[0], 8, F32, layers=depth, slots=2, slot=1, position=3)
    for i, t in enumerate(layers):
        cases.window(run, t, range(8), layer=i)
    cases.moved(run, accepted)
    settle(run, *layers)
    for i in range(0, depth, 1 if depth < 9 else 23):
        _, alone = plain(layers[i], 8, F32, accepted, 3)
        assert torch.equal(run.recurrent[1, i], alone.recurrent[0, 0])
        assert torch.equal(run.conv[1, i], alone.conv[0, 0])


@pytest.mark.parametrize("decay", [-1e4, 1e4])
@pytest.mark.parametrize("bound", [-5.0, None])
def test_gate_extremes(decay: float, bound: float | None):
    """Log decays at the bound (or of -1e5) and at 0, for every row of full windows."""
    shape = KINDS[0][0]
    t = tokens(16, shape, F32, 2, bound)
    t.f.fill_(decay)
    run = cases.begin(kernel.step, t, 8, F32, initial=torch.randn(shape[0], shape[2], shape[1]).to(DEVICE))
    initial = run.recurrent[0, 0].clone()
    found = []
    for rows in (range(8), range(8, 16)):
        found.append(cases.window(run, t, rows))
        cases.moved(run, 8)
    settle(run, t)
    expected, last = cases.definition(t, initial, torch.zeros_like(run.conv[0, 0]))
    assert error(torch.cat(found), expected) < 2e-5
    assert error(run.recurrent[0, 0], last) < 2e-5
