"""Shared memory of a cluster of programs on Hopper, in Gluon: what one program makes and others use.

The language has no operation on another program's shared memory, so the rows are in a buffer of their own, and every
access to it is written out. An address is an int32 of shared memory, the same in all programs of a cluster. A thread's
four neighbouring channels are one access, whose address and predicate are those of the first of them.

A store to another program counts its bytes at a memory barrier there. Who has waited for all bytes sees all rows, and
knows that whatever was loaded to make them has been read: no fence of all memory is needed, which would wait for the
state on its way.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

PARTS = gl.constexpr(4)
"""Programs in a cluster; the texts below store to each."""


@gluon.jit
def _buffer(LONG: gl.constexpr):
    """Address of this program's part of the buffer: 40 KB, of which the state takes the last 16, or LONG 47 KB without
    one. To be called once."""
    if LONG:
        return gl.inline_asm_elementwise(
            "{ .shared .align 1024 .b8 cluster_rows[48128]; mov.u32 $0, cluster_rows; }", "=r", [], dtype=gl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip
    return gl.inline_asm_elementwise(
        "{ .shared .align 1024 .b8 cluster_rows[40960]; mov.u32 $0, cluster_rows; }", "=r", [], dtype=gl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _start(barriers):
    """Makes three memory barriers of 8 bytes, of one arrival each, and tells the cluster that this program runs."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred p;
        .reg .b32 thread;
        mov.u32 thread, %tid.x;
        setp.eq.s32 p, thread, 0;
        @p mbarrier.init.shared::cta.b64 [$1], 1;
        @p mbarrier.init.shared::cta.b64 [$1 + 8], 1;
        @p mbarrier.init.shared::cta.b64 [$1 + 16], 1;
        @p fence.mbarrier_init.release.cluster;
        barrier.cluster.arrive.relaxed.aligned;
        mov.u32 $0, 0;
        }""",
        "=r,r", [barriers], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _started(barriers, bytes_of_rows, bytes_of_outputs):
    """Returns when all programs of the cluster run; says what this one is to receive."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred p;
        .reg .b32 thread;
        barrier.cluster.wait.aligned;
        mov.u32 thread, %tid.x;
        setp.eq.s32 p, thread, 0;
        @p mbarrier.arrive.expect_tx.shared::cta.b64 _, [$1], $2;
        @p mbarrier.arrive.expect_tx.shared::cta.b64 _, [$1 + 8], $3;
        mov.u32 $0, 0;
        }""",
        "=r,r,r,r", [barriers, bytes_of_rows, bytes_of_outputs], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _received(barrier):
    """Returns when all bytes that this memory barrier was told of have come."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred done;
        again:
        mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [$1], 0;
        @!done bra again;
        mov.u32 $0, 0;
        }""",
        "=r,r", [barrier], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _rank():
    """Which program of the cluster this is."""
    return gl.inline_asm_elementwise("mov.u32 $0, %cluster_ctarank;", "=r", [], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _warp():
    """A thread's warp in its program. What is under a condition on it must not need other warps; it comes from the
    first lane, or else the compiler would take every later shuffle for one of a warp that has parted."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 warp;
        mov.u32 warp, %tid.x;
        shr.u32 warp, warp, 5;
        shfl.sync.idx.b32 $0, warp, 0, 0x1f, 0xffffffff;
        }""",
        "=r", [], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _push_to_all(at, rows, barrier):
    """Stores fp32 rows, four neighbours a thread, at address `at` of every program."""
    gl.inline_asm_elementwise(
        """{
        .reg .b32 a, b;
        mapa.shared::cluster.u32 a, $4, 0;
        mapa.shared::cluster.u32 b, $12, 0;
        st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [a], {$8, $9, $10, $11}, [b];
        mapa.shared::cluster.u32 a, $4, 1;
        mapa.shared::cluster.u32 b, $12, 1;
        st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [a], {$8, $9, $10, $11}, [b];
        mapa.shared::cluster.u32 a, $4, 2;
        mapa.shared::cluster.u32 b, $12, 2;
        st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [a], {$8, $9, $10, $11}, [b];
        mapa.shared::cluster.u32 a, $4, 3;
        mapa.shared::cluster.u32 b, $12, 3;
        st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [a], {$8, $9, $10, $11}, [b];
        mov.b32 $0, 0;
        mov.b32 $1, 0;
        mov.b32 $2, 0;
        mov.b32 $3, 0;
        }""",
        "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r,r,r", [at, rows, barrier], dtype=gl.int32, is_pure=False, pack=4,
    )  # fmt: skip


@gluon.jit
def _push_to_one(at, part, rows, barrier):
    """As `_push_to_all`, to program `part` only."""
    gl.inline_asm_elementwise(
        """{
        .reg .b32 a, b;
        mapa.shared::cluster.u32 a, $4, $8;
        mapa.shared::cluster.u32 b, $16, $8;
        st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [a], {$12, $13, $14, $15}, [b];
        mov.b32 $0, 0;
        mov.b32 $1, 0;
        mov.b32 $2, 0;
        mov.b32 $3, 0;
        }""",
        "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r", [at, part, rows, barrier], dtype=gl.int32, is_pure=False,
        pack=4,
    )  # fmt: skip


@gluon.jit
def _push_number(at, number, barrier):
    """Stores one fp32 of each warp at address `at` of every program."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred p;
        .reg .b32 a, b, lane;
        mov.u32 lane, %laneid;
        setp.eq.s32 p, lane, 0;
        mapa.shared::cluster.u32 a, $1, 0;
        mapa.shared::cluster.u32 b, $3, 0;
        @p st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [a], $2, [b];
        mapa.shared::cluster.u32 a, $1, 1;
        mapa.shared::cluster.u32 b, $3, 1;
        @p st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [a], $2, [b];
        mapa.shared::cluster.u32 a, $1, 2;
        mapa.shared::cluster.u32 b, $3, 2;
        @p st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [a], $2, [b];
        mapa.shared::cluster.u32 a, $1, 3;
        mapa.shared::cluster.u32 b, $3, 3;
        @p st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [a], $2, [b];
        mov.b32 $0, 0;
        }""",
        "=r,r,r,r", [at, number, barrier], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _lane(like):
    """A thread's lane, in a tensor as the given int32 one."""
    return gl.inline_asm_elementwise("mov.u32 $0, %laneid; // $1", "=r,r", [like], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _four(at):
    """fp32 at address `at` of this program, four neighbours a thread."""
    return gl.inline_asm_elementwise(
        "ld.shared.v4.f32 {$0, $1, $2, $3}, [$4];", "=f,=f,=f,=f,r,r,r,r", [at], dtype=gl.float32, is_pure=False,
        pack=4,
    )  # fmt: skip


@gluon.jit
def _number(at):
    return gl.inline_asm_elementwise("ld.shared.f32 $0, [$1];", "=f,r", [at], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def _single(at):
    """fp32 at address `at` of this program, one for two neighbours."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 a; ld.shared.b32 a, [$2]; mov.b32 $0, a; mov.b32 $1, a; }",
        "=r,=r,r,r", [at], dtype=gl.float32, is_pure=False, pack=2,
    )  # fmt: skip
