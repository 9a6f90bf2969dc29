"""Latent attention kernels against the definition, and on what the bits of a row depend."""

from __future__ import annotations

import pytest
import torch
from k3_kernels import mla
from k3_kernels.mla import decode_triton, prefill_library, reference
from k3_kernels.mla.decode_triton import Tiling, append, decode
from k3_kernels.mla.merge_triton import merge
from k3_kernels.ops import decode_definition, error, mla_definition
from torch import Tensor

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
DTYPES = [torch.float32, torch.bfloat16] if CUDA else [torch.float32]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
SPLITS, LEAST = (decode_triton.SPLITS, decode_triton.LEAST) if CUDA else (8, 1)
STEP = decode_triton.UNIT * SPLITS * LEAST
"""The first position whose span is longer than its predecessor's."""
SMALL = (5, 3, 10, 16, 32, 9, 64)
K3 = (8, 96, 128, 64, 512, 128, 512)
SHAPES = [SMALL, K3] if CUDA else [SMALL]


def inputs(shape: tuple[int, ...], start: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, ...]:
    """(q, pages, table, w_uk, w_uv, cursor); NaN behind the window's last row and in the pages of another layer."""
    W, H, N, P, R, V, page = shape
    random = torch.Generator().manual_seed(seed)
    count = (start + W - 1) // page + 1
    table = torch.randperm(count + 3, generator=random)[:count]
    rows = torch.randn(count * page, R + P, generator=random)
    rows[start + W :] = float("nan")
    pool = torch.full((count + 3, 2, page, R + P), float("nan"))
    pool[table, 1] = rows.view(count, page, R + P)
    q = torch.randn(W, H, N + P, generator=random)
    w_uk, w_uv = torch.randn(H, N, R, generator=random) * R**-0.5, torch.randn(H, V, R, generator=random) * R**-0.5
    cursor = torch.tensor([start, 0, 0, 0], device=DEVICE)
    q, pool, w_uk, w_uv = (x.to(DEVICE, dtype) for x in (q, pool, w_uk, w_uv))
    return q, pool[:, 1], table.int().to(DEVICE), w_uk, w_uv, cursor


def scale(shape: tuple[int, ...]) -> float:
    return 3 * (shape[2] + shape[3]) ** -0.5


