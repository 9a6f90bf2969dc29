"""The router's selection for a window in Gluon: eight warps a row instead of one.

Each warp finds the best k of an eighth of the experts, then all warps alike the best k of what was found. A maximum
over a warp is one instruction where a row of the tensor is one warp's, which Triton's own layouts don't give.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

LOWEST = gl.constexpr(-2147483648)


@gluon.jit
def _logit(at, stride, inside, P: gl.constexpr):
    total = gl.load(at, mask=inside, other=0.0)
    for p in gl.static_range(1, P):
        total += gl.load(at + p * stride, mask=inside, other=0.0)
    return total


@gluon.jit
def _best(key, e, K: gl.constexpr, BK: gl.constexpr, X: gl.constexpr):
    """For each row the K largest keys and their experts, largest first, of equal ones the lowest expert: [rows, BK]."""
    j = gl.arange(0, BK, gl.SliceLayout(0, X))[None, :]
    keys = gl.full([key.shape[0], BK], LOWEST, gl.int32, X)
    experts = gl.full([key.shape[0], BK], 2147483647, gl.int32, X)
    for i in range(K):
        best = gl.max(key, 1)[:, None]
        expert = gl.min(gl.where(key == best, e, 2147483647), 1)[:, None]
        keys = gl.where(j == i, best, keys)
        experts = gl.where(j == i, expert, experts)
        key = gl.where(e == expert, LOWEST, key)
    return keys, experts


@gluon.jit
def select(
    parts, bias, ids, weights, stride_p, stride_t, scale,
    E: gl.constexpr, K: gl.constexpr, P: gl.constexpr, RENORMALIZE: gl.constexpr,
    BE: gl.constexpr, BK: gl.constexpr,
):  # fmt: skip
    """Arguments and results of `route_triton._select`; grid (rows), eight warps."""
    X: gl.constexpr = gl.BlockedLayout([1, BE // 256], [1, 32], [8, 1], [1, 0])
    Y: gl.constexpr = gl.BlockedLayout([1, BK // 4 if BK > 4 else 1], [1, 32], [8, 1], [1, 0])
    t = gl.program_id(0).to(gl.int64)
    at = parts + t * stride_t
    e = (
        gl.arange(0, 8, gl.SliceLayout(1, X))[:, None] * (BE // 8)
        + gl.arange(0, BE // 8, gl.SliceLayout(0, X))[None, :]
    )
    score = 1 / (1 + gl.exp(-_logit(at + e, stride_p, e < E, P)))
    bits = (score + gl.load(bias + e, mask=e < E, other=0.0)).to(gl.int32, bitcast=True)
    key = gl.where(e < E, bits ^ ((bits >> 31) & 0x7FFFFFFF), LOWEST)  # orders like the float
    key, e = _best(key, e, K, BK, X)
    key = key.reshape([1, 8 * BK])
    e = e.reshape([1, 8 * BK])
    key = gl.convert_layout(key.broadcast_to([8, 8 * BK]), Y)
    e = gl.convert_layout(e.broadcast_to([8, 8 * BK]), Y)
    key, e = _best(key, e, K, BK, Y)
    found = gl.max(e, 0)  # all rows are the same
    j = gl.arange(0, BK, gl.SliceLayout(0, Y))
    weight = 1 / (1 + gl.exp(-_logit(at + found, stride_p, j < K, P)))
    if RENORMALIZE:
        weight = weight / (gl.sum(gl.where(j < K, weight, 0.0), 0) + 1e-20)
    gl.store(ids + t * K + j, found.to(gl.int64), mask=j < K)
    gl.store(weights + t * K + j, weight * scale, mask=j < K)
