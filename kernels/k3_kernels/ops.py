"""The table of operators: what each computes, inputs to try it on, and how near an implementation must come.

Tests and benchmarks walk this table. An entry pairs the public function with a definition that shares no code with it
where one exists (a loop over tokens, an unblocked softmax, a matrix product with unpacked weights), both called with
the same arguments. `error` is max |found - expected| / max |expected| over every returned tensor, expected in fp64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from k3_kernels import attnres, conv, kda, linear, mla, moe, norm, ranks
from k3_kernels.activation import Situ, Swiglu
from k3_kernels.kda.reference import recurrent

Inputs = tuple[object, ...]
LENGTHS = (0, 1, 63, 64, 65, 1000)
"""Token counts to try: nothing, one, around a chunk, many chunks with a rest."""


@dataclass(frozen=True)
class Op:
    """One operator. make(T, dtype, generator) builds the arguments of `run` and `definition`.

    tolerance: dtype -> largest accepted error, with the reason in `why`. lengths: token counts it is tried at.
    """

    name: str
    run: Callable[..., Tensor | tuple[Tensor, ...]]
    definition: Callable[..., Tensor | tuple[Tensor, ...]]
    make: Callable[[int, torch.dtype, torch.Generator], Inputs]
    tolerance: dict[torch.dtype, float]
    why: str
    lengths: tuple[int, ...] = LENGTHS


def error(found: Tensor, expected: Tensor) -> float:
    """Largest absolute error relative to the largest expected value; infinite when anything is not finite."""
    if found.shape != expected.shape or not bool(torch.isfinite(found).all()):
        return float("inf")
    if not expected.numel():
        return 0.0
    scale = float(expected.double().abs().max()) or 1.0
    return float((found.double() - expected.double()).abs().max()) / scale


def _double(x: Tensor) -> Tensor:
    return x.double()


def kda_inputs(T: int, dtype: torch.dtype, random: torch.Generator, bound: float | None = -5.0) -> Inputs:
    """H = 3, K = 20, V = 12: all different, none a power of two."""
    H, K, V = 3, 20, 12

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random)

    rates = draw(H) * 0.5
    return (
        draw(T, H, K).to(dtype),
        draw(T, H, K).to(dtype),
        draw(T, H, V).to(dtype),
        draw(T, H, K).to(dtype),
        draw(T, H).to(dtype),
        rates,
        draw(H, K) - 1,
        bound,
        draw(H, V, K),
    )


def kda_unbounded_inputs(T: int, dtype: torch.dtype, random: torch.Generator) -> Inputs:
    """Kimi-Linear's gate with rates up to 200: log decays of -1000 beside others near 0, in one sub-chunk."""
    inputs = list(kda_inputs(T, dtype, random, None))
    inputs[5] = torch.tensor([5.3, 0.0, -4.0])
    return tuple(inputs)


