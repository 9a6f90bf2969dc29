"""The commit of KDA layers for Hopper in Gluon, K = V = 128: the replay of the accepted rows of all layers, one launch.

A program takes heads in turn and holds a state in registers; rows are prepared a warp each and handed over in shared
memory, and the chain over them has no barrier: a warp owns whole rows of the state, sixteen lanes along K. The step has
a kernel of its own (`step_hopper_triton`), with sums in the same order; the tests on a device hold the bits of both to
each other.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from k3_kernels.kda.step_hopper_cluster_triton import _lane
from k3_kernels.kda.step_hopper_rows_triton import (
    L2_EPS,
    _convolved,
    _exp,
    _inputs,
    _log_decay,
    _rounded,
    _row,
    _rsqrt,
    _sigmoid,
    _slot,
    _squares,
    _taps,
)
from k3_kernels.kda.step_hopper_sums_triton import _correction_of_four, _own_row
from k3_kernels.kda.step_hopper_walk_triton import _dot, _plus
from k3_kernels.kda.step_reference import StepLog, StepWeights

# Named anew between Triton 3.6 and 3.7.
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier

RESIDENT = 2
"""Programs a processor holds at once; registers are limited so that they fit."""


@gluon.jit
def _prepare(
    group, rows, taps, rate, shift, BOUND: gl.constexpr, bound, d, keys, decays, values, betas
):  # fmt: skip
    """What the recurrence takes of a group of rows, into shared memory."""
    k_rows, v_rows, _, f_rows, b_rows = rows
    k_taps, v_taps = taps
    decays.index(group).store(_exp(_log_decay(f_rows.to(gl.float32) + shift, _exp(rate), BOUND, bound)))
    betas.index(group).store(_sigmoid(b_rows.to(gl.float32)))
    values.index(group).store(_convolved(v_rows, v_taps))
    key = _convolved(k_rows, k_taps)
    keys.index(group).store(key * _rsqrt(_squares(key, d % 4 == 0) + L2_EPS)[:, None])


@gluon.jit
def _vector(rows, t, RUNS: gl.constexpr, ALONG_K: gl.constexpr):
    """Row t of [.., K / 64, 16, 4] in shared memory, as the state has its channels: [16, K / 16]."""
    runs = rows.index(t).permute([1, 0, 2]).load(RUNS)
    return gl.convert_layout(runs.reshape([16, runs.shape[1] * 4]), ALONG_K, assert_trivial=True)


@gluon.jit(
    do_not_specialize=[
        "state_slot", "state_layer", "conv_slot", "conv_layer", "conv_row", "layers", "W", "bound",
    ],
    do_not_specialize_on_alignment=["log_b", "A_log", "cursor"],
)  # fmt: skip
def commit_kernel(
    weight, A_log, dt_bias, recurrent, conv, log_x, log_f, log_b, cursor,
    state_slot, state_layer, conv_slot, conv_layer, conv_row, layers, W, bound,
    BOUND: gl.constexpr, SLOTS: gl.constexpr, H: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
):  # fmt: skip
    """Arguments as of step_triton.step_kernel."""
    ROWS: gl.constexpr = 8  # prepared at once, a warp each
    # A head's state [V, 16, K / 16]: sixteen lanes along K with runs of four channels each.
    STATE: gl.constexpr = gl.BlockedLayout([8, 1, 8], [2, 16, 1], [8, 1, 1], [2, 1, 0])
    ALONG_K: gl.constexpr = gl.SliceLayout(0, STATE)
    RUNS: gl.constexpr = gl.SliceLayout(0, gl.BlockedLayout([8, 1, 2, 4], [2, 16, 1, 1], [8, 1, 1, 1], [3, 2, 1, 0]))
    LANES: gl.constexpr = gl.SliceLayout(2, STATE)
    ALONG_V: gl.constexpr = gl.SliceLayout(1, LANES)
    R: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [8, 1], [1, 0])
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    ROWS4: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    TILE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    GROUPS: gl.constexpr = SLOTS // ROWS
    keys = gl.allocate_shared_memory(gl.float32, [GROUPS, ROWS, K], TILE)
    decays = gl.allocate_shared_memory(gl.float32, [GROUPS, ROWS, K], TILE)
    values = gl.allocate_shared_memory(gl.float32, [GROUPS, ROWS, V], TILE)
    betas = gl.allocate_shared_memory(gl.float32, [GROUPS, ROWS], LINE)
    # A row's channels as the state has them: [16, K / 64, 4], channel 64 of the second dimension apart.
    key_row = keys._reinterpret(gl.float32, [SLOTS, K // 64, 16, 4], ROWS4)
    decay_row = decays._reinterpret(gl.float32, [SLOTS, K // 64, 16, 4], ROWS4)
    value_row = values._reinterpret(gl.float32, [SLOTS, V], LINE)
    beta_row = betas._reinterpret(gl.float32, [SLOTS, 1], LINE)

    conv_row *= 4
    state_slot = state_slot.to(gl.int64) * 16
    state_layer = state_layer.to(gl.int64) * 16
    HK: gl.constexpr = H * K
    C: gl.constexpr = 2 * HK + H * V
    kind: gl.constexpr = recurrent.dtype.element_ty
    position = gl.load(cursor).to(gl.int32)
    accepted = gl.load(cursor + 1).to(gl.int32)
    entry = gl.load(cursor + 2)
    first = position % W - accepted
    first = gl.where(first < 0, first + W, first)
    j = gl.arange(0, ROWS, gl.SliceLayout(1, R))
    d = gl.arange(0, K, gl.SliceLayout(0, R))[None, :]
    kl = gl.arange(0, 16, gl.SliceLayout(1, ALONG_K))[:, None]
    kr = gl.arange(0, K // 16, gl.SliceLayout(0, ALONG_K))[None, :]
    along = kr // 4 * 64 + kl * 4 + kr % 4
    v = gl.arange(0, V, ALONG_V)[:, None]
    lane = _lane(v + gl.arange(0, 16, gl.SliceLayout(0, LANES))[None, :])

    for item in range(gl.program_id(0), layers * H, gl.num_programs(0)):
        layer = (item // H).to(gl.int64)
        h = item % H
        conv_at = conv + (entry * conv_slot + layer * conv_layer) * 4
        log_x_at = log_x + layer * W * C
        log_f_at = log_f + layer * W * HK
        log_b_at = log_b + layer * W * H
        channel = h * K + d
        weights = weight + layer * C * 4 + channel
        taps = _taps(weights + HK, C), _taps(weights + 2 * HK, C)
        rate = gl.load(A_log + layer * H + h)
        shift = gl.load(dt_bias + layer * HK + channel)
        # No row is live: the log stands for the projections.
        now = _inputs(
            j, accepted, accepted, first, W, conv_at, conv_row, log_x_at, log_x_at, C, log_f_at, log_f_at, HK,
            log_b_at, log_b_at, H, h, H, K, V, R, False
        )  # fmt: skip
        row = entry * state_slot + layer * state_layer + h * V * K
        state = recurrent + row + v[:, :, None] * K + along[None, :, :]
        if accepted > 0:
            _prepare(0, now, taps, rate, shift, BOUND, bound, d, keys, decays, values, betas)
        if GROUPS > 1:
            for base in range(ROWS, accepted, ROWS):
                more = _inputs(
                    base + j, accepted, accepted, first, W, conv_at, conv_row, log_x_at, log_x_at, C, log_f_at,
                    log_f_at, HK, log_b_at, log_b_at, H, h, H, K, V, R, False
                )  # fmt: skip
                _prepare(base // ROWS, more, taps, rate, shift, BOUND, bound, d, keys, decays, values, betas)
        S = gl.load(state).to(gl.float32)
        # The window behind the accepted rows is read before anything of it is overwritten.
        moves = ((j < 3) & (accepted > 0))[:, None]
        last = accepted - 3 + gl.minimum(j, 2)
        slot = _slot(first + gl.maximum(last, 0), W)
        source = _row(last, slot, accepted, conv_at, conv_row, log_x_at, C, log_x_at, C)
        source += channel
        moved_q = gl.load(source, mask=moves)
        moved_k = gl.load(source + HK, mask=moves)
        moved_v = gl.load(source + 2 * HK, mask=moves)
        barrier()
        target = conv_at + (j * conv_row)[:, None] + channel
        gl.store(target, moved_q, mask=moves)
        gl.store(target + HK, moved_k, mask=moves)
        gl.store(target + 2 * HK, moved_v, mask=moves)

        key = _vector(key_row, 0, RUNS, ALONG_K)
        decay = _vector(decay_row, 0, RUNS, ALONG_K)
        for t in range(accepted):
            # A vector of the next row is loaded as soon as this row's has been used for the last time.
            ahead = gl.minimum(t + 1, accepted - 1)
            value = _own_row(value_row.index(t).load(ALONG_V)[:, None], lane)
            beta = beta_row.index(t).load(ALONG_V)[:, None]
            S = S * decay[None, :, :]
            decay = _vector(decay_row, ahead, RUNS, ALONG_K)
            u = _correction_of_four(_dot(S, key, kr == 0), value, beta, lane)
            S = _plus(S, u, key)
            key = _vector(key_row, ahead, RUNS, ALONG_K)
            # What a stored state would hold: a bf16 state is rounded behind every row.
            S = _rounded(S, kind)
        if accepted > 0:
            gl.store(state, S.to(kind))


def launch(
    w: StepWeights,
    recurrent: Tensor,
    conv: Tensor,
    log: StepLog,
    cursor: Tensor,
    strides: tuple[int, ...],
    processors: int,
) -> None:
    """The kernel with the checked arguments of step_triton; strides in its units."""
    layers, H, V, K = recurrent.shape[1:]
    W = log.x.shape[1]
    commit_kernel[(min(layers * H, RESIDENT * processors),)](
        w.conv, w.A_log, w.dt_bias, recurrent, conv, *log, cursor, *strides[4:], layers, W, w.lower_bound or 0.0,
        BOUND=w.lower_bound is not None, SLOTS=8 if W <= 8 else 16, H=H, K=K, V=V, num_warps=8, maxnreg=128,
    )  # fmt: skip
