"""Absorbed decode over pages: split over keys at fixed positions, merged in a fixed order. Four launches.

absorb   queries of the live rows times w_uk, per head
attend   one program: 64 (row, head) pairs x one split of the keys, running softmax, unnormalised sums out
combine  the splits of one row and head, by their maxima
project  latents times w_uv, per head

The row at position p is cut into splits of `span(p)` keys, a step function of p alone, at most SPLITS of them. So the
grid depends on n only, and programs behind a row's last split leave at once. A tile whose rows have different spans
(a window that crosses a step) is walked once for each. Keys are read in blocks of at most 64, which divides spans and
pages; what a block holds behind a row weighs exactly zero.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from k3_kernels.mla.scratch import SPLITS

UNIT = 128
"""Keys; spans are multiples of it: pairs of blocks."""
FAR = 1 << 18
"""From this position on there are twice as many, so that any number of tiles fills the processors evenly."""
LEAST = 2
"""Units of the shortest span: shorter ones would serve one row behind few tokens and cost a full window its sums."""
ROWS = 16
"""Window rows a head's small products are padded to: the least a matrix instruction takes."""
LOG2E = 1.4426950408889634
DEPENDENT = False
"""On Hopper and newer, kernels start before the one in front has ended, and fetch their weights while they wait."""


class Tiling(NamedTuple):
    """Of `attend`: BM pairs of row and head, BN keys at a time, warps, pipeline stages; "triton" or "hopper"."""

    BM: int
    BN: int
    warps: int
    stages: int
    form: str = "triton"


def tiling(dtype: torch.dtype, R: int, P: int, pages: Tensor) -> Tiling:
    """bf16 fills registers with 64 x 512 sums and shared memory with queries and two key blocks; fp32 stays small."""
    if dtype != torch.bfloat16:
        return Tiling(16, 32, 4, 1)
    hopper = pages.is_cuda and torch.cuda.get_device_capability(pages.device)[0] == 9
    # Its copies count rows from the pool's first: pages must lie whole rows apart.
    fits = (R, P) == (512, 64) and pages.stride(0) % pages.stride(1) == 0
    return Tiling(64, 64, 8, 2, "hopper" if hopper and fits else "triton")


