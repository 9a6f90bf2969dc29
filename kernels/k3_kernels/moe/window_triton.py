"""Experts over a decode window on the device: a few rows against many experts, bound by the bytes of the weights.

Four launches. `_prepare` lists each chosen expert once, with the rows that chose it, and reorders the rows for the
decoder below. `_up` and `_down` run one warp a program over a tile of weight rows: 16 bytes a thread are one MXFP4
group, decoded in registers where the matrix instruction wants them, so that no weight passes through shared memory.
`_combine` adds the k outputs of a row in the order of its ids.

Decoding. Two nibbles of a 32-bit word, 16 bits apart, become two bf16 values by moving the sign to bit 15 and the
other three bits to 8..6. That is the value times 2^-126, subnormals included; the group's scale 2^(s-127) times 2^64
brings it back to a normal number, and 2^62 in the sum does the rest. Exact for scales from 2^-63 to 2^63; above, the
result is infinite or not a number.

Bits. A column of a product is one row of the window: its sums don't see the other columns, and K is walked in one
fixed order. Which rows share a program changes nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from k3_kernels.activation.math_triton import constants, gated
from k3_kernels.activation.reference import Activation
from k3_kernels.moe.reference import Experts

STEP: int = 128
"""Columns of weights a step covers: 16 words of eight nibbles, four groups. Rows are stored padded to this."""


@triton.jit
def _place(k, PACKED: tl.constexpr):
    """Where column k of a row is stored: within 128 columns, the four nibble pairs (i, i + 4) of all words."""
    if PACKED:
        word = k // 8
        return word // 16 * 128 + k % 4 * 32 + word % 16 * 2 + k % 8 // 4
    else:
        return k


@triton.jit
def _prepare(
    z,
    z_row,
    ids,
    cursor,
    rows,
    used,
    member,
    n,
    W: tl.constexpr,
    K: tl.constexpr,
    L: tl.constexpr,
    WIDTH: tl.constexpr,
    R: tl.constexpr,
    BK: tl.constexpr,
    BL: tl.constexpr,
    PACKED: tl.constexpr,
):
    i = tl.program_id(0)
    position = tl.load(cursor)
    slot = (position + i) % W
    k = tl.arange(0, BL)
    tl.store(rows + i * WIDTH + _place(k, PACKED), tl.load(z + slot * z_row + k, mask=k < L), mask=k < L)

    mine = tl.arange(0, BK)
    wanted = tl.load(ids + slot * K + mine, mask=mine < K, other=-1)
    r = tl.arange(0, R)
    slots = (position + r) % W
    live = (r < n)[:, None] & (mine < K)[None, :]
    all_ids = tl.load(ids + slots[:, None] * K + mine[None, :], mask=live, other=-2)
    pair = r[:, None] * K + mine[None, :]
    same = wanted[:, None, None] == all_ids[None, :, :]
    chosen = tl.max(tl.where(same, pair[None, :, :], -1), axis=2)
    tl.store(member + (i * K + mine)[:, None] * R + r[None, :], chosen, mask=(mine < K)[:, None])
    earlier = tl.max(tl.where((r < i)[None, :], chosen, -1), axis=1)
    tl.store(used + i * K + mine, tl.where(earlier < 0, wanted, -1).to(tl.int32), mask=mine < K)


@triton.jit
def _pair(x, Q: tl.constexpr):
    """Nibbles Q and Q + 4 of each word as two bf16 in one word, times 2^-126."""
    if Q < 2:
        magnitude = (x << (6 - 4 * Q)) & 0x01C001C0
    else:
        magnitude = (x >> (4 * Q - 6)) & 0x01C001C0
    return magnitude | ((x << (12 - 4 * Q)) & -2147450880)


@triton.jit
def _decoded(x, scale, Q: tl.constexpr, BN: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """The weights of nibbles Q and Q + 4 of words [BN, 16], each word's two side by side: [BN, 32], times 2^-62."""
    u = _pair(x, Q)
    exponent = tl.minimum(scale.to(tl.int32) + 64, 255)
    if DTYPE == tl.bfloat16:
        both = exponent * 0x00800080
        if ASM:  # one instruction for two products; Triton would unpack them
            u = tl.inline_asm_elementwise(
                "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [u, both], dtype=tl.int32, is_pure=True, pack=1
            )
            low = u.to(tl.int16).to(tl.bfloat16, bitcast=True)
            high = (u >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
        else:
            factor = both.to(tl.int16).to(tl.bfloat16, bitcast=True)
            low = u.to(tl.int16).to(tl.bfloat16, bitcast=True) * factor
            high = (u >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True) * factor
    else:
        factor = (exponent << 23).to(tl.float32, bitcast=True)
        low = (u << 16).to(tl.float32, bitcast=True) * factor
        high = (u & -65536).to(tl.float32, bitcast=True) * factor
    return tl.reshape(tl.join(low, high), (BN, 32))


@triton.jit
def _columns(
    z, acc, x, scale, start, live, WIDTH: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr, ASM: tl.constexpr
):
    """One step of 128 columns: acc [BN, R] += weights . rows."""
    k = tl.arange(0, 32)
    for q in tl.static_range(4):
        a = _decoded(x, scale, q, BN, z.dtype.element_ty, ASM)
        inside = live
        if not EVEN:
            inside = live & (start * 8 + k // 2 * 8 < WIDTH)[:, None]
        b = tl.load(z + start * 8 + q * 32 + k[:, None], mask=inside, other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
    return acc


@triton.jit
def _words(at, scale_at, rows, words, EVEN: tl.constexpr, FULL: tl.constexpr):
    """A step's words and their scales; beyond the matrix, zeros."""
    if EVEN and FULL:
        x, s = tl.load(at), tl.load(scale_at)
    else:
        inside = rows[:, None] & words[None, :]
        x, s = tl.load(at, mask=inside, other=0), tl.load(scale_at, mask=inside, other=0)
    return x, s


@triton.jit
def _product(
    w,
    scales,
    rows,
    inside,
    z,
    live,
    WIDTH: tl.constexpr,
    FULL: tl.constexpr,
    BN: tl.constexpr,
    R: tl.constexpr,
    PACKED: tl.constexpr,
    UNROLL: tl.constexpr,
    ASM: tl.constexpr,
):
    """Rows [BN] of one expert's matrix (w, scales: its first element) times the rows behind z [1, R]: fp32 [BN, R]."""
    acc = tl.zeros((BN, R), tl.float32)
    if PACKED:
        J: tl.constexpr = WIDTH // 8
        EVEN: tl.constexpr = WIDTH % (128 * UNROLL) == 0
        word = tl.arange(0, 16)
        at = w + rows[:, None] * J + word[None, :]
        scale_at = scales + rows[:, None] * (J // 4) + (word // 4)[None, :]
        for j in tl.range(0, J, 16 * UNROLL, num_stages=1):
            x, s = _words(at + j, scale_at + j // 4, inside, j + word < J, EVEN, FULL)
            if UNROLL == 2:
                x1, s1 = _words(at + j + 16, scale_at + j // 4 + 4, inside, j + 16 + word < J, EVEN, FULL)
            acc = _columns(z, acc, x, s, j, live, WIDTH, BN, EVEN, ASM)
            if UNROLL == 2:
                acc = _columns(z, acc, x1, s1, j + 16, live, WIDTH, BN, EVEN, ASM)
        acc *= 4611686018427387904.0  # 2^62
    else:
        k = tl.arange(0, 32)
        for start in tl.range(0, WIDTH, 32, num_stages=1):
            a = tl.load(w + rows[:, None] * WIDTH + start + k[None, :], mask=inside[:, None], other=0.0)
            b = tl.load(z + start + k[:, None], mask=live, other=0.0)
            acc = tl.dot(a, b, acc, input_precision="ieee")
    return acc


@triton.jit
def _up(
    z,
    w,
    scales,
    used,
    member,
    inner,
    L: tl.constexpr,
    F: tl.constexpr,
    K: tl.constexpr,
    Z_STRIDE: tl.constexpr,
    INNER_STRIDE: tl.constexpr,
    BETA: tl.constexpr,
    LINEAR_BETA: tl.constexpr,
    BN: tl.constexpr,
    R: tl.constexpr,
    PACKED: tl.constexpr,
    UNROLL: tl.constexpr,
    ASM: tl.constexpr,
):
    """inner[pair] = act(gate, up) of BN/2 features of one expert, for every row that chose it."""
    p = tl.program_id(1)
    e = tl.load(used + p).to(tl.int64)
    if e >= 0:
        pair = tl.load(member + p * R + tl.arange(0, R))
        live = (pair >= 0)[None, :]
        i = tl.program_id(0) * BN + tl.arange(0, BN)
        rows = i % 2 * F + i // 2  # gate and up of a feature side by side
        at = z + (pair // K)[None, :].to(tl.int64) * Z_STRIDE
        if PACKED:
            w += e * (2 * F * (L // 8))
            scales += e * (2 * F * (L // 32))
        else:
            w += e * (2 * F * L)
        found = _product(
            w,
            scales,
            rows,
            i < 2 * F,
            at,
            live,
            L,
            2 * F % BN == 0,
            BN,
            R,
            PACKED,
            UNROLL,
            ASM,
        )
        gate, up = tl.split(tl.permute(tl.reshape(found, (BN // 2, 2, R)), (0, 2, 1)))
        f = tl.program_id(0) * (BN // 2) + tl.arange(0, BN // 2)
        to = inner + pair[None, :].to(tl.int64) * INNER_STRIDE + _place(f, PACKED)[:, None]
        tl.store(to, gated(gate, up, BETA, LINEAR_BETA).to(inner.dtype.element_ty), mask=live & (f < F)[:, None])


@triton.jit
def _down(
    inner,
    w,
    scales,
    used,
    member,
    out,
    L: tl.constexpr,
    F: tl.constexpr,
    INNER_STRIDE: tl.constexpr,
    BN: tl.constexpr,
    R: tl.constexpr,
    PACKED: tl.constexpr,
    UNROLL: tl.constexpr,
    ASM: tl.constexpr,
):
    """out[pair] fp32 = BN rows of one expert's second matrix times inner[pair]."""
    p = tl.program_id(1)
    e = tl.load(used + p).to(tl.int64)
    if e >= 0:
        pair = tl.load(member + p * R + tl.arange(0, R))
        live = (pair >= 0)[None, :]
        rows = tl.program_id(0) * BN + tl.arange(0, BN)
        if PACKED:
            w += e * (L * (F // 8))
            scales += e * (L * (F // 32))
        else:
            w += e * (L * F)
        z = inner + pair[None, :].to(tl.int64) * INNER_STRIDE
        found = _product(w, scales, rows, rows < L, z, live, F, L % BN == 0, BN, R, PACKED, UNROLL, ASM)
        tl.store(
            out + pair[None, :].to(tl.int64) * L + rows[:, None],
            found.to(out.dtype.element_ty),
            mask=live & (rows < L)[:, None],
        )


@triton.jit
def _combine(
    parts, weights, cursor, out, n,
    W: tl.constexpr, K: tl.constexpr, L: tl.constexpr, BL: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """out[slot] = the k outputs of a row, weighted, in the order of its ids; idle slots get zeros. EARLY: launched
    before the kernel before has ended."""
    if EARLY:
        gdc_wait()
    slot = tl.program_id(1)
    i = (slot - tl.load(cursor) % W + W) % W
    column = tl.program_id(0) * BL + tl.arange(0, BL)
    inside = column < L
    total = tl.zeros((BL,), tl.float32)
    if i < n:
        for j in tl.static_range(K):
            part = tl.load(parts + (i * K + j) * L + column, mask=inside, other=0.0)
            weight = tl.load(weights + slot * K + j)
            # Of an expert that a row has twice, one output was computed; what is in the other's place is no number.
            total += weight * tl.where(weight == 0, 0.0, part)
    tl.store(out + slot * L + column, total.to(out.dtype.element_ty), mask=inside)


def experts_window(
    z: Tensor,
    ids: Tensor,
    weights: Tensor,
    experts: Experts,
    act: Activation,
    cursor: Tensor,
    n: int,
    *,
    up_tile: int = 16,
    down_tile: int = 16,
    unroll: int = 2,
) -> Tensor:
    """The kernels' form of `k3_kernels.moe.experts_window`; the tile sizes are for benchmarks."""
    W, k = ids.shape
    L, F = z.shape[1], experts.w13.shape[1] // 2
    packed = experts.w13_scale is not None
    R = max(8, triton.next_power_of_2(W))
    width = triton.cdiv(L, STEP) * STEP
    inner_width = triton.cdiv(F, STEP) * STEP
    out = z.new_empty(W, L)
    rows = z.new_empty(max(n, 1), width)
    used = torch.empty(max(n, 1) * k, dtype=torch.int32, device=z.device)
    member = torch.empty(max(n, 1) * k, R, dtype=torch.int32, device=z.device)
    inner = z.new_empty(max(n, 1) * k, inner_width)
    parts = torch.empty(max(n, 1) * k, L, dtype=torch.float32, device=z.device)
    w13, w2, s13, s2 = experts.w13, experts.w2, experts.w13_scale, experts.w2_scale
    if packed:
        w13, w2 = w13.view(torch.int32), w2.view(torch.int32)
    else:
        s13, s2 = w13, w2  # not read
    asm = z.is_cuda
    beta, linear_beta = constants(act)
    if n:
        _prepare[(n,)](
            z, z.stride(0), ids, cursor, rows, used, member, n,
            W, k, L, width, R, triton.next_power_of_2(k), triton.next_power_of_2(L), packed,
            num_warps=8,
        )  # fmt: skip
        _up[(triton.cdiv(2 * F, up_tile), n * k)](
            rows, w13, s13, used, member, inner,
            L, F, k, width, inner_width, beta, linear_beta, up_tile, R, packed, unroll, asm,
            num_warps=1, num_stages=1,
        )  # fmt: skip
        _down[(triton.cdiv(L, down_tile), n * k)](
            inner, w2, s2, used, member, parts,
            L, F, inner_width, down_tile, R, packed, unroll, asm,
            num_warps=1, num_stages=1,
        )  # fmt: skip
    _combine[(triton.cdiv(L, 256), W)](parts, weights, cursor, out, n, W, k, L, 256, False, num_warps=4)
    return out
