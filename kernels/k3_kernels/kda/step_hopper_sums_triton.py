"""Sums over the lanes of a KDA step on Hopper, in Gluon: sixteen lanes along K, and two or four rows in a thread.

Halves are exchanged first, so that a lane ends with one of the rows: five shuffles for four sums where the language's
own takes sixteen. The order is fixed: lanes 8 apart, then 4, 2, 1.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def _correction(own, value, beta, lane):
    """(value - sum of own over sixteen lanes) * beta, for both rows of a thread. value: of the lane's own row, the
    second where the lane's 8 is set; own, value, beta fp32, lane int32."""
    return gl.inline_asm_elementwise(
        """{
        .reg .pred p;
        .reg .b32 s, a, x;
        and.b32 s, $8, 8;
        setp.ne.s32 p, s, 0;
        selp.b32 s, $2, $3, p;
        selp.b32 a, $3, $2, p;
        shfl.sync.bfly.b32 x, s, 8, 0x1f, 0xffffffff;
        add.rn.f32 a, a, x;
        shfl.sync.bfly.b32 x, a, 4, 0x1f, 0xffffffff;
        add.rn.f32 a, a, x;
        shfl.sync.bfly.b32 x, a, 2, 0x1f, 0xffffffff;
        add.rn.f32 a, a, x;
        shfl.sync.bfly.b32 x, a, 1, 0x1f, 0xffffffff;
        add.rn.f32 a, a, x;
        sub.rn.f32 a, $4, a;
        mul.rn.f32 a, a, $6;
        shfl.sync.idx.b32 $0, a, 0, 0x171f, 0xffffffff;
        shfl.sync.idx.b32 $1, a, 8, 0x171f, 0xffffffff;
        }""",
        "=&r,=&r,r,r,r,r,r,r,r,r", [own, value, beta, lane], dtype=gl.float32, is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def _correction_of_four(own, value, beta, lane):
    """(value - sum of own over sixteen lanes) * beta, for all four rows of a thread. value: of the lane's own row, the
    (lane / 4 mod 4)th of the four; own, value, beta fp32, lane int32."""
    return gl.inline_asm_elementwise(
        """{
        .reg .pred p, q;
        .reg .b32 s, t, a, b, x, y;
        and.b32 s, $16, 8;
        setp.ne.s32 p, s, 0;
        and.b32 s, $16, 4;
        setp.ne.s32 q, s, 0;
        selp.b32 s, $4, $6, p;
        selp.b32 t, $5, $7, p;
        selp.b32 a, $6, $4, p;
        selp.b32 b, $7, $5, p;
        shfl.sync.bfly.b32 x, s, 8, 0x1f, 0xffffffff;
        shfl.sync.bfly.b32 y, t, 8, 0x1f, 0xffffffff;
        add.rn.f32 a, a, x;
        add.rn.f32 b, b, y;
        selp.b32 s, a, b, q;
        selp.b32 a, b, a, q;
        shfl.sync.bfly.b32 x, s, 4, 0x1f, 0xffffffff;
        add.rn.f32 a, a, x;
        shfl.sync.bfly.b32 x, a, 2, 0x1f, 0xffffffff;
        add.rn.f32 a, a, x;
        shfl.sync.bfly.b32 x, a, 1, 0x1f, 0xffffffff;
        add.rn.f32 a, a, x;
        sub.rn.f32 a, $8, a;
        mul.rn.f32 a, a, $12;
        shfl.sync.idx.b32 $0, a, 0, 0x131f, 0xffffffff;
        shfl.sync.idx.b32 $1, a, 4, 0x131f, 0xffffffff;
        shfl.sync.idx.b32 $2, a, 8, 0x131f, 0xffffffff;
        shfl.sync.idx.b32 $3, a, 12, 0x131f, 0xffffffff;
        }""",
        "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r", [own, value, beta, lane], dtype=gl.float32, is_pure=True,
        pack=4,
    )  # fmt: skip


@gluon.jit
def _push_sums(a_rows, b_rows, lane, at, part, inside, barrier):
    """Sums over sixteen lanes of a thread's four rows, two of each half; the lane's own goes to address `at` of program
    `part` of the cluster, where `inside`, from one of the four lanes that have it."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred p, q;
        .reg .b32 s, t, a, b, x, y;
        and.b32 s, $6, 8;
        setp.ne.s32 p, s, 0;
        and.b32 s, $6, 4;
        setp.ne.s32 q, s, 0;
        selp.b32 s, $2, $4, p;
        selp.b32 t, $3, $5, p;
        selp.b32 a, $4, $2, p;
        selp.b32 b, $5, $3, p;
        shfl.sync.bfly.b32 x, s, 8, 0x1f, 0xffffffff;
        shfl.sync.bfly.b32 y, t, 8, 0x1f, 0xffffffff;
        add.rn.f32 a, a, x;
        add.rn.f32 b, b, y;
        selp.b32 s, a, b, q;
        selp.b32 a, b, a, q;
        shfl.sync.bfly.b32 x, s, 4, 0x1f, 0xffffffff;
        add.rn.f32 a, a, x;
        shfl.sync.bfly.b32 x, a, 2, 0x1f, 0xffffffff;
        add.rn.f32 a, a, x;
        shfl.sync.bfly.b32 x, a, 1, 0x1f, 0xffffffff;
        add.rn.f32 a, a, x;
        and.b32 s, $6, 3;
        setp.eq.s32 p, s, 0;
        setp.ne.and.s32 p, $12, 0, p;
        mapa.shared::cluster.u32 x, $8, $10;
        mapa.shared::cluster.u32 y, $14, $10;
        @p st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [x], a, [y];
        mov.b32 $0, 0;
        mov.b32 $1, 0;
        }""",
        "=r,=r,r,r,r,r,r,r,r,r,r,r,r,r,r,r", [a_rows, b_rows, lane, at, part, inside, barrier], dtype=gl.int32,
        is_pure=False, pack=2,
    )  # fmt: skip


@gluon.jit
def _own_row(four, lane):
    """Of a thread's four values the one of the lane's own row, four times."""
    return gl.inline_asm_elementwise(
        """{
        .reg .pred p, q;
        .reg .b32 s, t;
        and.b32 s, $8, 8;
        setp.ne.s32 p, s, 0;
        and.b32 s, $8, 4;
        setp.ne.s32 q, s, 0;
        selp.b32 s, $6, $4, p;
        selp.b32 t, $7, $5, p;
        selp.b32 s, t, s, q;
        mov.b32 $0, s;
        mov.b32 $1, s;
        mov.b32 $2, s;
        mov.b32 $3, s;
        }""",
        "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r", [four, lane], dtype=gl.float32, is_pure=True, pack=4,
    )  # fmt: skip