@cache
def _processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _dependent(device: torch.device) -> bool:
    return DEPENDENT and device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def _span(p, UNIT: tl.constexpr, SPLITS: tl.constexpr, LEAST: tl.constexpr, FAR: tl.constexpr):
    """Keys of a split of the row at position p."""
    reach = tl.where(p < FAR, UNIT * SPLITS, 2 * UNIT * SPLITS)
    return tl.maximum(p // reach + 1, LEAST) * UNIT


@triton.jit
def append_kernel(
    rows, pages, table, cursor, row_stride, page_stride, key_stride, W, PAGE, WIDTH,
    B: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    p = tl.load(cursor) + tl.program_id(0)
    page = tl.load(table + p // PAGE).to(tl.int64)
    x = tl.arange(0, B)
    value = tl.load(rows + (p % W) * row_stride + x, mask=x < WIDTH)
    tl.store(pages + page * page_stride + (p % PAGE) * key_stride + x, value, mask=x < WIDTH)


@triton.jit(do_not_specialize=["n"])
def absorb_kernel(
    q, w_uk, absorbed, cursor, q_row, q_head, W, H, n,
    N: tl.constexpr, BK: tl.constexpr, R: tl.constexpr, BR: tl.constexpr, P: tl.constexpr,
    ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (H, R / BR). absorbed [n H, R + P], pair i H + h of the window's i-th row; slots order the products."""
    h = tl.program_id(0)
    k = tl.arange(0, BK)
    r = tl.program_id(1) * BR + tl.arange(0, BR)
    # The weights come from far and depend on nothing: they are asked for first.
    w = tl.load(w_uk + (h * N + k)[:, None] * R + r[None, :], mask=(k < N)[:, None], other=0.0)
    if PDL:
        gdc_wait()
    start = tl.load(cursor)
    slot = tl.arange(0, ROWS)
    i = (slot - start % W + W) % W
    live = (slot < W) & (i < n)
    source = q + slot[:, None] * q_row + h * q_head
    x = tl.load(source + k[None, :], mask=live[:, None] & (k < N)[None, :], other=0.0)
    y = tl.dot(x, w, input_precision="ieee")
    to = absorbed + (i * H + h)[:, None] * (R + P)
    tl.store(to + r[None, :], y.to(absorbed.dtype.element_ty), mask=live[:, None])
    if tl.program_id(1) == 0:
        e = tl.arange(0, P)
        tl.store(to + R + e[None, :], tl.load(source + N + e[None, :], mask=live[:, None]), mask=live[:, None])


@triton.jit(do_not_specialize=["n"])
def attend_kernel(
    absorbed, pages, table, cursor, sums, tops, norms, factor, page_stride, H, n,
    KEY: tl.constexpr, R: tl.constexpr, P: tl.constexpr, PAGE: tl.constexpr,
    UNIT: tl.constexpr, SPLITS: tl.constexpr, LEAST: tl.constexpr, FAR: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, 2 SPLITS): tiles that read the same keys run at once.

    sums [n H, 2 SPLITS, R] divided by norms, tops and norms [n H, 2 SPLITS] fp32; factor: scale times log2 e; KEY:
    elements from one key to the next.
    """
    tile, split = tl.program_id(0), tl.program_id(1)
    start = tl.load(cursor).to(tl.int32)
    pair = tile * BM + tl.arange(0, BM)
    live = pair < n * H
    p = start + pair // H
    first = start + tile * BM // H
    last = start + tl.minimum((tile * BM + BM - 1) // H, n - 1)
    low, high = _span(first, UNIT, SPLITS, LEAST, FAR), _span(last, UNIT, SPLITS, LEAST, FAR)
    r, e, x = tl.arange(0, R), tl.arange(0, P), tl.arange(0, BN)
    walks = 1 + (high != low).to(tl.int32)
    for walk in range(walks):
        span = tl.where(walk == 0, low, high)
        begin = split * span
        end = tl.minimum(begin + span, last + 1)
        if begin < end:
            query = absorbed + pair[:, None] * (R + P)
            qc = tl.load(query + r[None, :], mask=live[:, None], other=0.0)
            qp = tl.load(query + R + e[None, :], mask=live[:, None], other=0.0)
            top = tl.full([BM], -1e30, tl.float32)
            norm = tl.zeros([BM], tl.float32)
            acc = tl.zeros([BM, R], tl.float32)
            page = tl.load(table + begin // PAGE).to(tl.int64)
            for key in range(begin, end, BN):
                keys = key + x
                source = pages + page * page_stride + (key % PAGE) * KEY + x[:, None] * KEY
                inside = (keys < end)[:, None]
                kc = tl.load(source + r[None, :], mask=inside, other=0.0)
                kp = tl.load(source + R + e[None, :], mask=inside, other=0.0)
                page = tl.load(table + tl.minimum(key + BN, end - 1) // PAGE).to(tl.int64)
                s = tl.dot(qc, tl.trans(kc), input_precision="ieee")
                s = tl.dot(qp, tl.trans(kp), s, input_precision="ieee")
                s = tl.where(keys[None, :] <= p[:, None], s, float("-inf"))
                new = tl.maximum(top, tl.max(s, 1))
                # Subtract, then multiply: nothing to contract, so every compilation rounds alike.
                weight = tl.exp2((s - new[:, None]) * factor)
                shrink = tl.exp2((top - new) * factor)
                norm = norm * shrink + tl.sum(weight, 1)
                acc = tl.dot(weight.to(kc.dtype), kc, acc * shrink[:, None], input_precision="ieee")
                top = new
            mine = live & (_span(p, UNIT, SPLITS, LEAST, FAR) == span)
            at = pair.to(tl.int64) * (2 * SPLITS) + split
            tl.store(tops + at, top, mask=mine)
            tl.store(norms + at, norm, mask=mine)
            acc = (acc / tl.maximum(norm, 1e-30)[:, None]).to(
                sums.dtype.element_ty
            )  # rows elsewhere have no weight here
            tl.store(sums + at[:, None] * R + r[None, :], acc, mask=mine[:, None])


@triton.jit
def combine_kernel(
    sums, tops, norms, latent, cursor, factor, W, H,
    R: tl.constexpr, BR: tl.constexpr, UNIT: tl.constexpr, SPLITS: tl.constexpr, LEAST: tl.constexpr, FAR: tl.constexpr,
    BS: tl.constexpr, SWAPPED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (n H, R / BR). latent [H, W, R]; BS splits at a time, in order, each column within one thread.

    SWAPPED: of 32 columns, sums hold column 8 j + 2 t + e at 8 t + 2 j + e.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    pair = tl.program_id(0)
    p = tl.load(cursor).to(tl.int32) + pair // H
    r = tl.program_id(1) * BR + tl.arange(0, BR)
    count = p // _span(p, UNIT, SPLITS, LEAST, FAR) + 1
    at = pair.to(tl.int64) * (2 * SPLITS)
    every = tl.arange(0, 2 * SPLITS)
    top = tl.max(tl.load(tops + at + every, mask=every < count, other=-1e30), 0)
    out = tl.zeros([BR], tl.float32)
    norm = 0.0
    for first in range(0, count, BS):
        split = first + tl.arange(0, BS)
        there = split < count
        part = tl.load(sums + (at + split)[:, None] * R + r[None, :], mask=there[:, None], other=0.0)
        own = tl.load(tops + at + split, mask=there, other=float("-inf"))
        weight = tl.exp2((own - top) * factor) * tl.load(norms + at + split, mask=there, other=0.0)
        norm += tl.sum(weight, 0)
        out += tl.sum(part.to(tl.float32) * weight[:, None], 0)
    if SWAPPED:
        r = r // 32 * 32 + r % 8 // 2 * 8 + r % 32 // 8 * 2 + r % 2
    tl.store(latent + ((pair % H) * W + p % W) * R + r, (out / norm).to(latent.dtype.element_ty))


@triton.jit(do_not_specialize=["n"])
def project_kernel(
    latent, w_uv, out, cursor, W, H, n,
    V: tl.constexpr, BV: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (H, V / BV). out [W, H, V], zeros where no row is live."""
    h = tl.program_id(0)
    r = tl.arange(0, R)
    v = tl.program_id(1) * BV + tl.arange(0, BV)
    w = tl.load(w_uv + (h * V + v)[:, None] * R + r[None, :], mask=(v < V)[:, None], other=0.0)
    if PDL:
        gdc_wait()
    slot = tl.arange(0, ROWS)
    live = (slot < W) & ((slot - tl.load(cursor) % W + W) % W < n)
    x = tl.load(latent + (h * W + slot)[:, None] * R + r[None, :], mask=live[:, None], other=0.0)
    y = tl.dot(x, tl.trans(w), input_precision="ieee")
    to = out + (slot[:, None] * H + h) * V + v[None, :]
    tl.store(to, y.to(out.dtype.element_ty), mask=(slot < W)[:, None] & (v < V)[None, :])


def append(rows: Tensor, pages: Tensor, table: Tensor, cursor: Tensor, n: int) -> None:
    """As the reference; one launch."""
    W, width = rows.shape
    append_kernel[(n,)](
        rows, pages, table, cursor, rows.stride(0), pages.stride(0), pages.stride(1), W, pages.shape[1], width,
        B=triton.next_power_of_2(width), PDL=_dependent(rows.device),
    )  # fmt: skip


def decode(
    q: Tensor,
    pages: Tensor,
    table: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    cursor: Tensor,
    scale: float,
    n: int,
    tile: Tiling | None = None,
) -> Tensor:
    """As the reference, nothing read on the host. Workspace: `scratch.decode_scratch`, 103 MB for 8 rows, 96 heads."""
    W, H = q.shape[:2]
    N, R = w_uk.shape[1:]
    V, P = w_uv.shape[1], q.shape[2] - N
    shape = tile or tiling(q.dtype, R, P, pages)
    pairs, factor = n * H, scale * LOG2E
    empty: dict[str, Any] = {"device": q.device, "dtype": torch.float32}
    absorbed = torch.empty(pairs, R + P, device=q.device, dtype=q.dtype)
    # Means of latents, which a norm keeps small: halves carry three bits more than the bf16 they end as.
    kind = torch.float32 if q.dtype == torch.float32 else torch.float16
    sums = torch.empty(pairs, 2 * SPLITS, R, device=q.device, dtype=kind)
    tops, norms = (torch.empty(pairs, 2 * SPLITS, **empty) for _ in range(2))
    latent = torch.empty(H, W, R, device=q.device, dtype=q.dtype)
    out = torch.empty(W, H, V, device=q.device, dtype=q.dtype)
    early: dict[str, Any] = {"PDL": True, "launch_pdl": True} if _dependent(q.device) else {"PDL": False}
    BR, BV = min(R, 128), min(32, triton.next_power_of_2(V))
    absorb_kernel[(H, R // BR)](
        q, w_uk, absorbed, cursor, q.stride(0), q.stride(1), W, H, n,
        N=N, BK=max(16, triton.next_power_of_2(N)), R=R, BR=BR, P=P, ROWS=ROWS, **early,
    )  # fmt: skip
    tiles = triton.cdiv(pairs, shape.BM)
    spans: dict[str, Any] = {"UNIT": UNIT, "SPLITS": SPLITS, "LEAST": LEAST, "FAR": FAR}
    hopper = shape.form == "hopper"
    if hopper:
        from k3_kernels.mla import decode_hopper_triton

        decode_hopper_triton.attend_kernel[(_processors(q.device),)](
            *decode_hopper_triton.descriptors(pages, absorbed, R, shape.BM, shape.BN),
            table, cursor, sums, tops, norms, factor, pages.stride(0) // pages.stride(1), H, n,
            w_uv, w_uv.nbytes // 128, R=R, P=P, PAGE=pages.shape[1], BM=shape.BM, BN=shape.BN, **spans, num_warps=4,
        )  # fmt: skip
    else:
        attend_kernel[(tiles, 2 * SPLITS)](
            absorbed, pages, table, cursor, sums, tops, norms, factor, pages.stride(0), H, n,
            KEY=pages.stride(1), R=R, P=P, PAGE=pages.shape[1], BM=shape.BM, BN=shape.BN, **spans,
            num_warps=shape.warps, num_stages=shape.stages,
        )  # fmt: skip
    wide = min(R, 256)
    combine_kernel[(pairs, R // wide)](
        sums, tops, norms, latent, cursor, factor, W, H,
        R=R, BR=wide, **spans, BS=min(32, SPLITS), SWAPPED=hopper, num_warps=1, **early,
    )  # fmt: skip
    project_kernel[(H, triton.cdiv(V, BV))](latent, w_uv, out, cursor, W, H, n, V=V, BV=BV, R=R, ROWS=ROWS, **early)
    return out
