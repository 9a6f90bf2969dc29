"""`attend` of decode_triton for Hopper in Gluon: a warp that copies, two warp groups that share every block of keys.

Blocks of 64 keys are taken in pairs. The first group scores the even block, then the second the odd one; each publishes
its weights, and each adds both blocks to its own half of the latents. So one group's softmax runs beside the other's
products, and the maximum goes from block to block in order. Copies are bulk copies by halves of the columns; a half is
copied anew as soon as its group has added it. A program holds 64 queries of 576, a pair of blocks and one block of
weights in shared memory (226 KB), and 64 x 512 sums in registers. There is one program a processor; each takes tiles
and splits in turn, those of the same keys at the same time, and its copies run ahead into its next split. What is
summed with what does not depend on who does it. bf16 only.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from k3_kernels.mla.decode_hopper_parts_triton import (
    barrier,
    blank,
    copy,
    extent,
    finish,
    items_of,
    publish,
    scores,
    softmax,
)


@gluon.jit
def _even(
    cursor, sums, tops, norms, factor, H, n, qc, qp, kc, kp, ps, shrinks, peaks, parts, full, empty, ready, told,
    asked, done, scored, R: gl.constexpr,
    UNIT: gl.constexpr, SPLITS: gl.constexpr, LEAST: gl.constexpr, FAR: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr,
):  # fmt: skip
    """The first warp group: scores of even blocks, the left half of the latents."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, R // 2, 16])  # noqa: E741
    LEFT: gl.constexpr = gl.DotOperandLayout(0, O, 2)
    HALF: gl.constexpr = R // 2
    none = gl.zeros([BM, BN], gl.float32, S)
    start = gl.load(cursor).to(gl.int32)
    tiles = gl.cdiv(n * H, BM)
    turn = 0
    even = 0
    odd = 0
    for item in range(gl.program_id(0), items_of(start, tiles, n, UNIT, SPLITS, LEAST, FAR), gl.num_programs(0)):
        tile, split = item % tiles, item // tiles
        for walk in range(2):
            span, begin, end = extent(start, tile, split, H, n, walk, UNIT, SPLITS, LEAST, FAR, BM)
            if begin < end:
                p = start + (tile * BM + gl.arange(0, BM, gl.SliceLayout(1, S))) // H
                top = gl.full([BM], -1e30, gl.float32, gl.SliceLayout(1, S))
                norm = gl.zeros([BM], gl.float32, gl.SliceLayout(1, S))
                acc = gl.zeros([BM, HALF], gl.float32, O)
                mbarrier.wait(asked, turn & 1)
                for key in range(begin, end, 2 * BN):
                    s = scores(qc, qp, kc.index(0), kp.index(0), full.index(0), full.index(1), even & 1, none, 0, R)
                    s = warpgroup_mma_wait(0, [s])
                    mbarrier.arrive(scored, count=1)
                    if key + 2 * BN >= end:
                        barrier()
                        mbarrier.arrive(done, count=1)
                    weight, shrink, top, norm = softmax(s, key, p, top, norm, factor, BN, S)
                    held = weight.to(ps.dtype)
                    publish(held, shrink, top, ps, shrinks.index(0), peaks.index(0), ready.index(0))
                    if key + BN > end:
                        blank(kc.index(0).slice(0, HALF, 1), end - key, BN, R)
                    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, O))[:, None]
                    left = gl.convert_layout(held, LEFT)
                    acc = warpgroup_mma(left, kc.index(0).slice(0, HALF, 1), acc, is_async=True)
                    acc = warpgroup_mma_wait(0, [acc])
                    barrier()
                    mbarrier.arrive(empty.index(0), count=1)
                    even += 1
                    if key + BN < end:
                        mbarrier.wait(full.index(2), odd & 1)
                        mbarrier.wait(ready.index(1), odd & 1)
                        shrink = shrinks.index(1).load(gl.SliceLayout(1, S))
                        top = peaks.index(1).load(gl.SliceLayout(1, S))
                        norm = norm * shrink
                        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, O))[:, None]
                        if key + 2 * BN > end:
                            blank(kc.index(1).slice(0, HALF, 1), end - key - BN, BN, R)
                        acc = warpgroup_mma(ps, kc.index(1).slice(0, HALF, 1), acc, is_async=True)
                        acc = warpgroup_mma_wait(0, [acc])
                        barrier()
                        mbarrier.arrive(empty.index(2), count=1)
                        odd += 1
                finish(
                    sums, tops, norms, acc, top, norm, parts, told, turn, start, tile, split, H, n, span,
                    0, R, UNIT, SPLITS, LEAST, FAR, BM, S, O,
                )  # fmt: skip
                turn += 1


