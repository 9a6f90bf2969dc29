"""The KDA step for Hopper in Gluon, K = V = 128: rows are handed over in shared memory, and nothing waits in the chain.

One program holds a head's state in registers. It prepares all rows, a warp each (convolution, SiLU, l2 norm, gate),
into shared memory while the state arrives, and then takes one row after the other. In that chain a warp owns whole
rows of the state, eight lanes along K: sums over K are three shuffles, there is no barrier, and outputs stay in
registers. Replayed and live rows go through the same instructions.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from k3_kernels.kda.step_reference import StepLog, StepWeights

# Named anew between Triton 3.6 and 3.7.
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier

L2_EPS = gl.constexpr(1e-6)


@gluon.jit
def _slot(row, W):
    """row mod W for 0 <= row < 3 W."""
    row = gl.where(row >= W, row - W, row)
    return gl.where(row >= W, row - W, row)


@gluon.jit
def _row(s, accepted, first, W, conv, conv_row, log, C, x, x_row):
    """Addresses of the convolution inputs of the timeline's rows s: window in front, then log, then projections."""
    slot = _slot(first + gl.maximum(s, 0), W)
    logged = gl.where(s < accepted, log + slot * C, x + slot * x_row)
    return gl.where(s < 0, conv + (s + 3) * conv_row, logged)[:, None]


@gluon.jit
def _inputs(
    base, total, accepted, first, W, conv, conv_row, log_x, x, x_row, log_f, f, f_row, log_b, b, b_row, h,
    H: gl.constexpr, K: gl.constexpr, V: gl.constexpr, ROWS: gl.constexpr, R: gl.constexpr, LIVE: gl.constexpr,
):  # fmt: skip
    """What rows base and on are made of: the four convolution inputs of q, k and v, oldest first, then f and b.

    Rows behind the last hold anything, and nothing made of them is used.
    """
    HK: gl.constexpr = H * K
    C: gl.constexpr = 2 * HK + H * V
    t = base + gl.arange(0, ROWS, gl.SliceLayout(1, R))
    d = h * K + gl.arange(0, K, gl.SliceLayout(0, R))[None, :]
    inside = (t < total)[:, None]
    slot = _slot(first + t, W)
    p0 = _row(t - 3, accepted, first, W, conv, conv_row, log_x, C, x, x_row) + d
    p1 = _row(t - 2, accepted, first, W, conv, conv_row, log_x, C, x, x_row) + d
    p2 = _row(t - 1, accepted, first, W, conv, conv_row, log_x, C, x, x_row) + d
    p3 = _row(t, accepted, first, W, conv, conv_row, log_x, C, x, x_row) + d
    f_line = gl.where(t < accepted, log_f + slot * HK, f + slot * f_row)[:, None]
    b_line = gl.where(t < accepted, log_b + slot * H, b + slot * b_row)
    k_rows = _four(p0 + HK, p1 + HK, p2 + HK, p3 + HK, inside)
    v_rows = _four(p0 + 2 * HK, p1 + 2 * HK, p2 + 2 * HK, p3 + 2 * HK, inside)
    q_rows = _four(p0, p1, p2, p3, inside) if LIVE else k_rows
    return k_rows, v_rows, q_rows, gl.load(f_line + d, mask=inside), gl.load(b_line + h, mask=t < total)


@gluon.jit
def _four(p0, p1, p2, p3, mask):
    return gl.load(p0, mask=mask), gl.load(p1, mask=mask), gl.load(p2, mask=mask), gl.load(p3, mask=mask)


@gluon.jit
def _taps(at, C: gl.constexpr):
    """The four taps of channels, oldest row first."""
    return gl.load(at), gl.load(at + C), gl.load(at + 2 * C), gl.load(at + 3 * C)