def kda_definition(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    f: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float | None,
    state: Tensor,
) -> tuple[Tensor, Tensor]:
    """The token loop in fp64."""
    shifted = _double(f) + _double(dt_bias)
    rate = _double(A_log).exp()[:, None]
    if lower_bound is None:
        g = -rate * torch.logaddexp(shifted, torch.zeros_like(shifted))
    else:
        g = lower_bound / (1 + (-rate * shifted).exp())
    q64, k64 = _double(q), _double(k)
    q64 = q64 / (q64.square().sum(-1, keepdim=True) + 1e-6).sqrt() / q.shape[-1] ** 0.5
    k64 = k64 / (k64.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    return recurrent(q64, k64, _double(v), g, torch.sigmoid(_double(b)), _double(state))


def conv_inputs(T: int, dtype: torch.dtype, random: torch.Generator) -> Inputs:
    x, window, weight = (torch.randn(s, generator=random) for s in ((T, 13), (3, 13), (13, 4)))
    return x.to(dtype), window.to(dtype), weight


def conv_definition(x: Tensor, window: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """One output at a time."""
    rows = [*_double(window), *_double(x)]
    keep = window.shape[0]
    out = torch.zeros(x.shape, dtype=torch.float64)
    for t in range(x.shape[0]):
        total = sum((rows[t + j] * _double(weight)[:, j] for j in range(keep + 1)), torch.zeros(x.shape[1]).double())
        out[t] = total / (1 + (-total).exp())
    return out, torch.stack(rows[len(rows) - keep :])


def mla_inputs(T: int, dtype: torch.dtype, random: torch.Generator) -> Inputs:
    """T queries at positions 37 and on, pages of 50 rows in no order: H = 3, N = 10, P = 6, R = 14, V = 9."""
    H, N, P, R, V, start, page = 3, 10, 6, 14, 9, 37, 50

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random).to(dtype)

    table = torch.randperm(-(-(start + T) // page) + 1, generator=random).int()
    pages = draw(len(table), page, R + P)
    return draw(T, H, N + P), pages, table, draw(H, N + V, R) * R**-0.5, start, (N + P) ** -0.5


def mla_definition(q: Tensor, pages: Tensor, table: Tensor, w_kv_b: Tensor, start: int, scale: float) -> Tensor:
    """All keys and values at once, one softmax."""
    latent, R = _double(pages[table.long()].flatten(0, 1)[: start + q.shape[0]]), w_kv_b.shape[-1]
    N = q.shape[-1] - (latent.shape[-1] - R)
    expanded = torch.einsum("nr,hor->hno", latent[:, :R], _double(w_kv_b))
    shared = latent[:, R:].expand(expanded.shape[0], -1, -1)
    keys = torch.cat((expanded[..., :N], shared), -1)
    scores = torch.einsum("thd,hnd->htn", _double(q), keys) * scale
    rows = torch.arange(start, start + q.shape[0], device=q.device)
    scores = scores.masked_fill(torch.arange(latent.shape[0], device=q.device) > rows[:, None], float("-inf"))
    return torch.einsum("htn,hnv->thv", scores.softmax(-1), expanded[..., N:])


def decode_inputs(T: int, dtype: torch.dtype, random: torch.Generator) -> Inputs:
    """All T rows of a window live, the first at position 2 pages + 7 of T + 20 rows each."""
    H, N, P, R, V, page = 3, 10, 6, 14, 9, T + 20

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random).to(dtype)

    cursor, table = torch.tensor([2 * page + 7, 0, 0, 0]), torch.tensor([2, 0, 3], dtype=torch.int32)
    w_uk, w_uv = draw(H, N, R) * R**-0.5, draw(H, V, R) * R**-0.5
    return draw(T, H, N + P), draw(4, page, R + P), table, w_uk, w_uv, cursor, (N + P) ** -0.5, T


def decode_definition(
    q: Tensor, pages: Tensor, table: Tensor, w_uk: Tensor, w_uv: Tensor, cursor: Tensor, scale: float, n: int
) -> Tensor:
    """The expanded form; idle rows are zero."""
    start, W = int(cursor[0]), q.shape[0]
    slots = [p % W for p in range(start, start + n)]
    out = torch.zeros(W, q.shape[1], w_uv.shape[1], dtype=torch.float64, device=q.device)
    out[slots] = mla_definition(q[slots], pages, table, torch.cat((w_uk, w_uv), 1), start, scale)
    return out


def experts_inputs(T: int, dtype: torch.dtype, random: torch.Generator) -> Inputs:
    """Seven packed experts, L = 64, F = 96, three for each token; scales from 2^-6 to 2^-3."""
    E, L, F, k = 7, 64, 96, 3

    def packed(*shape: int) -> Tensor:
        return torch.randint(0, 256, shape, generator=random, dtype=torch.uint8)

    def scales(*shape: int) -> Tensor:
        return torch.randint(121, 125, shape, generator=random, dtype=torch.uint8)

    weights = moe.Experts(
        packed(E, 2 * F, L // 2), packed(E, L, F // 2), scales(E, 2 * F, L // 32), scales(E, L, F // 32)
    )
    ids = torch.stack([torch.randperm(E, generator=random)[:k] for _ in range(T)]) if T else torch.empty(0, k).long()
    z = torch.randn(T, L, generator=random).to(dtype)
    return z, ids, torch.rand(T, k, generator=random), weights, Situ(4.0, 25.0)


def experts_definition(z: Tensor, ids: Tensor, weights: Tensor, experts: moe.Experts, act: Situ | Swiglu) -> Tensor:
    """Token by token, weights unpacked with integer arithmetic, fp64."""
    w13, w2 = (_unpack(p, s) for p, s in ((experts.w13, experts.w13_scale), (experts.w2, experts.w2_scale)))
    out = torch.zeros(z.shape, dtype=torch.float64)
    for t in range(z.shape[0]):
        for e, weight in zip(ids[t].tolist(), weights[t].double(), strict=True):
            gate, up = (w13[e] @ _double(z[t])).chunk(2)
            out[t] += weight * (w2[e] @ _activation(act, gate, up))
    return out


def _unpack(packed: Tensor, scale: Tensor | None) -> Tensor:
    if scale is None:
        return _double(packed)
    nibbles = torch.stack((packed & 15, packed >> 4), -1).flatten(-2).int()
    code = nibbles & 7
    # E2M1: exponent 0 counts halves, above it (1 + m/2) 2^(e-1).
    value = torch.where(code < 2, code * 0.5, (1 + (code & 1) * 0.5) * 2.0 ** ((code >> 1) - 1).double())
    sign = 1 - 2 * (nibbles >> 3)
    return value * sign * 2.0 ** (scale.double() - 127).repeat_interleave(32, -1)


def _activation(act: Situ | Swiglu, gate: Tensor, up: Tensor) -> Tensor:
    if isinstance(act, Swiglu):
        return gate * torch.sigmoid(gate) * up
    bounded = act.beta * torch.tanh(gate / act.beta) * torch.sigmoid(gate)
    return bounded * act.linear_beta * torch.tanh(up / act.linear_beta)


def window_inputs(T: int, dtype: torch.dtype, random: torch.Generator) -> Inputs:
    return *experts_inputs(T, dtype, random), torch.tensor([5 * T, 0, 0, 0]), T


def window_definition(
    z: Tensor, ids: Tensor, weights: Tensor, experts: moe.Experts, act: Situ | Swiglu, cursor: Tensor, n: int
) -> Tensor:
    return experts_definition(z, ids, weights, experts, act)


def mix_inputs(T: int, dtype: torch.dtype, random: torch.Generator) -> Inputs:
    sources, query, weight = (torch.randn(s, generator=random) for s in ((4, T, 23), (23,), (23,)))
    return sources.to(dtype), query, weight.to(dtype), 1e-5, 1e-5


def mix_definition(sources: Tensor, query: Tensor, weight: Tensor, mix_eps: float, norm_eps: float) -> Tensor:
    """Token by token."""
    out = torch.zeros(sources.shape[1:], dtype=torch.float64)
    for t in range(sources.shape[1]):
        rows = [_double(row) for row in sources[:, t]]
        scores = torch.stack([(row / (row.square().mean() + mix_eps).sqrt()) @ _double(query) for row in rows])
        mixed = sum((p * row for p, row in zip(scores.softmax(0), rows, strict=True)), torch.zeros_like(rows[0]))
        out[t] = mixed / (mixed.square().mean() + norm_eps).sqrt() * _double(weight)
    return out


def gated_inputs(T: int, dtype: torch.dtype, random: torch.Generator) -> Inputs:
    x, gate, weight = (torch.randn(s, generator=random) for s in ((T, 3, 12), (T, 3, 12), (12,)))
    return x.to(dtype), gate.to(dtype), weight, 1e-5


def gated_definition(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    x64 = _double(x)
    return x64 / (x64.square().mean(-1, keepdim=True) + eps).sqrt() * _double(weight) / (1 + (-_double(gate)).exp())


def product_inputs(T: int, dtype: torch.dtype, random: torch.Generator) -> Inputs:
    return tuple(torch.randn(rows, 48, generator=random).to(dtype) for rows in (T, 72))


def product_definition(x: Tensor, weight: Tensor) -> Tensor:
    return _double(x) @ _double(weight).t()


def rows_inputs(T: int, dtype: torch.dtype, random: torch.Generator) -> Inputs:
    """Ids before, in and behind a part of 9 rows that begins with id 7."""
    return torch.randint(0, 24, (T,), generator=random), torch.randn(9, 20, generator=random).to(dtype), 7


def rows_definition(ids: Tensor, table: Tensor, first: int) -> Tensor:
    found = torch.zeros(len(ids), table.shape[1], dtype=table.dtype, device=table.device)
    for at, row in enumerate(ids.tolist()):
        if 0 <= row - first < len(table):
            found[at] = table[row - first]
    return found


def parts_inputs(T: int, dtype: torch.dtype, random: torch.Generator) -> Inputs:
    return (torch.randn((3, T, 23), generator=random).to(dtype),)


def parts_definition(parts: Tensor) -> Tensor:
    return _double(parts).sum(0)


SUMS = "fp32 sums of a few hundred terms; bf16 rounds the result to 8 bits once or twice"
BOTH = {torch.float32: 5e-6, torch.bfloat16: 5e-3}

OPS: tuple[Op, ...] = (
    Op("kda.prefill", kda.prefill, kda_definition, kda_inputs, {torch.float32: 2e-5, torch.bfloat16: 5e-3}, SUMS),
    Op(
        "kda.prefill, unbounded gate",
        kda.prefill,
        kda_definition,
        kda_unbounded_inputs,
        {torch.float32: 2e-5, torch.bfloat16: 5e-3},
        SUMS,
    ),
    Op("conv.short_conv", conv.short_conv, conv_definition, conv_inputs, BOTH, SUMS),
    Op(
        "mla.prefill",
        mla.prefill,
        mla_definition,
        mla_inputs,
        {torch.float32: 5e-6, torch.bfloat16: 1e-2},
        "in bf16 expanded keys and values are rounded as well",
    ),
    Op("mla.decode", mla.decode, decode_definition, decode_inputs, BOTH, SUMS, lengths=(1, 2, 8)),
    Op(
        "moe.experts_grouped",
        moe.experts_grouped,
        experts_definition,
        experts_inputs,
        {torch.float32: 5e-6, torch.bfloat16: 2e-2},
        "bf16 rounds hidden values, activations and expert outputs",
    ),
    Op(
        "moe.experts_window",
        moe.experts_window,
        window_definition,
        window_inputs,
        {torch.float32: 5e-6, torch.bfloat16: 2e-2},
        "bf16 rounds hidden values, activations and expert outputs",
        lengths=(1, 2, 8),
    ),
    Op("attnres.mix_norm", attnres.mix_norm, mix_definition, mix_inputs, {**BOTH, torch.bfloat16: 1e-2}, SUMS),
    Op("norm.gated_rms_norm", norm.gated_rms_norm, gated_definition, gated_inputs, BOTH, SUMS),
    Op("linear.few", linear.few, product_definition, product_inputs, BOTH, SUMS),
    Op("ranks.add", ranks.add, parts_definition, parts_inputs, BOTH, "bf16 rounds the result once"),
    Op("ranks.embed", ranks.embed, rows_definition, rows_inputs, dict.fromkeys(BOTH, 0.0), "copies"),
)
