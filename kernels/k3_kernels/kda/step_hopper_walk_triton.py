"""The recurrence of a KDA step on Hopper, in Gluon: rows one after the other, the state in registers.

Half a head's state is [V / 2, 16, K / 16], sixteen lanes along K with runs of four channels each. A thread has two rows
of each half, and the halves are half a row apart: while the sums of one go round the lanes, the other has work. With
all four rows at once a row took twice as long, since the programs of a processor wait at the same time.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from k3_kernels.kda.step_hopper_cluster_triton import PARTS, _four, _number, _single
from k3_kernels.kda.step_hopper_copy_triton import _send, _written
from k3_kernels.kda.step_hopper_rows_triton import _rounded, _times
from k3_kernels.kda.step_hopper_sums_triton import _correction, _push_sums


@gluon.jit
def _dot(S, row, first):
    """Sums over K of states [.., 16, K / 16] as far as a thread has the summands. first: 0 in the last dimension."""
    row = row[None, :, :]
    return gl.sum(gl.where(first[None, :, :], _times(S, row), S * row), 2)


@gluon.jit
def _plus(S, u, key):
    return S + u[:, :, None] * key[None, :, :]


@gluon.jit
def _walk(
    a_state, b_state, a_own, start, count, keys, decays, queries, a_values, b_values, betas, outputs, came, lane, first,
    stored, at, target, BULK: gl.constexpr, LIVE: gl.constexpr, kind: gl.constexpr, K: gl.constexpr, V: gl.constexpr
):  # fmt: skip
    """Takes rows start to start + count of the timeline one after the other. LIVE: their outputs go out; otherwise the
    state behind the last of them goes to `stored`, in memory, or, BULK, in shared memory, and on to `target` from where
    a warp's rows begin, `at`. Addresses of vectors are those of row 0.

    The first half comes and goes as the next row finds it: decayed, and with its sums over that row's key, a_own. What
    is behind the last row of all may be anything."""
    OWN: gl.constexpr = V // PARTS
    SIZE: gl.constexpr = kind.primitive_bitwidth // 8
    key = _four(keys + start * (K * 4))
    decay = _four(decays + start * (K * 4))
    a_read = a_own
    b_read = a_own
    for t in range(start, start + count):
        o = t - start
        beta = _number(betas + t * 4)
        b_state = b_state * decay[None, :, :]
        b_own = _dot(b_state, key, first)
        decay = _four(decays + (t + 1) * (K * 4))
        u = _correction(a_own, _single(a_values + t * (OWN * 4)), beta, lane)
        if LIVE:
            # Of the row before: sums that nothing waits for.
            before = gl.maximum(o - 1, 0).to(gl.uint32)
            out_at = outputs + before // PARTS * (V * 4)
            _push_sums(a_read, b_read, lane, out_at, before % PARTS, (o > 0).to(gl.int32), came)
            q = _four(queries + o * (K * 4))
        a_state = _plus(a_state, u, key)
        u = _correction(b_own, _single(b_values + t * (OWN * 4)), beta, lane)
        if LIVE:
            a_read = _dot(a_state, q, first)
        # What a stored state would hold: a bf16 state is rounded behind every row.
        a_state = _rounded(a_state, kind)
        b_state = _plus(b_state, u, key)
        key = _four(keys + (t + 1) * (K * 4))
        if LIVE:
            b_read = _dot(b_state, q, first)
        b_state = _rounded(b_state, kind)
        if not LIVE:
            if o == count - 1:
                if BULK:
                    _written(stored, a_state, kind)
                    _written(stored + 2 * K * SIZE, b_state, kind)
                    _send(at, target, 8 * K * SIZE)
                else:
                    gl.store(stored, a_state.to(kind))
                    gl.store(stored + 2 * K, b_state.to(kind))
        a_state = a_state * decay[None, :, :]
        a_own = _dot(a_state, key, first)
    if LIVE:
        o = (count - 1).to(gl.uint32)
        out_at = outputs + o // PARTS * (V * 4)
        _push_sums(a_read, b_read, lane, out_at, o % PARTS, (count > 0).to(gl.int32), came)
    return a_state, b_state, a_own
