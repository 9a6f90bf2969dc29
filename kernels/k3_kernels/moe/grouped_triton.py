"""Experts over many tokens on the device: pairs (token, expert) are sorted by expert and cut into tiles of one expert.

`_tiles` makes the table: for each tile its expert and its pairs, by sort and prefix sums, without waiting for the
device. With few tokens for an expert the bytes of its weights are the limit: the window's kernels run over the tiles.
With many, `_wide_up` and `_wide_down` decode a tile of weights once for up to BM + BM2 tokens and multiply on the
matrix units from shared memory; two row blocks share the decoded weights, because tile heights are powers of two and
token counts aren't. `_sum` adds the k outputs of a token in the order of its ids, so nothing depends on the schedule.

K columns are stored so that the two nibbles decoded together lie side by side within their word (`_within_word`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3_kernels.activation.math_triton import constants, gated
from k3_kernels.activation.reference import Activation
from k3_kernels.moe.reference import Experts
from k3_kernels.moe.window_triton import _down, _pair, _place, _up

STEP = 128
"""Columns of weights a step covers; expert dimensions are multiples of it."""
NARROW = 12
"""Mean tokens of an expert up to which the window's kernels run."""
COSTS = {64: 13.8, 128: 25.0, 192: 36.9}
"""Milliseconds of one tile of this height for each of K3's experts, on an H200: close to proportional to the height."""


@triton.jit
def _within_word(k, PACKED: tl.constexpr):
    """Where column k of a row is stored: nibbles 0 4 1 5 2 6 3 7 of each word."""
    if PACKED:
        return k // 8 * 8 + k % 4 * 2 + k % 8 // 4
    else:
        return k


@triton.jit
def _permute(z, z_row, to, WIDE: tl.constexpr, PACKED: tl.constexpr, L: tl.constexpr, BL: tl.constexpr):
    """Stores each row in the order the decoder wants."""
    t = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BL)
    place = _within_word(k, PACKED) if WIDE else _place(k, PACKED)
    tl.store(to + t * L + place, tl.load(z + t * z_row + k, mask=k < L), mask=k < L)


