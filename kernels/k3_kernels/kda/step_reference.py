"""One KDA step of a window of rows, the definition: replay what was accepted, then compute the window; nothing stored
but the replayed state and the window's inputs.

Everything between the projections and the output projection is here: short convolution, SiLU, l2 norm, gate,
recurrence, gated output norm. A row goes through the same operations, in tensors of the same shape and in the same
slot, whether it is in the window or replayed, so any cut of a sequence into windows gives the same bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from k3_kernels.kda.reference import log_decay, prepare
from k3_kernels.norm import gated_rms_norm


class StepWeights(NamedTuple):
    """Weights of one layer. `commit` takes all layers at once: a leading layer dimension on the first four.

    conv [2HK + HV, w] fp32, last column for the current row, best stored as [w, 2HK + HV] (`.mT` of such a tensor: the
    kernel reads tap by tap, and copies others in every call); A_log [H], dt_bias [H, K], o_norm [V] fp32;
    lower_bound: of the gate's log decay, None for the unbounded gate; norm_eps: of the output norm.
    """

    conv: Tensor
    A_log: Tensor
    dt_bias: Tensor
    o_norm: Tensor
    lower_bound: float | None
    norm_eps: float


class StepLog(NamedTuple):
    """The raw inputs of the newest window's rows, kept instead of states; the row of position p in slot p mod W.

    x [W, 2HK + HV] convolution inputs, f [W, H, K] gate projection, b [W, H] beta logits, all in the activation dtype.
    Contiguous. The log of all layers has a leading layer dimension.
    """

    x: Tensor
    f: Tensor
    b: Tensor

    @staticmethod
    def empty(
        layers: int, window: int, heads: int, K: int, V: int, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> StepLog:
        """A log of all layers; its contents don't matter until a window was written."""
        width = heads * (2 * K + V)
        return StepLog(
            torch.zeros(layers, window, width, dtype=dtype, device=device),
            torch.zeros(layers, window, heads, K, dtype=dtype, device=device),
            torch.zeros(layers, window, heads, dtype=dtype, device=device),
        )

    def layer(self, index: int) -> StepLog:
        """One layer's log, a view."""
        return StepLog(self.x[index], self.f[index], self.b[index])

    @property
    def nbytes(self) -> int:
        return self.x.nbytes + self.f.nbytes + self.b.nbytes


class _Rows(NamedTuple):
    """What the recurrence takes, fp32, [W, ...] by slot: q scaled, q and k normalised, decay = exp(g)."""

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    beta: Tensor


def step(
    x: Tensor,
    f: Tensor,
    b: Tensor,
    gate: Tensor,
    w: StepWeights,
    recurrent: Tensor,
    conv: Tensor,
    log: StepLog,
    cursor: Tensor,
    n: int,
) -> Tensor:
    """See `k3_kernels.kda.step`."""
    position, accepted, slot = cursor[:3].tolist()
    W, V = x.shape[0], gate.shape[-1]
    before, now = _slots(position - accepted, accepted, W), _slots(position, n, W)
    sources = torch.cat((conv[slot], *_parts(log.x, before), *_parts(x, now)))
    taps = _taps(sources, w.conv)
    together = accepted + n <= W  # no row of the window takes the slot of one that is still to be replayed
    if together:
        _keep(log, (x, f, b), now)
        every = _prologue(taps, before + now, log.f, log.b, w, x.dtype, V)
        S = _walk(recurrent[slot], every, before)
    else:
        every = None
        S = _replayed(recurrent[slot], taps[:accepted], before, log, w, V)
    if accepted:
        recurrent[slot] = S
        conv[slot] = sources[accepted : accepted + conv.shape[1]]
    rows = every or _prologue(taps[accepted:], now, f, b, w, x.dtype, V)
    out = torch.zeros_like(rows.v)
    for row in now:
        S = _token(S, rows, row)
        out[row] = torch.bmm(S, rows.q[row].unsqueeze(-1)).squeeze(-1)
        S = _stored(S, recurrent.dtype)
    if not together:
        _keep(log, (x, f, b), now)
    out = gated_rms_norm(out, gate, w.o_norm, w.norm_eps)
    for idle in _parts(out, _slots(position + n, W - n, W)):
        idle.zero_()
    return out.view(W, -1)


