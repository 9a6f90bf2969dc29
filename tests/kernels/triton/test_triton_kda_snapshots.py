"""The peer that keeps a state behind every row computes what `kda.step` does: else its times would say nothing."""

from __future__ import annotations

import pytest
import torch
from k3_kernels.bench.kda_snapshots_triton import snapshot_step
from k3_kernels.kda import step_cases as cases
from k3_kernels.kda import step_triton
from k3_kernels.kda.step_reference import StepWeights
from k3_kernels.ops import error
from torch import Tensor

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
H, K, V = (5, 128, 128) if CUDA else (2, 32, 16)
W = 8


@pytest.mark.parametrize(("n", "position"), [(1, 3), (8, 13), (5, 1 << 20)])
def test_outputs_and_every_state_are_those_of_the_step(n: int, position: int):
    t = cases.draw(n, H, K, V, torch.float32, n, device=DEVICE)
    initial = torch.randn(H, V, K, device=DEVICE)
    states = torch.full((W, H, V, K), float("nan"), device=DEVICE)
    states[(position - 1) % W] = initial

    def step(
        x: Tensor, f: Tensor, b: Tensor, gate: Tensor, w: StepWeights, _: Tensor, conv: Tensor, log: object,
        cursor: Tensor, rows: int,
    ) -> Tensor:  # fmt: skip
        return snapshot_step(x, f, b, gate, w, states, conv[0], cursor, rows)

    found = cases.window(cases.begin(step, t, W, torch.float32, position=position, initial=initial), t, range(n))
    for accepted in sorted({1, (n + 1) // 2, n}):
        run = cases.begin(step_triton.step, t, W, torch.float32, position=position, initial=initial)
        wanted = cases.window(run, t, range(n))
        cases.moved(run, accepted)
        stacked = StepWeights(*(part[None] for part in t.w[:4]), *t.w[4:])
        step_triton.commit(run.recurrent, run.conv, run.log, stacked, run.cursor)
        assert error(states[(position + accepted - 1) % W], run.recurrent[0, 0]) < 2e-6
    assert error(found, wanted) < 2e-6
    untouched = {(position + i) % W for i in range(n, W - 1)}
    assert states[sorted(untouched)].isnan().all()