@pytest.fixture(autouse=True)
def _few_splits(monkeypatch: pytest.MonkeyPatch):
    """Interpreted, spans grow behind 1,024 keys already."""
    monkeypatch.setattr(decode_triton, "SPLITS", SPLITS)
    monkeypatch.setattr(decode_triton, "LEAST", LEAST)


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch):
    """Fresh tensors are full of NaN: what a kernel does not write shows."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **how: empty(*size, **how).fill_(float("nan")))


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("start", [0, 1, 61, 64, 1000, STEP - 3])
def test_decode_follows_the_definition(shape: tuple[int, ...], start: int, dtype: torch.dtype):
    given = inputs(shape, start, dtype)
    W = shape[0]
    for n in (1, W):
        found = decode(*given, scale(shape), n)
        assert error(found, decode_definition(*given, scale(shape), n)) < TOLERANCE[dtype]
        idle = [p % W for p in range(start + n, start + W)]
        assert not found[idle].any()


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("start", [0, 60, STEP - 3, *([20000, 7 * 4096 - 2] if CUDA else [])])
def test_bits_depend_on_position_alone(shape: tuple[int, ...], start: int, dtype: torch.dtype):
    """Alone beside NaN, in windows of any size, across a step of the span, with other rows behind."""
    given, W = inputs(shape, start, dtype), shape[0]
    whole = decode(*given, scale(shape), W)
    assert torch.isfinite(whole).all()
    for n in range(1, W, 1 if CUDA else 2):
        live = [p % W for p in range(start, start + n)]
        assert torch.equal(decode(*given, scale(shape), n)[live], whole[live])
    for i in range(0, W, 1 if CUDA else 2):
        slot = (start + i) % W
        q = torch.full_like(given[0], float("nan"))
        q[slot] = given[0][slot]
        alone = decode(q, *given[1:5], given[5] + torch.tensor([i, 0, 0, 0], device=DEVICE), scale(shape), 1)
        assert torch.equal(alone[slot], whole[slot])


@pytest.mark.skipif(not CUDA, reason="these tilings need a CUDA device")
@pytest.mark.parametrize("form", ["triton", "hopper"])
@pytest.mark.parametrize("start", [0, 1000, STEP - 3])
def test_every_form_of_attend(start: int, form: str):
    given = inputs(K3, start, torch.bfloat16)
    found = decode(*given, scale(K3), K3[0], Tiling(64, 64, 8, 2, form))
    assert error(found, decode_definition(*given, scale(K3), K3[0])) < TOLERANCE[torch.bfloat16]


@pytest.mark.skipif(not CUDA, reason="far positions take a CUDA device")
def test_where_splits_double():
    """A window across the position from which rows have twice as many splits, against the reference."""
    given = inputs(K3, decode_triton.FAR - 3, torch.bfloat16)
    whole = decode(*given, scale(K3), 8)
    assert error(whole, reference.decode(*given, scale(K3), 8)) < TOLERANCE[torch.bfloat16]
    for i in range(8):
        slot = (decode_triton.FAR - 3 + i) % 8
        alone = decode(*given[:5], given[5] + torch.tensor([i, 0, 0, 0], device=DEVICE), scale(K3), 1)
        assert torch.equal(alone[slot], whole[slot])


@pytest.mark.parametrize("dtype", DTYPES)
def test_huge_scores_stay_finite(dtype: torch.dtype):
    q, *rest = inputs(SMALL, 70, dtype)
    found = decode(q * 1e4, *rest, 1.0, 5)
    assert error(found, decode_definition(q * 1e4, *rest, 1.0, 5)) < 10 * TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("start", [0, 62, 64])
def test_append_writes_live_rows_only(start: int, dtype: torch.dtype):
    W, _, _, P, R, _, _ = SMALL
    _, pages, table, _, _, cursor = inputs(SMALL, start, dtype)
    pool = pages.nan_to_num(1e30).unsqueeze(1).repeat(1, 2, 1, 1)
    rows = torch.randn(W, 2 * (R + P), device=DEVICE).to(dtype)[:, : R + P]
    for n in (1, W):
        wanted, found = pool.clone(), pool.clone()
        mla.append(rows, wanted[:, 1], table, cursor, n)
        append(rows, found[:, 1], table, cursor, n)
        assert torch.equal(found, wanted)
        assert not torch.equal(found, pool)


def plain_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, factor: float) -> tuple[Tensor, Tensor]:
    """What the library computes, in fp32."""
    scores = torch.einsum("thd,nhd->htn", q.float(), k.float()) * factor
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores[0]).triu(1).bool(), float("-inf"))
    out = torch.einsum("htn,nhv->thv", scores.softmax(-1), v.float())
    return out.to(q.dtype), scores.logsumexp(-1)


def prefill_inputs(T: int, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    _, pages, table, w_uk, w_uv, _ = inputs((T, *shape[1:]), start, dtype, seed=1)
    q = torch.randn(T, shape[1], shape[2] + shape[3], device=DEVICE).to(dtype)
    return q, pages, table, torch.cat((w_uk, w_uv), 1)


@pytest.mark.parametrize(("T", "start"), [(1, 0), (7, 0), (64, 100), (33, 96), (1, 200)])
def test_prefill_by_blocks(monkeypatch: pytest.MonkeyPatch, T: int, start: int):
    """The merge of blocks of keys, with a plain attention in the library's place."""
    monkeypatch.setattr(prefill_library, "attention", plain_attention)
    monkeypatch.setattr(prefill_library, "BLOCK", 48)
    given = prefill_inputs(T, start, SMALL, torch.float32)
    found = prefill_library.prefill(*given, start, scale(SMALL))
    assert error(found, mla_definition(*given, start, scale(SMALL))) < 5e-6


def test_merge_with_nothing_near():
    """One side's sums dwarf the other's by more than fp32 can tell."""
    a, b = torch.randn(2, 5, 3, 9, device=DEVICE)
    la, lb = torch.randn(2, 3, 5, device=DEVICE)
    out = torch.full_like(a, float("nan"))
    merge(a, la - 500, b, lb, out)
    assert torch.equal(out, b)


@pytest.mark.skipif(not CUDA, reason="the library's attention needs a CUDA device")
@pytest.mark.parametrize(("T", "start"), [(1, 0), (65, 0), (512, 512), (1000, 777), (1, 3000), (700, 20001)])
def test_prefill_through_the_library(T: int, start: int):
    shape = (8, 4, 128, 64, 512, 128, 512)
    given = prefill_inputs(T, start, shape, torch.bfloat16)
    found = prefill_library.prefill(*given, start, scale(shape))
    assert error(found, mla_definition(*given, start, scale(shape))) < 1e-2
