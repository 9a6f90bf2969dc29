"""The product of the grouped experts for Hopper in Gluon: packed weights become the register operand.

Tokens are sorted by expert, so that the rows of a tile lie one behind the other and the copy engine can fetch them. A
program owns 64 weight rows for each of three or four warp groups, and up to 160 tokens (two products, of a width that
is a power of two each). One warp keeps a ring of tokens and packed weights filled. A group decodes its 64 x 64 weights
in registers while the products of the ones before run: decoded weights never see shared memory, and tokens are the
operand that all groups share. Programs take tiles in turn, so copies run ahead into the next tile.

Orders of rows and columns: `decode_hopper_triton`.
"""

from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from k3_kernels.moe.decode_hopper_triton import (
    X3_GATED,
    X3_PLAIN,
    X_GATED,
    X_PLAIN,
    activated,
    barrier,
    both,
    operand,
)


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
    G: gl.constexpr, SPAN: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One warp: tokens and packed weights into the ring, SPAN times 128 columns a stage."""
    TURNS: gl.constexpr = (OUT + 64 * G - 1) // (64 * G)
    J: gl.constexpr = WIDTH // 8
    further_row: gl.constexpr = OUT // 8 if GATED else 0
    further_word: gl.constexpr = 0 if GATED else J
    first, end = _tile(tiles, bounds, CLASS, TURNS)
    count = 0
    for item in range(first, end, gl.num_programs(0)):
        expert = gl.load(tiles + item // TURNS * 3)
        start = gl.load(tiles + item // TURNS * 3 + 1)
        unit = item % TURNS * G
        for stage in range(WIDTH // (128 * SPAN)):
            now = count % STAGES
            mbarrier.wait(empty.index(now), (count // STAGES + 1) & 1)
            ready = full.index(now)
            tokens: gl.constexpr = near.block_type.nbytes + (far.block_type.nbytes if N2 > 0 else 0)
            mbarrier.expect(ready, 2 * G * words.block_type.nbytes + 2 * SPAN * tokens)
            for g in gl.static_range(G):
                u = unit + g
                if GATED:
                    row = expert * (OUT // 4) + u // 4 * 32
                    column = u % 4 * J + stage * (16 * SPAN)
                else:
                    row = expert * (OUT // 2) + u * 32
                    column = stage * (16 * SPAN)
                for half in gl.static_range(2):
                    tma.async_copy_global_to_shared(
                        words,
                        [row + half * further_row, column + half * further_word],
                        ready,
                        packed.index(now * 2 * G + 2 * g + half),
                    )
            for part in gl.static_range(2 * SPAN):
                column = stage * (128 * SPAN) + part * 64
                at = now * (2 * SPAN) + part
                tma.async_copy_global_to_shared(near, [start, column], ready, wide.index(at))
                if N2 > 0:
                    tma.async_copy_global_to_shared(far, [start + near.block_shape[0], column], ready, rest.index(at))
            count += 1


@gluon.jit
def _fetch(
    packed, now, PART: gl.constexpr, GROUP: gl.constexpr, G: gl.constexpr, X: gl.constexpr, X3: gl.constexpr
):  # fmt: skip
    """The words of the two blocks of rows, 128 columns of a stage."""
    x0 = packed.index(now * 2 * G + 2 * GROUP).slice(16 * PART, 16, 1).load(X).reshape([32, 4, 4])
    x1 = packed.index(now * 2 * G + 2 * GROUP + 1).slice(16 * PART, 16, 1).load(X).reshape([32, 4, 4])
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
def _issue(a, tokens, rest, at, acc, acc2, N2: gl.constexpr, A2: gl.constexpr):
    """Starts the products of 64 columns; returns when the ones before are done.

    Each wait, even one for nothing, ends what ptxas takes for a stage; inside one, it wants no operands defined.
    """
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
    SPAN: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One warp group: 64 weight rows times the tokens of a tile."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N1, 16])
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
        mbarrier.wait(full.index(count % STAGES), (count // STAGES) & 1)
        x0, x1 = _fetch(packed, count % STAGES, 0, GROUP, G, X, X3)
        a = operand(x0, x1, both(s0), both(s1), 0, GATED, A)
        for stage in range(STEPS // SPAN):
            now = count % STAGES
            for part in gl.static_range(SPAN):
                later = gl.minimum(stage * SPAN + part + 2, STEPS - 1) * 4
                u0, u1 = gl.load(at + later), gl.load(at + (later + further * GROUPS))
                half = now * (2 * SPAN) + 2 * part
                acc, acc2 = _issue(a, wide.index(half), rest, half, acc, acc2, N2, A2)
                b = operand(x0, x1, both(s0), both(s1), 1, GATED, A)
                acc, acc2 = _issue(b, wide.index(half + 1), rest, half + 1, acc, acc2, N2, A2)
                s0, s1, t0, t1 = t0, t1, u0, u1
                if part + 1 < SPAN:
                    x0, x1 = _fetch(packed, now, part + 1, GROUP, G, X, X3)
                else:
                    # The last stage is decoded once more, for nobody.
                    following = count + gl.where(stage + 1 < STEPS // SPAN, 1, 0)
                    mbarrier.wait(full.index(following % STAGES), (following // STAGES) & 1)
                    x0, x1 = _fetch(packed, following % STAGES, 0, GROUP, G, X, X3)
                a = operand(x0, x1, both(s0), both(s1), 0, GATED, A)
                # Products still running where a loop turns make ptxas wait after each of them.
                if N2 > 0:
                    acc, acc2 = warpgroup_mma_wait(0, [acc, acc2])
                else:
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
    SPAN: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """to[row] = act(gate, up) or the product of the tokens of each tile of one class with their expert's matrix."""
    BARS: gl.constexpr = mbarrier.MBarrierLayout()
    R: gl.constexpr = N2 if N2 > 0 else 16
    wide = gl.allocate_shared_memory(near.dtype, [2 * SPAN * STAGES, N1, 64], near.layout)
    rest = gl.allocate_shared_memory(near.dtype, [2 * SPAN * STAGES if N2 > 0 else 1, R, 64], near.layout)
    packed = gl.allocate_shared_memory(gl.int32, [2 * G * STAGES, 32, 16 * SPAN], words.layout)
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
                        scales, tiles, bounds, to, wide, rest, packed, full, empty, 0,
                        GATED, OUT, WIDTH, BETA, LINEAR_BETA, CLASS, N1, N2, G, SPAN, STAGES,
                    ),
                ),
                (
                    _multiply,
                    (
                        scales, tiles, bounds, to, wide, rest, packed, full, empty, 1,
                        GATED, OUT, WIDTH, BETA, LINEAR_BETA, CLASS, N1, N2, G, SPAN, STAGES,
                    ),
                ),
                (
                    _multiply,
                    (
                        scales, tiles, bounds, to, wide, rest, packed, full, empty, 2,
                        GATED, OUT, WIDTH, BETA, LINEAR_BETA, CLASS, N1, N2, G, SPAN, STAGES,
                    ),
                ),
                (
                    _copy,
                    (
                        near, far, words, tiles, bounds, wide, rest, packed, full, empty,
                        GATED, OUT, WIDTH, CLASS, N2, G, SPAN, STAGES,
                    ),
                ),
            ],
            [4, 4, 1],
            [160, 160, 32],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (
                    _multiply,
                    (
                        scales, tiles, bounds, to, wide, rest, packed, full, empty, 0,
                        GATED, OUT, WIDTH, BETA, LINEAR_BETA, CLASS, N1, N2, G, SPAN, STAGES,
                    ),
                ),
                (
                    _multiply,
                    (
                        scales, tiles, bounds, to, wide, rest, packed, full, empty, 1,
                        GATED, OUT, WIDTH, BETA, LINEAR_BETA, CLASS, N1, N2, G, SPAN, STAGES,
                    ),
                ),
                (
                    _multiply,
                    (
                        scales, tiles, bounds, to, wide, rest, packed, full, empty, 2,
                        GATED, OUT, WIDTH, BETA, LINEAR_BETA, CLASS, N1, N2, G, SPAN, STAGES,
                    ),
                ),
                (
                    _multiply,
                    (
                        scales, tiles, bounds, to, wide, rest, packed, full, empty, 3,
                        GATED, OUT, WIDTH, BETA, LINEAR_BETA, CLASS, N1, N2, G, SPAN, STAGES,
                    ),
                ),
                (
                    _copy,
                    (
                        near, far, words, tiles, bounds, wide, rest, packed, full, empty,
                        GATED, OUT, WIDTH, CLASS, N2, G, SPAN, STAGES,
                    ),
                ),
            ],
            [4, 4, 4, 1],
            [112, 112, 112, 40],
        )  # fmt: skip
