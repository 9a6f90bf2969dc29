"""Kimi Delta Attention, the definition: gate, token recurrence, chunk form. Decode is in `step_reference.py`.

Source: Kimi Linear (arXiv 2510.26692); the bounded gate is Kimi K3's. All arithmetic is fp32, decay is in log space
until it multiplies the state. One state per head is S [V, K], K contiguous:

    S <- S diag(exp(g_t));  u = beta_t (v_t - S k_t);  S <- S + u k_t^T;  o_t = S q_t
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64
SUB_CHUNK = 16
L2_EPS = 1e-6


def log_decay(f: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float | None) -> Tensor:
    """The gate g [T, H, K] fp32, a log decay, never positive.

    f [T, H, K] raw projection, A_log [H], dt_bias [H, K] fp32. With a lower bound (K3: -5):
    `lower_bound * sigmoid(exp(A_log) (f + dt_bias))`; without (Kimi-Linear): `-exp(A_log) softplus(f + dt_bias)`.
    """
    rate = A_log.exp()[:, None]
    shifted = f.float() + dt_bias
    if lower_bound is None:
        return -rate * F.softplus(shifted)
    return lower_bound * torch.sigmoid(rate * shifted)


def prepare(q: Tensor, k: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """L2-normalised k, L2-normalised and 1/sqrt(K)-scaled q, beta = sigmoid(b); all fp32. eps is added to the sum."""
    qf, kf = q.float(), k.float()
    qn = qf * (torch.rsqrt(qf.square().sum(-1, keepdim=True) + L2_EPS) * q.shape[-1] ** -0.5)
    kn = kf * torch.rsqrt(kf.square().sum(-1, keepdim=True) + L2_EPS)
    return qn, kn, torch.sigmoid(b.float())


def recurrent(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The token loop, the definition every other form is tested against.

    q, k, g [T, H, K], v [T, H, V], beta [T, H], state [H, V, K], one float dtype (fp64 works); q scaled, q and k
    normalised, g log decay. Returns (o [T, H, V], the state after T tokens); the given state is not written.
    """
    out = torch.empty_like(v)
    S = state.clone()
    for t in range(v.shape[0]):
        S = S * g[t].exp()[:, None, :]
        u = beta[t][:, None] * (v[t] - torch.einsum("hvk,hk->hv", S, k[t]))
        S = S + u[:, :, None] * k[t][:, None, :]
        out[t] = torch.einsum("hvk,hk->hv", S, q[t])
    return out, S


