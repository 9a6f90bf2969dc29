"""The KDA step on a GPU: one program holds a tile of one head's state in registers and walks through the tokens.

A program issues the loads of its state, then prepares all rows (accepted ones from the log, live ones from the
projections: convolution, SiLU, l2 norm, gate) into a line of scratch memory each, and then takes one row after the
other. Replayed and live rows go through the same instructions, and `commit` runs the same binary with no live rows:
equal bits by construction. Integer arguments are therefore left unspecialised: strides that are multiples of 4 or 16
come divided by that, so that the compiler knows of it whatever their value.

State tiles are [RR, KA, RW, RL, KL, KI]: KI = 4 neighbouring channels in a thread, KL lanes side by side along K
and RL along V, RW warps along V, RR x KA repetitions in registers. The layout the compiler derives from the addresses
is exactly that, so a sum over K costs log2(KL) shuffles for each of a thread's rows, and rows of q, k and decay are
loaded once for all of a thread's RR rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3_kernels.kda.step_reference import StepLog, StepWeights
from k3_kernels.kda.step_rows_triton import (
    ROWS,
    _convolved,
    _finish,
    _gate,
    _inputs,
    _keep,
    _log_decay,
    _move_window,
    _taps,
    _window_rows,
)

PAD = tl.constexpr(16)  # floats behind a scratch line; the first is beta
L2_EPS = tl.constexpr(1e-6)
LANES_FIRST = tl.constexpr(tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 7))
"""Where the compiler starts handing out lanes among dimensions without neighbouring addresses: with the first one up to
3.6, with the last one from 3.7 on. With the wrong value the kernel is right and slow."""
RESIDENT = 2
"""Programs a processor holds at once when all layers are committed."""


@triton.jit(
    do_not_specialize=[
        "x_row", "f_row", "b_row", "gate_row", "state_slot", "state_layer", "conv_slot", "conv_layer", "conv_row",
        "layers", "H", "W", "n", "one", "eps", "bound",
    ],
    do_not_specialize_on_alignment=["b", "log_b", "A_log", "cursor"],
)  # fmt: skip
def step_kernel(
    x, f, b, gate, weight, A_log, dt_bias, norm, recurrent, conv, log_x, log_f, log_b, cursor, scratch, outputs, out,
    x_row, f_row, b_row, gate_row, state_slot, state_layer, conv_slot, conv_layer, conv_row, layers, H, W, n, one,
    eps, bound,
    BOUND: tl.constexpr, SLOTS: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    RR: tl.constexpr, KA: tl.constexpr, RW: tl.constexpr, RL: tl.constexpr, KL: tl.constexpr, KI: tl.constexpr,
):  # fmt: skip
    """Programs take the layers x H heads in turn. one: 1, hidden from the compiler.

    x_row, f_row, gate_row, conv_row are in fours of elements, state_slot and state_layer in sixteens.
    """
    LINE: tl.constexpr = 3 * K + V + PAD
    x_row *= 4
    f_row *= 4
    gate_row *= 4
    conv_row *= 4
    state_slot = state_slot.to(tl.int64) * 16
    state_layer = state_layer.to(tl.int64) * 16
    HK = H * K
    C = 2 * HK + H * V

    position = tl.load(cursor).to(tl.int32)
    accepted = tl.load(cursor + 1).to(tl.int32)
    entry = tl.load(cursor + 2)
    here = position % W
    first = (position - accepted) % W
    total = accepted + n

    rr, ka, rw, rl, kl, ki = _axes(RR, KA, RW, RL, KL, KI)
    rows = (rr * RW + rw) * RL + rl
    channels = (ka * KL + kl) * KI + ki
    # Addresses that repeat over warps and lanes, of the shape that gets the state's own layout. `one` hides that rows
    # are neighbours: their layout has to follow from the shape, not from the addresses.
    wide = channels + (rw + rl) * 0
    tall = rr * (RW * RL) + (rw * RL + rl) * one + kl * 0
    lane = kl + rows * 0 == 0
    kk = tl.arange(0, K)
    vv = tl.arange(0, V)
    lines = scratch + tl.program_id(0) * (2 * W * LINE)

    for item in range(tl.program_id(0), layers * H, tl.num_programs(0)):
        layer = (item // H).to(tl.int64)
        h = item % H
        conv_at = conv + (entry * conv_slot + layer * conv_layer) * 4
        log_x_at = log_x + layer * W * C
        log_f_at = log_f + layer * W * HK
        log_b_at = log_b + layer * W * H
        q_at = h * K + kk[None, :]
        k_at = q_at + HK
        v_at = 2 * HK + h * V + vv[None, :]
        # Loads go out before anything waits for one: weights, rows, state; the next rows' once these are convolved.
        weights = weight + layer * C * 4
        q_taps = _taps(weights, C, q_at)
        k_taps = _taps(weights, C, k_at)
        v_taps = _taps(weights, C, v_at)
        rate = tl.load(A_log + layer * H + h)
        shift = tl.load(dt_bias + layer * HK + q_at)
        q0, q1, q2, q3, k0, k1, k2, k3, v0, v1, v2, v3, f_rows, b_rows = _inputs(
            0, total, accepted, first, W, conv_at, conv_row, log_x_at, C, x, x_row, log_f_at, f, f_row, log_b_at, b,
            b_row, H, h, q_at, k_at, v_at, K
        )  # fmt: skip
        state = recurrent + entry * state_slot + layer * state_layer + h * V * K + rows * K + channels
        S = tl.load(state).to(tl.float32)
        rate = tl.exp(rate)
        for base in range(0, total, ROWS):
            q = _convolved(q0, q1, q2, q3, q_taps)
            key = _convolved(k0, k1, k2, k3, k_taps)
            value = _convolved(v0, v1, v2, v3, v_taps)
            raw = f_rows.to(tl.float32) + shift
            beta = 1 / (1 + tl.exp(-b_rows.to(tl.float32)))
            if base + ROWS < total:
                q0, q1, q2, q3, k0, k1, k2, k3, v0, v1, v2, v3, f_rows, b_rows = _inputs(
                    base + ROWS, total, accepted, first, W, conv_at, conv_row, log_x_at, C, x, x_row, log_f_at, f,
                    f_row, log_b_at, b, b_row, H, h, q_at, k_at, v_at, K
                )  # fmt: skip
            q *= (1 / tl.sqrt(tl.sum(q * q, 1) + L2_EPS) * (1 / K**0.5))[:, None]
            key *= (1 / tl.sqrt(tl.sum(key * key, 1) + L2_EPS))[:, None]
            decay = tl.exp(_log_decay(raw, rate, BOUND, bound))
            t = base + tl.arange(0, ROWS)
            inside = (t < total)[:, None]
            line = lines + (t * LINE)[:, None]
            tl.store(line + kk[None, :], key, mask=inside)
            tl.store(line + K + kk[None, :], decay, mask=inside)
            tl.store(line + 2 * K + kk[None, :], q, mask=inside)
            tl.store(line + 3 * K + vv[None, :], value, mask=inside)
            tl.store(lines + t * LINE + 3 * K + V, beta, mask=t < total)
        moved_q = _window_rows(accepted, first, W, conv_at, conv_row, log_x_at, C, q_at)
        moved_k = _window_rows(accepted, first, W, conv_at, conv_row, log_x_at, C, k_at)
        moved_v = _window_rows(accepted, first, W, conv_at, conv_row, log_x_at, C, v_at)
        tl.debug_barrier()
        # Every thread has now read what it needs of the old log and window, and every line is written.
        _move_window(accepted, conv_at, conv_row, q_at, moved_q)
        _move_window(accepted, conv_at, conv_row, k_at, moved_k)
        _move_window(accepted, conv_at, conv_row, v_at, moved_v)
        if n > 0:
            _keep(
                h, here, n, W, x, x_row, f, f_row, b, b_row, log_x_at, log_f_at, log_b_at, C, H, q_at, k_at, v_at,
                SLOTS, K
            )  # fmt: skip
        # No rows are live in a commit, and nothing is loaded.
        logits = _gate(h, here, n, W, gate, gate_row, SLOTS, V)
        norm_weight = tl.load(norm + vv)

        o_at = outputs + item * W * V
        # Each vector of the next line is loaded as soon as this line's has been used for the last time.
        key = tl.load(lines + wide)
        decay = tl.load(lines + K + wide)
        q = tl.load(lines + 2 * K + wide)
        # Two phases, replay and window, of one loop: `one` keeps the compiler from making two loops of it.
        for phase in range(one + 1):
            for t in range(accepted * phase, accepted + n * phase):
                line = lines + t * LINE
                ahead = lines + tl.minimum(t + 1, total - 1) * LINE
                value = tl.load(line + 3 * K + tall)
                beta = tl.load(line + 3 * K + V)
                S *= decay
                decay = tl.load(ahead + K + wide)
                u = (value - _over_k(S * key)) * beta
                S += u * key
                key = tl.load(ahead + wide)
                if t >= accepted:
                    tl.store(o_at + (t - accepted) * V + tall, _over_k(S * q) + kl * 0, mask=lane)
                q = tl.load(ahead + 2 * K + wide)
                # What a stored state would hold: a bf16 state is rounded behind every row.
                S = S.to(recurrent.dtype.element_ty).to(tl.float32)
            if (phase == 0) & (accepted > 0):
                tl.store(state, S.to(recurrent.dtype.element_ty))
        tl.debug_barrier()
        if n > 0:
            _finish(h, here, n, W, o_at, logits, norm_weight, out, eps, H, SLOTS, V)


@triton.jit
def _axes(RR: tl.constexpr, KA: tl.constexpr, RW: tl.constexpr, RL: tl.constexpr, KL: tl.constexpr, KI: tl.constexpr):
    """The six axes of a state tile as indices, lanes first or last."""
    ki = tl.arange(0, KI)[None, None, None, None, None, :]
    rw = tl.arange(0, RW)[None, None, :, None, None, None]
    if LANES_FIRST:
        kl = tl.arange(0, KL)[:, None, None, None, None, None]
        rl = tl.arange(0, RL)[None, :, None, None, None, None]
        rr = tl.arange(0, RR)[None, None, None, :, None, None]
        ka = tl.arange(0, KA)[None, None, None, None, :, None]
    else:
        kl = tl.arange(0, KL)[None, None, None, None, :, None]
        rl = tl.arange(0, RL)[None, None, None, :, None, None]
        rr = tl.arange(0, RR)[:, None, None, None, None, None]
        ka = tl.arange(0, KA)[None, :, None, None, None, None]
    return rr, ka, rw, rl, kl, ki


@triton.jit
def _over_k(products):
    """Sum of a state tile over K: inside a thread first, then over the KL lanes."""
    if LANES_FIRST:
        KL: tl.constexpr = products.shape[0]
        RL: tl.constexpr = products.shape[1]
        RW: tl.constexpr = products.shape[2]
        RR: tl.constexpr = products.shape[3]
        own = tl.sum(tl.reshape(products, (KL, RL, RW, RR, products.shape[4] * products.shape[5])), 4, keep_dims=True)
        return tl.sum(own, 0, keep_dims=True)[:, :, :, :, :, None]
    else:
        return tl.sum(tl.sum(tl.sum(products, 5, keep_dims=True), 1, keep_dims=True), 4, keep_dims=True)


@dataclass(frozen=True)
class Tile:
    """How a head's state is spread: KL lanes along K, warps along V. hopper: as step_hopper_triton does it instead."""

    KL: int
    warps: int
    hopper: bool = False

    def shape(self, K: int, V: int) -> dict[str, int]:
        """RR, KA, RW, RL, KL, KI; the tile fills all lanes of all warps."""
        KI, RL = 4, 32 // self.KL
        KA, RR = K // (self.KL * KI), V // (self.warps * RL)
        assert KA >= 1, (self, K)
        assert RR >= 1, (self, V)
        return {"RR": RR, "KA": KA, "RW": self.warps, "RL": RL, "KL": self.KL, "KI": KI}


