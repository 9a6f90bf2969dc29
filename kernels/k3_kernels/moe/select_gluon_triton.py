"""The router's selection for a window in Gluon: eight warps a row instead of one.

Each warp finds the best k of an eighth of the experts, one after the other: a maximum over a warp is one instruction
where a row of the tensor is one warp's, which Triton's own layouts don't give. Of what was found, a place is the number
of those that are better: all comparisons at once instead of another k rounds.
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
def _best(key, e, own, K: gl.constexpr, BK: gl.constexpr, X: gl.constexpr):
    """For each row the K largest keys with their experts and `own` (not negative), of equal ones the lowest expert:
    three of [rows, BK]."""
    j = gl.arange(0, BK, gl.SliceLayout(0, X))[None, :]
    keys = gl.full([key.shape[0], BK], LOWEST, gl.int32, X)
    experts = gl.full([key.shape[0], BK], 2147483647, gl.int32, X)
    owns = gl.full([key.shape[0], BK], 0, gl.int32, X)
    for i in range(K):
        best = gl.max(key, 1)[:, None]
        expert = gl.min(gl.where(key == best, e, 2147483647), 1)[:, None]
        keys = gl.where(j == i, best, keys)
        experts = gl.where(j == i, expert, experts)
        owns = gl.where(j == i, gl.max(gl.where(e == expert, own, 0), 1)[:, None], owns)
        key = gl.where(e == expert, LOWEST, key)
    return keys, experts, owns


@gluon.jit
def select(
    parts, bias, ids, weights, stride_p, stride_t, scale,
    E: gl.constexpr, K: gl.constexpr, P: gl.constexpr, RENORMALIZE: gl.constexpr,
    BE: gl.constexpr, BK: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Arguments and results of `route_triton._select`; grid (rows), eight warps. EARLY: as `_scores`."""
    X: gl.constexpr = gl.BlockedLayout([1, BE // 256], [1, 32], [8, 1], [1, 0])
    Y: gl.constexpr = gl.BlockedLayout([1, BK], [4, 8], [8, 1], [1, 0])
    ONE: gl.constexpr = gl.SliceLayout(1, Y)
    OTHER: gl.constexpr = gl.SliceLayout(0, Y)
    t = gl.program_id(0).to(gl.int64)
    at = parts + t * stride_t
    e = (
        gl.arange(0, 8, gl.SliceLayout(1, X))[:, None] * (BE // 8)
        + gl.arange(0, BE // 8, gl.SliceLayout(0, X))[None, :]
    )
    more = gl.load(bias + e, mask=e < E, other=0.0)
    if EARLY:
        gl.inline_asm_elementwise(
            "griddepcontrol.wait; griddepcontrol.launch_dependents; mov.u32 $0, 0;", "=r", [], dtype=gl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip
    score = 1 / (1 + gl.exp(-_logit(at + e, stride_p, e < E, P)))
    bits = (score + more).to(gl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # orders like the float
    key = gl.where(e < E, gl.maximum(bits, LOWEST + 1), LOWEST)
    # A score isn't negative, so a maximum of its bits fetches it from whoever has it.
    key, e, own = _best(key, e, score.to(gl.int32, bitcast=True), K, BK, X)
    key, e = key.reshape([8 * BK]), e.reshape([8 * BK])
    other_key, other = gl.convert_layout(key, OTHER)[None, :], gl.convert_layout(e, OTHER)[None, :]
    key, e = gl.convert_layout(key, ONE), gl.convert_layout(e, ONE)
    better = (other_key > key[:, None]) | ((other_key == key[:, None]) & (other < e[:, None]))
    place = gl.sum(better.to(gl.int32), 1)
    chosen = (place < K) & (key > LOWEST)
    weight = gl.convert_layout(own.reshape([8 * BK]), ONE).to(gl.float32, bitcast=True)
    if RENORMALIZE:
        weight = weight / (gl.sum(gl.where(chosen, weight, 0.0), 0) + 1e-20)
    gl.store(ids + t * K + place, e.to(gl.int64), mask=chosen)
    gl.store(weights + t * K + place, weight * scale, mask=chosen)