def chunk(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The same as `recurrent`, 64 tokens at a time. Every exponent is a sum of log decays, hence never positive.

    Inside a 16-token sub-chunk the decay between two tokens is the exponential of a difference; between sub-chunks it
    factors at the boundary in front of the later one (both factors at most 1). So unbounded gates can't overflow.
    The T x T systems are solved by forward substitution, the state is carried from chunk to chunk.
    """
    T, H, K = k.shape
    V = v.shape[-1]
    if T == 0:
        return v.new_empty(0, H, V), state.clone()
    size = min(CHUNK, -(-T // SUB_CHUNK) * SUB_CHUNK)
    n = -(-T // size)
    subs = size // SUB_CHUNK
    # Padding rows have beta = 0 and k = 0: they add nothing, and g = 0 leaves the state as it is.
    q, k, v, g = (_chunked(x, n, size) for x in (q, k, v, g))
    beta = _chunked(beta.unsqueeze(-1), n, size)

    blocked = g.view(n, H, subs, SUB_CHUNK, K)
    local = blocked.cumsum(-2)
    total = local[..., -1, :]
    to_end = torch.cat((blocked[..., 1:, :], torch.zeros_like(blocked[..., :1, :])), -2).flip(-2).cumsum(-2).flip(-2)
    before = torch.cat((torch.zeros_like(total[:, :, :1]), total[:, :, :-1].cumsum(2)), 2)
    after = torch.cat((total[:, :, 1:], torch.zeros_like(total[:, :, :1])), 2).flip(2).cumsum(2).flip(2)

    A, B = _pair_products(q, k, blocked, local, total, to_end)
    from_start = (before.unsqueeze(-2) + local).view(n, H, size, K).exp()
    k_end = k * (after.unsqueeze(-2) + to_end).view(n, H, size, K).exp()
    q_start = q * from_start
    decay = (before[:, :, -1] + total[:, :, -1]).exp().unsqueeze(-2)

    rhs = torch.cat((beta * v, beta * (k * from_start)), -1)
    solved = torch.linalg.solve_triangular(beta * A, rhs, upper=False, unitriangular=True)
    u_v, u_k = solved[..., :V], solved[..., V:]

    out = torch.empty_like(v)
    S = state.clone()
    for i in range(n):
        u = u_v[i] - u_k[i] @ S.mT
        out[i] = q_start[i] @ S.mT + B[i] @ u
        S = S * decay[i] + u.mT @ k_end[i]
    return out.transpose(1, 2).reshape(n * size, H, V)[:T].contiguous(), S


def _chunked(x: Tensor, n: int, size: int) -> Tensor:
    """[T, H, D] -> [n, H, size, D], zero rows behind T."""
    T, H, D = x.shape
    if n * size != T:
        x = torch.cat((x, x.new_zeros(n * size - T, H, D)))
    return x.view(n, size, H, D).transpose(1, 2).contiguous()


def _pair_products(
    q: Tensor, k: Tensor, g: Tensor, local: Tensor, total: Tensor, to_end: Tensor
) -> tuple[Tensor, Tensor]:
    """A[t, s] = sum_d k_t k_s e^(G_t - G_s) for s < t and B[t, s] = sum_d q_t k_s e^(G_t - G_s) for s <= t."""
    n, H, subs, sub, K = g.shape
    size = subs * sub
    qs, ks = q.view(n, H, subs, sub, K), k.view(n, H, subs, sub, K)
    A = q.new_zeros(n, H, subs, sub, subs, sub)
    B = torch.zeros_like(A)

    # Same sub-chunk: differences, in fp64 because a large decay earlier in the sub-chunk would cost digits.
    sums = g.double().cumsum(-2)
    later = torch.ones(sub, sub, dtype=torch.bool, device=g.device).triu(1).unsqueeze(-1)
    diff = (sums.unsqueeze(-2) - sums.unsqueeze(-3)).to(g.dtype)
    weighted = diff.masked_fill_(later, float("-inf")).exp_().mul_(ks.unsqueeze(-3))
    pair = torch.stack((ks, qs), -2) @ weighted.mT
    for i in range(subs):
        A[:, :, i, :, i] = pair[:, :, i, :, 0].tril(-1)
        B[:, :, i, :, i] = pair[:, :, i, :, 1]

    # Earlier sub-chunks: both sides measured from the boundary in front of sub-chunk i.
    rows = torch.cat((ks, qs), -2) * torch.cat((local, local), -2).exp()
    columns = to_end.clone()
    for i in range(1, subs):
        factor = (ks[:, :, :i] * columns[:, :, :i].exp()).view(n, H, i * sub, K)
        products = (rows[:, :, i] @ factor.mT).view(n, H, 2 * sub, i, sub)
        A[:, :, i, :, :i] = products[:, :, :sub]
        B[:, :, i, :, :i] = products[:, :, sub:]
        columns[:, :, :i] += total[:, :, i, None, None]
    return A.view(n, H, size, size), B.view(n, H, size, size)


def prefill(
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
    """KDA over T tokens from convolved projections: gate, normalisation, chunk form, state in and out.

    q, k [T, H, K], v [T, H, V] after convolution and SiLU; f [T, H, K] raw gate projection, b [T, H] beta logits (all
    fp32 or bf16); A_log [H], dt_bias [H, K] fp32; state [H, V, K] fp32, not written.
    Returns (o [T, H, V] in v's dtype, new state fp32).
    """
    qn, kn, beta = prepare(q, k, b)
    g = log_decay(f, A_log, dt_bias, lower_bound)
    out, S = chunk(qn, kn, v.float(), g, beta, state)
    return out.to(v.dtype), S
