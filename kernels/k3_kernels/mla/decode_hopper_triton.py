"""`attend` of decode_triton for Hopper in Gluon, where layouts are ours: Triton computes the scores of a tile once per
warp group, here each warp group computes half of them.

One program holds 64 queries of 576, two blocks of 64 keys and one block of weights in shared memory (224 KB) and the
64 x 512 sums in the registers of two warp groups, 64 x 256 each. In order of issue: scores of block t, then (when the
products of block t - 1 are done with its buffer) the copies of block t + 1, softmax, products of block t. bf16 only.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

# Named anew between Triton 3.6 and 3.7.
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


@gluon.jit
def _span(p, UNIT: gl.constexpr, SPLITS: gl.constexpr, LEAST: gl.constexpr, FAR: gl.constexpr):
    reach = gl.where(p < FAR, UNIT * SPLITS, 2 * UNIT * SPLITS)
    return gl.maximum(p // reach + 1, LEAST) * UNIT


@gluon.jit
def _copy(kc, kp, source, keys, end, KEY: gl.constexpr, R: gl.constexpr, P: gl.constexpr, BN: gl.constexpr):
    """Starts the copies of BN keys; rows at `end` and behind become zeros."""
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 2], [1, 0])
    NARROW: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    row = gl.arange(0, BN, gl.SliceLayout(1, WIDE))
    column = gl.arange(0, R, gl.SliceLayout(0, WIDE))
    there = (row < end - keys)[:, None]
    async_copy.async_copy_global_to_shared(kc, source + (row * KEY)[:, None] + column[None, :], mask=there)
    row = gl.arange(0, BN, gl.SliceLayout(1, NARROW))
    column = gl.arange(0, P, gl.SliceLayout(0, NARROW))
    there = (row < end - keys)[:, None]
    async_copy.async_copy_global_to_shared(kp, source + (row * KEY)[:, None] + (R + column)[None, :], mask=there)
    async_copy.commit_group()


@gluon.jit(do_not_specialize=["n"])
def attend_kernel(
    absorbed, pages, table, cursor, sums, tops, norms, factor, page_stride, H, n,
    KEY: gl.constexpr, R: gl.constexpr, P: gl.constexpr, PAGE: gl.constexpr,
    UNIT: gl.constexpr, SPLITS: gl.constexpr, LEAST: gl.constexpr, FAR: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr,
):  # fmt: skip
    """Arguments, grid and results of decode_triton.attend_kernel; BM = BN = 64, eight warps."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, BN // 2, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, min(R // 2, 256), 16])  # noqa: E741
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 2], [1, 0])
    NARROW: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    kind: gl.constexpr = absorbed.dtype.element_ty
    qc = gl.allocate_shared_memory(kind, [BM, R], SHARED)
    qp = gl.allocate_shared_memory(kind, [BM, P], SHARED)
    kc = gl.allocate_shared_memory(kind, [2, BN, R], SHARED)
    kp = gl.allocate_shared_memory(kind, [2, BN, P], SHARED)
    ps = gl.allocate_shared_memory(kind, [BM, BN], SHARED)
    tile, split = gl.program_id(0), gl.program_id(1)
    start = gl.load(cursor).to(gl.int32)
    pair = tile * BM + gl.arange(0, BM, gl.SliceLayout(1, S))
    p = start + pair // H
    first = start + tile * BM // H
    last = start + gl.minimum((tile * BM + BM - 1) // H, n - 1)
    low, high = _span(first, UNIT, SPLITS, LEAST, FAR), _span(last, UNIT, SPLITS, LEAST, FAR)
    walks = 1 + (high != low).to(gl.int32)
    for walk in range(walks):
        span = gl.where(walk == 0, low, high)
        begin = split * span
        end = gl.minimum(begin + span, last + 1)
        if begin < end:
            barrier()  # the walk before is done with all buffers
            row = tile * BM + gl.arange(0, BM, gl.SliceLayout(1, WIDE))
            from_ = absorbed + (row * (R + P))[:, None] + gl.arange(0, R, gl.SliceLayout(0, WIDE))[None, :]
            qc.store(gl.load(from_, mask=(row < n * H)[:, None], other=0.0))
            row = tile * BM + gl.arange(0, BM, gl.SliceLayout(1, NARROW))
            from_ = absorbed + (row * (R + P) + R)[:, None] + gl.arange(0, P, gl.SliceLayout(0, NARROW))[None, :]
            qp.store(gl.load(from_, mask=(row < n * H)[:, None], other=0.0))
            top = gl.full([BM], -1e30, gl.float32, gl.SliceLayout(1, S))
            norm = gl.zeros([BM], gl.float32, gl.SliceLayout(1, S))
            acc = gl.zeros([BM, R], gl.float32, O)
            none = gl.zeros([BM, BN], gl.float32, S)
            page = gl.load(table + begin // PAGE).to(gl.int64)
            _copy(
                kc.index(0), kp.index(0), pages + page * page_stride + (begin % PAGE) * KEY, begin, end, KEY, R, P, BN
            )
            page = gl.load(table + gl.minimum(begin + BN, end - 1) // PAGE).to(gl.int64)
            for key in range(begin, end, BN):
                now = ((key - begin) // BN) % 2
                async_copy.wait_group(0)
                fence_async_shared()
                barrier()
                s = warpgroup_mma(qc, kc.index(now).permute([1, 0]), none, use_acc=False, is_async=True)
                s = warpgroup_mma(qp, kp.index(now).permute([1, 0]), s, is_async=True)
                # The other buffer is free: its products were waited for by all warps before the barrier.
                if key + BN < end:
                    source = pages + page * page_stride + ((key + BN) % PAGE) * KEY
                    _copy(kc.index(1 - now), kp.index(1 - now), source, key + BN, end, KEY, R, P, BN)
                    page = gl.load(table + gl.minimum(key + 2 * BN, end - 1) // PAGE).to(gl.int64)
                s = warpgroup_mma_wait(0, [s])
                keys = key + gl.arange(0, BN, gl.SliceLayout(0, S))
                s = gl.where(keys[None, :] <= p[:, None], s, float("-inf"))
                new = gl.maximum(top, gl.max(s, 1))
                weight = gl.exp2((s - new[:, None]) * factor)
                shrink = gl.exp2((top - new) * factor)
                norm = norm * shrink + gl.sum(weight, 1)
                top = new
                ps.store(weight.to(kind))
                acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, O))[:, None]
                fence_async_shared()
                barrier()
                acc = warpgroup_mma(ps, kc.index(now), acc, is_async=True)
                acc = warpgroup_mma_wait(0, [acc])
            mine = (pair < n * H) & (_span(p, UNIT, SPLITS, LEAST, FAR) == span)
            at = pair.to(gl.int64) * (2 * SPLITS) + split
            gl.store(tops + at, top, mask=mine)
            gl.store(norms + at, norm, mask=mine)
            at = gl.convert_layout(at, gl.SliceLayout(1, O))
            mine = gl.convert_layout(mine, gl.SliceLayout(1, O))
            column = gl.arange(0, R, gl.SliceLayout(0, O))
            acc = acc / gl.convert_layout(norm, gl.SliceLayout(1, O))[:, None]
            gl.store(sums + (at * R)[:, None] + column[None, :], acc.to(sums.dtype.element_ty), mask=mine[:, None])
