"""The walk of prefill_triton for Hopper in Gluon, K = V = 128, bf16: warps that copy, warps that multiply.

One warp fills a ring of buffers with the operands of coming chunks. Two warp groups hold 64 rows each of one head's
state in registers, read every buffer together and never wait for each other, only for the ring. The queries' product
runs while the update of the state is worked out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

# Named anew between Triton 3.6 and 3.7.
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


@gluon.jit
def _copy(
    k_start, q_start, k_end, solve, mix, low, decay, beta, itself, v,
    keys, queries, ends, solves, mixes, fades, rates, owns, values, full, empty,
    first, n, each, H, V: gl.constexpr, C: gl.constexpr, STAGES: gl.constexpr, OUTPUT: gl.constexpr,
):  # fmt: skip
    """Fills the ring, one buffer a chunk."""
    head = gl.program_id(1)
    begin = gl.program_id(2) * each
    count = 0
    for chunk in range(begin, gl.minimum(begin + each, n)):
        now = count % STAGES
        line = chunk * H + head
        mbarrier.wait(empty.index(now), (count // STAGES + 1) & 1)
        ready = full.index(now)
        if OUTPUT:
            mbarrier.expect(
                ready,
                k_start.block_type.nbytes + q_start.block_type.nbytes + k_end.block_type.nbytes
                + 2 * solve.block_type.nbytes + mix.block_type.nbytes + decay.block_type.nbytes
                + beta.block_type.nbytes + itself.block_type.nbytes + v.block_type.nbytes,
            )  # fmt: skip
        else:
            mbarrier.expect(
                ready,
                k_start.block_type.nbytes + k_end.block_type.nbytes + 2 * solve.block_type.nbytes
                + decay.block_type.nbytes + beta.block_type.nbytes + v.block_type.nbytes,
            )  # fmt: skip
        tma.async_copy_global_to_shared(k_start, [line * C, 0], ready, keys.index(now))
        tma.async_copy_global_to_shared(v, [first + chunk * C, head * V], ready, values.index(now))
        tma.async_copy_global_to_shared(beta, [line, 0], ready, rates.index(now))
        tma.async_copy_global_to_shared(solve, [line * C, 0], ready, solves.index(2 * now))
        tma.async_copy_global_to_shared(low, [line * C, 0], ready, solves.index(2 * now + 1))
        tma.async_copy_global_to_shared(decay, [line, 0], ready, fades.index(now))
        tma.async_copy_global_to_shared(k_end, [line * C, 0], ready, ends.index(now))
        if OUTPUT:
            tma.async_copy_global_to_shared(q_start, [line * C, 0], ready, queries.index(now))
            tma.async_copy_global_to_shared(mix, [line * C, 0], ready, mixes.index(now))
            tma.async_copy_global_to_shared(itself, [line, 0], ready, owns.index(now))
        count += 1


@gluon.jit
def _multiply(
    o, start, end, keys, queries, ends, solves, mixes, fades, rates, owns, values, outs, full, empty,
    first, n, each, H, GROUP: gl.constexpr, K: gl.constexpr, V: gl.constexpr, C: gl.constexpr,
    STAGES: gl.constexpr, OUTPUT: gl.constexpr,
):  # fmt: skip
    """One warp group: rows [tile V + 64 GROUP, + 64) of the state through the chunks of a segment."""
    ROWS: gl.constexpr = 64
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    PAIR: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, PAIR, 2)
    LEFT_ACC: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    kind: gl.constexpr = keys.dtype
    tile = gl.program_id(0)
    head = gl.program_id(1)
    segment = gl.program_id(2)
    row = tile * V + GROUP * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, ACC))
    d = gl.arange(0, K, gl.SliceLayout(0, ACC))
    if OUTPUT:
        S = gl.load(start + ((segment * H + head) * V + row[:, None]) * K + d[None, :])
    else:
        S = gl.where(row[:, None] - V == d[None, :], 1.0, 0.0)
    none = gl.zeros([ROWS, C], gl.float32, PAIR)
    begin = segment * each
    count = 0
    for chunk in range(begin, gl.minimum(begin + each, n)):
        now = count % STAGES
        mbarrier.wait(full.index(now), (count // STAGES) & 1)
        held = gl.convert_layout(S.to(kind), LEFT)
        met = warpgroup_mma(held, keys.index(now).permute([1, 0]), none, use_acc=False, is_async=True)
        if OUTPUT:
            out = warpgroup_mma(held, queries.index(now).permute([1, 0]), none, use_acc=False, is_async=True)
        given = values.index(now).slice(GROUP * ROWS, ROWS, 1).permute([1, 0]).load(PAIR).to(gl.float32)
        if not OUTPUT:
            given = gl.where(tile == 0, given, 0.0)
        rate = rates.index(now).load(PAIR)
        S = S * fades.index(now).load(ACC)
        if OUTPUT:
            met, out = warpgroup_mma_wait(1, [met, out])
        else:
            met = warpgroup_mma_wait(0, [met])
        rest = (given - met) * rate
        whole = rest.to(kind)
        lost = gl.convert_layout((rest - whole.to(gl.float32)).to(kind), LEFT)
        whole = gl.convert_layout(whole, LEFT)
        u = warpgroup_mma(whole, solves.index(2 * now).permute([1, 0]), rest, is_async=True)
        u = warpgroup_mma(whole, solves.index(2 * now + 1).permute([1, 0]), u, is_async=True)
        u = warpgroup_mma(lost, solves.index(2 * now).permute([1, 0]), u, is_async=True)
        if OUTPUT:
            u, out = warpgroup_mma_wait(0, [u, out])
        else:
            u = warpgroup_mma_wait(0, [u])
        near = u.to(kind)
        low = (u - near.to(gl.float32)).to(kind)
        S = warpgroup_mma(gl.convert_layout(near, LEFT_ACC), ends.index(now), S, is_async=True)
        S = warpgroup_mma(gl.convert_layout(low, LEFT_ACC), ends.index(now), S, is_async=True)
        if OUTPUT:
            out = warpgroup_mma(gl.convert_layout(near, LEFT), mixes.index(now).permute([1, 0]), out, is_async=True)
            own = u * owns.index(now).load(PAIR)
            # Both at once: ptxas crashes when the outputs are stored while the state's products run.
            out, S = warpgroup_mma_wait(0, [out, S])
            mine = outs.index(2 * GROUP + count % 2)
            tma.store_wait(1)
            barrier()
            mine.permute([1, 0]).store((out + own).to(kind))
            fence_async_shared()
        else:
            S = warpgroup_mma_wait(0, [S])
        barrier()
        if OUTPUT:
            tma.async_copy_shared_to_global(o, [first + chunk * C, head * V + GROUP * ROWS], mine)
        mbarrier.arrive(empty.index(now), count=1)
        count += 1
    if OUTPUT:
        if segment == gl.num_programs(2) - 1:
            gl.store(end + (head * V + row[:, None]) * K + d[None, :], S)
        tma.store_wait(0)
    else:
        gl.store(end + ((segment * H + head) * (V + K) + row[:, None]) * K + d[None, :], S)


@gluon.jit(do_not_specialize=["first", "n", "each"])
def walk(
    k_start, q_start, k_end, solve, mix, low, decay, beta, itself, v, o, start, end, first, n, each, H,
    K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, STAGES: gl.constexpr,
    OUTPUT: gl.constexpr,
):  # fmt: skip
    """Arguments and results of prefill_triton's walk, all tensors but start and end as descriptors. Grid (tiles of V
    rows, heads, segments), four warps and five more."""
    BARS: gl.constexpr = mbarrier.MBarrierLayout()
    OUT: gl.constexpr = STAGES if OUTPUT else 1
    keys = gl.allocate_shared_memory(k_start.dtype, [STAGES, C, K], k_start.layout)
    ends = gl.allocate_shared_memory(k_end.dtype, [STAGES, C, K], k_end.layout)
    values = gl.allocate_shared_memory(v.dtype, [STAGES, C, V], v.layout)
    solves = gl.allocate_shared_memory(solve.dtype, [2 * STAGES, C, C], solve.layout)
    fades = gl.allocate_shared_memory(decay.dtype, [STAGES, 1, K], decay.layout)
    rates = gl.allocate_shared_memory(beta.dtype, [STAGES, 1, C], beta.layout)
    owns = gl.allocate_shared_memory(itself.dtype, [OUT, 1, C], itself.layout)
    queries = gl.allocate_shared_memory(q_start.dtype, [OUT, C, K], q_start.layout)
    mixes = gl.allocate_shared_memory(mix.dtype, [OUT, C, C], mix.layout)
    outs = gl.allocate_shared_memory(o.dtype, [4 if OUTPUT else 1, C, 64], o.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARS)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARS)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    barrier()
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    o, start, end, keys, queries, ends, solves, mixes, fades, rates, owns, values, outs, full, empty,
                    first, n, each, H, 0, K, V, C, STAGES, OUTPUT,
                ),
            ),
            (
                _multiply,
                (
                    o, start, end, keys, queries, ends, solves, mixes, fades, rates, owns, values, outs, full, empty,
                    first, n, each, H, 1, K, V, C, STAGES, OUTPUT,
                ),
            ),
            (
                _copy,
                (
                    k_start, q_start, k_end, solve, mix, low, decay, beta, itself, v,
                    keys, queries, ends, solves, mixes, fades, rates, owns, values, full, empty,
                    first, n, each, H, V, C, STAGES, OUTPUT,
                ),
            ),
        ],
        [4, 1],
        [216, 32],
    )  # fmt: skip


def launcher(parts: NamedTuple, v: Tensor, o: Tensor) -> Callable[..., None]:
    """The walk with these operands; see prefill_triton."""
    tiles, squares, *lines = parts
    _, H, V = v.shape
    C, K = squares.shape[-1], tiles.shape[-1]
    wide, square, line = (gl.NVMMASharedLayout(*x, 2) for x in ((128, 16), (64, 16), (0, 32)))
    shared = (
        *(TensorDescriptor.from_tensor(x, [C, K], wide) for x in tiles),
        *(TensorDescriptor.from_tensor(x, [C, C], square) for x in squares),
        *(TensorDescriptor.from_tensor(x, [1, x.shape[1]], line) for x in lines),
        TensorDescriptor.from_tensor(v.flatten(1), [C, V], wide),
        TensorDescriptor.from_tensor(o.flatten(1), [C, 64], wide),
    )

    def launch(
        grid: tuple[int, int, int], start: Tensor, end: Tensor, first: int, n: int, each: int, output: bool
    ) -> None:
        walk[grid](
            *shared, start, end, first, n, each, H, K=K, V=V, C=C, STAGES=4 if output else 5, OUTPUT=output, num_warps=4
        )

    return launch
