"""The KDA step for Hopper in Gluon, K = V = 128: a cluster of four programs holds a head's state, a quarter of its rows
each, so that all processors work, and the programs that share one hide a part of each other's waits for sums.

A row is prepared (convolution, SiLU, norm, gate) by one warp of the cluster, which hands it to all four programs; an
output goes to the program that norms its row. Old log and convolution window are written only when all rows have come:
they were made of whatever any program of the cluster reads there. Rows of state, keys and outputs are summed in the
order of `step_hopper_commit_triton`: the same bits.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from k3_kernels.kda.step_hopper_cluster_triton import (
    PARTS,
    _buffer,
    _four,
    _lane,
    _number,
    _push_number,
    _push_to_all,
    _push_to_one,
    _rank,
    _received,
    _single,
    _start,
    _started,
    _warp,
)
from k3_kernels.kda.step_hopper_rows_triton import (
    L2_EPS,
    _convolved,
    _exp,
    _inputs,
    _log_decay,
    _rounded,
    _rsqrt,
    _sigmoid,
    _slot,
    _taps,
)
from k3_kernels.kda.step_hopper_sums_triton import _correction, _push_sum
from k3_kernels.kda.step_reference import StepLog, StepWeights

# Named anew between Triton 3.6 and 3.7.
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier

# Four programs along the first dimension. A head's state [V, 16, K / 64, 4]: sixteen lanes along K.
STATE = gl.constexpr(
    gl.BlockedLayout([4, 1, 2, 4], [2, 16, 1, 1], [4, 1, 1, 1], [3, 2, 1, 0], [[1, 0, 0, 0], [2, 0, 0, 0]])
)
# Rows of 128 channels, a warp each.
R = gl.constexpr(gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0], [[1, 0], [2, 0]]))


@gluon.jit
def _prefetch(at, C: gl.constexpr):
    """Has the taps of the queries brought into the L2: there are no registers for them yet."""
    for tap in gl.static_range(4):
        gl.inline_asm_elementwise(
            "prefetch.global.L2 [$4]; mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;",
            "=r,=r,=r,=r,l,l,l,l", [at + tap * C], dtype=gl.int32, is_pure=False, pack=4,
        )  # fmt: skip


@gluon.jit
def _hand_over(
    t, rows, taps, weights, rate, shift, BOUND: gl.constexpr, bound, accepted, total, d, keys, decays, queries,
    values, betas, came, V: gl.constexpr, K: gl.constexpr, C: gl.constexpr
):  # fmt: skip
    """Prepares rows t and stores what the recurrence takes in all programs of the cluster."""
    k_rows, v_rows, q_rows, f_rows, b_rows = rows
    k_taps, v_taps = taps
    inside = ((t < total)[:, None] & (d >= 0)).to(gl.int32)
    # The address of a thread's four channels, the same for each.
    at = t[:, None] * (K * 4) + d // 4 * 16
    key = _convolved(k_rows, k_taps)
    q_taps = _taps(weights, C)
    key = key * _rsqrt(gl.sum(key * key, 1) + L2_EPS)[:, None]
    _push_to_all(keys + at, key, inside, came)
    decay = _exp(_log_decay(f_rows.to(gl.float32) + shift, _exp(rate), BOUND, bound))
    _push_to_all(decays + at, decay, inside, came)
    OWN: gl.constexpr = V // PARTS
    value_at = values + t[:, None] * (OWN * 4) + d // 4 % (OWN // 4) * 16
    _push_to_one(value_at, d // OWN, _convolved(v_rows, v_taps), inside, came)
    _push_number(betas + t * 4, _sigmoid(b_rows.to(gl.float32)), (t < total).to(gl.int32), came)
    q = _convolved(q_rows, q_taps)
    q = q * (_rsqrt(gl.sum(q * q, 1) + L2_EPS) * (1 / K**0.5))[:, None]
    asked = ((t >= accepted) & (t < total))[:, None] & (d >= 0)
    _push_to_all(queries + at - accepted * (K * 4), q, asked.to(gl.int32), came)


@gluon.jit
def _write(
    t, slot, rows, accepted, total, conv, conv_row, log_x, log_f, log_b, channel, h,
    H: gl.constexpr, HK: gl.constexpr, C: gl.constexpr
):  # fmt: skip
    """Logs the live ones of rows t, and moves the convolution window: to what is in front of the first of them."""
    k_rows, v_rows, q_rows, f_rows, b_rows = rows
    alive = (t >= accepted) & (t < total)
    mask = alive[:, None]
    target = log_x + (slot * C)[:, None] + channel
    gl.store(target, q_rows[3], mask=mask)
    gl.store(target + HK, k_rows[3], mask=mask)
    gl.store(target + 2 * HK, v_rows[3], mask=mask)
    gl.store(log_f + (slot * HK)[:, None] + channel, f_rows, mask=mask)
    gl.store(log_b + slot * H + h, b_rows, mask=alive)
    mask = ((t == accepted) & (accepted > 0))[:, None]
    for j in gl.static_range(3):
        target = conv + j * conv_row + channel + (t * 0)[:, None]
        gl.store(target, q_rows[j], mask=mask)
        gl.store(target + HK, k_rows[j], mask=mask)
        gl.store(target + 2 * HK, v_rows[j], mask=mask)


@gluon.jit(
    do_not_specialize=[
        "x_row", "f_row", "b_row", "gate_row", "state_slot", "conv_slot", "conv_row", "W", "n", "one", "eps", "bound",
    ],
    do_not_specialize_on_alignment=["b", "log_b", "A_log", "cursor"],
)  # fmt: skip
def step_kernel(
    x, f, b, gate, weight, A_log, dt_bias, norm, recurrent, conv, log_x, log_f, log_b, cursor, out,
    x_row, f_row, b_row, gate_row, state_slot, conv_slot, conv_row, W, n, one, eps, bound,
    BOUND: gl.constexpr, SLOTS: gl.constexpr, H: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
):  # fmt: skip
    """Arguments as of step_triton.step_kernel, of one layer; a cluster a head."""
    ROWS: gl.constexpr = 4 * PARTS  # prepared at once, a warp each
    OWN: gl.constexpr = V // PARTS  # rows of the state in a program
    ALONG_K: gl.constexpr = gl.SliceLayout(0, STATE)  # [16, K / 64, 4]
    LANES: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, STATE))  # [V, 16]
    LINES: gl.constexpr = 2 * SLOTS  # accepted rows and live ones
    GROUPS: gl.constexpr = LINES // ROWS
    keys = _buffer(SLOTS > 8)
    decays = keys + LINES * K * 4
    queries = decays + LINES * K * 4
    values = queries + SLOTS * K * 4
    betas = values + LINES * OWN * 4
    came = betas + LINES * 4
    outputs = betas + 256
    _start(came)
    x_row *= 4
    f_row *= 4
    gate_row *= 4
    conv_row *= 4
    state_slot = state_slot.to(gl.int64) * 16
    HK: gl.constexpr = H * K
    C: gl.constexpr = 2 * HK + H * V
    kind: gl.constexpr = recurrent.dtype.element_ty
    h = gl.program_id(0)
    # Which row a warp has: neighbours are in different programs.
    j = gl.arange(0, ROWS, gl.SliceLayout(1, R))
    i = j % 4 * PARTS + j // 4
    d = gl.arange(0, K, gl.SliceLayout(0, R))[None, :]
    channel = h * K + d
    wide = d + gl.zeros([ROWS, K], gl.int32, R)

    # Launched while the kernel in front still runs; nothing was touched yet.
    gl.inline_asm_elementwise("griddepcontrol.wait; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    position = gl.load(cursor).to(gl.int32)
    accepted = gl.load(cursor + 1).to(gl.int32)
    entry = gl.load(cursor + 2)
    here = position % W
    first = here - accepted
    first = gl.where(first < 0, first + W, first)
    total = accepted + n
    # Loads go out before anything waits for one: weights, rows, then the state.
    weights = weight + channel
    taps = _taps(weights + HK, C), _taps(weights + 2 * HK, C)
    _prefetch(weight + h * K + wide // 4 * 4, C)
    rate = gl.load(A_log + h)
    shift = gl.load(dt_bias + channel)
    conv_at = conv + entry * conv_slot * 4
    now = _inputs(
        i, total, accepted, first, W, conv_at, conv_row, log_x, x, x_row, log_f, f, f_row, log_b, b, b_row, h,
        H, K, V, R, True
    )  # fmt: skip
    if GROUPS > 1:
        later = _inputs(
            i + ROWS, total, accepted, first, W, conv_at, conv_row, log_x, x, x_row, log_f, f, f_row, log_b, b, b_row,
            h, H, K, V, R, True
        )  # fmt: skip
    kl = gl.arange(0, 16, gl.SliceLayout(1, gl.SliceLayout(2, ALONG_K)))[:, None][:, :, None]
    ka = gl.arange(0, K // 64, gl.SliceLayout(0, gl.SliceLayout(2, ALONG_K)))[None, :][:, :, None]
    ki = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, ALONG_K)))[None, :][:, None, :]
    v = gl.arange(0, V, gl.SliceLayout(1, LANES))[:, None]
    along = ka * 64 + kl * 4 + ki
    state = recurrent + entry * state_slot + h * V * K
    state = state + v[:, :, None][:, :, :, None] * K + along[None, :, :, :]
    # The barriers keep the compiler from moving loads.
    barrier()
    stored = gl.load(state)
    barrier()
    # A row's key, decay, beta and own values, the live ones' queries; then every fourth row of outputs.
    _started(came, total * (2 * K + OWN + 1) * 4 + n * (K * 4), (n + PARTS - 1 - _rank()) // PARTS * (V * 4))
    # A warp without a row goes on.
    row = _warp() * PARTS + _rank()
    if row < total:
        _hand_over(
            i, now, taps, weights, rate, shift, BOUND, bound, accepted, total, wide, keys, decays, queries, values,
            betas, came, V, K, C
        )  # fmt: skip
    if GROUPS > 1:
        if row + ROWS < total:
            _hand_over(
                i + ROWS, later, taps, weights, rate, shift, BOUND, bound, accepted, total, wide, keys, decays, queries,
                values, betas, came, V, K, C
            )  # fmt: skip
    _received(came)
    _write(i, _slot(first + i, W), now, accepted, total, conv_at, conv_row, log_x, log_f, log_b, channel, h, H, HK, C)
    if GROUPS > 1:
        _write(
            i + ROWS, _slot(first + i + ROWS, W), later, accepted, total, conv_at, conv_row, log_x, log_f, log_b,
            channel, h, H, HK, C
        )  # fmt: skip

    slot = _slot(here + i, W)
    alive = (i < n)[:, None]
    logits = gl.load(gate + (slot * gate_row)[:, None] + (h * V + d), mask=alive)
    scale = gl.load(norm + d)
    S = stored.to(gl.float32)
    k_at = along // 4 * 16
    group = gl.arange(0, 16, gl.SliceLayout(0, LANES))[None, :] // 4
    lane = _lane(v + group)
    # A lane's own row of the four of its thread.
    v_at = (v % OWN // 4 * 4 + group) * 4
    o_at = outputs + (v // 4 * 4 + group) * 4
    key = _four(keys + k_at)
    decay = _four(decays + k_at)
    # Two phases, replay and window, of one loop: `one` keeps the compiler from making two loops of it.
    for phase in range(one + 1):
        for t in range(accepted * phase, accepted + n * phase):
            # A vector of the next row is loaded as soon as this row's has been used for the last time.
            ahead = gl.minimum(t + 1, total - 1) * (K * 4)
            value = _single(values + t * (OWN * 4) + v_at)
            beta = _number(betas + t * 4)
            S = S * decay[None, :, :, :]
            decay = _four(decays + ahead + k_at)
            u = _correction(gl.sum(gl.sum(S * key[None, :, :, :], 3), 2), value, beta, lane)
            S = S + u[:, :, None][:, :, :, None] * key[None, :, :, :]
            key = _four(keys + ahead + k_at)
            if t >= accepted:
                o = (t - accepted).to(gl.uint32)
                q = _four(queries + o * (K * 4) + k_at)
                own = gl.sum(gl.sum(S * q[None, :, :, :], 3), 2)
                _push_sum(own, lane, o_at + o // PARTS * (V * 4), o % PARTS, came + 8)
            # What a stored state would hold: a bf16 state is rounded behind every row.
            S = _rounded(S, kind)
        if (phase == 0) & (accepted > 0):
            gl.store(state, S.to(kind))

    _received(came + 8)
    kept = gl.minimum(i, SLOTS - 1) // PARTS
    y = _four(outputs + (kept * (V * 4))[:, None] + wide // 4 * 16)
    y = y * _rsqrt(gl.sum(y * y, 1) / V + eps)[:, None] * scale * _sigmoid(logits.to(gl.float32))
    y = gl.where(alive, y, 0.0).to(out.dtype.element_ty)
    gl.store(out + (slot * H * V)[:, None] + (h * V + d), y, mask=(i < W)[:, None])


def launch(
    rows: tuple[Tensor, Tensor, Tensor, Tensor],
    w: StepWeights,
    recurrent: Tensor,
    conv: Tensor,
    log: StepLog,
    cursor: Tensor,
    n: int,
    out: Tensor,
    strides: tuple[int, ...],
) -> None:
    """The kernel with the checked arguments of step_triton, n > 0; strides in its units."""
    H, V, K = recurrent.shape[2:]
    W = log.x.shape[1]
    x_row, f_row, b_row, gate_row, state_slot, _, conv_slot, _, conv_row = strides
    # Registers for four programs a processor, which the common case fits without spilling.
    options = {"maxnreg": 128} if rows[0].element_size() == 2 and W <= 8 else {}
    step_kernel[(H,)](
        *rows, w.conv, w.A_log, w.dt_bias, w.o_norm, recurrent, conv, *log, cursor, out,
        x_row, f_row, b_row, gate_row, state_slot, conv_slot, conv_row, W, n, 1, w.norm_eps, w.lower_bound or 0.0,
        BOUND=w.lower_bound is not None, SLOTS=8 if W <= 8 else 16, H=H, K=K, V=V,
        num_warps=4, num_ctas=PARTS.value, launch_pdl=True, **options,
    )  # fmt: skip