@triton.jit
def _scaled(u, both, ASM: tl.constexpr):
    """Both bf16 halves of words times the halves of `both`."""
    if ASM:
        return tl.inline_asm_elementwise(
            "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [u, both], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        factor = both.to(tl.int16).to(tl.bfloat16, bitcast=True)
        low = u.to(tl.int16).to(tl.bfloat16, bitcast=True) * factor
        high = (u >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True) * factor
        return (low.to(tl.int16, bitcast=True).to(tl.int32) & 65535) | (
            high.to(tl.int16, bitcast=True).to(tl.int32) << 16
        )


@triton.jit
def _weights(x, four, BN: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """Words [BN, 16] and their four scales in a word [BN, 1] as [BN, 128] times 2^-62, columns as `_within_word`."""
    word = tl.arange(0, 16)
    exponent = tl.minimum(((four >> (8 * (word // 4))[None, :]) & 255) + 64, 255)
    u0, u1, u2, u3 = _pair(x, 0), _pair(x, 1), _pair(x, 2), _pair(x, 3)
    if DTYPE == tl.bfloat16:
        both = exponent * 0x00800080
        u0, u1, u2, u3 = _scaled(u0, both, ASM), _scaled(u1, both, ASM), _scaled(u2, both, ASM), _scaled(u3, both, ASM)
        u = tl.reshape(tl.join(tl.join(u0, u2), tl.join(u1, u3)), (BN, 64))
        low = u.to(tl.int16).to(tl.bfloat16, bitcast=True)
        high = (u >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
        return tl.reshape(tl.join(low, high), (BN, 128))
    else:
        factor = (exponent << 23).to(tl.float32, bitcast=True)
        both = tl.join(tl.join(factor, factor), tl.join(factor, factor))
        factors = tl.reshape(both, (BN, 64))
        u = tl.reshape(tl.join(tl.join(u0, u2), tl.join(u1, u3)), (BN, 64))
        low = (u << 16).to(tl.float32, bitcast=True) * factors
        high = (u & -65536).to(tl.float32, bitcast=True) * factors
        return tl.reshape(tl.join(low, high), (BN, 128))


@triton.jit
def _rows_times(
    z,
    w,
    scales,
    rows,
    at,
    at2,
    WIDTH: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    BM2: tl.constexpr,
    PACKED: tl.constexpr,
    STAGES: tl.constexpr,
    ASM: tl.constexpr,
):
    """Rows at offsets `at` [BM] and `at2` [BM2] of z times weight rows [BN]: fp32 [BM, BN] and [BM2, BN]."""
    k = tl.arange(0, 128)
    za = z + at[:, None] + k[None, :]
    zb = z + at2[:, None] + k[None, :]
    acc = tl.zeros((BM, BN), tl.float32)
    acc2 = tl.zeros((BM2, BN), tl.float32)
    if PACKED:
        wa = w + rows[:, None] * (WIDTH // 8) + tl.arange(0, 16)[None, :]
        sa = scales + rows[:, None] * (WIDTH // 128)
    else:
        wa = w + rows[:, None] * WIDTH + k[None, :]
    for start in tl.range(0, WIDTH, 128, num_stages=STAGES):
        if PACKED:
            x = tl.load(wa + start // 8)
            four = tl.load(sa + start // 128)
            b = tl.trans(_weights(x, four, BN, z.dtype.element_ty, ASM))
        else:
            b = tl.trans(tl.load(wa + start))
        acc = tl.dot(tl.load(za + start), b, acc, input_precision="ieee")
        if BM2 > 16:
            acc2 = tl.dot(tl.load(zb + start), b, acc2, input_precision="ieee")
    if PACKED:
        acc *= 4611686018427387904.0  # 2^62
        acc2 *= 4611686018427387904.0
    return acc, acc2


@triton.jit
def _activated(found, BM: tl.constexpr, BN: tl.constexpr, BETA: tl.constexpr, LINEAR_BETA: tl.constexpr):
    gate, up = tl.split(tl.reshape(found, (BM, BN // 2, 2)))
    return gated(gate, up, BETA, LINEAR_BETA)


@triton.jit
def _wide_up(
    z,
    w,
    scales,
    used,
    member,
    inner,
    K: tl.constexpr,
    L: tl.constexpr,
    F: tl.constexpr,
    BETA: tl.constexpr,
    LINEAR_BETA: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    BM2: tl.constexpr,
    R: tl.constexpr,
    PACKED: tl.constexpr,
    STAGES: tl.constexpr,
    ASM: tl.constexpr,
):
    """inner[pair] = act(gate, up) for BN/2 features of one expert and the pairs of one tile."""
    p = tl.program_id(1)
    e = tl.load(used + p).to(tl.int64)
    if e >= 0:
        pair = tl.load(member + p * R + tl.arange(0, BM))
        pair2 = tl.load(member + p * R + BM + tl.arange(0, BM2), mask=tl.arange(0, BM2) < R - BM, other=-1)
        i = tl.program_id(0) * BN + tl.arange(0, BN)
        rows = i % 2 * F + i // 2  # gate and up of a feature side by side
        if PACKED:
            w += e * (2 * F * (L // 8))
            scales += e * (2 * F * (L // 128))
        else:
            w += e * (2 * F * L)
        at, at2 = (tl.maximum(pair, 0) // K).to(tl.int64) * L, (tl.maximum(pair2, 0) // K).to(tl.int64) * L
        acc, acc2 = _rows_times(z, w, scales, rows, at, at2, L, BN, BM, BM2, PACKED, STAGES, ASM)
        f = tl.program_id(0) * (BN // 2) + tl.arange(0, BN // 2)
        column = _within_word(f, PACKED)[None, :]
        kind = inner.dtype.element_ty
        to = inner + pair[:, None].to(tl.int64) * F + column
        tl.store(to, _activated(acc, BM, BN, BETA, LINEAR_BETA).to(kind), mask=(pair >= 0)[:, None])
        if BM2 > 16:
            to = inner + pair2[:, None].to(tl.int64) * F + column
            tl.store(to, _activated(acc2, BM2, BN, BETA, LINEAR_BETA).to(kind), mask=(pair2 >= 0)[:, None])


@triton.jit
def _wide_down(
    inner,
    w,
    scales,
    used,
    member,
    out,
    L: tl.constexpr,
    F: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    BM2: tl.constexpr,
    R: tl.constexpr,
    PACKED: tl.constexpr,
    STAGES: tl.constexpr,
    ASM: tl.constexpr,
):
    """out[pair] = BN rows of one expert's second matrix times inner[pair], for the pairs of one tile."""
    p = tl.program_id(1)
    e = tl.load(used + p).to(tl.int64)
    if e >= 0:
        pair = tl.load(member + p * R + tl.arange(0, BM))
        pair2 = tl.load(member + p * R + BM + tl.arange(0, BM2), mask=tl.arange(0, BM2) < R - BM, other=-1)
        rows = tl.program_id(0) * BN + tl.arange(0, BN)
        if PACKED:
            w += e * (L * (F // 8))
            scales += e * (L * (F // 128))
        else:
            w += e * (L * F)
        at, at2 = tl.maximum(pair, 0).to(tl.int64) * F, tl.maximum(pair2, 0).to(tl.int64) * F
        acc, acc2 = _rows_times(inner, w, scales, rows, at, at2, F, BN, BM, BM2, PACKED, STAGES, ASM)
        kind = out.dtype.element_ty
        tl.store(out + pair[:, None].to(tl.int64) * L + rows[None, :], acc.to(kind), mask=(pair >= 0)[:, None])
        if BM2 > 16:
            to = out + pair2[:, None].to(tl.int64) * L + rows[None, :]
            tl.store(to, acc2.to(kind), mask=(pair2 >= 0)[:, None])


@triton.jit
def _sum(parts, weights, out, K: tl.constexpr, L: tl.constexpr, BL: tl.constexpr):
    """out[t] = the k outputs of a token, weighted, in the order of its ids."""
    t = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BL + tl.arange(0, BL)
    total = tl.zeros((BL,), tl.float32)
    for j in tl.static_range(K):
        part = tl.load(parts + (t * K + j) * L + column, mask=column < L, other=0.0)
        total += tl.load(weights + t * K + j) * part.to(tl.float32)
    tl.store(out + t * L + column, total.to(out.dtype.element_ty), mask=column < L)


def _tiles(ids: Tensor, experts: int, height: int) -> tuple[Tensor, Tensor]:
    """(expert of each tile, -1 behind the last; its pairs [tiles, height], -1 in empty places): int32.

    Pair p is choice p mod k of token p // k. Their number is bounded from the shapes alone.
    """
    pairs = ids.numel()
    ordered, order = torch.sort(ids.flatten(), stable=True)
    bounds = torch.searchsorted(ordered, torch.arange(experts + 1, device=ids.device))
    counts = bounds.diff()
    last = ((counts + height - 1) // height).cumsum(0)
    tile = torch.arange(min(pairs, experts) + pairs // height, device=ids.device)
    expert = torch.searchsorted(last, tile, right=True)
    known = expert.clamp(max=experts - 1)
    number = tile - torch.where(known > 0, last[known - 1], 0)
    first = bounds[known] + number * height
    at = first.unsqueeze(1) + torch.arange(height, device=ids.device)
    inside = (at < bounds[known + 1].unsqueeze(1)) & (expert < experts).unsqueeze(1)
    member = torch.where(inside, order[at.clamp(0, pairs - 1)], -1)
    return torch.where(expert < experts, expert, -1).int(), member.int().contiguous()


def _heights(mean: float) -> tuple[int, int]:
    """(tile, rest): the rows that cost least when experts have `mean` tokens, give or take its square root."""
    likely = mean + 1.3 * mean**0.5
    height = min(COSTS, key=lambda rows: COSTS[rows] * -(-likely // rows))
    return min(height, 128), max(height - 128, 0)


def experts_grouped(
    z: Tensor,
    ids: Tensor,
    weights: Tensor,
    experts: Experts,
    act: Activation,
    *,
    narrow: int = NARROW,
    narrow_tile: int = 16,
    tile: int | None = None,
    rest: int = 0,
    columns: int = 128,
    warps: int = 8,
) -> Tensor:
    """The kernels' form of `k3_kernels.moe.experts_grouped`; the tile sizes are for benchmarks."""
    T, k = ids.shape
    L, F, E = z.shape[1], experts.w13.shape[1] // 2, experts.w13.shape[0]
    out = z.new_empty(T, L)
    if T == 0:
        return out
    packed = experts.w13_scale is not None
    mean = T * k / E
    wide = mean > narrow and (z.dtype == torch.bfloat16 or not z.is_cuda)  # fp32 has no matrix units
    rows = z.new_empty(T, L)
    _permute[(T,)](z, z.stride(0), rows, wide, packed, L, triton.next_power_of_2(L), num_warps=4)
    inner, parts = z.new_empty(T * k, F), z.new_empty(T * k, L)
    w13, w2, s13, s2 = experts.w13, experts.w2, experts.w13_scale, experts.w2_scale
    if s13 is None or s2 is None:
        s13, s2 = w13, w2  # not read
    else:
        w13, w2 = w13.view(torch.int32), w2.view(torch.int32)
        if wide:
            s13, s2 = s13.view(torch.int32), s2.view(torch.int32)
    beta, linear_beta = constants(act)
    asm = z.is_cuda
    if wide:
        if tile is None:
            tile, rest = _heights(mean)
        stages = 2 if rest else 3
        height = tile + rest
        used, member = _tiles(ids, E, height)
        _wide_up[(2 * F // columns, used.numel())](
            rows, w13, s13, used, member, inner,
            k, L, F, beta, linear_beta, columns, tile, max(rest, 16), height, packed, stages, asm,
            num_warps=warps, num_stages=stages,
        )  # fmt: skip
        _wide_down[(L // columns, used.numel())](
            inner, w2, s2, used, member, parts,
            L, F, columns, tile, max(rest, 16), height, packed, stages, asm,
            num_warps=warps, num_stages=stages,
        )  # fmt: skip
    else:
        height = 8 if mean <= 6 else 16
        used, member = _tiles(ids, E, height)
        _up[(triton.cdiv(2 * F, narrow_tile), used.numel())](
            rows, w13, s13, used, member, inner,
            L, F, k, L, F, beta, linear_beta, narrow_tile, height, packed, 2, asm,
            num_warps=1, num_stages=1,
        )  # fmt: skip
        _down[(triton.cdiv(L, narrow_tile), used.numel())](
            inner, w2, s2, used, member, parts,
            L, F, F, narrow_tile, height, packed, 2, asm,
            num_warps=1, num_stages=1,
        )  # fmt: skip
    _sum[(triton.cdiv(L, 512), T)](parts, weights, out, k, L, 512, num_warps=4)
    return out