def commit(recurrent: Tensor, conv: Tensor, log: StepLog, w: StepWeights, cursor: Tensor) -> None:
    """See `k3_kernels.kda.commit`."""
    position, accepted, slot = cursor[:3].tolist()
    before = _slots(position - accepted, accepted, log.x.shape[1])
    if not accepted:
        return
    for i in range(recurrent.shape[1]):
        layer = StepWeights(w.conv[i], w.A_log[i], w.dt_bias[i], w.o_norm[i], w.lower_bound, w.norm_eps)
        sources = torch.cat((conv[slot, i], *_parts(log.x[i], before)))
        taps, V = _taps(sources, layer.conv), recurrent.shape[3]
        recurrent[slot, i] = _replayed(recurrent[slot, i], taps, before, log.layer(i), layer, V)
        conv[slot, i] = sources[accepted:]


def _slots(start: int, count: int, W: int) -> list[int]:
    return [(start + i) % W for i in range(count)]


def _parts(rows: Tensor, slots: list[int]) -> list[Tensor]:
    """Views of consecutive slots, which wrap at most once, in time order: cheaper than gathering by index."""
    if not slots:
        return []
    wrap = len(slots) if slots[-1] >= slots[0] else len(rows) - slots[0]
    first = rows[slots[0] : slots[0] + wrap]
    return [first] if wrap == len(slots) else [first, rows[: len(slots) - wrap]]


def _taps(sources: Tensor, weight: Tensor) -> Tensor:
    """The convolution of the rows behind the first w-1, before the activation, fp32."""
    full, kernel = sources.float(), weight.t()
    rows = full.shape[0] - kernel.shape[0] + 1
    total = full[:rows] * kernel[0]
    for j in range(1, kernel.shape[0]):
        total += full[j : j + rows] * kernel[j]
    return total


def _prologue(
    taps: Tensor, slots: list[int], f: Tensor, b: Tensor, w: StepWeights, dtype: torch.dtype, V: int
) -> _Rows:
    """From convolved rows in time order to what the recurrence takes, by slot; idle slots hold anything."""
    W, H, K = f.shape
    # All W slots whatever the count: vector and scalar code of a transcendental function may differ in the last bit,
    # and which of the two an element gets depends on the shape.
    placed, done = taps.new_zeros(W, taps.shape[1]), 0
    for part in _parts(placed, slots):
        part.copy_(taps[done : done + len(part)])
        done += len(part)
    q, k, v = F.silu(placed).to(dtype).split((H * K, H * K, H * V), dim=-1)
    qn, kn, beta = prepare(q.reshape(W, H, K), k.reshape(W, H, K), b.contiguous())
    decay = log_decay(f.contiguous(), w.A_log, w.dt_bias, w.lower_bound).exp_()
    return _Rows(qn, kn, v.reshape(W, H, V).float(), decay, beta)


def _replayed(state: Tensor, taps: Tensor, slots: list[int], log: StepLog, w: StepWeights, V: int) -> Tensor:
    """The state after the logged rows, fp32 with the values its own dtype can hold; the given one is not written."""
    if not slots:
        return state.float()
    return _walk(state, _prologue(taps, slots, log.f, log.b, w, log.x.dtype, V), slots)


def _walk(state: Tensor, rows: _Rows, slots: list[int]) -> Tensor:
    """The state after the rows in these slots, as `_replayed`."""
    S = state.float()
    for row in slots:
        S = _stored(_token(S, rows, row), state.dtype)
    return S


def _keep(log: StepLog, new: tuple[Tensor, Tensor, Tensor], slots: list[int]) -> None:
    for kept, given in zip(log, new, strict=True):
        for old, rows in zip(_parts(kept, slots), _parts(given, slots), strict=True):
            old.copy_(rows)


def _token(S: Tensor, rows: _Rows, row: int) -> Tensor:
    """S [H, V, K] fp32 after one row; a new tensor."""
    key = rows.k[row]
    S = S * rows.decay[row].unsqueeze(-2)
    u = (rows.v[row] - torch.bmm(S, key.unsqueeze(-1)).squeeze(-1)) * rows.beta[row].unsqueeze(-1)
    S += u.unsqueeze(-1) * key.unsqueeze(-2)
    return S


def _stored(S: Tensor, dtype: torch.dtype) -> Tensor:
    """What a state of this dtype holds between two rows: bf16 states are rounded behind every row, stored or not."""
    return S if dtype == S.dtype else S.to(dtype).float()
