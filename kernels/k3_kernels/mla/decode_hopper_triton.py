"""`attend` of decode_triton for Hopper in Gluon: three kinds of warps that wait for each other through barriers.

Copying warps fill two blocks of 64 keys in turn. The first warp group multiplies queries and keys, takes the softmax,
publishes weights and the shrinking of older sums, and adds its half of the latents; the second group adds the other
half. A program holds 64 queries of 576, two blocks of keys and one of weights in shared memory (224 KB) and 64 x 512
sums in registers. So scores are computed once, by products wide enough for the matrix units, and copies have a whole
block's time. There is one program a processor; each takes tiles and splits in turn, those of the same keys at the same
time, and its copies run ahead into its next split. What is summed with what does not depend on who does it. bf16 only.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# Named anew between Triton 3.6 and 3.7.
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


@gluon.jit
def _span(p, UNIT: gl.constexpr, SPLITS: gl.constexpr, LEAST: gl.constexpr, FAR: gl.constexpr):
    reach = gl.where(p < FAR, UNIT * SPLITS, 2 * UNIT * SPLITS)
    return gl.maximum(p // reach + 1, LEAST) * UNIT


@gluon.jit
def _extent(
    start, tile, split, H, n, walk,
    UNIT: gl.constexpr, SPLITS: gl.constexpr, LEAST: gl.constexpr, FAR: gl.constexpr, BM: gl.constexpr,
):  # fmt: skip
    """(span, first key, end of keys) of a split for one of its tile's spans; the end may lie before the first."""
    first = start + tile * BM // H
    last = start + gl.minimum((tile * BM + BM - 1) // H, n - 1)
    low, high = _span(first, UNIT, SPLITS, LEAST, FAR), _span(last, UNIT, SPLITS, LEAST, FAR)
    span = gl.where(walk == 0, low, high)
    begin = split * span
    end = gl.minimum(begin + span, last + 1)
    # A second walk only where the tile's rows have two spans.
    end = gl.where((walk == 1) & (high == low), begin, end)
    return span, begin, end


@gluon.jit
def _copy(
    pages, table, cursor, page_stride, H, n, kc, kp, full, empty,
    KEY: gl.constexpr, R: gl.constexpr, P: gl.constexpr, PAGE: gl.constexpr,
    UNIT: gl.constexpr, SPLITS: gl.constexpr, LEAST: gl.constexpr, FAR: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr,
):  # fmt: skip
    """Four warps that copy blocks of keys; rows at the end and behind become zeros."""
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [2, 2], [1, 0])
    NARROW: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    start = gl.load(cursor).to(gl.int32)
    tiles = gl.cdiv(n * H, BM)
    count = 0
    for item in range(gl.program_id(0), 2 * SPLITS * tiles, gl.num_programs(0)):
        for walk in range(2):
            _w, begin, end = _extent(start, item % tiles, item // tiles, H, n, walk, UNIT, SPLITS, LEAST, FAR, BM)
            for key in range(begin, end, BN):
                page = gl.load(table + key // PAGE).to(gl.int64)
                source = pages + page * page_stride + (key % PAGE) * KEY
                now = count % 2
                mbarrier.wait(empty.index(now), (count // 2 + 1) & 1)
                # Computed here and not before the loop: registers are short.
                row = gl.arange(0, BN, gl.SliceLayout(1, WIDE))
                from_ = source + (row * KEY)[:, None] + gl.arange(0, R, gl.SliceLayout(0, WIDE))[None, :]
                async_copy.async_copy_global_to_shared(kc.index(now), from_, mask=(row < end - key)[:, None])
                row = gl.arange(0, BN, gl.SliceLayout(1, NARROW))
                from_ = source + (row * KEY)[:, None] + (R + gl.arange(0, P, gl.SliceLayout(0, NARROW)))[None, :]
                async_copy.async_copy_global_to_shared(kp.index(now), from_, mask=(row < end - key)[:, None])
                async_copy.commit_group()
                async_copy.wait_group(0)
                fence_async_shared()
                barrier()
                mbarrier.arrive(full.index(now), count=1)
                count += 1


@gluon.jit
def _store_half(
    sums, acc, start, tile, split, H, n, span, FIRST: gl.constexpr, R: gl.constexpr,
    UNIT: gl.constexpr, SPLITS: gl.constexpr, LEAST: gl.constexpr, FAR: gl.constexpr,
    BM: gl.constexpr, O: gl.constexpr,  # noqa: E741
):  # fmt: skip
    pair = tile * BM + gl.arange(0, BM, gl.SliceLayout(1, O))
    p = start + pair // H
    mine = (pair < n * H) & (_span(p, UNIT, SPLITS, LEAST, FAR) == span)
    at = pair.to(gl.int64) * (2 * SPLITS) + split
    column = FIRST + gl.arange(0, R // 2, gl.SliceLayout(0, O))
    gl.store(sums + (at * R)[:, None] + column[None, :], acc.to(sums.dtype.element_ty), mask=mine[:, None])


@gluon.jit
def _weigh(
    absorbed, cursor, sums, tops, norms, factor, H, n, qc, qp, kc, kp, ps, shrinks, full, empty, ready, taken,
    R: gl.constexpr, P: gl.constexpr,
    UNIT: gl.constexpr, SPLITS: gl.constexpr, LEAST: gl.constexpr, FAR: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr,
):  # fmt: skip
    """The first warp group: scores, softmax, the first half of the latents."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, R // 2, 16])  # noqa: E741
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [2, 2], [1, 0])
    NARROW: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    kind: gl.constexpr = absorbed.dtype.element_ty
    none = gl.zeros([BM, BN], gl.float32, S)
    start = gl.load(cursor).to(gl.int32)
    tiles = gl.cdiv(n * H, BM)
    count = 0
    turn = 0
    for item in range(gl.program_id(0), 2 * SPLITS * tiles, gl.num_programs(0)):
        tile, split = item % tiles, item // tiles
        for walk in range(2):
            span, begin, end = _extent(start, tile, split, H, n, walk, UNIT, SPLITS, LEAST, FAR, BM)
            if begin < end:
                row = tile * BM + gl.arange(0, BM, gl.SliceLayout(1, WIDE))
                from_ = absorbed + (row * (R + P))[:, None] + gl.arange(0, R, gl.SliceLayout(0, WIDE))[None, :]
                qc.store(gl.load(from_, mask=(row < n * H)[:, None], other=0.0))
                row = tile * BM + gl.arange(0, BM, gl.SliceLayout(1, NARROW))
                from_ = absorbed + (row * (R + P) + R)[:, None] + gl.arange(0, P, gl.SliceLayout(0, NARROW))[None, :]
                qp.store(gl.load(from_, mask=(row < n * H)[:, None], other=0.0))
                fence_async_shared()
                barrier()
                pair = tile * BM + gl.arange(0, BM, gl.SliceLayout(1, S))
                p = start + pair // H
                top = gl.full([BM], -1e30, gl.float32, gl.SliceLayout(1, S))
                norm = gl.zeros([BM], gl.float32, gl.SliceLayout(1, S))
                acc = gl.zeros([BM, R // 2], gl.float32, O)
                for key in range(begin, end, BN):
                    now = count % 2
                    mbarrier.wait(full.index(now), (count // 2) & 1)
                    s = warpgroup_mma(qc, kc.index(now).permute([1, 0]), none, use_acc=False, is_async=True)
                    s = warpgroup_mma(qp, kp.index(now).permute([1, 0]), s, is_async=True)
                    s = warpgroup_mma_wait(0, [s])
                    keys = key + gl.arange(0, BN, gl.SliceLayout(0, S))
                    s = gl.where(keys[None, :] <= p[:, None], s, float("-inf"))
                    new = gl.maximum(top, gl.max(s, 1))
                    # Subtract, then multiply: nothing to contract, so every compilation rounds alike.
                    weight = gl.exp2((s - new[:, None]) * factor)
                    shrink = gl.exp2((top - new) * factor)
                    top = new
                    mbarrier.wait(taken, (turn + 1) & 1)
                    ps.store(weight.to(kind))
                    shrinks.store(shrink)
                    fence_async_shared()
                    barrier()
                    mbarrier.arrive(ready, count=1)
                    turn += 1
                    norm = norm * shrink + gl.sum(weight, 1)
                    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, O))[:, None]
                    acc = warpgroup_mma(ps, kc.index(now).slice(0, R // 2, 1), acc, is_async=True)
                    acc = warpgroup_mma_wait(0, [acc])
                    barrier()
                    mbarrier.arrive(empty.index(now), count=1)
                    count += 1
                # The other group divides by the same sums.
                mbarrier.wait(taken, (turn + 1) & 1)
                shrinks.store(1 / norm)
                barrier()
                mbarrier.arrive(ready, count=1)
                turn += 1
                mine = (pair < n * H) & (_span(p, UNIT, SPLITS, LEAST, FAR) == span)
                at = pair.to(gl.int64) * (2 * SPLITS) + split
                gl.store(tops + at, top, mask=mine)
                gl.store(norms + at, norm, mask=mine)
                acc = acc * gl.convert_layout(1 / norm, gl.SliceLayout(1, O))[:, None]
                _store_half(sums, acc, start, tile, split, H, n, span, 0, R, UNIT, SPLITS, LEAST, FAR, BM, O)


@gluon.jit
def _follow(
    cursor, sums, H, n, kc, ps, shrinks, empty, ready, taken, R: gl.constexpr,
    UNIT: gl.constexpr, SPLITS: gl.constexpr, LEAST: gl.constexpr, FAR: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr,
):  # fmt: skip
    """The second warp group: the other half of the latents."""
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, R // 2, 16])  # noqa: E741
    start = gl.load(cursor).to(gl.int32)
    tiles = gl.cdiv(n * H, BM)
    count = 0
    turn = 0
    for item in range(gl.program_id(0), 2 * SPLITS * tiles, gl.num_programs(0)):
        tile, split = item % tiles, item // tiles
        for walk in range(2):
            span, begin, end = _extent(start, tile, split, H, n, walk, UNIT, SPLITS, LEAST, FAR, BM)
            if begin < end:
                acc = gl.zeros([BM, R // 2], gl.float32, O)
                for _key in range(begin, end, BN):
                    now = count % 2
                    mbarrier.wait(ready, turn & 1)
                    acc = acc * shrinks.load(gl.SliceLayout(1, O))[:, None]
                    acc = warpgroup_mma(ps, kc.index(now).slice(R // 2, R // 2, 1), acc, is_async=True)
                    acc = warpgroup_mma_wait(0, [acc])
                    barrier()
                    mbarrier.arrive(empty.index(now), count=1)
                    mbarrier.arrive(taken, count=1)
                    count += 1
                    turn += 1
                mbarrier.wait(ready, turn & 1)
                acc = acc * shrinks.load(gl.SliceLayout(1, O))[:, None]
                barrier()
                mbarrier.arrive(taken, count=1)
                turn += 1
                _store_half(sums, acc, start, tile, split, H, n, span, R // 2, R, UNIT, SPLITS, LEAST, FAR, BM, O)


@gluon.jit(do_not_specialize=["n"])
def attend_kernel(
    absorbed, pages, table, cursor, sums, tops, norms, factor, page_stride, H, n,
    KEY: gl.constexpr, R: gl.constexpr, P: gl.constexpr, PAGE: gl.constexpr,
    UNIT: gl.constexpr, SPLITS: gl.constexpr, LEAST: gl.constexpr, FAR: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr,
):  # fmt: skip
    """Arguments and results of decode_triton.attend_kernel; grid: any; BM = BN = 64, four warps and eight more."""
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    BARS: gl.constexpr = mbarrier.MBarrierLayout()
    kind: gl.constexpr = absorbed.dtype.element_ty
    qc = gl.allocate_shared_memory(kind, [BM, R], SHARED)
    qp = gl.allocate_shared_memory(kind, [BM, P], SHARED)
    kc = gl.allocate_shared_memory(kind, [2, BN, R], SHARED)
    kp = gl.allocate_shared_memory(kind, [2, BN, P], SHARED)
    ps = gl.allocate_shared_memory(kind, [BM, BN], SHARED)
    shrinks = gl.allocate_shared_memory(gl.float32, [BM], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [2, 1], BARS)
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], BARS)
    ready = gl.allocate_shared_memory(gl.int64, [1], BARS)
    taken = gl.allocate_shared_memory(gl.int64, [1], BARS)
    for i in gl.static_range(2):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    mbarrier.init(ready, count=1)
    mbarrier.init(taken, count=1)
    barrier()
    gl.warp_specialize(
        [
            (
                _weigh,
                (
                    absorbed, cursor, sums, tops, norms, factor, H, n, qc, qp, kc, kp, ps, shrinks,
                    full, empty, ready, taken, R, P, UNIT, SPLITS, LEAST, FAR, BM, BN,
                ),
            ),
            (
                _follow,
                (cursor, sums, H, n, kc, ps, shrinks, empty, ready, taken, R, UNIT, SPLITS, LEAST, FAR, BM, BN),
            ),
            (
                _copy,
                (
                    pages, table, cursor, page_stride, H, n, kc, kp, full, empty,
                    KEY, R, P, PAGE, UNIT, SPLITS, LEAST, FAR, BM, BN,
                ),
            ),
        ],
        [4, 4],
        [184, 80],
    )  # fmt: skip
