"""Experts over many tokens for Hopper in Gluon, MXFP4 and bf16: packed weights become the register operand.

Tokens are sorted by expert, so that the rows of a tile lie one behind the other and the copy engine can fetch them. A
program owns 192 weight rows, 64 for each of three warp groups, and up to 160 tokens (two products, of a width that is
a power of two each). One warp keeps a ring of tokens and packed weights filled. A group decodes its 64 x 64 weights in
registers while the products of the ones before run: decoded weights never see shared memory, and tokens are the operand
that all groups share. Programs take tiles in turn, so copies run ahead into the next tile.

Orders of rows and columns: `decode_hopper_triton`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    mma_v2,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from k3_kernels.activation.math_triton import constants
from k3_kernels.activation.reference import Activation
from k3_kernels.moe.decode_hopper_triton import (
    X3_GATED,
    X3_PLAIN,
    X_GATED,
    X_PLAIN,
    activated,
    barrier,
    both,
    operand,
    processors,
    views,
)
from k3_kernels.moe.reference import Experts
from k3_kernels.moe.tiles import tiles

PLAIN_UP_TO = gl.constexpr(16)
CLASSES = ((128, 32, 3, 4), (64, 32, 3, 6), (64, 0, 4, 6), (16, 0, 4, 8))
"""Tokens of a tile as one or two products, warp groups, and stages of the ring; most tokens first."""


@gluon.jit
def _tile(tiles, bounds, CLASS: gl.constexpr, TURNS: gl.constexpr):
    """(first item, end of items) of a class of tiles."""
    first = gl.load(bounds + CLASS) * TURNS
    end = gl.load(bounds + CLASS + 1) * TURNS
    return first + gl.program_id(0), end


@gluon.jit
def _copy(
    near, far, words, tiles, bounds, wide, rest, packed, full, empty,
    GATED: gl.constexpr, OUT: gl.constexpr, WIDTH: gl.constexpr, CLASS: gl.constexpr, N2: gl.constexpr,
    G: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One warp: tokens and packed weights of 128 columns into the ring."""
    TURNS: gl.constexpr = (OUT + 64 * G - 1) // (64 * G)
    J: gl.constexpr = WIDTH // 8
    first, end = _tile(tiles, bounds, CLASS, TURNS)
    count = 0
    for item in range(first, end, gl.num_programs(0)):
        expert = gl.load(tiles + item // TURNS * 3)
        start = gl.load(tiles + item // TURNS * 3 + 1)
        unit = item % TURNS * G
        for step in range(WIDTH // 128):
            now = count % STAGES
            mbarrier.wait(empty.index(now), (count // STAGES + 1) & 1)
            ready = full.index(now)
            if N2 > 0:
                mbarrier.expect(
                    ready, 2 * G * words.block_type.nbytes + 2 * near.block_type.nbytes + 2 * far.block_type.nbytes
                )
            else:
                mbarrier.expect(ready, 2 * G * words.block_type.nbytes + 2 * near.block_type.nbytes)
            for g in gl.static_range(G):
                u = unit + g
                if GATED:
                    row = expert * (OUT // 4) + u // 4 * 32
                    column = u % 4 * J + step * 16
                    tma.async_copy_global_to_shared(words, [row, column], ready, packed.index(now * 2 * G + 2 * g))
                    tma.async_copy_global_to_shared(
                        words, [row + OUT // 8, column], ready, packed.index(now * 2 * G + 2 * g + 1)
                    )
                else:
                    row = expert * (OUT // 2) + u * 32
                    tma.async_copy_global_to_shared(words, [row, step * 16], ready, packed.index(now * 2 * G + 2 * g))
                    tma.async_copy_global_to_shared(
                        words, [row, J + step * 16], ready, packed.index(now * 2 * G + 2 * g + 1)
                    )
            for half in gl.static_range(2):
                column = step * 128 + half * 64
                tma.async_copy_global_to_shared(near, [start, column], ready, wide.index(now * 2 + half))
                if N2 > 0:
                    tma.async_copy_global_to_shared(
                        far, [start + near.block_shape[0], column], ready, rest.index(now * 2 + half)
                    )
            count += 1


@gluon.jit
def _fetch(
    packed, full, count, GROUP: gl.constexpr, G: gl.constexpr, STAGES: gl.constexpr, X: gl.constexpr, X3: gl.constexpr
):
    """The words of the two blocks of rows of a step, once they are there."""
    now = count % STAGES
    mbarrier.wait(full.index(now), (count // STAGES) & 1)
    x0 = packed.index(now * 2 * G + 2 * GROUP).load(X).reshape([32, 4, 4])
    x1 = packed.index(now * 2 * G + 2 * GROUP + 1).load(X).reshape([32, 4, 4])
    return gl.convert_layout(x0, X3), gl.convert_layout(x1, X3)


@triton.constexpr_function
def _layout(n: int, gated: bool) -> gl.DistributedLinearLayout:
    """How the columns of n tokens lie in a warp group: [n / 8, 4, 2, columns]."""
    tokens = [[0, 0, 1, 0]] + [[i, 0, 0, 0] for i in (1, 2, 4, 8) if 8 * i < n]
    lanes, least, width = [[0, 1, 0, 0], [0, 2, 0, 0]], 1, 32
    if not gated:
        tokens, least, width = [[0, 0, 0, 1], *tokens], 2, 64
    columns = [[0, 0, 0, least * i] for i in (1, 2, 4, 8, 16)]
    return gl.DistributedLinearLayout(tokens, lanes + columns[:3], columns[3:], [], [n // 8, 4, 2, width])


@gluon.jit
def _store(
    acc, to, first, end, unit, OUT: gl.constexpr, GATED: gl.constexpr, BETA: gl.constexpr, LINEAR_BETA: gl.constexpr,
    N: gl.constexpr,
):  # fmt: skip
    """Columns of 64 weight rows for tokens from `first` on, those before `end`.

    Tokens are numbered by registers and by lanes apart, so that what registers number are constants.
    """
    F: gl.constexpr = 32 if GATED else 64
    LAYOUT: gl.constexpr = _layout(N, GATED)
    ROW: gl.constexpr = OUT // 2 if GATED else OUT
    acc = acc * 4611686018427387904.0  # 2^62
    kind: gl.constexpr = to.dtype.element_ty
    if GATED:
        gate, up = gl.split(acc.reshape([4, 2, 8, N]).permute(3, 0, 2, 1).reshape([N, 32, 2]))
        found = activated(gate, up, BETA, LINEAR_BETA).to(kind)
    else:
        found = acc.reshape([4, 2, 8, N]).permute(3, 0, 2, 1).reshape([N, 64]).to(kind)
    found = gl.convert_layout(found.reshape([N // 8, 4, 2, F]), LAYOUT)
    eight = gl.arange(0, N // 8, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT)))) * 8
    two = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT)))) * 2
    one = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, LAYOUT))))
    column = unit * F + gl.arange(0, F, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))))
    two = two.expand_dims(0).expand_dims(2).expand_dims(3)
    held = eight.expand_dims(1).expand_dims(2).expand_dims(3) + one.expand_dims(0).expand_dims(1).expand_dims(3)
    column = column.expand_dims(0).expand_dims(1).expand_dims(2)
    at = to + (first + two).to(gl.int64) * ROW + column + held * ROW
    gl.store(at, found, mask=(held < end - first - two) & (column < ROW))


@gluon.jit
def _issue(a, tokens, rest, at, acc, acc2, N2: gl.constexpr, A2: gl.constexpr, PLAIN: gl.constexpr):
    """Starts the products of 64 columns; returns when the ones before are done.

    Each wait, even one for nothing, ends what ptxas takes for a stage; inside one, it wants no operands defined.
    """
    if PLAIN:
        B: gl.constexpr = gl.DotOperandLayout(1, acc.type.layout, 2)
        acc = mma_v2(a, tokens.permute([1, 0]).load(B), acc)
    else:
        acc = warpgroup_mma(a, tokens.permute([1, 0]), acc, is_async=True)
        if N2 > 0:
            acc2 = warpgroup_mma(gl.convert_layout(a, A2), rest.index(at).permute([1, 0]), acc2, is_async=True)
            acc, acc2 = warpgroup_mma_wait(2, [acc, acc2])
        else:
            acc = warpgroup_mma_wait(1, [acc])
    return acc, acc2


@gluon.jit
def _multiply(
    scales, tiles, bounds, to, wide, rest, packed, full, empty, GROUP: gl.constexpr,
    GATED: gl.constexpr, OUT: gl.constexpr, WIDTH: gl.constexpr, BETA: gl.constexpr, LINEAR_BETA: gl.constexpr,
    CLASS: gl.constexpr, N1: gl.constexpr, N2: gl.constexpr, G: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """One warp group: 64 weight rows times the tokens of a tile."""
    # A product this narrow takes the tensor cores as long as one of 64 columns, through their older instruction less.
    PLAIN: gl.constexpr = N1 <= PLAIN_UP_TO
    ACC: gl.constexpr = gl.NVMMADistributedLayout(
        [2, 0] if PLAIN else [3, 0], [4, 1], [16, 8] if PLAIN else [16, N1, 16]
    )
    A: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    R: gl.constexpr = N2 if N2 > 0 else 16
    ACC2: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, R, 16])
    A2: gl.constexpr = gl.DotOperandLayout(0, ACC2, 2)
    X: gl.constexpr = X_GATED if GATED else X_PLAIN
    X3: gl.constexpr = X3_GATED if GATED else X3_PLAIN
    S: gl.constexpr = gl.SliceLayout(2, X3)
    TURNS: gl.constexpr = (OUT + 64 * G - 1) // (64 * G)
    STEPS: gl.constexpr = WIDTH // 128
    GROUPS: gl.constexpr = WIDTH // 32
    further: gl.constexpr = OUT // 2 if GATED else 1
    NEXT: gl.constexpr = 4 if STEPS > 1 else 0
    first, end = _tile(tiles, bounds, CLASS, TURNS)
    row = gl.arange(0, 32, gl.SliceLayout(1, S))
    group = gl.arange(0, 4, gl.SliceLayout(0, S))
    count = 0
    for item in range(first, end, gl.num_programs(0)):
        expert = gl.load(tiles + item // TURNS * 3)
        start = gl.load(tiles + item // TURNS * 3 + 1)
        stop = gl.load(tiles + item // TURNS * 3 + 2)
        unit = item % TURNS * G + GROUP
        if GATED:
            last = gl.minimum(unit, OUT // 64 - 1)
            r = last // 4 * 128 + last % 4 + 4 * row
        else:
            r = gl.minimum(unit * 64, OUT - 64) + 2 * row
        at = scales + expert.to(gl.int64) * (OUT * GROUPS) + r[:, None] * GROUPS + group[None, :]
        s0, s1 = gl.load(at), gl.load(at + further * GROUPS)
        t0, t1 = gl.load(at + NEXT), gl.load(at + (NEXT + further * GROUPS))
        acc = gl.zeros([64, N1], gl.float32, ACC)
        acc2 = gl.zeros([64, R], gl.float32, ACC2)
        x0, x1 = _fetch(packed, full, count, GROUP, G, STAGES, X, X3)
        a = operand(x0, x1, both(s0), both(s1), 0, GATED, A)
        for step in range(STEPS):
            now = count % STAGES
            later = gl.minimum(step + 2, STEPS - 1) * 4
            u0, u1 = gl.load(at + later), gl.load(at + (later + further * GROUPS))
            acc, acc2 = _issue(a, wide.index(now * 2), rest, now * 2, acc, acc2, N2, A2, PLAIN)
            b = operand(x0, x1, both(s0), both(s1), 1, GATED, A)
            acc, acc2 = _issue(b, wide.index(now * 2 + 1), rest, now * 2 + 1, acc, acc2, N2, A2, PLAIN)
            # The last step decodes its words once more, and nobody uses them.
            following = gl.minimum(step + 1, STEPS - 1)
            s0, s1, t0, t1 = t0, t1, u0, u1
            x0, x1 = _fetch(packed, full, count - step + following, GROUP, G, STAGES, X, X3)
            a = operand(x0, x1, both(s0), both(s1), 0, GATED, A)
            # Products still running where a loop turns make ptxas wait after each of them.
            if N2 > 0:
                acc, acc2 = warpgroup_mma_wait(0, [acc, acc2])
            elif not PLAIN:
                acc = warpgroup_mma_wait(0, [acc])
            barrier()
            mbarrier.arrive(empty.index(now), count=1)
            count += 1
        _store(acc, to, start, stop, unit, OUT, GATED, BETA, LINEAR_BETA, N1)
        if N2 > 0:
            _store(acc2, to, start + N1, stop, unit, OUT, GATED, BETA, LINEAR_BETA, N2)


@gluon.jit
def product(
    near, far, words, scales, tiles, bounds, to,
    GATED: gl.constexpr, OUT: gl.constexpr, WIDTH: gl.constexpr, BETA: gl.constexpr, LINEAR_BETA: gl.constexpr,
    CLASS: gl.constexpr, N1: gl.constexpr, N2: gl.constexpr, G: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """to[row] = act(gate, up) or the product of the tokens of each tile of one class with their expert's matrix."""
    BARS: gl.constexpr = mbarrier.MBarrierLayout()
    R: gl.constexpr = N2 if N2 > 0 else 16
    wide = gl.allocate_shared_memory(near.dtype, [2 * STAGES, N1, 64], near.layout)
    rest = gl.allocate_shared_memory(near.dtype, [2 * STAGES if N2 > 0 else 1, R, 64], near.layout)
    packed = gl.allocate_shared_memory(gl.int32, [2 * G * STAGES, 32, 16], words.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARS)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARS)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=G)
    fence_async_shared()
    barrier()
    if G == 3:
        gl.warp_specialize(
            [
                (
                    _multiply,
                    (
                        scales,
                        tiles,
                        bounds,
                        to,
                        wide,
                        rest,
                        packed,
                        full,
                        empty,
                        0,
                        GATED,
                        OUT,
                        WIDTH,
                        BETA,
                        LINEAR_BETA,
                        CLASS,
                        N1,
                        N2,
                        G,
                        STAGES,
                    ),
                ),
                (
                    _multiply,
                    (
                        scales,
                        tiles,
                        bounds,
                        to,
                        wide,
                        rest,
                        packed,
                        full,
                        empty,
                        1,
                        GATED,
                        OUT,
                        WIDTH,
                        BETA,
                        LINEAR_BETA,
                        CLASS,
                        N1,
                        N2,
                        G,
                        STAGES,
                    ),
                ),
                (
                    _multiply,
                    (
                        scales,
                        tiles,
                        bounds,
                        to,
                        wide,
                        rest,
                        packed,
                        full,
                        empty,
                        2,
                        GATED,
                        OUT,
                        WIDTH,
                        BETA,
                        LINEAR_BETA,
                        CLASS,
                        N1,
                        N2,
                        G,
                        STAGES,
                    ),
                ),
                (
                    _copy,
                    (
                        near,
                        far,
                        words,
                        tiles,
                        bounds,
                        wide,
                        rest,
                        packed,
                        full,
                        empty,
                        GATED,
                        OUT,
                        WIDTH,
                        CLASS,
                        N2,
                        G,
                        STAGES,
                    ),
                ),
            ],
            [4, 4, 1],
            [160, 160, 32],
        )
    else:
        gl.warp_specialize(
            [
                (
                    _multiply,
                    (
                        scales,
                        tiles,
                        bounds,
                        to,
                        wide,
                        rest,
                        packed,
                        full,
                        empty,
                        0,
                        GATED,
                        OUT,
                        WIDTH,
                        BETA,
                        LINEAR_BETA,
                        CLASS,
                        N1,
                        N2,
                        G,
                        STAGES,
                    ),
                ),
                (
                    _multiply,
                    (
                        scales,
                        tiles,
                        bounds,
                        to,
                        wide,
                        rest,
                        packed,
                        full,
                        empty,
                        1,
                        GATED,
                        OUT,
                        WIDTH,
                        BETA,
                        LINEAR_BETA,
                        CLASS,
                        N1,
                        N2,
                        G,
                        STAGES,
                    ),
                ),
                (
                    _multiply,
                    (
                        scales,
                        tiles,
                        bounds,
                        to,
                        wide,
                        rest,
                        packed,
                        full,
                        empty,
                        2,
                        GATED,
                        OUT,
                        WIDTH,
                        BETA,
                        LINEAR_BETA,
                        CLASS,
                        N1,
                        N2,
                        G,
                        STAGES,
                    ),
                ),
                (
                    _multiply,
                    (
                        scales,
                        tiles,
                        bounds,
                        to,
                        wide,
                        rest,
                        packed,
                        full,
                        empty,
                        3,
                        GATED,
                        OUT,
                        WIDTH,
                        BETA,
                        LINEAR_BETA,
                        CLASS,
                        N1,
                        N2,
                        G,
                        STAGES,
                    ),
                ),
                (
                    _copy,
                    (
                        near,
                        far,
                        words,
                        tiles,
                        bounds,
                        wide,
                        rest,
                        packed,
                        full,
                        empty,
                        GATED,
                        OUT,
                        WIDTH,
                        CLASS,
                        N2,
                        G,
                        STAGES,
                    ),
                ),
            ],
            [4, 4, 4, 1],
            [112, 112, 112, 40],
        )


@gluon.jit
def _sorted_rows(z, z_row, order, to, K: gl.constexpr, L: gl.constexpr, X: gl.constexpr):
    """to[p] = the row of pair order[p], columns as the decoder yields them (`place`).

    A thread moves 32 values, word i of four groups of 128 columns: 16 bytes a load and a store, the order made in
    registers.
    """
    p = gl.program_id(0).to(gl.int64)
    block = gl.program_id(1) * 32 + gl.arange(0, 32, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, X))))
    group = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, X))))
    word = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, X))))
    value = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, X))))
    block = block.expand_dims(1).expand_dims(2).expand_dims(3)
    at = block * 128 + group.expand_dims(0).expand_dims(2).expand_dims(3) * 32
    at = at + word.expand_dims(0).expand_dims(1).expand_dims(3) * 8 + value.expand_dims(0).expand_dims(1).expand_dims(2)
    x = gl.load(z + gl.load(order + p) // K * z_row + at, mask=block < L // 128)
    x = x.reshape([32, 4, 4, 2, 4]).permute(0, 4, 2, 1, 3).reshape([32, 4, 4, 8])
    gl.store(to + p * L + at, gl.convert_layout(x, X), mask=block < L // 128)


_LANES = [[0, 0, 1, 0], [0, 0, 2, 0], [1, 0, 0, 0], [2, 0, 0, 0], [4, 0, 0, 0]]
MOVED = gl.DistributedLinearLayout(
    [[0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 0, 4], [0, 1, 0, 0], [0, 2, 0, 0]],
    _LANES, [[8, 0, 0, 0], [16, 0, 0, 0]], [], [32, 4, 4, 8],
)  # fmt: skip
"""[blocks of 128 columns, 4, words, 8]: a thread has all but words and blocks."""


@triton.jit
def _sum(parts, place, weights, out, K: tl.constexpr, L: tl.constexpr, BL: tl.constexpr):
    """out[t] = the k outputs of a token, weighted, in the order of its ids."""
    t = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BL + tl.arange(0, BL)
    total = tl.zeros((BL,), tl.float32)
    for j in tl.static_range(K):
        at = tl.load(place + t * K + j).to(tl.int64)
        part = tl.load(parts + at * L + column, mask=column < L, other=0.0)
        total += tl.load(weights + t * K + j) * part.to(tl.float32)
    tl.store(out + t * L + column, total.to(out.dtype.element_ty), mask=column < L)


def experts_grouped(
    z: Tensor,
    ids: Tensor,
    weights: Tensor,
    experts: Experts,
    act: Activation,
    *,
    classes: tuple[tuple[int, int, int, int], ...] = CLASSES,
) -> Tensor:
    """The form of `k3_kernels.moe.experts_grouped` for Hopper; `classes` is for benchmarks."""
    T, k = ids.shape
    E, L, F = experts.w13.shape[0], z.shape[1], experts.w13.shape[1] // 2
    assert experts.w13_scale is not None
    assert experts.w2_scale is not None
    out = z.new_empty(T, L)
    if T == 0:
        return out
    order, table, bounds = tiles(ids, E, tuple(near + far for near, far, *_ in classes))
    rows, inner = z.new_empty(T * k, L), z.new_empty(T * k, F)
    _sorted_rows[(T * k, triton.cdiv(L, 4096))](z, z.stride(0), order, rows, k, L, MOVED, num_warps=4)
    w13, w2 = views(experts)
    beta, linear_beta = constants(act)
    _products(classes, rows, w13, experts.w13_scale, table, bounds, inner, True, 2 * F, L, beta, linear_beta)
    _products(classes, inner, w2, experts.w2_scale, table, bounds, rows, False, L, F, 0.0, 0.0)
    place = torch.empty(T * k, dtype=torch.int32, device=z.device)
    place[order] = torch.arange(T * k, dtype=torch.int32, device=z.device)
    _sum[(triton.cdiv(L, 512), T)](rows, place, weights, out, k, L, 512, num_warps=4)
    return out


def _products(
    classes: tuple[tuple[int, int, int, int], ...],
    tokens: Tensor,
    words: Tensor,
    scales: Tensor,
    table: Tensor,
    bounds: Tensor,
    to: Tensor,
    gated: bool,
    out: int,
    width: int,
    beta: float,
    linear_beta: float,
) -> None:
    wide, packed = gl.NVMMASharedLayout(128, 16, 2), gl.NVMMASharedLayout(64, 32, 2)
    weights = TensorDescriptor.from_tensor(words, [32, 16], packed)
    for i, (near, far, groups, stages) in enumerate(classes):
        product[(processors(tokens.device),)](
            TensorDescriptor.from_tensor(tokens, [near, 64], wide),
            TensorDescriptor.from_tensor(tokens, [far or 16, 64], wide),
            weights, scales, table, bounds, to,
            gated, out, width, beta, linear_beta, i, near, far, groups, stages, num_warps=4,
        )  # fmt: skip
