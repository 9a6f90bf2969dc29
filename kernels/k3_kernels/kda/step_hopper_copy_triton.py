"""A part of a state between memory and shared memory on Hopper, in Gluon: one thread has the copy engine move it.

So the state needs no registers before its rows are there, and no thread waits while it is stored. Addresses of shared
memory as in `step_hopper_cluster_triton`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from k3_kernels.kda.step_hopper_cluster_triton import _four


@gluon.jit
def _fetch(at, source, size, barrier):
    """Has the copy engine bring size bytes of memory to address `at` of this program, in 700 cycles: the rows that were
    asked for before come sooner if the state, of which there is much more, is not on the way yet. Warp 3 waits."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred p, early;
        .reg .b32 thread, start, now;
        mov.u32 thread, %tid.x;
        setp.eq.s32 p, thread, 96;
        mov.u32 start, %clock;
        @!p bra go;
        again:
        mov.u32 now, %clock;
        sub.u32 now, now, start;
        setp.lt.u32 early, now, 700;
        @early bra again;
        go:
        @p mbarrier.arrive.expect_tx.shared::cta.b64 _, [$4], $3;
        @p cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$1], [$2], $3, [$4];
        mov.u32 $0, 0;
        }""",
        "=r,r,l,r,r", [at, source, size, barrier], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _send(at, target, size):
    """Has the copy engine take size bytes at address `at` of this program, written by the threads of a warp, to memory;
    every warp its own."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred p;
        .reg .b32 lane;
        fence.proxy.async.shared::cta;
        bar.warp.sync 0xffffffff;
        mov.u32 lane, %laneid;
        setp.eq.s32 p, lane, 0;
        @p cp.async.bulk.global.shared::cta.bulk_group [$2], [$1], $3;
        @p cp.async.bulk.commit_group;
        mov.u32 $0, 0;
        }""",
        "=r,r,l,r", [at, target, size], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _sent():
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _read(at, kind: gl.constexpr):
    """fp32 of four neighbours of a state in shared memory."""
    if kind == gl.bfloat16:
        return gl.inline_asm_elementwise(
            """{
            .reg .b32 a, b;
            ld.shared.v2.b32 {a, b}, [$4];
            shl.b32 $0, a, 16;
            and.b32 $1, a, 0xffff0000;
            shl.b32 $2, b, 16;
            and.b32 $3, b, 0xffff0000;
            }""",
            "=r,=r,=r,=r,r,r,r,r", [at], dtype=gl.float32, is_pure=False, pack=4,
        )  # fmt: skip
    return _four(at)


@gluon.jit
def _written(at, S, kind: gl.constexpr):
    """Stores four neighbours of a state in shared memory."""
    if kind == gl.bfloat16:
        gl.inline_asm_elementwise(
            """{
            .reg .b32 a, b;
            cvt.rn.bf16x2.f32 a, $9, $8;
            cvt.rn.bf16x2.f32 b, $11, $10;
            st.shared.v2.b32 [$4], {a, b};
            mov.b32 $0, 0;
            mov.b32 $1, 0;
            mov.b32 $2, 0;
            mov.b32 $3, 0;
            }""",
            "=r,=r,=r,=r,r,r,r,r,f,f,f,f", [at, S], dtype=gl.int32, is_pure=False, pack=4,
        )  # fmt: skip
    else:
        gl.inline_asm_elementwise(
            """{
            st.shared.v4.b32 [$4], {$8, $9, $10, $11};
            mov.b32 $0, 0;
            mov.b32 $1, 0;
            mov.b32 $2, 0;
            mov.b32 $3, 0;
            }""",
            "=r,=r,=r,=r,r,r,r,r,r,r,r,r", [at, S], dtype=gl.int32, is_pure=False, pack=4,
        )  # fmt: skip
