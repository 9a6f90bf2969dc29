"""Random sequences for `kda.step`, a driver that cuts them into windows, and what must come out, in fp64.

Tests in `tests/kernels` and the checks before a benchmark use them for the reference and for the kernel alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from k3_kernels.kda.reference import recurrent as token_loop
from k3_kernels.kda.step_reference import StepLog, StepWeights

Step = Callable[..., Tensor]
MARGIN = 1 << 30


class Tokens(NamedTuple):
    """The projections of T tokens in one layer, [T, ...] as `kda.step` takes them by slot, and the layer's weights."""

    x: Tensor
    f: Tensor
    b: Tensor
    gate: Tensor
    w: StepWeights


def draw(
    T: int,
    heads: int,
    K: int,
    V: int,
    dtype: torch.dtype,
    seed: int,
    *,
    bound: float | None = -5.0,
    device: torch.device | str = "cpu",
    taps: int = 4,
) -> Tokens:
    """Fresh random tokens; decays from nearly -bound to nearly 0. bound None: rates up to 200, as far as -1000."""
    source = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=source)

    width = heads * (2 * K + V)
    spread = normal(heads) * (0.5 if bound is not None else 2.5)
    w = StepWeights(
        normal(width, taps).to(device) * 0.5,
        spread.to(device),
        normal(heads, K).to(device) - 1,
        1 + normal(V).to(device) * 0.1,
        bound,
        1e-5,
    )
    shapes = ((T, width), (T, heads, K), (T, heads), (T, heads, V))
    x, f, b, gate = (normal(*shape).to(device, dtype) for shape in shapes)
    return Tokens(x, f * 2, b, gate, w)


def definition(t: Tokens, state: Tensor, conv: Tensor) -> tuple[Tensor, Tensor]:
    """One token after the other in fp64 from `state` [H, V, K] and `conv` [w-1, C]: (rows [T, HV], last state)."""
    T, H, K = t.f.shape
    V = t.gate.shape[-1]
    x, f, b, gate = (part.double() for part in (t.x, t.f, t.b, t.gate))
    weight, A_log, bias, norm = (part.double() for part in t.w[:4])
    rows = torch.cat((conv.double(), x))
    total = torch.stack([(rows[i : i + weight.shape[1]] * weight.t()).sum(0) for i in range(T)])
    y = total / (1 + (-total).exp())
    q, k, v = y[:, : H * K].view(T, H, K), y[:, H * K : 2 * H * K].view(T, H, K), y[:, 2 * H * K :].view(T, H, V)
    q = q / (q.square().sum(-1, keepdim=True) + 1e-6).sqrt() * K**-0.5
    k = k / (k.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    shifted, rate = f + bias, A_log.exp()[:, None]
    if t.w.lower_bound is None:
        g = -rate * torch.logaddexp(shifted, torch.zeros_like(shifted))
    else:
        g = t.w.lower_bound * torch.sigmoid(rate * shifted)
    o, S = token_loop(q, k, v, g, torch.sigmoid(b), state.double())
    o = o / (o.square().mean(-1, keepdim=True) + t.w.norm_eps).sqrt() * norm * torch.sigmoid(gate)
    return o.view(T, H * V), S


@dataclass
class Run:
    """A sequence in progress: slot `slot` of a pool with `slots` states, guard zones of 1e30 on both sides of all."""

    step: Step
    W: int
    slot: int
    recurrent: Tensor
    conv: Tensor
    log: StepLog
    cursor: Tensor
    guards: list[Tensor]


def begin(
    step: Step,
    t: Tokens,
    W: int,
    state: torch.dtype,
    *,
    slots: int = 1,
    slot: int = 0,
    layers: int = 1,
    position: int = 0,
    initial: Tensor | None = None,
) -> Run:
    """An empty run; other slots hold 7s. initial [H, V, K]: the state to begin with instead of zeros."""
    _, H, K = t.f.shape
    V, C, device = t.gate.shape[-1], t.x.shape[1], t.x.device
    guards: list[Tensor] = []
    recurrent = _guarded((slots, layers, H, V, K), state, device, guards)
    conv = _guarded((slots, layers, t.w.conv.shape[1] - 1, C), t.x.dtype, device, guards)
    log = StepLog(
        _guarded((layers, W, C), t.x.dtype, device, guards),
        _guarded((layers, W, H, K), t.x.dtype, device, guards),
        _guarded((layers, W, H), t.x.dtype, device, guards),
    )
    recurrent.fill_(7)
    conv.fill_(7)
    for part in log:
        part.fill_(float("nan"))
    recurrent[slot] = 0 if initial is None else initial.to(state)
    conv[slot] = 0
    cursor = torch.tensor([position, 0, slot, 0], device=device)
    return Run(step, W, slot, recurrent, conv, log, cursor, guards)


def window(run: Run, t: Tokens, rows: Sequence[int], layer: int = 0) -> Tensor:
    """One step on tokens `rows` of t as the rows at cursor's position and on; returns their outputs in time order.

    Idle slots are NaN, the output is checked to be written everywhere, guard zones and other slots to be untouched.
    """
    n, W = len(rows), run.W
    start = int(run.cursor[0])
    where = [(start + i) % W for i in range(n)]
    placed = []
    for part in (t.x, t.f, t.b, t.gate):
        # Rows of a wider tensor, as slices of one projection are.
        wide = torch.full((W, part[0].numel() + 5 * 16), float("nan"), dtype=part.dtype, device=part.device)
        inner = wide[:, 16 : 16 + part[0].numel()]
        inner[where] = part[list(rows)].flatten(1)
        placed.append(inner.unflatten(1, part.shape[1:]))
    out = run.step(
        *placed, t.w, run.recurrent[:, layer], run.conv[:, layer], run.log.layer(layer), run.cursor.clone(), n
    )
    idle = sorted(set(range(W)) - set(where))
    assert not out[idle].any(), "idle rows are 0"
    check_untouched(run)
    return out[where]


def moved(run: Run, accepted: int) -> None:
    """The cursor after a window of which `accepted` rows stay."""
    run.cursor[0] += accepted
    run.cursor[1] = accepted
    run.cursor[3] = 1 - run.cursor[3]


def check_untouched(run: Run) -> None:
    """Guard zones are as they were, and so is every slot but the run's."""
    for guard in run.guards:
        assert bool((guard == MARGIN).all()), "a guard zone was written"
    for pool in (run.recurrent, run.conv):
        others = [i for i in range(pool.shape[0]) if i != run.slot]
        assert bool((pool[others] == 7).all()), "another slot was written"


def _guarded(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, guards: list[Tensor], zone: int = 512
) -> Tensor:
    size = 1
    for length in shape:
        size *= length
    whole = torch.full((size + 2 * zone,), MARGIN, dtype=dtype, device=device)
    guards += [whole[:zone], whole[zone + size :]]
    return whole[zone : zone + size].view(shape)
