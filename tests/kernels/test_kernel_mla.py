"""Latent attention over pages: where rows land, and on what the bits of a row depend."""

from __future__ import annotations

import pytest
import torch
from k3_kernels import mla
from k3_kernels.ops import decode_definition, error
from torch import Tensor

W, H, N, P, R, V, PAGE = 8, 3, 10, 6, 14, 9, 32


def inputs(start: int, scattered: bool = True, seed: int = 0) -> tuple[Tensor, ...]:
    """(q, pages, table, w_uk, w_uv, cursor) with NaN in every row behind the window's last."""
    random = torch.Generator().manual_seed(seed)
    count = (start + W - 1) // PAGE + 1
    table = torch.randperm(count, generator=random) if scattered else torch.arange(count)
    rows = torch.randn(count * PAGE, R + P, generator=random)
    rows[start + W :] = float("nan")
    pages = torch.empty(count, PAGE, R + P)
    pages[table] = rows.view(count, PAGE, R + P)
    q = torch.randn(W, H, N + P, generator=random)
    w_uk, w_uv = torch.randn(H, N, R, generator=random) / 4, torch.randn(H, V, R, generator=random) / 4
    return q, pages, table.int(), w_uk, w_uv, torch.tensor([start, 0, 0, 0])


def attend(given: tuple[Tensor, ...], n: int, run=mla.decode) -> Tensor:
    return run(*given, 0.25, n)


@pytest.mark.parametrize("start", [0, 1, 24, 31, 32, 60, 1000])
def test_decode_follows_the_definition(start: int):
    given = inputs(start)
    assert error(attend(given, W), attend(given, W, decode_definition)) < 5e-6


@pytest.mark.parametrize("start", [0, 27, 16 * PAGE - 3])
def test_bits_depend_on_position_alone(start: int):
    """Alone, in windows of any number of rows, beside NaN in idle slots, in pages side by side or scattered."""
    given = inputs(start)
    whole = attend(given, W)
    for n in range(1, W):
        found = attend(given, n)
        live = [p % W for p in range(start, start + n)]
        idle = [p % W for p in range(start + n, start + W)]
        assert torch.equal(found[live], whole[live])
        assert not found[idle].any()
    for i in range(W):
        q = torch.full_like(given[0], float("nan"))
        q[(start + i) % W] = given[0][(start + i) % W]
        alone = attend((q, *given[1:5], torch.tensor([start + i, 0, 0, 0])), 1)
        assert torch.equal(alone[(start + i) % W], whole[(start + i) % W])
    q, pages, table, *rest = given
    straight = torch.empty_like(pages).copy_(pages[table.long()])
    assert torch.equal(attend((q, straight, torch.arange(len(table)).int(), *rest), W), whole)


@pytest.mark.parametrize("start", [0, 29, 32])
def test_append_writes_live_rows_only(start: int):
    _, pages, table, _, _, cursor = inputs(start)
    rows = torch.randn(W, R + P)
    for n in (1, 5, W):
        wanted, found = pages.clone(), pages.clone()
        for p in range(start, start + n):
            wanted[table[p // PAGE], p % PAGE] = rows[p % W]
        mla.append(rows, found, table, cursor, n)
        assert torch.equal(found.nan_to_num(7), wanted.nan_to_num(7))


def test_store_writes_a_chunk_across_pages():
    pool = torch.zeros(5, 2, PAGE, R + P)
    rows = torch.randn(70, R + P)
    mla.store(rows, pool[:, 1], torch.tensor([4, 0, 2], dtype=torch.int32), 20)
    assert not pool[:, 0].any()
    assert torch.equal(pool[[4, 0, 2], 1].flatten(0, 1)[20:90], rows)
    assert int(pool.any(-1).sum()) == 70
