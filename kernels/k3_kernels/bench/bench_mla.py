"""Latent attention at K3's shapes: decode over paged latents by context and rows, prefill of 8,192 queries."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from k3_kernels.bench.harness import Case, sets_for
from k3_kernels.mla import decode_triton, prefill_library

H, N, P, R, V, PAGE, W = 96, 128, 64, 512, 128, 512, 8
SCALE = (N + P) ** -0.5
WEIGHTS = 2 * H * (N + V) * R
"""Bytes of w_uk and w_uv of one layer; every decode case reads them once on top of its latents."""
CHUNK = 8192
TARGETS = {(1, 1 << 17): 75.0, (1, 1 << 20): 400.0, (8, 1 << 20): 3200.0}
Run = Callable[[], object]


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


class Latents:
    """`sets` sequences of `tokens` latent rows in one pool [pages, sets, PAGE, R + P], each in scattered pages."""

    def __init__(self, tokens: int, sets: int) -> None:
        count = -(-tokens // PAGE)
        self.pool = draw(count, sets, PAGE, R + P)
        self.tables = [torch.randperm(count, device="cuda").int() for _ in range(sets)]


def decode_run(latents: Latents, index: int, start: int, n: int) -> Run:
    """One decode of rows start .. start + n - 1 with weights and queries of its own."""
    q, w_uk, w_uv = draw(W, H, N + P), draw(H, N, R) * R**-0.5, draw(H, V, R) * R**-0.5
    cursor = torch.tensor([start, 0, 0, 0], device="cuda")
    pages, table = latents.pool[:, index], latents.tables[index]
    return lambda: decode_triton.decode(q, pages, table, w_uk, w_uv, cursor, SCALE, n)


def plain_run(latents: Latents, index: int, start: int, n: int) -> Run:
    """The peer: contiguous latents, absorbed queries, two products and a softmax in torch; no mask, no weights."""
    rows = latents.pool[:, index].reshape(-1, R + P)[: start + n]
    q = draw(n * H, R + P) * SCALE
    return lambda: (q @ rows.t()).softmax(-1) @ rows[:, :R]


def decode_cases() -> list[Case]:
    found = []
    for context in (0, 1 << 12, 1 << 15, 1 << 17, 1 << 20):
        start = max(0, context - 8)
        latents = Latents(start + 8, sets_for(2 * (R + P) * context + WEIGHTS))
        sets = range(len(latents.tables))
        for n in (1, 8):
            keys = start + n
            found.append(
                Case(
                    "mla.decode",
                    f"{n} rows, {context} keys",
                    [decode_run(latents, i, start, n) for i in sets],
                    bytes=2 * (R + P) * keys + WEIGHTS,
                    flops=2 * n * H * keys * (2 * R + P) + 2 * n * H * R * (N + V),
                    peer=[plain_run(latents, i, start, n) for i in sets] if context else (),
                    peer_name="torch, two products",
                    target_us=TARGETS.get((n, context)),
                    note=f"{WEIGHTS / 1e6:.0f} MB of weights counted",
                )
            )
    return found


def prefill_cases() -> list[Case]:
    """Operations of the attention alone; the expansion of keys and values is in the time."""
    found = []
    for keys in (1 << 13, 1 << 16, 1 << 19, 1 << 20):
        start = keys - CHUNK
        latents, w_kv_b = Latents(keys, 2), draw(H, N + V, R) * R**-0.5
        flops = 2 * H * (N + P + V) * CHUNK * (start + (CHUNK + 1) // 2)
        runs = [prefill_run(latents, i, w_kv_b, start) for i in range(2)]
        expanded = 2 * keys * H * (N + V) * R
        found.append(
            Case(
                "mla.prefill",
                f"{CHUNK} queries, {keys} keys",
                runs,
                bytes=2 * (R + P) * keys + WEIGHTS + 2 * CHUNK * H * (N + P + V),
                flops=flops,
                peer=[library_run(keys)] if start == 0 or keys <= 1 << 16 else (),
                peer_name="cuDNN alone, expanded keys",
                target_us=flops / 500e12 * 1e6,
                note=f"+ {expanded / flops:.1%} operations for the expansion",
            )
        )
    return found


def prefill_run(latents: Latents, index: int, w_kv_b: Tensor, start: int) -> Run:
    q = draw(CHUNK, H, N + P)
    pages, table = latents.pool[:, index], latents.tables[index]
    return lambda: prefill_library.prefill(q, pages, table, w_kv_b, start, SCALE)


def library_run(keys: int) -> Run:
    """The peer: one call over keys and values that are already there; causal when they are the chunk's own."""
    q, k, v = draw(CHUNK, H, N + P), draw(keys, H, N + P), draw(keys, H, V)
    return lambda: prefill_library.attention(q, k, v, keys == CHUNK, SCALE)


def cases() -> list[Case]:
    return decode_cases() + prefill_cases()
