"""KDA prefill on a GPU: what can be done for all chunks at once (prefill_inside_triton), then the walk of the state
from chunk to chunk. Chunks have 32 tokens.

`_walk` carries tiles of the state, in registers, along the chunks. With few heads that would leave most of the chip
idle: then the tokens are cut into segments. What a segment does to a state is affine, S -> S P + Q, so `_walk` first
finds (P, Q) of all segments but the last at the same time, `_join` applies them one behind the other, and `_walk` runs
again, all segments together, from the right states.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from k3_kernels.kda.prefill import CHUNK, RESIDENT, ROWS, WORKSPACE, chunk_bytes, squares
from k3_kernels.kda.prefill_inside_triton import inside, inside_exact, invert

REGISTERS = 128
"""Of a thread of `inside`: four programs fit a processor."""
STAGES = 3
HOPPER_RESIDENT = 72
"""The same for the Gluon walk: one a processor, twice as many in the first pass."""
Launch = Callable[[tuple[int, int, int], Tensor, Tensor, int, int, int, bool], None]
"""Runs a walk: grid, start, end, first token, chunks, chunks of a segment, whether it makes outputs."""


@triton.jit(do_not_specialize=["first", "n", "each"])
def _walk(
    k_start, q_start, k_end, solve, mix, low, decay, beta, itself, v, o, start, end, first, n, each, H,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BV: tl.constexpr,
    OUTPUT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Rows [tile BV, (tile + 1) BV) of one head's state through the chunks of one segment.

    With OUTPUT: from start [segments, H, V, K], writes o, and the last segment writes end [H, V, K]. Without: rows
    below V begin at zero, the K rows behind them at the identity and see no values; all segments write their
    end [segments, H, V + K, K]. k_start to low, v and o are tensor descriptors: of [chunks H C, K], of
    [chunks H C, C] and of [T, H V].
    """
    tile = tl.program_id(0)
    head = tl.program_id(1)
    segment = tl.program_id(2)
    row = tile * BV + tl.arange(0, BV)
    c = tl.arange(0, C)
    d = tl.arange(0, K)
    kind: tl.constexpr = k_start.dtype
    if OUTPUT:
        S = tl.load(start + ((segment * H + head) * V + row[:, None]) * K + d[None, :])
    else:
        S = tl.where(row[:, None] - V == d[None, :], 1.0, 0.0)
    valued = tile * BV < V
    channel = head * V + tl.where(valued, tile * BV, 0)
    for chunk in tl.range(segment * each, tl.minimum(segment * each + each, n), num_stages=STAGES):
        at = chunk * H + head
        keys = k_start.load([at * C, 0])
        solved = solve.load([at * C, 0])
        ends = k_end.load([at * C, 0])
        values = tl.where(valued, v.load([first + chunk * C, channel]).to(tl.float32), 0.0)
        fade = tl.load(decay + at * K + d)
        rate = tl.load(beta + at * C + c)
        held = S.to(kind)
        rest = tl.trans(values) - tl.dot(held, tl.trans(keys), input_precision=PRECISION)
        rest *= rate[None, :]
        # The unit diagonal of the inverse stays outside of the product, and so does B's: most of u and o isn't rounded.
        whole = rest.to(kind)
        u = tl.dot(whole, tl.trans(solved), rest, input_precision=PRECISION)
        if kind != tl.float32:
            u = tl.dot(whole, tl.trans(low.load([at * C, 0])), u)
            u = tl.dot((rest - whole.to(tl.float32)).to(kind), tl.trans(solved), u)
        near = u.to(kind)
        if OUTPUT:
            out = tl.dot(held, tl.trans(q_start.load([at * C, 0])), input_precision=PRECISION)
            out = tl.dot(near, tl.trans(mix.load([at * C, 0])), out, input_precision=PRECISION)
            out += u * tl.load(itself + at * C + c)[None, :]
            o.store([first + chunk * C, channel], tl.trans(out).to(o.dtype))
        S = tl.dot(near, ends, S * fade[None, :], input_precision=PRECISION)
        if kind != tl.float32:
            S = tl.dot((u - near.to(tl.float32)).to(kind), ends, S, input_precision=PRECISION)
    if OUTPUT:
        if segment == tl.num_programs(2) - 1:
            tl.store(end + (head * V + row[:, None]) * K + d[None, :], S)
    else:
        tl.store(end + ((segment * H + head) * (V + K) + row[:, None]) * K + d[None, :], S)