@gluon.jit
def _odd(
    cursor, sums, tops, norms, factor, H, n, qc, qp, kc, kp, ps, shrinks, peaks, parts, full, empty, ready, told,
    asked, done, scored, R: gl.constexpr,
    UNIT: gl.constexpr, SPLITS: gl.constexpr, LEAST: gl.constexpr, FAR: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr,
):  # fmt: skip
    """The second warp group: scores of odd blocks, the right half of the latents."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, R // 2, 16])  # noqa: E741
    LEFT: gl.constexpr = gl.DotOperandLayout(0, O, 2)
    HALF: gl.constexpr = R // 2
    none = gl.zeros([BM, BN], gl.float32, S)
    start = gl.load(cursor).to(gl.int32)
    tiles = gl.cdiv(n * H, BM)
    turn = 0
    even = 0
    odd = 0
    for item in range(gl.program_id(0), items_of(start, tiles, n, UNIT, SPLITS, LEAST, FAR), gl.num_programs(0)):
        tile, split = item % tiles, item // tiles
        for walk in range(2):
            span, begin, end = extent(start, tile, split, H, n, walk, UNIT, SPLITS, LEAST, FAR, BM)
            if begin < end:
                p = start + (tile * BM + gl.arange(0, BM, gl.SliceLayout(1, S))) // H
                top = gl.full([BM], -1e30, gl.float32, gl.SliceLayout(1, S))
                norm = gl.zeros([BM], gl.float32, gl.SliceLayout(1, S))
                acc = gl.zeros([BM, HALF], gl.float32, O)
                mbarrier.wait(asked, turn & 1)
                pairs = gl.cdiv(end - begin, BN) // 2
                for pair in range(pairs):
                    key = begin + (2 * pair + 1) * BN
                    # In turns: one group's softmax beside the other's scores.
                    mbarrier.wait(scored, even & 1)
                    s = scores(qc, qp, kc.index(1), kp.index(1), full.index(3), full.index(2), odd & 1, none, 1, R)
                    # Nothing may touch the sums while a product runs, or the assembler makes all of them wait.
                    s = warpgroup_mma_wait(0, [s])
                    mbarrier.wait(full.index(1), even & 1)
                    mbarrier.wait(ready.index(0), even & 1)
                    shrink = shrinks.index(0).load(gl.SliceLayout(1, S))
                    norm = norm * shrink
                    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, O))[:, None]
                    adding = warpgroup_mma(ps, kc.index(0).slice(HALF, HALF, 1), acc, is_async=True)
                    barrier()  # or the softmax is put in front of the product it should run beside
                    top = peaks.index(0).load(gl.SliceLayout(1, S))
                    weight, shrink, top, norm = softmax(s, key, p, top, norm, factor, BN, S)
                    held = weight.to(ps.dtype)
                    acc, held = warpgroup_mma_wait(0, [adding, held])  # held: or it is computed behind the wait
                    barrier()
                    mbarrier.arrive(empty.index(1), count=1)
                    if pair == pairs - 1:
                        mbarrier.arrive(done, count=1)
                    publish(held, shrink, top, ps, shrinks.index(1), peaks.index(1), ready.index(1))
                    if key + BN > end:
                        blank(kc.index(1).slice(HALF, HALF, 1), end - key, BN, R)
                    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, O))[:, None]
                    left = gl.convert_layout(held, LEFT)
                    acc = warpgroup_mma(left, kc.index(1).slice(HALF, HALF, 1), acc, is_async=True)
                    acc = warpgroup_mma_wait(0, [acc])
                    barrier()
                    mbarrier.arrive(empty.index(3), count=1)
                    even += 1
                    odd += 1
                key = begin + 2 * pairs * BN
                if key < end:
                    if pairs == 0:
                        mbarrier.arrive(done, count=1)
                    mbarrier.wait(full.index(1), even & 1)
                    mbarrier.wait(ready.index(0), even & 1)
                    shrink = shrinks.index(0).load(gl.SliceLayout(1, S))
                    top = peaks.index(0).load(gl.SliceLayout(1, S))
                    norm = norm * shrink
                    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, O))[:, None]
                    if key + BN > end:
                        blank(kc.index(0).slice(HALF, HALF, 1), end - key, BN, R)
                    acc = warpgroup_mma(ps, kc.index(0).slice(HALF, HALF, 1), acc, is_async=True)
                    acc = warpgroup_mma_wait(0, [acc])
                    barrier()
                    mbarrier.arrive(empty.index(1), count=1)
                    even += 1
                finish(
                    sums, tops, norms, acc, top, norm, parts, told, turn, start, tile, split, H, n, span,
                    1, R, UNIT, SPLITS, LEAST, FAR, BM, S, O,
                )  # fmt: skip
                turn += 1


@gluon.jit(do_not_specialize=["n"])
def attend_kernel(
    half_c, whole_p, half_q, whole_q, table, cursor, sums, tops, norms, factor, page_rows, H, n, ahead, lines,
    R: gl.constexpr, P: gl.constexpr, PAGE: gl.constexpr,
    UNIT: gl.constexpr, SPLITS: gl.constexpr, LEAST: gl.constexpr, FAR: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr,
):  # fmt: skip
    """Results of decode_triton.attend_kernel; pages and queries by descriptors; grid: any; four warps and five more.

    ahead: what comes behind reads these `lines` of 128 bytes, which are brought into the L2.
    """
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BARS: gl.constexpr = mbarrier.MBarrierLayout()
    kind: gl.constexpr = half_c.dtype
    qc = gl.allocate_shared_memory(kind, [BM, R], SHARED)
    qp = gl.allocate_shared_memory(kind, [BM, P], SHARED)
    kc = gl.allocate_shared_memory(kind, [2, BN, R], SHARED)
    kp = gl.allocate_shared_memory(kind, [2, BN, P], SHARED)
    ps = gl.allocate_shared_memory(kind, [BM, BN], SHARED)
    # By group: shrinking, maxima, and (by turns) norms.
    shrinks = gl.allocate_shared_memory(gl.float32, [2, BM], LINE)
    peaks = gl.allocate_shared_memory(gl.float32, [2, BM], LINE)
    parts = gl.allocate_shared_memory(gl.float32, [4, BM], LINE)
    # 2 x block + half of its columns.
    full = gl.allocate_shared_memory(gl.int64, [4, 1], BARS)
    empty = gl.allocate_shared_memory(gl.int64, [4, 1], BARS)
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], BARS)
    told = gl.allocate_shared_memory(gl.int64, [4, 1], BARS)
    asked = gl.allocate_shared_memory(gl.int64, [1], BARS)
    done = gl.allocate_shared_memory(gl.int64, [1], BARS)
    scored = gl.allocate_shared_memory(gl.int64, [1], BARS)
    for i in gl.static_range(4):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
        mbarrier.init(told.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(ready.index(i), count=1)
    mbarrier.init(asked, count=1)
    mbarrier.init(done, count=2)
    mbarrier.init(scored, count=1)
    fence_async_shared()
    barrier()
    gl.warp_specialize(
        [
            (
                _even,
                (
                    cursor, sums, tops, norms, factor, H, n, qc, qp, kc, kp, ps, shrinks, peaks, parts, full, empty,
                    ready, told, asked, done, scored, R, UNIT, SPLITS, LEAST, FAR, BM, BN,
                ),
            ),
            (
                _odd,
                (
                    cursor, sums, tops, norms, factor, H, n, qc, qp, kc, kp, ps, shrinks, peaks, parts, full, empty,
                    ready, told, asked, done, scored, R, UNIT, SPLITS, LEAST, FAR, BM, BN,
                ),
            ),
            (
                copy,
                (
                    half_c, whole_p, half_q, whole_q, table, cursor, page_rows, H, n, qc, qp, kc, kp, full, empty,
                    asked, done, ahead, lines, PAGE, R, UNIT, SPLITS, LEAST, FAR, BM, BN,
                ),
            ),
        ],
        [4, 1],
        [216, 32],
    )  # fmt: skip


def descriptors(pages: Tensor, absorbed: Tensor, R: int, BM: int, BN: int) -> tuple[TensorDescriptor, ...]:
    """(half a block's latents, its shared key parts, the same of queries); rows count from the first page's first."""
    count, size, width = pages.shape
    page, key, _ = pages.stride()
    rows = pages.as_strided(((count - 1) * (page // key) + size, width), (key, 1))
    layout = gl.NVMMASharedLayout(128, 16, 2)
    return tuple(
        TensorDescriptor.from_tensor(source, [height, part], layout)
        for source, height in ((rows, BN), (absorbed, BM))
        for part in (R // 2, width - R)
    )
