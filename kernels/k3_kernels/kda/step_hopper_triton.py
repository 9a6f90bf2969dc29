"""The KDA step for Hopper in Gluon, K = V = 128: a cluster of four programs holds a head's state, a quarter of its rows
each, so that all processors work and a row is prepared once, by one warp of the cluster.

A prepared row (convolution, SiLU, norm, gate) is handed to all four programs; an output goes to the program that norms
its row. Old log and convolution window are written only when all rows have come: they were made of whatever any program
of the cluster reads there. Sums over keys are those of `step_hopper_commit_triton`, in the same order: the same bits.
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
    _push_number,
    _push_to_all,
    _push_to_one,
    _rank,
    _received,
    _start,
    _started,
    _warp,
)
from k3_kernels.kda.step_hopper_copy_triton import _fetch, _read, _sent
from k3_kernels.kda.step_hopper_rows_triton import (
    L2_EPS,
    _convolved,
    _exp,
    _inputs,
    _log_decay,
    _rsqrt,
    _sigmoid,
    _slot,
    _squares,
    _taps,
)
from k3_kernels.kda.step_hopper_walk_triton import _dot, _walk
from k3_kernels.kda.step_reference import StepLog, StepWeights

# Named anew between Triton 3.6 and 3.7.
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier

# Four programs along the first dimension. Half a head's state [V / 2, 16, K / 16]: sixteen lanes along K. Of four
# neighbouring rows of the state, which a thread has, the halves have two each.
STATE = gl.constexpr(gl.BlockedLayout([2, 1, 8], [2, 16, 1], [4, 1, 1], [2, 1, 0], [[1, 0, 0], [2, 0, 0]]))
# Rows of 128 channels, a warp each.
R = gl.constexpr(gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0], [[1, 0], [2, 0]]))


@gluon.jit
def _hand_over(
    t, rows, taps, rate, shift, BOUND: gl.constexpr, bound, accepted, live, d, keys, decays, queries, values, betas,
    came, V: gl.constexpr, K: gl.constexpr
):  # fmt: skip
    """Prepares rows t and stores what the recurrence takes in all programs of the cluster. live: of the warp's row."""
    k_rows, v_rows, q_rows, f_rows, b_rows = rows
    k_taps, v_taps, q_taps = taps
    OWN: gl.constexpr = V // PARTS
    key = _convolved(k_rows, k_taps)
    q = _convolved(q_rows, q_taps)
    value = _convolved(v_rows, v_taps)
    decay = _exp(_log_decay(f_rows.to(gl.float32) + shift, _exp(rate), BOUND, bound))
    beta = _sigmoid(b_rows.to(gl.float32))
    key = key * _rsqrt(_squares(key, d % 4 == 0) + L2_EPS)[:, None]
    q = q * (_rsqrt(_squares(q, d % 4 == 0) + L2_EPS) * (1 / K**0.5))[:, None]
    # The address of a thread's four channels, the same for each.
    at = t[:, None] * (K * 4) + d // 4 * 16
    _push_to_all(keys + at, key, came)
    _push_to_all(decays + at, decay, came)
    _push_to_one(values + t[:, None] * (OWN * 4) + d // 4 % (OWN // 4) * 16, d // OWN, value, came)
    _push_number(betas + t * 4, beta, came)
    if live:
        _push_to_all(queries + at - accepted * (K * 4), q, came)


@gluon.jit
def _prefetch(at):
    """Has the lines at these addresses, the same for four neighbours, brought into the L2."""
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$4]; mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;",
        "=r,=r,=r,=r,l,l,l,l", [at], dtype=gl.int32, is_pure=False, pack=4,
    )  # fmt: skip


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
        "x_row", "f_row", "b_row", "gate_row", "state_slot", "conv_slot", "conv_row", "W", "n", "eps", "bound",
    ],
    do_not_specialize_on_alignment=["b", "log_b", "A_log", "cursor"],
)  # fmt: skip
def step_kernel(
    x, f, b, gate, weight, A_log, dt_bias, norm, recurrent, conv, log_x, log_f, log_b, cursor, out,
    x_row, f_row, b_row, gate_row, state_slot, conv_slot, conv_row, W, n, eps, bound,
    BOUND: gl.constexpr, SLOTS: gl.constexpr, H: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
):  # fmt: skip
    """Arguments as of step_triton.step_kernel, of one layer; a cluster a head."""
    ROWS: gl.constexpr = 4 * PARTS  # prepared at once, a warp each
    OWN: gl.constexpr = V // PARTS  # rows of the state in a program
    ALONG_K: gl.constexpr = gl.SliceLayout(0, STATE)  # [16, K / 16]
    LANES: gl.constexpr = gl.SliceLayout(2, STATE)  # [V / 2, 16]
    LINES: gl.constexpr = 2 * SLOTS  # accepted rows and live ones
    GROUPS: gl.constexpr = LINES // ROWS
    BULK: gl.constexpr = SLOTS <= 8  # whether the shared memory that the cluster buffer may have holds a state too
    keys = _buffer(not BULK)
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
    # Rows to prepare: a program has neighbours, which share inputs. Outputs to norm: neighbours in different programs.
    j = gl.arange(0, ROWS, gl.SliceLayout(1, R))
    i = j % 4 * PARTS + j // 4
    d = gl.arange(0, K, gl.SliceLayout(0, R))[None, :]
    channel = h * K + d
    wide = d + gl.zeros([ROWS, K], gl.int32, R)

    # Launched while the kernel in front still runs, which writes no weights: a warp has one of the twelve lines of taps
    # brought into the L2 before it waits for the rest.
    _prefetch(weight + (j % 4 * C + gl.minimum(j // 4, 2) * HK)[:, None] + h * K + wide // 4 * 4)
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    position = gl.load(cursor).to(gl.int32)
    accepted = gl.load(cursor + 1).to(gl.int32)
    entry = gl.load(cursor + 2)
    here = position % W
    first = here - accepted
    first = gl.where(first < 0, first + W, first)
    total = accepted + n
    # Loads go out before anything waits for one: rows, weights, then the state.
    conv_at = conv + entry * conv_slot * 4
    now = _inputs(
        j, total, accepted, first, W, conv_at, conv_row, log_x, x, x_row, log_f, f, f_row, log_b, b, b_row, h,
        H, K, V, R, True
    )  # fmt: skip
    if GROUPS > 1:
        later = _inputs(
            j + ROWS, total, accepted, first, W, conv_at, conv_row, log_x, x, x_row, log_f, f, f_row, log_b, b, b_row,
            h, H, K, V, R, True
        )  # fmt: skip
    weights = weight + channel
    taps = _taps(weights + HK, C), _taps(weights + 2 * HK, C), _taps(weights, C)
    rate = gl.load(A_log + h)
    shift = gl.load(dt_bias + channel)
    kl = gl.arange(0, 16, gl.SliceLayout(1, ALONG_K))[:, None]
    kr = gl.arange(0, K // 16, gl.SliceLayout(0, ALONG_K))[None, :]
    pair = gl.arange(0, V // 2, gl.SliceLayout(1, LANES))[:, None]
    v = pair // 2 * 4 + pair % 2
    along = kr // 4 * 64 + kl * 4 + kr % 4
    state = recurrent + entry * state_slot + h * V * K
    SIZE: gl.constexpr = recurrent.dtype.element_ty.primitive_bitwidth // 8
    at = keys + 24576
    if BULK:
        barrier()
        _fetch(at, state + _rank() * (OWN * K), OWN * K * SIZE, came + 16)
    else:
        state = state + v[:, :, None] * K + along[None, :, :]
        a_stored = gl.load(state)
        b_stored = gl.load(state + 2 * K)
    # A row's key, decay, beta and own values, the live ones' queries; then every fourth row of outputs.
    _started(came, total * (2 * K + OWN + 1) * 4 + n * (K * 4), (n + PARTS - 1 - _rank()) // PARTS * (V * 4))
    # A warp without a row goes on.
    row = _rank() * 4 + _warp()
    if row < total:
        _hand_over(
            j, now, taps, rate, shift, BOUND, bound, accepted, row >= accepted, wide, keys, decays, queries, values,
            betas, came, V, K
        )  # fmt: skip
    if GROUPS > 1:
        if row + ROWS < total:
            _hand_over(
                j + ROWS, later, taps, rate, shift, BOUND, bound, accepted, row + ROWS >= accepted, wide, keys, decays,
                queries, values, betas, came, V, K
            )  # fmt: skip
    _received(came)
    # From here on the kernel behind may start, as far as it does not wait for this one: earlier, programs of several
    # kernels would gather on one processor.
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )
    _write(j, _slot(first + j, W), now, accepted, total, conv_at, conv_row, log_x, log_f, log_b, channel, h, H, HK, C)
    if GROUPS > 1:
        _write(
            j + ROWS, _slot(first + j + ROWS, W), later, accepted, total, conv_at, conv_row, log_x, log_f, log_b,
            channel, h, H, HK, C
        )  # fmt: skip

    slot = _slot(here + i, W)
    alive = (i < n)[:, None]
    logits = gl.load(gate + (slot * gate_row)[:, None] + (h * V + d), mask=alive)
    scale = gl.load(norm + d)
    if BULK:
        a_at = at + (v % OWN)[:, :, None] * (K * SIZE) + (along // 4 * (4 * SIZE))[None, :, :]
        b_at = a_at + 2 * K * SIZE
        _received(came + 16)
        a_state = _read(a_at, kind)
        b_state = _read(b_at, kind)
    else:
        a_state = a_stored.to(gl.float32)
        b_state = b_stored.to(gl.float32)
    keys += along // 4 * 16
    decays += along // 4 * 16
    queries += along // 4 * 16
    group = gl.arange(0, 16, gl.SliceLayout(0, LANES))[None, :] // 4
    lane = _lane(v + group)
    # A lane's own row: of the two of a half, and of all four of its thread.
    a_values = values + (pair // 2 * 4 % OWN + group // 2) * 4
    b_values = a_values + 8
    o_at = outputs + (pair // 2 * 4 + group) * 4
    a_state = a_state * _four(decays)[None, :, :]
    a_own = _dot(a_state, _four(keys), kr == 0)
    # A warp has eight rows of the state.
    mine = _warp() * (8 * K)
    target = recurrent + entry * state_slot + (h * V + _rank() * OWN) * K + mine
    stored = a_at if BULK else state
    a_state, b_state, a_own = _walk(
        a_state, b_state, a_own, 0, accepted, keys, decays, queries, a_values, b_values, betas, o_at, came + 8, lane,
        kr == 0, stored, at + mine * SIZE, target, BULK, False, kind, K, V
    )  # fmt: skip
    _walk(
        a_state, b_state, a_own, accepted, n, keys, decays, queries, a_values, b_values, betas, o_at, came + 8, lane,
        kr == 0, stored, at, target, BULK, True, kind, K, V
    )  # fmt: skip
    _received(came + 8)
    kept = gl.minimum(i, SLOTS - 1) // PARTS
    y = _four(outputs + (kept * (V * 4))[:, None] + wide // 4 * 16)
    y = y * _rsqrt(gl.sum(y * y, 1) / V + eps)[:, None] * scale * _sigmoid(logits.to(gl.float32))
    y = gl.where(alive, y, 0.0).to(out.dtype.element_ty)
    gl.store(out + (slot * H * V)[:, None] + (h * V + d), y, mask=(i < W)[:, None])
    if BULK:
        _sent()


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
    step_kernel[(H,)](
        *rows, w.conv, w.A_log, w.dt_bias, w.o_norm, recurrent, conv, *log, cursor, out,
        x_row, f_row, b_row, gate_row, state_slot, conv_slot, conv_row, W, n, w.norm_eps, w.lower_bound or 0.0,
        BOUND=w.lower_bound is not None, SLOTS=8 if W <= 8 else 16, H=H, K=K, V=V,
        num_warps=4, num_ctas=PARTS.value, launch_pdl=True,
    )  # fmt: skip
