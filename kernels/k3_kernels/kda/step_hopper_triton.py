"""The KDA step for Hopper in Gluon, K = V = 128: rows are handed over in shared memory, and the chain has no barrier.

One program holds a head's state in registers. It prepares all rows while the state arrives, and then takes one after
the other. There a warp owns whole rows of the state, eight lanes along K, and outputs stay in registers; the replayed
state is stored by the copy engine, since stores of a thread hold up the loads and shuffles of the rows behind. Replayed
and live rows go through one loop; `commit` is another compilation of it, and the tests on a device hold the bits of
both to each other.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from k3_kernels.kda.step_hopper_rows_triton import (
    _inputs,
    _move,
    _prepare,
    _rounded,
    _row,
    _rsqrt,
    _sigmoid,
    _slot,
    _taps,
)
from k3_kernels.kda.step_hopper_sums_triton import _everywhere, _own, _scattered
from k3_kernels.kda.step_reference import StepLog, StepWeights

# Named anew between Triton 3.6 and 3.7.
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier

RESIDENT = 2
"""Programs a processor holds at once in a commit; registers are limited so that they fit."""


@gluon.jit(
    do_not_specialize=[
        "x_row", "f_row", "b_row", "gate_row", "state_slot", "state_layer", "conv_slot", "conv_layer", "conv_row",
        "layers", "W", "n", "one", "eps", "bound",
    ],
    do_not_specialize_on_alignment=["b", "log_b", "A_log", "cursor"],
)  # fmt: skip
def step_kernel(
    x, f, b, gate, weight, A_log, dt_bias, norm, recurrent, states, conv, log_x, log_f, log_b, cursor, out,
    x_row, f_row, b_row, gate_row, state_slot, state_layer, conv_slot, conv_layer, conv_row, layers, W, n, one,
    eps, bound,
    BOUND: gl.constexpr, LIVE: gl.constexpr, SLOTS: gl.constexpr, H: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
):  # fmt: skip
    """Arguments as of step_triton.step_kernel; states: `recurrent` as rows of K for the copy engine, None in a commit.

    LIVE: whether n > 0; then one layer's heads are the grid. In a commit programs take the heads of all layers in turn.
    """
    ROWS: gl.constexpr = 8  # prepared at once, a warp each
    VT: gl.constexpr = V // 32  # rows of the state in a thread
    STATE: gl.constexpr = gl.BlockedLayout([VT, 4], [4, 8], [8, 1], [1, 0])
    ALONG_K: gl.constexpr = gl.SliceLayout(0, STATE)
    ALONG_V: gl.constexpr = gl.SliceLayout(1, STATE)
    # What the eight lanes of a row have each, [V, 8], and the same for all their channels, [V, 8, K / 32, 4].
    OUT: gl.constexpr = gl.BlockedLayout([VT, 1], [4, 8], [8, 1], [1, 0])
    DEEP: gl.constexpr = gl.BlockedLayout([VT, 1, K // 32, 4], [4, 8, 1, 1], [8, 1, 1, 1], [3, 2, 1, 0])
    # Outputs: one of the four rows of a thread for two lanes, and all rows of the window, [V / 4, 8, SLOTS].
    KEPT: gl.constexpr = gl.BlockedLayout([1, 1, SLOTS], [4, 8, 1], [8, 1, 1], [2, 1, 0])
    PAIRS: gl.constexpr = gl.BlockedLayout([1, 4, 2], [1, 32, 1], [8, 1, 1], [2, 1, 0])
    R: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [8, 1], [1, 0])
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    TILE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    # Lines of rows: accepted ones and live ones.
    LINES: gl.constexpr = 2 * SLOTS if LIVE else SLOTS
    GROUPS: gl.constexpr = LINES // ROWS
    keys = gl.allocate_shared_memory(gl.float32, [GROUPS, ROWS, K], TILE)
    decays = gl.allocate_shared_memory(gl.float32, [GROUPS, ROWS, K], TILE)
    values = gl.allocate_shared_memory(gl.float32, [GROUPS, ROWS, V], TILE)
    betas = gl.allocate_shared_memory(gl.float32, [GROUPS, ROWS], LINE)
    queries = gl.allocate_shared_memory(gl.float32, [GROUPS if LIVE else 1, ROWS, K], TILE)
    key_row = keys._reinterpret(gl.float32, [LINES, K], LINE)
    decay_row = decays._reinterpret(gl.float32, [LINES, K], LINE)
    value_row = values._reinterpret(gl.float32, [LINES, V], LINE)
    beta_row = betas._reinterpret(gl.float32, [LINES, 1], LINE)
    if LIVE:
        query_row = queries._reinterpret(gl.float32, [LINES, K], LINE)
        outputs = gl.allocate_shared_memory(gl.float32, [SLOTS, V], TILE)
        held = gl.allocate_shared_memory(recurrent.dtype.element_ty, [V, K], states.layout)
        # Launched while the kernel in front still runs; nothing was touched yet.
        gl.inline_asm_elementwise("griddepcontrol.wait; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)

    x_row *= 4
    f_row *= 4
    gate_row *= 4
    conv_row *= 4
    state_slot = state_slot.to(gl.int64) * 16
    state_layer = state_layer.to(gl.int64) * 16
    HK: gl.constexpr = H * K
    C: gl.constexpr = 2 * HK + H * V
    position = gl.load(cursor).to(gl.int32)
    accepted = gl.load(cursor + 1).to(gl.int32)
    entry = gl.load(cursor + 2)
    here = position % W
    first = here - accepted
    first = gl.where(first < 0, first + W, first)
    total = accepted + n
    d = gl.arange(0, K, gl.SliceLayout(0, R))[None, :]
    kind: gl.constexpr = recurrent.dtype.element_ty
    lane = gl.arange(0, 8, gl.SliceLayout(0, OUT))[None, :] + gl.zeros([V, 8], gl.int32, OUT)

    start = gl.program_id(0)
    # One head is no loop: what a loop keeps from head to head costs registers.
    end, stride = (start + 1, 1) if LIVE else (layers * H, gl.num_programs(0))
    for item in range(start, end, stride):
        layer = gl.to_tensor(0 if LIVE else item // H).to(gl.int64)
        h = item if LIVE else item % H
        conv_at = conv + (entry * conv_slot + layer * conv_layer) * 4
        log_x_at = log_x + layer * W * C
        log_f_at = log_f + layer * W * HK
        log_b_at = log_b + layer * W * H
        weights = weight + layer * C * 4 + h * K + d
        # Loads go out before anything waits for one: weights, rows, then the state.
        taps = _taps(weights + HK, C), _taps(weights + 2 * HK, C), _taps(weights, C)
        rate = gl.load(A_log + layer * H + h)
        shift = gl.load(dt_bias + layer * HK + h * K + d)
        now = _inputs(
            0, total, accepted, first, W, conv_at, conv_row, log_x_at, x, x_row, log_f_at, f, f_row, log_b_at, b,
            b_row, h, H, K, V, ROWS, R, LIVE
        )  # fmt: skip
        if GROUPS > 1:
            later = _inputs(
                ROWS, total, accepted, first, W, conv_at, conv_row, log_x_at, x, x_row, log_f_at, f, f_row,
                log_b_at, b, b_row, h, H, K, V, ROWS, R, LIVE
            )  # fmt: skip
        row = entry * state_slot + layer * state_layer + h * V * K
        state = recurrent + row + gl.arange(0, V, ALONG_V)[:, None] * K + gl.arange(0, K, ALONG_K)[None, :]
        if LIVE:
            # The barriers keep the compiler from moving loads, the condition from moving work on rows in front of them.
            barrier()
            stored = gl.load(state)
            barrier()
        if total > 0:
            _prepare(0, now, taps, rate, shift, BOUND, bound, keys, decays, values, betas, queries, K, LIVE)
        if GROUPS > 1:
            if total > ROWS:
                _prepare(1, later, taps, rate, shift, BOUND, bound, keys, decays, values, betas, queries, K, LIVE)
        if GROUPS > 2:
            for base in range(2 * ROWS, total, ROWS):
                more = _inputs(
                    base, total, accepted, first, W, conv_at, conv_row, log_x_at, x, x_row, log_f_at, f, f_row,
                    log_b_at, b, b_row, h, H, K, V, ROWS, R, LIVE
                )  # fmt: skip
                _prepare(
                    base // ROWS, more, taps, rate, shift, BOUND, bound, keys, decays, values, betas, queries, K, LIVE
                )
        if not LIVE:
            stored = gl.load(state)
        # The window behind the accepted rows, and what is to be logged, are read before anything old is overwritten.
        j = gl.arange(0, ROWS, gl.SliceLayout(1, R))
        moves = ((j < 3) & (accepted > 0))[:, None]
        source = _row(accepted - 3 + gl.minimum(j, 2), accepted, first, W, conv_at, conv_row, log_x_at, C, log_x_at, C)
        source += h * K + d
        moved_q = gl.load(source, mask=moves)
        moved_k = gl.load(source + HK, mask=moves)
        moved_v = gl.load(source + 2 * HK, mask=moves)
        if LIVE:
            i = gl.arange(0, SLOTS, gl.SliceLayout(1, R))
            slot = _slot(here + i, W)
            alive = (i < n)[:, None]
            source = x + (slot * x_row)[:, None] + (h * K + d)
            kept_q = gl.load(source, mask=alive)
            kept_k = gl.load(source + HK, mask=alive)
            kept_v = gl.load(source + 2 * HK, mask=alive)
            kept_f = gl.load(f + (slot * f_row)[:, None] + (h * K + d), mask=alive)
            kept_b = gl.load(b + slot * b_row + h, mask=i < n)
            logits = gl.load(gate + (slot * gate_row)[:, None] + (h * V + d), mask=alive)
            scale = gl.load(norm + d)
            o = gl.zeros([V // 4, 8, SLOTS], gl.float32, KEPT)
            column = gl.arange(0, SLOTS, gl.SliceLayout(0, gl.SliceLayout(1, KEPT)))[None, None, :]
        barrier()
        if not LIVE:
            _move(conv_at, conv_row, j, h * K + d, HK, moved_q, moved_k, moved_v, moves)

        S = stored.to(gl.float32)
        key = key_row.index(0).load(ALONG_K)
        decay = decay_row.index(0).load(ALONG_K)
        # Two phases, replay and window, of one loop: `one` keeps the compiler from making two loops of it.
        for phase in range(one + 1):
            for t in range(accepted * phase, accepted + n * phase):
                # A vector of the next row is loaded as soon as this row's has been used for the last time.
                ahead = gl.minimum(t + 1, total - 1)
                value = value_row.index(t).load(gl.SliceLayout(1, OUT))[:, None]
                beta = beta_row.index(t).load(gl.SliceLayout(1, OUT))[:, None]
                S = S * decay[None, :]
                decay = decay_row.index(ahead).load(ALONG_K)
                u = (value - _everywhere(_own(S * key[None, :], V, K, OUT), lane)) * beta
                u = gl.convert_layout(u, gl.SliceLayout(2, gl.SliceLayout(3, DEEP)))[:, :, None][:, :, :, None]
                u, _ = gl.broadcast(u, gl.zeros([V, 8, K // 32, 4], gl.float32, DEEP))
                u = gl.convert_layout(gl.reshape(gl.permute(u, [0, 2, 1, 3]), [V, K]), STATE)
                S = S + u * key[None, :]
                key = key_row.index(ahead).load(ALONG_K)
                if LIVE:
                    if t >= accepted:
                        q = query_row.index(t).load(ALONG_K)
                        read = _scattered(_own(S * q[None, :], V, K, OUT), lane, V)
                        read = gl.convert_layout(read, gl.SliceLayout(2, KEPT))[:, :, None]
                        o = gl.where(column == t - accepted, read, o)
                # What a stored state would hold: a bf16 state is rounded behind every row.
                S = _rounded(S, kind)
            if (phase == 0) & (accepted > 0):
                if LIVE:
                    held.store(S.to(kind))
                    fence_async_shared()
                    barrier()
                    tma.async_copy_shared_to_global(states, [(row // K).to(gl.int32), 0], held)
                else:
                    gl.store(state, S.to(kind))

        if LIVE:
            _move(conv_at, conv_row, j, h * K + d, HK, moved_q, moved_k, moved_v, moves)
            # Of the two lanes that have the same, the first is taken.
            both = gl.convert_layout(gl.reshape(gl.permute(o, [2, 0, 1]), [SLOTS, V, 2]), PAIRS)
            rows, _ = gl.split(both)
            outputs.store(rows)
            target = log_x_at + (slot * C)[:, None] + (h * K + d)
            gl.store(target, kept_q, mask=alive)
            gl.store(target + HK, kept_k, mask=alive)
            gl.store(target + 2 * HK, kept_v, mask=alive)
            gl.store(log_f_at + (slot * HK)[:, None] + (h * K + d), kept_f, mask=alive)
            gl.store(log_b_at + slot * H + h, kept_b, mask=i < n)
            y = outputs.load(R)
            y = y * _rsqrt(gl.sum(y * y, 1) / V + eps)[:, None] * scale * _sigmoid(logits.to(gl.float32))
            y = gl.where(alive, y, 0.0).to(out.dtype.element_ty)
            gl.store(out + (slot * H * V)[:, None] + (h * V + d), y, mask=(i < W)[:, None])
            tma.store_wait(0)


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
    processors: int,
) -> None:
    """The kernel with the checked arguments of step_triton; strides in its units."""
    layers, H, V, K = recurrent.shape[1:]
    W, live = log.x.shape[1], n > 0
    options: dict[str, int | bool] = {"launch_pdl": True} if live else {"maxnreg": 128}
    states = None
    if live:
        layout = gl.NVMMASharedLayout(0, recurrent.element_size() * 8, 2)
        length = (recurrent.shape[0] - 1) * recurrent.stride(0) // K + H * V
        states = TensorDescriptor(recurrent, [length, K], [K, 1], [V, K], layout)
    step_kernel[(H if live else min(layers * H, RESIDENT * processors),)](
        *rows, w.conv, w.A_log, w.dt_bias, w.o_norm, recurrent, states, conv, *log, cursor, out, *strides,
        layers, W, n, 1, w.norm_eps, w.lower_bound or 0.0,
        BOUND=w.lower_bound is not None, LIVE=live, SLOTS=8 if W <= 8 else 16, H=H, K=K, V=V, num_warps=8, **options,
    )  # fmt: skip
