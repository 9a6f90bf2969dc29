"""Parts of decode_hopper_triton: which keys a program takes, their copies, scores, softmax, and how a split ends."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma

# Named anew between Triton 3.6 and 3.7.
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


@gluon.jit
def span_of(p, UNIT: gl.constexpr, SPLITS: gl.constexpr, LEAST: gl.constexpr, FAR: gl.constexpr):
    reach = gl.where(p < FAR, UNIT * SPLITS, 2 * UNIT * SPLITS)
    return gl.maximum(p // reach + 1, LEAST) * UNIT


@gluon.jit
def items_of(
    start, tiles, n, UNIT: gl.constexpr, SPLITS: gl.constexpr, LEAST: gl.constexpr, FAR: gl.constexpr
):  # fmt: skip
    """Tiles times the splits that any of the window's rows may have."""
    last = start + n - 1
    low, high = span_of(start, UNIT, SPLITS, LEAST, FAR), span_of(last, UNIT, SPLITS, LEAST, FAR)
    return tiles * (last // gl.minimum(low, high) + 1)


@gluon.jit
def extent(
    start, tile, split, H, n, walk,
    UNIT: gl.constexpr, SPLITS: gl.constexpr, LEAST: gl.constexpr, FAR: gl.constexpr, BM: gl.constexpr,
):  # fmt: skip
    """(span, first key, end of keys) of a split for one of its tile's spans; the end may lie before the first."""
    first = start + tile * BM // H
    last = start + gl.minimum((tile * BM + BM - 1) // H, n - 1)
    low, high = span_of(first, UNIT, SPLITS, LEAST, FAR), span_of(last, UNIT, SPLITS, LEAST, FAR)
    span = gl.where(walk == 0, low, high)
    begin = split * span
    end = gl.minimum(begin + span, last + 1)
    # A second walk only where the tile's rows have two spans.
    end = gl.where((walk == 1) & (high == low), begin, end)
    return span, begin, end


@gluon.jit
def copy(
    half_c, whole_p, half_q, whole_q, table, cursor, page_rows, H, n, qc, qp, kc, kp, full, empty, asked, done,
    ahead, lines, PAGE: gl.constexpr, R: gl.constexpr,
    UNIT: gl.constexpr, SPLITS: gl.constexpr, LEAST: gl.constexpr, FAR: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr,
):  # fmt: skip
    """One warp: a tile's queries, then its blocks; halves of their columns as they become free."""
    HALF: gl.constexpr = R // 2
    start = gl.load(cursor).to(gl.int32)
    tiles = gl.cdiv(n * H, BM)
    split_count = 0
    even = 0
    odd = 0
    for item in range(gl.program_id(0), items_of(start, tiles, n, UNIT, SPLITS, LEAST, FAR), gl.num_programs(0)):
        tile = item % tiles
        for walk in range(2):
            _w, begin, end = extent(start, tile, item // tiles, H, n, walk, UNIT, SPLITS, LEAST, FAR, BM)
            if begin < end:
                mbarrier.wait(done, (split_count + 1) & 1)
                mbarrier.expect(asked, 2 * half_q.block_type.nbytes + whole_q.block_type.nbytes)
                tma.async_copy_global_to_shared(half_q, [tile * BM, 0], asked, qc.slice(0, HALF, 1))
                tma.async_copy_global_to_shared(half_q, [tile * BM, HALF], asked, qc.slice(HALF, HALF, 1))
                tma.async_copy_global_to_shared(whole_q, [tile * BM, R], asked, qp)
                split_count += 1
            for key in range(begin, end, 2 * BN):
                row = gl.load(table + key // PAGE) * page_rows + key % PAGE
                phase = (even + 1) & 1
                to = kc.index(0)
                mbarrier.wait(empty.index(0), phase)
                mbarrier.expect(full.index(0), half_c.block_type.nbytes + whole_p.block_type.nbytes)
                tma.async_copy_global_to_shared(half_c, [row, 0], full.index(0), to.slice(0, HALF, 1))
                tma.async_copy_global_to_shared(whole_p, [row, R], full.index(0), kp.index(0))
                mbarrier.wait(empty.index(1), phase)
                mbarrier.expect(full.index(1), half_c.block_type.nbytes)
                tma.async_copy_global_to_shared(half_c, [row, HALF], full.index(1), to.slice(HALF, HALF, 1))
                even += 1
                if key + BN < end:
                    phase = (odd + 1) & 1
                    to = kc.index(1)
                    row = gl.load(table + (key + BN) // PAGE) * page_rows + (key + BN) % PAGE
                    mbarrier.wait(empty.index(3), phase)
                    mbarrier.expect(full.index(3), half_c.block_type.nbytes + whole_p.block_type.nbytes)
                    tma.async_copy_global_to_shared(half_c, [row, HALF], full.index(3), to.slice(HALF, HALF, 1))
                    tma.async_copy_global_to_shared(whole_p, [row, R], full.index(3), kp.index(1))
                    mbarrier.wait(empty.index(2), phase)
                    mbarrier.expect(full.index(2), half_c.block_type.nbytes)
                    tma.async_copy_global_to_shared(half_c, [row, 0], full.index(2), to.slice(0, HALF, 1))
                    odd += 1
    # What the projection will read is fetched while the last blocks are multiplied.
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    for first in range(gl.program_id(0) * 128, lines, gl.num_programs(0) * 128):
        line = gl.minimum(first + gl.arange(0, 128, LINE), lines - 1)
        gl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [ahead + line * 64], gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def scores(qc, qp, keys, shared, near, far, phase, none, MINE: gl.constexpr, R: gl.constexpr):
    """Starts queries times a block: this group's half and the shared part, then the other half."""
    HALF: gl.constexpr = R // 2
    mbarrier.wait(near, phase)
    s = warpgroup_mma(
        qc.slice(MINE * HALF, HALF, 1), keys.slice(MINE * HALF, HALF, 1).permute([1, 0]), none,
        use_acc=False, is_async=True,
    )  # fmt: skip
    s = warpgroup_mma(qp, shared.permute([1, 0]), s, is_async=True)
    mbarrier.wait(far, phase)
    other = qc.slice((1 - MINE) * HALF, HALF, 1)
    return warpgroup_mma(other, keys.slice((1 - MINE) * HALF, HALF, 1).permute([1, 0]), s, is_async=True)


@gluon.jit
def softmax(s, key, p, top, norm, factor, BN: gl.constexpr, S: gl.constexpr):
    """(weights, shrinking of older sums, maxima, norms) of a block."""
    keys = key + gl.arange(0, BN, gl.SliceLayout(0, S))
    s = gl.where(keys[None, :] <= p[:, None], s, float("-inf"))
    new = gl.maximum(top, gl.max(s, 1))
    # Subtract, then multiply: nothing to contract, so every compilation rounds alike.
    weight = gl.exp2((s - new[:, None]) * factor)
    shrink = gl.exp2((top - new) * factor)
    return weight, shrink, new, norm * shrink + gl.sum(weight, 1)


@gluon.jit
def blank(latents, live, BN: gl.constexpr, R: gl.constexpr):
    """Rows from `live` on become zeros: what lies there may not be numbers, and weights of zero would not hide that."""
    B: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row = gl.arange(0, BN, gl.SliceLayout(1, B))
    for part in gl.static_range(R // 128):
        piece = latents.slice(part * 64, 64, 1)
        value = piece.load(B)
        piece.store(gl.where((row < live)[:, None], value, gl.full([BN, 64], 0, value.dtype, B)))
    fence_async_shared()
    barrier()


@gluon.jit
def publish(weight, shrink, top, ps, shrinks, peaks, ready):
    ps.store(weight)
    shrinks.store(shrink)
    peaks.store(top)
    fence_async_shared()
    barrier()
    mbarrier.arrive(ready, count=1)


@gluon.jit
def finish(
    sums, tops, norms, acc, top, norm, parts, told, turn, start, tile, split, H, n, span,
    MINE: gl.constexpr, R: gl.constexpr,
    UNIT: gl.constexpr, SPLITS: gl.constexpr, LEAST: gl.constexpr, FAR: gl.constexpr, BM: gl.constexpr,
    S: gl.constexpr, O: gl.constexpr,  # noqa: E741
):  # fmt: skip
    """Divides by both groups' norms and stores this group's half, eight numbers of a thread side by side.

    Of 32 columns 8 j + 2 t + e, as the matrix unit leaves them, column 8 t + 2 j + e of `sums` gets the value.
    """
    now = 2 * (turn & 1)
    parts.index(now + MINE).store(norm)
    barrier()
    mbarrier.arrive(told.index(now + MINE), count=1)
    mbarrier.wait(told.index(now + 1 - MINE), turn // 2 & 1)
    other = parts.index(now + 1 - MINE).load(gl.SliceLayout(1, S))
    norm = norm + other
    if MINE == 0:
        pair = tile * BM + gl.arange(0, BM, gl.SliceLayout(1, S))
        inside = (pair < n * H) & (span_of(start + pair // H, UNIT, SPLITS, LEAST, FAR) == span)
        at = pair.to(gl.int64) * (2 * SPLITS) + split
        gl.store(tops + at, top, mask=inside)
        gl.store(norms + at, norm, mask=inside)
    # Rows that have no key here have no weight either.
    acc = acc * gl.convert_layout(1 / gl.maximum(norm, 1e-30), gl.SliceLayout(1, O))[:, None]
    wide = acc.to(sums.dtype.element_ty).reshape([BM, R // 64, 4, 4, 2]).permute([0, 1, 3, 2, 4]).reshape([BM, R // 2])
    D: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0], [0, 32], [0, 64], [0, 128]],
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [BM, R // 2],
    )  # fmt: skip
    wide = gl.convert_layout(wide, D)
    pair = tile * BM + gl.arange(0, BM, gl.SliceLayout(1, D))
    inside = (pair < n * H) & (span_of(start + pair // H, UNIT, SPLITS, LEAST, FAR) == span)
    at = (pair.to(gl.int64) * (2 * SPLITS) + split) * R + MINE * (R // 2)
    gl.store(sums + at[:, None] + gl.arange(0, R // 2, gl.SliceLayout(0, D))[None, :], wide, mask=inside[:, None])
