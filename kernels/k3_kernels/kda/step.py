"""The KDA step of decode and verify, and the commit of what it left open. Source: the recurrence is Kimi Linear's
(arXiv 2510.26692); the log of raw inputs with replay inside the next step is this project's."""

from __future__ import annotations

import torch
from torch import Tensor

from k3_kernels import select
from k3_kernels.kda import step_reference as reference
from k3_kernels.kda.step_reference import StepLog, StepWeights


def step(
    x: Tensor,
    f: Tensor,
    b: Tensor,
    gate: Tensor,
    w: StepWeights,
    recurrent: Tensor,
    conv: Tensor,
    log: StepLog,
    cursor: Tensor,
    n: int,
) -> Tensor:
    """One layer, one window: replays the accepted rows of the previous window into the state, then computes n rows.

    x [W, 2HK + HV]: q, k, v projections of the window before the convolution; f [W, H, K] gate projection; b [W, H]
    beta logits; gate [W, H, V] output gate logits: one dtype, fp32 or bf16, last dimension contiguous, rows may be
    slices of a wider projection. The row of position p is in slot p mod W; slots without a live row may hold anything.
    recurrent [S, H, V, K] fp32 or bf16 and conv [S, w-1, 2HK + HV] (last inputs of the convolution, activation dtype):
    entry `slot` is moved on by the accepted rows, in place; a bf16 state is rounded behind every row. log: this layer's
    view; its rows from position - accepted on are read, then the n live rows are written, in place.
    cursor int64 [4] on the device: position of the window's first row, accepted rows of the previous window (0 to W)
    not yet in the state, slot, and a fourth number that is not read. n: live rows, 1 to W.

    Returns [W, H V], normed and gated, in x's dtype; rows without a live row are 0. A live row and the state have the
    same bits however a sequence was cut into windows. A step must run once: it moves the state, so before the same
    cursor is used again its `accepted` has to be set to 0.
    """
    if choice(x.device, f.shape[-1], gate.shape[-1], w.conv.shape[-1]).kernel:
        from k3_kernels.kda import step_triton

        return step_triton.step(x, f, b, gate, w, recurrent, conv, log, cursor, n)
    return reference.step(x, f, b, gate, w, recurrent, conv, log, cursor, n)


def commit(recurrent: Tensor, conv: Tensor, log: StepLog, w: StepWeights, cursor: Tensor) -> None:
    """The replay alone, of all layers: afterwards the state is that of plain decoding, and `accepted` is to be 0.

    recurrent [S, L, H, V, K], conv [S, L, w-1, 2HK + HV], changed in place at cursor's slot; log and w with a leading
    layer dimension L; cursor as in `step`, its position the one behind the accepted rows.
    """
    if choice(recurrent.device, recurrent.shape[-1], recurrent.shape[-2], w.conv.shape[-1]).kernel:
        from k3_kernels.kda import step_triton

        step_triton.commit(recurrent, conv, log, w, cursor)
    else:
        reference.commit(recurrent, conv, log, w, cursor)


def choice(device: torch.device, K: int, V: int, taps: int) -> select.Choice:
    """Which implementation runs `step` and `commit` for these head dimensions and this convolution width, and why."""
    refusal = select.power_of_two(K=K, V=V)
    if not (32 <= K <= 128 and 8 <= V <= 128):
        refusal = f"head dimensions {K} and {V}: the kernel takes 32 to 128 and 8 to 128"
    if taps != 4:
        refusal = f"a convolution of width {taps}: the kernel takes 4"
    return select.choose(device, refusal)
