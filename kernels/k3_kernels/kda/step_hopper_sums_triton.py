"""Sums over the lanes of a KDA step on Hopper, in Gluon: the shuffles of a row take as long as its arithmetic, and the
language's own sum spends twelve on four sums of eight lanes. All add in the same order: lanes 4 apart, then 2, then 1.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def _own(products, V: gl.constexpr, K: gl.constexpr, OUT: gl.constexpr):
    """Sums over K of a state tile as far as a thread has the summands: [V, 8], a column a lane."""
    parts = gl.permute(gl.reshape(products, [V, K // 32, 8, 4]), [0, 2, 1, 3])
    return gl.convert_layout(gl.sum(gl.reshape(parts, [V, 8, K // 8]), 2), OUT)


@gluon.jit
def _everywhere(own, lane):
    """Sums of [V, 8] over its eight lanes, in all of them. Halves are exchanged first and last: eight shuffles for the
    four rows of a thread instead of twelve. own fp32, lane int32 [V, 8]; four neighbouring rows in a thread."""
    return gl.inline_asm_elementwise(
        """{
        .reg .pred p;
        .reg .b32 s, t, a, b, x, y;
        setp.ne.s32 p, $8, 0;
        selp.b32 s, $4, $6, p;
        selp.b32 t, $5, $7, p;
        selp.b32 a, $6, $4, p;
        selp.b32 b, $7, $5, p;
        shfl.sync.bfly.b32 x, s, 4, 0x1f, 0xffffffff;
        shfl.sync.bfly.b32 y, t, 4, 0x1f, 0xffffffff;
        add.f32 a, a, x;
        add.f32 b, b, y;
        shfl.sync.bfly.b32 x, a, 2, 0x1f, 0xffffffff;
        shfl.sync.bfly.b32 y, b, 2, 0x1f, 0xffffffff;
        add.f32 a, a, x;
        add.f32 b, b, y;
        shfl.sync.bfly.b32 x, a, 1, 0x1f, 0xffffffff;
        shfl.sync.bfly.b32 y, b, 1, 0x1f, 0xffffffff;
        add.f32 a, a, x;
        add.f32 b, b, y;
        shfl.sync.bfly.b32 x, a, 4, 0x1f, 0xffffffff;
        shfl.sync.bfly.b32 y, b, 4, 0x1f, 0xffffffff;
        selp.b32 $0, x, a, p;
        selp.b32 $1, y, b, p;
        selp.b32 $2, a, x, p;
        selp.b32 $3, b, y, p;
        }""",
        "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r", [own, lane & 4], dtype=gl.float32, is_pure=True, pack=4,
    )  # fmt: skip


@gluon.jit
def _scattered(own, lane, V: gl.constexpr):
    """Sums over the eight lanes as `_everywhere`, but a lane pair has one of four rows: [V / 4, 8]. Four shuffles."""
    sums = gl.inline_asm_elementwise(
        """{
        .reg .pred p, q;
        .reg .b32 s, t, a, b, x, y;
        setp.ne.s32 p, $8, 0;
        setp.ne.s32 q, $12, 0;
        selp.b32 s, $4, $6, p;
        selp.b32 t, $5, $7, p;
        selp.b32 a, $6, $4, p;
        selp.b32 b, $7, $5, p;
        shfl.sync.bfly.b32 x, s, 4, 0x1f, 0xffffffff;
        shfl.sync.bfly.b32 y, t, 4, 0x1f, 0xffffffff;
        add.f32 a, a, x;
        add.f32 b, b, y;
        selp.b32 s, a, b, q;
        selp.b32 a, b, a, q;
        shfl.sync.bfly.b32 x, s, 2, 0x1f, 0xffffffff;
        add.f32 a, a, x;
        shfl.sync.bfly.b32 x, a, 1, 0x1f, 0xffffffff;
        add.f32 $0, a, x;
        mov.b32 $1, 0;
        mov.b32 $2, 0;
        mov.b32 $3, 0;
        }""",
        "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r,r,r,r", [own, lane & 4, lane & 2], dtype=gl.float32, is_pure=True, pack=4,
    )  # fmt: skip
    four = gl.reshape(gl.permute(gl.reshape(sums, [V // 4, 4, 8]), [0, 2, 1]), [V // 4, 8, 2, 2])
    two, _ = gl.split(four)
    one, _ = gl.split(two)
    return one
