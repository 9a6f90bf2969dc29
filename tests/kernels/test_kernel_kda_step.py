"""`kda.step` and `kda.commit`, the reference: any cut of a sequence into windows gives the bits of plain decoding."""

from __future__ import annotations

import random

import pytest
import torch
from k3_kernels.kda import step_cases as cases
from k3_kernels.kda import step_reference as reference
from k3_kernels.ops import error

SHAPE = {"heads": 3, "K": 20, "V": 12}
F32, BF16 = torch.float32, torch.bfloat16


def plain(t: cases.Tokens, W: int, state: torch.dtype, position: int = 0) -> tuple[list[torch.Tensor], cases.Run]:
    """Every token alone; the state of the returned run is one row behind until it is committed."""
    run = cases.begin(reference.step, t, W, state, position=position)
    rows = []
    for i in range(t.x.shape[0]):
        rows.append(cases.window(run, t, [i])[0])
        cases.moved(run, 1)
    return rows, run


def settle(run: cases.Run, t: cases.Tokens) -> None:
    stacked = t.w._replace(**{name: getattr(t.w, name)[None] for name in ("conv", "A_log", "dt_bias", "o_norm")})
    reference.commit(run.recurrent, run.conv, run.log, stacked, run.cursor)
    run.cursor[1] = 0


@pytest.mark.parametrize("bound", [-5.0, None])
@pytest.mark.parametrize(("dtype", "state", "limit"), [(F32, F32, 2e-5), (BF16, F32, 2e-2), (F32, BF16, 3e-2)])
def test_the_recurrence(bound: float | None, dtype: torch.dtype, state: torch.dtype, limit: float):
    T = 70
    t = cases.draw(T, **SHAPE, dtype=dtype, seed=1, bound=bound)
    rows, run = plain(t, 8, state)
    settle(run, t)
    expected, last = cases.definition(t, torch.zeros(3, 12, 20), torch.zeros(3, t.x.shape[1]))
    assert error(torch.stack(rows), expected) < limit
    assert error(run.recurrent[0, 0], last) < limit
    assert torch.equal(run.conv[0, 0], t.x[-3:])


@pytest.mark.parametrize("bound", [-5.0, None])
@pytest.mark.parametrize(("state", "limit"), [(F32, 1e-6), (BF16, 5e-3)])
def test_nothing_drifts_over_4096_steps(bound: float | None, state: torch.dtype, limit: float):
    """A bf16 state is rounded behind every row; what that does to outputs and state fades with the state itself."""
    T, W = 4096, 8
    t = cases.draw(T, **SHAPE, dtype=F32, seed=2, bound=bound)
    run = cases.begin(reference.step, t, W, state)
    rows = []
    for start in range(0, T, W):
        rows.append(cases.window(run, t, range(start, start + W)))
        cases.moved(run, W)
    settle(run, t)
    expected, last = cases.definition(t, torch.zeros(3, 12, 20), torch.zeros(3, t.x.shape[1]))
    for found, wanted in ((torch.cat(rows)[-1000:], expected[-1000:]), (run.recurrent[0, 0], last)):
        relative = (found.double() - wanted).norm() / wanted.norm()
        assert relative < limit, float(relative)


@pytest.mark.parametrize("W", range(1, 9))
@pytest.mark.parametrize(("dtype", "state"), [(F32, F32), (BF16, BF16)])
def test_windows_give_the_bits_of_plain_decoding(W: int, dtype: torch.dtype, state: torch.dtype):
    """Chained random windows whose rejected rows hold other tokens, and commits in between."""
    T = 160
    t = cases.draw(2 * T, **SHAPE, dtype=dtype, seed=W)
    true = cases.Tokens(t.x[:T], t.f[:T], t.b[:T], t.gate[:T], t.w)
    expected, alone = plain(true, W, state, position=5)
    settle(alone, true)
    dice = random.Random(W)
    run = cases.begin(reference.step, t, W, state, position=5, slots=3, slot=1)
    done = 0
    while done < T:
        n = dice.randint(1, W)
        keep = min(dice.randint(0, n), T - done)
        rows = [done + i if i < keep else T + dice.randrange(T) for i in range(n)]
        found = cases.window(run, t, rows)
        for i in range(keep):
            assert torch.equal(found[i], expected[done + i]), (done, i)
        cases.moved(run, keep)
        done += keep
        if dice.random() < 0.1:
            settle(run, t)
    settle(run, t)
    assert torch.equal(run.recurrent[1], alone.recurrent[0])
    assert torch.equal(run.conv[1], alone.conv[0])


@pytest.mark.parametrize("accepted", range(9))
def test_commit_replays_every_layer(accepted: int):
    """Two layers with weights of their own, every accepted count of a full window; a second commit does nothing."""
    layers = [cases.draw(8, **SHAPE, dtype=F32, seed=10 + i) for i in range(2)]
    run = cases.begin(reference.step, layers[0], 8, F32, layers=2, slots=2, slot=1, position=3)
    for i, t in enumerate(layers):
        cases.window(run, t, range(8), layer=i)
    cases.moved(run, accepted)
    stacked = reference.StepWeights(
        *(torch.stack([part[i] for part in (t.w for t in layers)]) for i in range(4)), -5.0, 1e-5
    )
    for _ in range(2):
        reference.commit(run.recurrent, run.conv, run.log, stacked, run.cursor)
        run.cursor[1] = 0
        cases.check_untouched(run)
        for i, t in enumerate(layers):
            _, alone = plain(cases.Tokens(*(part[:accepted] for part in t[:4]), t.w), 8, F32, position=3)
            settle(alone, t)
            assert torch.equal(run.recurrent[1, i], alone.recurrent[0, 0])
            assert torch.equal(run.conv[1, i], alone.conv[0, 0])


def test_a_full_log_of_k3_is_small():
    """Eight rows of all 69 layers of K3 in bf16, counted on a hundredth of the heads."""
    log = reference.StepLog.empty(69, 8, 1, 128, 128, BF16)
    assert log.nbytes * 96 < 60e6
