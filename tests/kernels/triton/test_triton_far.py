"""Pools whose last entries lie beyond 2^31 elements: same bits as near ones. Files with holes hold them on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from k3_kernels.kda import step_cases as cases
from k3_kernels.kda import step_triton
from k3_kernels.mla import decode_triton, reference
from torch import Tensor

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
ENTRIES, APART = 131, 1 << 24
"""The last entry begins at 130 x 2^24 elements; products of two 32-bit numbers don't reach it."""


def far(folder: Path, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """[ENTRIES, *shape], entries 2^24 elements apart, zeros. The tests touch a few pages of it."""
    size = ENTRIES * APART
    if CUDA:
        if torch.cuda.mem_get_info()[0] < 3 * size * dtype.itemsize:
            pytest.skip("needs more device memory")
        flat = torch.zeros(size, dtype=dtype, device=DEVICE)
    else:
        flat = torch.from_file(str(folder / f"{len(list(folder.iterdir()))}"), shared=True, size=size, dtype=dtype)
    inner = torch.empty(shape, device="meta").stride()
    return flat.as_strided((ENTRIES, *shape), (APART, *inner))


@pytest.mark.parametrize("shape", [(2, 32, 16), *([(2, 128, 128)] if CUDA else [])])
def test_states_in_far_slots(tmp_path: Path, shape: tuple[int, int, int]):
    """A window, the replay of what was accepted of it in the next one, and the replay alone."""
    t = cases.draw(9, *shape, torch.float32, 0, device=DEVICE)
    near = cases.begin(step_triton.step, t, 4, torch.float32)
    away = cases.begin(step_triton.step, t, 4, torch.float32, slots=ENTRIES, slot=ENTRIES - 1)
    for name in ("recurrent", "conv"):
        pool = getattr(away, name)
        wide = far(tmp_path, tuple(pool.shape[1:]))
        wide.copy_(pool)
        setattr(away, name, wide)
    for rows, accepted in ((range(4), 3), (range(3, 7), 4)):
        wanted, found = (cases.window(run, t, rows) for run in (near, away))
        assert torch.equal(found, wanted)
        for run in (near, away):
            cases.moved(run, accepted)
    stacked = step_triton.StepWeights(*(part[None] for part in t.w[:4]), *t.w[4:])
    for run in (near, away):
        step_triton.commit(run.recurrent, run.conv, run.log, stacked, run.cursor)
        cases.check_untouched(run)
    assert torch.equal(away.recurrent[-1], near.recurrent[0])
    assert torch.equal(away.conv[-1], near.conv[0])


def test_latents_in_far_pages(tmp_path: Path):
    W, H, N, P, R, V, page = 5, 3, 10, 16, 32, 9, 64
    pages = far(tmp_path, (page, R + P))
    q, w_uk, w_uv = (torch.randn(shape, device=DEVICE) for shape in ((W, H, N + P), (H, N, R), (H, V, R)))
    latents = torch.randn(2 * page, R + P, device=DEVICE)
    start = page + 7
    cursor, near = torch.tensor([start, 0, 0, 0], device=DEVICE), latents.view(2, page, R + P).clone()
    tables = [torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ([0, 1], [ENTRIES - 1, ENTRIES - 2])]
    pages[tables[1].long()] = near
    rows = torch.randn(W, R + P, device=DEVICE)
    for pool, table in zip((near, pages), tables, strict=True):
        decode_triton.append(rows, pool, table, cursor, W)
    assert torch.equal(pages[tables[1].long()], near)
    assert not pages[0].any()
    wanted, found = (
        decode_triton.decode(q, pool, table, w_uk, w_uv, cursor, 0.2, W)
        for pool, table in zip((near, pages), tables, strict=True)
    )
    assert torch.equal(found, wanted)
    assert torch.allclose(found, reference.decode(q, near, tables[0], w_uk, w_uv, cursor, 0.2, W), atol=1e-4)
