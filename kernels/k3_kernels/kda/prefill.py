"""KDA over many tokens at once. Source: the recurrence and its chunk form are Kimi Linear's (arXiv 2510.26692); the
32-token chunks with data-independent anchors and the segments are this project's."""

from __future__ import annotations

import torch
from torch import Tensor

from k3_kernels import select
from k3_kernels.kda import reference

TYPES = (torch.bfloat16, torch.float32)
CHUNK = 32
WORKSPACE = 768 << 20
"""Bytes of scratch memory of a call; longer calls are made of several."""
ROWS = 64
"""Of the state, in one program of the Triton walk; the least the matrix units of Hopper take."""
RESIDENT = 256
"""Programs of the walk that should run at once: segments are cut until there are about that many."""


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

    q, k [T, H, K], v [T, H, V] after convolution and SiLU; f [T, H, K] raw gate projection, b [T, H] beta logits: fp32
    or bf16, tokens may be slices of something wider; A_log [H], dt_bias [H, K] fp32; state [H, V, K] fp32, not written.
    lower_bound: of the log decay (K3: -5), or None for Kimi-Linear's gate. Returns (o [T, H, V] in v's dtype, new state
    fp32). The same call gives the same bits; a sequence cut into other calls gives others.
    """
    if choice(v.device, k.shape[-1], v.shape[-1], v.dtype).kernel:
        from k3_kernels.kda import prefill_triton

        return prefill_triton.prefill(q, k, v, f, b, A_log, dt_bias, lower_bound, state)
    return reference.prefill(q, k, v, f, b, A_log, dt_bias, lower_bound, state)


def choice(device: torch.device, K: int, V: int, dtype: torch.dtype) -> select.Choice:
    """Which implementation runs these head dimensions and this activation type here, and why."""
    refusal = select.power_of_two(K=K, V=V)
    for name, size in (("K", K), ("V", V)):
        if refusal is None and not 16 <= size <= 128:
            refusal = f"{name} = {size}: the kernel takes 16 to 128"
    if refusal is None and dtype not in TYPES:
        refusal = f"{dtype}: the kernel takes bfloat16 and float32"
    return select.choose(device, refusal)


def squares(dtype: torch.dtype) -> int:
    """How many C x C matrices a chunk has: solve and mix, in 16 bits the rest of solve too."""
    return 2 if dtype == torch.float32 else 3


def chunk_bytes(H: int, K: int, dtype: torch.dtype) -> int:
    """Scratch memory of one chunk of all heads: three tiles and the squares, decay, beta, the diagonal."""
    return H * (dtype.itemsize * CHUNK * (3 * K + squares(dtype) * CHUNK) + 4 * K + 8 * CHUNK)


def prefill_scratch(T: int, H: int, K: int, V: int, dtype: torch.dtype) -> int:
    """Bytes that the kernels take beside arguments and results of a call of T tokens: chunks, segments, a state."""
    chunk, n, state = chunk_bytes(H, K, dtype), -(-T // CHUNK), 4 * H * V * K
    segments = max(1, min(RESIDENT // (H * max(1, V // ROWS)), n // 16))
    joined = segments * state + (segments - 1) * 4 * H * (V + K) * K if segments > 1 else 0
    return min(n, max(WORKSPACE // chunk, 1)) * chunk + joined + state
