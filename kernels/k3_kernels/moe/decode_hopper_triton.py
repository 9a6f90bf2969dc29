"""What both expert kernels for Hopper share: packed weights as the register operand of a product.

A warp group owns 64 rows of a product, two blocks of 32 rows of packed weights. Row i of either block becomes the rows
16 (i / 8) + i mod 8 and that plus 8, which one thread holds. Of a matrix of gates and ups the blocks are every fourth
gate and the ups beside them, otherwise even and odd rows: so gate and up, or two neighbouring outputs, meet in one
thread, and what a group stores lies together.

A thread's 16 bytes are one MXFP4 group, 32 columns. Columns are taken as the decoder yields them: within 128, nibbles
(0, 4), (1, 5), (2, 6), (3, 7) of all words one behind the other; words 0, 4, 8, 12, then 1, 5 and so on. The other
operand is stored in that order (`place`).
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from k3_kernels.moe.reference import Experts

# Named anew between Triton 3.6 and 3.7.
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


def _words(*rows: int) -> gl.DistributedLinearLayout:
    """Words [32, 16] of a block: four neighbours a thread; rows: what bits of lanes (three) and warps count."""
    lanes, warps = [[r, 0] for r in rows[:3]], [[r, 0] for r in rows[3:]]
    return gl.DistributedLinearLayout([[0, 1], [0, 2]], [[0, 4], [0, 8], *lanes], warps, [], [32, 16])


def _groups(*rows: int) -> gl.DistributedLinearLayout:
    """The same as [32, 4, 4]: rows, groups, words."""
    lanes, warps = [[r, 0, 0] for r in rows[:3]], [[r, 0, 0] for r in rows[3:]]
    return gl.DistributedLinearLayout([[0, 0, 1], [0, 0, 2]], [[0, 1, 0], [0, 2, 0], *lanes], warps, [], [32, 4, 4])


# Gates in an order in which neighbouring lanes store neighbours (`place`).
X_GATED, X3_GATED = gl.constexpr(_words(1, 8, 16, 2, 4)), gl.constexpr(_groups(1, 8, 16, 2, 4))
X_PLAIN, X3_PLAIN = gl.constexpr(_words(1, 2, 4, 8, 16)), gl.constexpr(_groups(1, 2, 4, 8, 16))


@triton.jit
def place(x, BL: tl.constexpr):
    """Columns [BL] of a row in the order of the decoder."""
    return tl.reshape(tl.permute(tl.reshape(x, (BL // 128, 4, 4, 2, 4)), (0, 4, 2, 1, 3)), (BL,))


@gluon.jit
def scaled(x, both, Q: gl.constexpr):
    """Nibbles Q and Q + 4 of each word as two bf16 in one word, times the bf16 in both halves of `both`.

    Sign to bit 15, the rest to bits 8..6: one product moves a nibble to both places.
    """
    if Q % 2 == 0:
        u = (x & 0x000F000F) * 0x1040
    else:
        u = (x & 0x00F000F0) * 0x104
    u = u & -2118090304
    return gl.inline_asm_elementwise(
        "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [u, both], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def operand(x0, x1, both0, both1, HALF: gl.constexpr, GATED: gl.constexpr, A: gl.constexpr):
    """Half of the columns of words [32, 4, 4] of two blocks of rows: [64, 64] as the product takes it, times 2^-62."""
    if HALF == 1:
        x0 = x0 >> 8
        x1 = x1 >> 8
    even = gl.join(scaled(x0, both0, 0), scaled(x1, both1, 0))
    odd = gl.join(scaled(x0, both0, 1), scaled(x1, both1, 1))
    u = gl.join(even, odd)
    if GATED:
        u = u.reshape([4, 4, 2, 4, 4, 2, 2]).permute(1, 5, 0, 2, 6, 4, 3).reshape([64, 32])
    else:
        u = u.reshape([4, 8, 4, 4, 2, 2]).permute(0, 4, 1, 5, 3, 2).reshape([64, 32])
    low = u.to(gl.int16).to(gl.bfloat16, bitcast=True)
    high = (u >> 16).to(gl.int16).to(gl.bfloat16, bitcast=True)
    return gl.convert_layout(gl.join(low, high).reshape([64, 64]), A)


@gluon.jit
def both(scale):
    """The factor of a group in both halves of a word, for each word of the group."""
    return (gl.minimum(scale.to(gl.int32) + 64, 255) * 0x00800080).expand_dims(2).broadcast_to([32, 4, 4])


@gluon.jit
def _tanh(x):
    return gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def activated(gate, up, BETA: gl.constexpr, LINEAR_BETA: gl.constexpr):
    sigmoid = 1 / (1 + gl.exp2(gate * -1.4426950408889634))
    if BETA == 0:
        return gate * sigmoid * up
    else:
        return (BETA * LINEAR_BETA) * _tanh(gate * (1 / BETA)) * sigmoid * _tanh(up * (1 / LINEAR_BETA))


@cache
def processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def views(experts: Experts) -> tuple[Tensor, Tensor]:
    """(w13 as int32 [E 2F / 4, 4 L / 8], w2 as int32 [E L / 2, 2 F / 8]): a block of rows is a box of a view."""
    E, rows, L = experts.w13.shape[0], experts.w13.shape[1], experts.w2.shape[1]
    w13, w2 = experts.w13.view(torch.int32), experts.w2.view(torch.int32)
    return w13.view(E * rows // 4, 4 * w13.shape[2]), w2.view(E * L // 2, 2 * w2.shape[2])
