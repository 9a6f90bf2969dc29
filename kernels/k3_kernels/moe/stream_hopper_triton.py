"""The product of a window's experts for Hopper in Gluon: a stream of weights that never waits for a warp.

One program a processor takes an equal share of all tiles of 64 weight rows. One warp keeps a ring of packed weights
and scales filled by the copy engine, so bytes in flight don't depend on who decodes; the rows of the window lie in
shared memory. Four warp groups decode a quarter of the columns each, in registers, and multiply; their four sums are
added in one order by the group whose turn it is. Every row of the window is a column of every product, wanted or not:
it costs nothing, columns don't see each other, and only wanted ones are stored. The products are the older matrix
instruction's: for eight columns it is fast enough, and the next stage is decoded between its results.

Orders of rows and columns: `decode_hopper_triton`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    mma_v2,
    tma,
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

STEP = gl.constexpr(512)
"""Columns of a stage of the ring: 16 scales a row, the least the copy engine takes."""


@gluon.jit
def after_the_kernel_before():
    """Under programmatic launch, what the kernel before wrote is there from here on."""
    gl.inline_asm_elementwise("griddepcontrol.wait; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def let_the_next_kernel_start():
    """Its programs come as processors become free; they may rely on all that was there before this kernel."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _share(count, OUT: gl.constexpr):
    """(first, end) of this program's tiles."""
    items = gl.load(count) * (OUT // 64)
    p = gl.program_id(0)
    return items * p // gl.num_programs(0), items * (p + 1) // gl.num_programs(0)


@gluon.jit
def _copy(
    rows, words, marks, used, count, held, packed, scales, full, empty, ready, free,
    GATED: gl.constexpr, OUT: gl.constexpr, WIDTH: gl.constexpr, STAGES: gl.constexpr, HELD: gl.constexpr,
):  # fmt: skip
    """One warp: rows of an expert when it changes, weights and scales of a stage."""
    J: gl.constexpr = WIDTH // 8
    UNITS: gl.constexpr = OUT // 64
    R: gl.constexpr = rows.block_shape[0]
    further_row: gl.constexpr = OUT // 8 if GATED else 0
    further_word: gl.constexpr = 0 if GATED else J
    # Rows of a new expert follow the weights that the ring has room for before anybody needs them.
    LATE: gl.constexpr = (STAGES if STAGES < WIDTH // STEP else WIDTH // STEP) - 1
    if GATED:
        after_the_kernel_before()
    let_the_next_kernel_start()
    first, end = _share(count, OUT)
    stage = 0
    experts = 0
    last = -1
    for item in range(first, end):
        place = item // UNITS
        unit = item % UNITS
        expert = gl.load(used + place)
        source = 0 if GATED else place
        if GATED:
            row = expert * (OUT // 4) + unit // 4 * 32
            word = unit % 4 * J
        else:
            row = expert * (OUT // 2) + unit * 32
            word = 0
        for step in range(WIDTH // STEP):
            now = stage % STAGES
            mbarrier.wait(empty.index(now), (stage // STAGES + 1) & 1)
            bar = full.index(now)
            mbarrier.expect(bar, 4 * words.block_type.nbytes + 2 * marks.block_type.nbytes)
            for half in gl.static_range(2):
                r = row + half * further_row
                w = word + half * further_word
                for q in gl.static_range(2):
                    tma.async_copy_global_to_shared(
                        words, [r, w + step * 64 + q * 32], bar, packed.index(now * 4 + 2 * q + half)
                    )
                tma.async_copy_global_to_shared(marks, [r, w // 4 + step * 16], bar, scales.index(now * 2 + half))
            stage += 1
            if (step == LATE) & (source != last):
                if not GATED:
                    after_the_kernel_before()
                at = experts % HELD
                mbarrier.wait(free.index(at), (experts // HELD + 1) & 1)
                mbarrier.expect(ready.index(at), (WIDTH // 64) * rows.block_type.nbytes)
                for c in range(WIDTH // 64):
                    tma.async_copy_global_to_shared(
                        rows, [source * R, c * 64], ready.index(at), held.index(at * (WIDTH // 64) + c)
                    )
                experts += 1
                last = source


@gluon.jit
def _fetch(
    packed, scales, full, empty, stage, GROUP: gl.constexpr, GATED: gl.constexpr, STAGES: gl.constexpr,
    A: gl.constexpr,
):  # fmt: skip
    """A group's quarter of a stage, decoded, once it is there: two operands of 64 columns. The stage is free then."""
    X: gl.constexpr = X_GATED if GATED else X_PLAIN
    X3: gl.constexpr = X3_GATED if GATED else X3_PLAIN
    S: gl.constexpr = gl.SliceLayout(2, X3)
    now = stage % STAGES
    mbarrier.wait(full.index(now), (stage // STAGES) & 1)
    box = now * 4 + GROUP // 2 * 2
    x0 = packed.index(box).slice(GROUP % 2 * 16, 16, 1).load(X).reshape([32, 4, 4])
    x1 = packed.index(box + 1).slice(GROUP % 2 * 16, 16, 1).load(X).reshape([32, 4, 4])
    x0, x1 = gl.convert_layout(x0, X3), gl.convert_layout(x1, X3)
    both0 = both(scales.index(now * 2).slice(4 * GROUP, 4, 1).load(S))
    both1 = both(scales.index(now * 2 + 1).slice(4 * GROUP, 4, 1).load(S))
    a = operand(x0, x1, both0, both1, 0, GATED, A)
    b = operand(x0, x1, both0, both1, 1, GATED, A)
    barrier()
    mbarrier.arrive(empty.index(now), count=1)
    return a, b


@gluon.jit
def _multiply(
    member, count, to, n, held, packed, scales, sums, full, empty, ready, free, done, taken, GROUP: gl.constexpr,
    GATED: gl.constexpr, OUT: gl.constexpr, WIDTH: gl.constexpr, BETA: gl.constexpr, LINEAR_BETA: gl.constexpr,
    R: gl.constexpr, STAGES: gl.constexpr, HELD: gl.constexpr,
):  # fmt: skip
    """One warp group: a quarter of the columns of every stage, and every fourth tile's result."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, ACC, 2)
    UNITS: gl.constexpr = OUT // 64
    CHUNKS: gl.constexpr = WIDTH // 64
    if GATED:
        after_the_kernel_before()
    STEPS: gl.constexpr = WIDTH // STEP
    first, end = _share(count, OUT)
    stage = 0
    experts = 0
    last = -1
    if first < end:
        a, b = _fetch(packed, scales, full, empty, 0, GROUP, GATED, STAGES, A)
        for item in range(first, end):
            source = 0 if GATED else item // UNITS
            if source != last:
                if experts > 0:
                    barrier()
                    mbarrier.arrive(free.index((experts - 1) % HELD), count=1)
                mbarrier.wait(ready.index(experts % HELD), (experts // HELD) & 1)
                experts += 1
                last = source
            mine = (experts - 1) % HELD * CHUNKS
            acc = gl.zeros([64, R], gl.float32, ACC)
            more = gl.zeros([64, R], gl.float32, ACC)
            for step in range(STEPS):
                at = mine + step * 8 + 2 * GROUP
                acc = mma_v2(a, held.index(at).permute([1, 0]).load(B), acc)
                more = mma_v2(b, held.index(at + 1).permute([1, 0]).load(B), more)
                # Behind the last stage, the last one again.
                stage = gl.minimum(stage + 1, (end - first) * STEPS - 1)
                a, b = _fetch(packed, scales, full, empty, stage, GROUP, GATED, STAGES, A)
            tile = item - first
            turn = tile % 2
            mbarrier.wait(taken.index(turn), (tile // 2 + 1) & 1)
            sums.index(turn * 4 + GROUP).store(acc + more)
            barrier()
            mbarrier.arrive(done.index(turn), count=1)
            if tile % 4 == GROUP:
                mbarrier.wait(done.index(turn), (tile // 2) & 1)
                total = sums.index(turn * 4).load(ACC) + sums.index(turn * 4 + 1).load(ACC)
                total += sums.index(turn * 4 + 2).load(ACC)
                total += sums.index(turn * 4 + 3).load(ACC)
                barrier()
                mbarrier.arrive(taken.index(turn), count=1)
                _store(total, to, member, item // UNITS, item % UNITS, n, OUT, GATED, BETA, LINEAR_BETA, R)


@gluon.jit
def _store(
    acc, to, member, place, unit, n, OUT: gl.constexpr, GATED: gl.constexpr, BETA: gl.constexpr,
    LINEAR_BETA: gl.constexpr, R: gl.constexpr,
):  # fmt: skip
    """Inner values of all live rows, or outputs of the rows that chose the expert."""
    F: gl.constexpr = 32 if GATED else 64
    acc = acc * 4611686018427387904.0  # 2^62
    kind: gl.constexpr = to.dtype.element_ty
    if GATED:
        gate, up = gl.split(acc.reshape([4, 2, 8, R]).permute(3, 0, 2, 1).reshape([R, 32, 2]))
        found = activated(gate, up, BETA, LINEAR_BETA).to(kind)
    else:
        found = acc.reshape([4, 2, 8, R]).permute(3, 0, 2, 1).reshape([R, 64]).to(kind)
    FLAT: gl.constexpr = gl.BlockedLayout([1, 2], [4, 8], [1, 4], [1, 0])
    found = gl.convert_layout(found, FLAT)
    r = gl.arange(0, R, gl.SliceLayout(1, FLAT))
    column = unit * F + gl.arange(0, F, gl.SliceLayout(0, FLAT))
    if GATED:
        at = to + (place * R + r)[:, None] * (OUT // 2) + column[None, :]
        gl.store(at, found, mask=(r < n)[:, None])
    else:
        pair = gl.load(member + place * R + r)
        at = to + pair.to(gl.int64)[:, None] * OUT + column[None, :]
        gl.store(at, found, mask=(pair >= 0)[:, None])


@gluon.jit(do_not_specialize=["n"])
def stream(
    rows, words, marks, used, member, count, to, n,
    GATED: gl.constexpr, OUT: gl.constexpr, WIDTH: gl.constexpr, BETA: gl.constexpr, LINEAR_BETA: gl.constexpr,
    R: gl.constexpr, STAGES: gl.constexpr, HELD: gl.constexpr,
):  # fmt: skip
    BARS: gl.constexpr = mbarrier.MBarrierLayout()
    held = gl.allocate_shared_memory(rows.dtype, [HELD * (WIDTH // 64), R, 64], rows.layout)
    packed = gl.allocate_shared_memory(gl.int32, [4 * STAGES, 32, 32], words.layout)
    scales = gl.allocate_shared_memory(gl.uint8, [2 * STAGES, 32, 16], marks.layout)
    sums = gl.allocate_shared_memory(gl.float32, [8, 64, R], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARS)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARS)
    ready = gl.allocate_shared_memory(gl.int64, [HELD, 1], BARS)
    free = gl.allocate_shared_memory(gl.int64, [HELD, 1], BARS)
    done = gl.allocate_shared_memory(gl.int64, [2, 1], BARS)
    taken = gl.allocate_shared_memory(gl.int64, [2, 1], BARS)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=4)
    for i in gl.static_range(HELD):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(free.index(i), count=4)
    for i in gl.static_range(2):
        mbarrier.init(done.index(i), count=4)
        mbarrier.init(taken.index(i), count=1)
    fence_async_shared()
    barrier()
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    member, count, to, n, held, packed, scales, sums, full, empty, ready, free, done, taken, 0,
                    GATED, OUT, WIDTH, BETA, LINEAR_BETA, R, STAGES, HELD,
                ),
            ),
            (
                _multiply,
                (
                    member, count, to, n, held, packed, scales, sums, full, empty, ready, free, done, taken, 1,
                    GATED, OUT, WIDTH, BETA, LINEAR_BETA, R, STAGES, HELD,
                ),
            ),
            (
                _multiply,
                (
                    member, count, to, n, held, packed, scales, sums, full, empty, ready, free, done, taken, 2,
                    GATED, OUT, WIDTH, BETA, LINEAR_BETA, R, STAGES, HELD,
                ),
            ),
            (
                _multiply,
                (
                    member, count, to, n, held, packed, scales, sums, full, empty, ready, free, done, taken, 3,
                    GATED, OUT, WIDTH, BETA, LINEAR_BETA, R, STAGES, HELD,
                ),
            ),
            (
                _copy,
                (
                    rows, words, marks, used, count, held, packed, scales, full, empty, ready, free,
                    GATED, OUT, WIDTH, STAGES, HELD,
                ),
            ),
        ],
        [4, 4, 4, 1],
        [112, 112, 112, 40],
    )  # fmt: skip