@gluon.jit
def _exp(x):
    """e to the x: within 2 units in the last place of a float32 for x near 0, within |x| / 16e6 further out."""
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x * 1.4426950408889634], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _sigmoid(x):
    return gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [1 + _exp(-x)], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _rsqrt(x):
    return gl.inline_asm_elementwise(
        "rsqrt.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _rounded(x, kind: gl.constexpr):
    """fp32 x to what `kind` can hold, as fp32."""
    if kind == gl.bfloat16:
        # Two at a time, which is an instruction of full rate; one at a time isn't.
        return gl.inline_asm_elementwise(
            "{ .reg .b32 both; cvt.rn.bf16x2.f32 both, $3, $2; shl.b32 $0, both, 16; and.b32 $1, both, 0xffff0000; }",
            "=r,=r,r,r", [x], dtype=gl.float32, is_pure=True, pack=2,
        )  # fmt: skip
    return x.to(kind).to(gl.float32)


@gluon.jit
def _convolved(rows, taps):
    """SiLU of the convolution, rounded like the input, as fp32 [ROWS, WIDTH]."""
    x0, x1, x2, x3 = rows
    w0, w1, w2, w3 = taps
    # Written as fused products, so that nothing is left to the compiler: rows are prepared in more than one place.
    total = x0.to(gl.float32) * w0
    total = gl.fma(x1.to(gl.float32), w1, total)
    total = gl.fma(x2.to(gl.float32), w2, total)
    total = gl.fma(x3.to(gl.float32), w3, total)
    return _rounded(total * _sigmoid(total), x3.dtype)


@gluon.jit
def _log_decay(f, rate, BOUND: gl.constexpr, bound):
    if BOUND:
        return bound * _sigmoid(rate * f)
    # softplus = max(f, 0) + log(1 + y), y = exp(-|f|); a series where 1 + y would swallow y.
    y = _exp(-gl.abs(f))
    return -rate * (gl.maximum(f, 0.0) + gl.where(y < 1e-3, y * (1 - y * (0.5 - y / 3)), gl.log(1 + y)))


@gluon.jit
def _prepare(
    group, rows, taps, rate, shift, BOUND: gl.constexpr, bound, keys, decays, values, betas, queries,
    K: gl.constexpr, LIVE: gl.constexpr,
):  # fmt: skip
    """What the recurrence takes of a group of rows, into shared memory."""
    k_rows, v_rows, q_rows, f_rows, b_rows = rows
    k_taps, v_taps, q_taps = taps
    rate = _exp(rate)
    decays.index(group).store(_exp(_log_decay(f_rows.to(gl.float32) + shift, rate, BOUND, bound)))
    betas.index(group).store(_sigmoid(b_rows.to(gl.float32)))
    values.index(group).store(_convolved(v_rows, v_taps))
    key = _convolved(k_rows, k_taps)
    keys.index(group).store(key * _rsqrt(gl.sum(key * key, 1) + L2_EPS)[:, None])
    if LIVE:
        q = _convolved(q_rows, q_taps)
        queries.index(group).store(q * (_rsqrt(gl.sum(q * q, 1) + L2_EPS) * (1 / K**0.5))[:, None])


@gluon.jit
def _move(conv, conv_row, j, channel, HK, q, k, v, mask):
    """Stores the convolution window behind the accepted rows."""
    target = conv + (j * conv_row)[:, None] + channel
    gl.store(target, q, mask=mask)
    gl.store(target + HK, k, mask=mask)
    gl.store(target + 2 * HK, v, mask=mask)


@gluon.jit(
    do_not_specialize=[
        "x_row", "f_row", "b_row", "gate_row", "state_slot", "state_layer", "conv_slot", "conv_layer", "conv_row",
        "layers", "W", "n", "one", "eps", "bound",
    ],
    do_not_specialize_on_alignment=["b", "log_b", "A_log", "cursor"],
)  # fmt: skip
def step_kernel(
    x, f, b, gate, weight, A_log, dt_bias, norm, recurrent, conv, log_x, log_f, log_b, cursor, out,
    x_row, f_row, b_row, gate_row, state_slot, state_layer, conv_slot, conv_layer, conv_row, layers, W, n, one,
    eps, bound,
    BOUND: gl.constexpr, LIVE: gl.constexpr, MANY: gl.constexpr, EARLY: gl.constexpr, AHEAD: gl.constexpr,
    PDL: gl.constexpr, SLOTS: gl.constexpr, H: gl.constexpr, K: gl.constexpr,
    V: gl.constexpr, ROWS: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Arguments as of step_triton.step_kernel; LIVE: whether n > 0."""
    VT: gl.constexpr = V // (4 * WARPS)
    STATE: gl.constexpr = gl.BlockedLayout([VT, 4], [4, 8], [WARPS, 1], [1, 0])
    ALONG_K: gl.constexpr = gl.SliceLayout(0, STATE)
    ALONG_V: gl.constexpr = gl.SliceLayout(1, STATE)
    # Outputs: the eight lanes that share a row of the state keep a window's row each.
    OUT: gl.constexpr = gl.BlockedLayout([VT, 1], [4, 8], [WARPS, 1], [1, 0])
    R: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [WARPS, 1], [1, 0])
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    TILE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    # Lines of rows: accepted ones and live ones.
    LINES: gl.constexpr = max(2 * SLOTS if LIVE else SLOTS, ROWS)
    GROUPS: gl.constexpr = LINES // ROWS
    keys = gl.allocate_shared_memory(gl.float32, [GROUPS, ROWS, K], TILE)
    decays = gl.allocate_shared_memory(gl.float32, [GROUPS, ROWS, K], TILE)
    values = gl.allocate_shared_memory(gl.float32, [GROUPS, ROWS, V], TILE)
    betas = gl.allocate_shared_memory(gl.float32, [GROUPS, ROWS], LINE)
    queries = gl.allocate_shared_memory(gl.float32, [GROUPS if LIVE else 1, ROWS, K], TILE)
    if LIVE:
        outputs = gl.allocate_shared_memory(gl.float32, [SLOTS, V], TILE)
        query = queries._reinterpret(gl.float32, [LINES, K], LINE)
    key_row = keys._reinterpret(gl.float32, [LINES, K], LINE)
    decay_row = decays._reinterpret(gl.float32, [LINES, K], LINE)
    value_row = values._reinterpret(gl.float32, [LINES, V], LINE)
    beta_row = betas._reinterpret(gl.float32, [LINES, 1], LINE)

    x_row *= 4
    f_row *= 4
    gate_row *= 4
    conv_row *= 4
    state_slot = state_slot.to(gl.int64) * 16
    state_layer = state_layer.to(gl.int64) * 16
    HK: gl.constexpr = H * K
    C: gl.constexpr = 2 * HK + H * V
    if PDL:
        gl.inline_asm_elementwise("griddepcontrol.wait; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    position = gl.load(cursor).to(gl.int32)
    accepted = gl.load(cursor + 1).to(gl.int32)
    entry = gl.load(cursor + 2)
    here = position % W
    first = here - accepted
    first = gl.where(first < 0, first + W, first)
    total = accepted + n
    d = gl.arange(0, K, gl.SliceLayout(0, R))[None, :]
    kind: gl.constexpr = recurrent.dtype.element_ty

    start = gl.program_id(0)
    # One head is no loop: what a loop keeps from head to head costs registers.
    end, stride = (layers * H, gl.num_programs(0)) if MANY else (start + 1, 1)
    for item in range(start, end, stride):
        layer = gl.to_tensor(item // H if MANY else 0).to(gl.int64)
        h = item % H if MANY else item
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
        if (GROUPS > 1) & (AHEAD == 1):
            later = _inputs(
                ROWS, total, accepted, first, W, conv_at, conv_row, log_x_at, x, x_row, log_f_at, f, f_row,
                log_b_at, b, b_row, h, H, K, V, ROWS, R, LIVE
            )  # fmt: skip
        state = recurrent + entry * state_slot + layer * state_layer + h * V * K
        state += gl.arange(0, V, ALONG_V)[:, None] * K + gl.arange(0, K, ALONG_K)[None, :]
        if EARLY:
            # The barriers keep the compiler from moving loads, the condition from moving work on rows in front of them.
            barrier()
            stored = gl.load(state)
        if (GROUPS > 1) & (AHEAD == 2):
            later = _inputs(
                ROWS, total, accepted, first, W, conv_at, conv_row, log_x_at, x, x_row, log_f_at, f, f_row,
                log_b_at, b, b_row, h, H, K, V, ROWS, R, LIVE
            )  # fmt: skip
        if EARLY:
            barrier()
        if total > 0:
            _prepare(0, now, taps, rate, shift, BOUND, bound, keys, decays, values, betas, queries, K, LIVE)
        if GROUPS > 1:
            if total > ROWS:
                if AHEAD == 0:
                    later = _inputs(
                        ROWS, total, accepted, first, W, conv_at, conv_row, log_x_at, x, x_row, log_f_at, f, f_row,
                        log_b_at, b, b_row, h, H, K, V, ROWS, R, LIVE
                    )  # fmt: skip
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
        if not EARLY:
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
            o = gl.zeros([V, SLOTS], gl.float32, OUT)
            column = gl.arange(0, SLOTS, gl.SliceLayout(0, OUT))[None, :]
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
                value = value_row.index(t).load(ALONG_V)
                beta = beta_row.index(t).load(ALONG_V)
                S = S * decay[None, :]
                decay = decay_row.index(ahead).load(ALONG_K)
                u = (value - gl.sum(S * key[None, :], 1)) * beta
                S = S + u[:, None] * key[None, :]
                key = key_row.index(ahead).load(ALONG_K)
                if LIVE:
                    if t >= accepted:
                        q = query.index(t).load(ALONG_K)
                        read = gl.convert_layout(gl.sum(S * q[None, :], 1), gl.SliceLayout(1, OUT))
                        o = gl.where(column == t - accepted, read[:, None], o)
                # What a stored state would hold: a bf16 state is rounded behind every row.
                S = _rounded(S, kind)
            if (phase == 0) & (accepted > 0):
                gl.store(state, S.to(kind))

        if LIVE:
            _move(conv_at, conv_row, j, h * K + d, HK, moved_q, moved_k, moved_v, moves)
            outputs.permute([1, 0]).store(o)
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


@dataclass(frozen=True)
class Tuning:
    """warps: of a program; early: its state is loaded before rows are prepared; dependent: launched while the kernel in
    front still runs; the rest: of a commit, resident programs a processor."""

    warps: int = 8
    early: bool = True
    ahead: int = 1
    dependent: bool = False
    resident: int = 2
    commit_registers: int | None = 128
    commit_early: bool = False


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
    tuning: Tuning,
) -> None:
    """The kernel with the checked arguments of step_triton."""
    layers, H, V, K = recurrent.shape[1:]
    W, live = log.x.shape[1], n > 0
    options: dict[str, int | bool] = {}
    if not live and tuning.commit_registers:
        options["maxnreg"] = tuning.commit_registers
    if tuning.dependent:
        options["launch_pdl"] = True
    items = layers * H
    step_kernel[(items if live else min(items, tuning.resident * processors),)](
        *rows, w.conv, w.A_log, w.dt_bias, w.o_norm, recurrent, conv, *log, cursor, out, *strides, layers, W, n, 1,
        w.norm_eps, w.lower_bound or 0.0,
        BOUND=w.lower_bound is not None, LIVE=live, MANY=not live, EARLY=tuning.early if live else tuning.commit_early,
        AHEAD=tuning.ahead, PDL=tuning.dependent, SLOTS=8 if W <= 8 else 16, H=H, K=K, V=V,
        ROWS=max(8, tuning.warps), WARPS=tuning.warps, num_warps=tuning.warps,
        **options,
    )  # fmt: skip