@triton.jit(do_not_specialize=["segments"])
def _join(affine, state, start, segments, H, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr):
    """start[0] = state, start[i + 1] = start[i] P_i + Q_i, with affine [segments - 1, H, V + K, K] = (Q, P)."""
    row = tl.program_id(0) * BV + tl.arange(0, BV)
    head = tl.program_id(1)
    d = tl.arange(0, K)
    S = tl.load(state + (head * V + row[:, None]) * K + d[None, :])
    for segment in range(segments):
        tl.store(start + ((segment * H + head) * V + row[:, None]) * K + d[None, :], S)
        if segment + 1 < segments:
            base = affine + (segment * H + head) * (V + K) * K
            P = tl.load(base + (V + d[:, None]) * K + d[None, :])
            Q = tl.load(base + row[:, None] * K + d[None, :])
            S = tl.dot(S, P, Q, input_precision="tf32x3")


@dataclass(frozen=True)
class Tuning:
    """How a call is carried out. segments: into how many the tokens are cut, 0 chooses from the numbers of heads and
    chunks. exact: pairs without factors though the gate is bounded; None: for fp32, which has digits to lose. hopper:
    the Gluon walk; None: where it runs."""

    segments: int = 0
    exact: bool | None = None
    hopper: bool | None = None


def prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    f: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float | None,
    state: Tensor,
    tuning: Tuning = Tuning(),
) -> tuple[Tensor, Tensor]:
    """`kda.prefill` for K and V powers of two, 16 to 128."""
    T, H, K = q.shape
    V = v.shape[-1]
    kind = v.dtype
    q, k, v, f = (_rows(x.to(kind)) for x in (q, k, v, f))
    b = b if b.stride(-1) == 1 else b.contiguous()
    o = torch.empty(T, H, V, dtype=kind, device=v.device)
    if T == 0:
        return o, state.clone()
    new = state.contiguous()
    most = max(WORKSPACE // chunk_bytes(H, K, kind), 1) * CHUNK
    for first in range(0, T, most):
        stop = min(T, first + most)
        parts = _inside(q, k, f, b, A_log, dt_bias, lower_bound, first, stop, tuning)
        new = _carry(parts, v, o, new, first, tuning)
        del parts  # not two at a time
    return o, new


def _rows(x: Tensor) -> Tensor:
    """[T, H, D] whose heads lie one behind the other, at addresses that are multiples of 16 bytes; tokens may be slices
    of something wider."""
    aligned = x.stride(0) * x.itemsize % 16 == 0 and x.data_ptr() % 16 == 0
    whole = x.stride(2) == 1 and x.stride(1) == x.shape[2]
    return x if aligned and whole else x.clone(memory_format=torch.contiguous_format)


class _Parts(NamedTuple):
    """What `inside` makes of n chunks of H heads: tiles [3, n H C, K], squares (solve, mix and, in 16 bits, the rest of
    solve) [2 or 3, n H C, C] in the activations' type, decay [n H, K], beta and itself [n H, C] fp32."""

    tiles: Tensor
    squares: Tensor
    decay: Tensor
    beta: Tensor
    itself: Tensor


def _inside(
    q: Tensor,
    k: Tensor,
    f: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float | None,
    first: int,
    stop: int,
    tuning: Tuning,
) -> _Parts:
    """Tokens [first, stop)."""
    _, H, K = k.shape
    kind = k.dtype
    lines = triton.cdiv(stop - first, CHUNK) * H
    tiles = k.new_empty(3, lines * CHUNK, K)
    square = k.new_empty(squares(kind), lines * CHUNK, CHUNK)
    decay = k.new_empty(lines, K, dtype=torch.float32)
    beta, itself = (k.new_empty(lines, CHUNK, dtype=torch.float32) for _ in range(2))
    # Until it is inverted, the system is kept as fp16 when activations have 16 bits.
    system = square[0] if kind == torch.float32 else square[0].view(torch.float16)
    bound = 0.0 if lower_bound is None else lower_bound
    given = (q, k, f, b, A_log, dt_bias, bound, stop, first, H, q.stride(0), k.stride(0), f.stride(0), b.stride(0))
    found = (*tiles, system, square[1], decay, beta, itself)
    exact = kind == torch.float32 if tuning.exact is None else tuning.exact
    if lower_bound is not None and -5 <= lower_bound <= 0 and not exact:
        inside[(lines,)](
            *given, *found, K=K, C=CHUNK, PRECISION=_precision(kind),
            num_warps=4, maxnreg=REGISTERS,
        )  # fmt: skip
    else:
        inside_exact[(lines,)](*given, *found, K=K, C=CHUNK, BOUNDED=lower_bound is not None, num_warps=4)
    invert[(lines,)](system, square[0], square[-1], C=CHUNK, num_warps=1)
    return _Parts(tiles, square, decay, beta, itself)


def _precision(kind: torch.dtype) -> str:
    return "tf32x3" if kind == torch.float32 else "tf32"


def _carry(parts: _Parts, v: Tensor, o: Tensor, state: Tensor, first: int, tuning: Tuning) -> Tensor:
    """The state through the chunks of `parts`, which begin at token `first`; writes o, returns the last state."""
    H, V, K = state.shape
    n = len(parts.decay) // H
    fits = v.dtype == torch.bfloat16 and K == V == 128 and v.is_cuda and torch.cuda.get_device_capability()[0] == 9
    hopper = fits if tuning.hopper is None else tuning.hopper
    if hopper:
        from k3_kernels.kda import prefill_hopper_triton

        BV, resident, launch = V, HOPPER_RESIDENT, prefill_hopper_triton.launcher(parts, v, o)
    else:
        BV, resident, launch = min(V, K, ROWS), RESIDENT, _launcher(parts, v, o)
    segments = tuning.segments or max(1, min(resident // (H * (V // BV)), n // 16))
    each = triton.cdiv(n, segments)
    segments = triton.cdiv(n, each)
    new = torch.empty_like(state)
    if segments > 1:
        affine = state.new_empty(segments - 1, H, V + K, K)
        launch(((V + K) // BV, H, segments - 1), state, affine, first, n, each, False)
        start = state.new_empty(segments, H, V, K)
        _join[(V // 16, H)](affine, state, start, segments, H, K=K, V=V, BV=16, num_warps=8)
        state = start
    launch((V // BV, H, segments), state, new, first, n, each, True)
    return new


def _launcher(parts: _Parts, v: Tensor, o: Tensor) -> Launch:
    """`_walk` with these operands."""
    _, H, V = v.shape
    K = parts.decay.shape[1]
    BV = min(V, K, ROWS)
    shared = (
        *(TensorDescriptor.from_tensor(x, [CHUNK, K]) for x in parts.tiles),
        *(TensorDescriptor.from_tensor(parts.squares[i], [CHUNK, CHUNK]) for i in (0, 1, -1)),
        *parts[2:],
        *(TensorDescriptor.from_tensor(x.flatten(1), [CHUNK, BV]) for x in (v, o)),
    )

    def launch(
        grid: tuple[int, int, int], start: Tensor, end: Tensor, first: int, n: int, each: int, output: bool
    ) -> None:
        _walk[grid](
            *shared, start, end, first, n, each, H, K=K, V=V, C=CHUNK, BV=BV, OUTPUT=output,
            PRECISION=_precision(v.dtype), STAGES=STAGES if v.dtype != torch.float32 else 1,
            num_warps=4,
        )  # fmt: skip

    return launch
