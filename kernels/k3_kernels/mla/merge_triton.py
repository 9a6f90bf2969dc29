"""Around the library's attention: the key part that all heads share put into their keys, results of blocks merged."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def merge_kernel(
    total, total_lse, part, part_lse, out,
    total_row, total_head, part_row, part_head, out_row, out_head, T, V,
    BT: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Grid (T / BT, H)."""
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    h = tl.program_id(1)
    v = tl.arange(0, BV)
    there = (t < T)[:, None] & (v < V)[None, :]
    wide = t.to(tl.int64)[:, None]
    a = tl.load(total_lse + h * T + t, mask=t < T, other=0.0)
    b = tl.load(part_lse + h * T + t, mask=t < T, other=0.0)
    high = tl.maximum(a, b)
    wa, wb = tl.exp(a - high), tl.exp(b - high)
    both = wa + wb
    x = tl.load(total + wide * total_row + h * total_head + v[None, :], mask=there, other=0.0).to(tl.float32)
    y = tl.load(part + wide * part_row + h * part_head + v[None, :], mask=there, other=0.0).to(tl.float32)
    z = x * (wa / both)[:, None] + y * (wb / both)[:, None]
    tl.store(out + wide * out_row + h * out_head + v[None, :], z.to(out.dtype.element_ty), mask=there)
    tl.store(total_lse + h * T + t, high + tl.log(both), mask=t < T)


def merge(total: Tensor, total_lse: Tensor, part: Tensor, part_lse: Tensor, out: Tensor) -> None:
    """out = attention over both key sets; total_lse is updated in place.

    total, part, out [T, H, V], last dimension contiguous; total_lse, part_lse [H, T] fp32, natural logarithms. out may
    be total.
    """
    T, H, V = total.shape
    BT = 16
    merge_kernel[(triton.cdiv(T, BT), H)](
        total, total_lse, part, part_lse, out,
        total.stride(0), total.stride(1), part.stride(0), part.stride(1), out.stride(0), out.stride(1), T, V,
        BT=BT, BV=triton.next_power_of_2(V),
    )  # fmt: skip


@triton.jit
def share_kernel(shared, keys, shared_row, n, H, N: tl.constexpr, P: tl.constexpr, BP: tl.constexpr, BT: tl.constexpr):
    """Grid (n / BT, H)."""
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    e = tl.arange(0, BP)
    wide = t.to(tl.int64)[:, None]
    there = (t < n)[:, None] & (e < P)[None, :]
    x = tl.load(shared + wide * shared_row + e[None, :], mask=there)
    tl.store(keys + (wide * H + tl.program_id(1)) * (N + P) + N + e[None, :], x, mask=there)


def share(shared: Tensor, keys: Tensor) -> None:
    """Writes shared [n, P] behind the first N of every head's keys [n, H, N + P], contiguous."""
    n, H, width = keys.shape
    P = shared.shape[1]
    share_kernel[(triton.cdiv(n, 64), H)](
        shared, keys, shared.stride(0), n, H, N=width - P, P=P, BP=triton.next_power_of_2(P), BT=64
    )