def tile(K: int, V: int, device: torch.device | None = None) -> Tile:
    """The tile of a layer, a fixed function of its shape and device: the order of sums over K depends on it."""
    KL = min(8, K // 4)
    hopper = device is not None and device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
    return Tile(KL, min(8, V * KL // 32), hopper and K == V == 128)


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
    cut: Tile | None = None,
) -> Tensor:
    """As `k3_kernels.kda.step`. cut: the tile to use instead of the shape's own, for benchmarks."""
    W, H, K = f.shape
    V = gate.shape[-1]
    x, f, gate = _aligned(x), _aligned(f.flatten(1)), _aligned(gate.flatten(1))
    out = torch.empty(W, H * V, dtype=x.dtype, device=x.device)
    _launch(
        (x, f, b, gate),
        w,
        recurrent.unsqueeze(1),
        conv.unsqueeze(1),
        StepLog(*(part.unsqueeze(0) for part in log)),
        cursor,
        n,
        out,
        cut or tile(K, V, x.device),
    )
    return out


def commit(
    recurrent: Tensor, conv: Tensor, log: StepLog, w: StepWeights, cursor: Tensor, cut: Tile | None = None
) -> None:
    """As `k3_kernels.kda.commit`."""
    V, K = recurrent.shape[3:]
    # Nothing is live: the arguments of live rows are never read.
    unused = (log.x[0], log.f[0].flatten(1), log.b[0], log.x[0])
    _launch(unused, w, recurrent, conv, log, cursor, 0, log.x[0], cut or tile(K, V, recurrent.device))


def _launch(
    rows: tuple[Tensor, Tensor, Tensor, Tensor],
    w: StepWeights,
    recurrent: Tensor,
    conv: Tensor,
    log: StepLog,
    cursor: Tensor,
    n: int,
    out: Tensor,
    cut: Tile,
) -> None:
    x, f, b, gate = rows
    layers, H, V, K = recurrent.shape[1:]
    W = log.x.shape[1]
    assert 1 <= W <= 16, W
    assert recurrent[0, 0].is_contiguous(), "a head's state is contiguous"
    assert conv.stride(-1) == 1, "convolution rows are contiguous"
    assert all(stride % 4 == 0 for stride in conv.stride()[:3]), "convolution rows are aligned"
    assert all(stride % 16 == 0 for stride in recurrent.stride()[:2]), "states are aligned"
    assert all(part.is_contiguous() for part in log), "a log is contiguous"
    strides = (x.stride(0) // 4, f.stride(0) // 4, b.stride(0), gate.stride(0) // 4)
    windows = (conv.stride(0) // 4, conv.stride(1) // 4, conv.stride(2) // 4)
    places = (*strides, recurrent.stride(0) // 16, recurrent.stride(1) // 16, *windows)
    if cut.hopper:
        from k3_kernels.kda import step_hopper_commit_triton, step_hopper_triton

        taps = w._replace(conv=_tap_by_tap(w.conv))
        if n > 0:
            step_hopper_triton.launch(rows, taps, recurrent, conv, log, cursor, n, out, places)
        else:
            step_hopper_commit_triton.launch(taps, recurrent, conv, log, cursor, places, _processors(x.device))
        return
    items = layers * H
    # With many layers, as many programs as are resident at once, and each goes on to its next head.
    programs = min(items, max(H, RESIDENT * _processors(x.device)))
    scratch = torch.empty(programs * 2 * W * (3 * K + V + PAD.value), dtype=torch.float32, device=x.device)
    outputs = torch.empty(H * W * V if n else 16, dtype=torch.float32, device=x.device)
    bound = w.lower_bound
    step_kernel[(programs,)](
        *rows, _tap_by_tap(w.conv), w.A_log, w.dt_bias, w.o_norm, recurrent, conv, *log, cursor, scratch, outputs, out,
        *places, layers, H, W, n, 1,
        w.norm_eps, 0.0 if bound is None else bound,
        BOUND=bound is not None, SLOTS=8 if W <= 8 else 16, K=K, V=V, **cut.shape(K, V),
        num_warps=cut.warps,
    )  # fmt: skip


def _aligned(rows: Tensor) -> Tensor:
    """Rows the kernel may read four values at a time; others are copied."""
    fits = rows.stride(-1) == 1 and rows.stride(0) % 4 == 0 and rows.data_ptr() % 16 == 0
    return rows if fits else rows.contiguous()


def _tap_by_tap(conv: Tensor) -> Tensor:
    """Convolution weights [..., C, 4] as the kernel reads them, all channels of a tap in a row; a copy if need be."""
    taps = conv.mT
    return taps if taps.is_contiguous() else taps.contiguous()


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
