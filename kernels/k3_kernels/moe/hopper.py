"""When the expert kernels for Hopper take a call. Imports no Triton."""

from __future__ import annotations

import torch
from torch import Tensor

from k3_kernels.moe.reference import Experts

SHARED_BYTES = 226 << 10
"""Shared memory of a program, less what barriers need."""
STAGE_BYTES = 17 << 10
"""A stage of the window's ring: 64 rows by 512 columns of nibbles, and their scales."""
MOST_PAIRS = 256
"""Rows times choices of a window that one program can compare with each other."""


def grouped_takes(z: Tensor, experts: Experts) -> bool:
    """Whether `grouped_hopper_triton` runs for rows like z [T, L]."""
    return _packed_on_hopper(z, experts) and z.shape[-1] % 128 == 0 and experts.w13.shape[1] % 256 == 0


def window_takes(z: Tensor, k: int, experts: Experts) -> bool:
    """Whether `window_hopper_triton` runs for rows like z [W, L] with k choices each."""
    L, F, R = z.shape[-1], experts.w13.shape[1] // 2, padded_rows(z.shape[0])
    if not _packed_on_hopper(z, experts) or L % 512 or F % 512 or R * (1 << (k - 1).bit_length()) > MOST_PAIRS:
        return False
    return rings(R, L, gated=True) is not None and rings(R, F, gated=False) is not None


def padded_rows(window: int) -> int:
    """Columns of a product: the instruction takes multiples of 8."""
    return 8 if window <= 8 else 16


def rings(rows: int, width: int, *, gated: bool) -> tuple[int, int] | None:
    """(stages of the ring of weights, experts whose rows are held at a time), or None when nothing fits.

    Four stages are enough; the rows of the next expert are fetched early where there is room.
    """
    sums = 2 * 4 * 64 * rows * 4
    for held in (1,) if gated else (2, 1):
        for stages in (4, 3):
            if held * rows * width * 2 + stages * STAGE_BYTES + sums <= SHARED_BYTES:
                return stages, held
    return None


def _packed_on_hopper(z: Tensor, experts: Experts) -> bool:
    if z.dtype != torch.bfloat16 or not z.is_cuda or torch.cuda.get_device_capability(z.device)[0] != 9:
        return False
    if experts.w13_scale is None or experts.w2_scale is None:
        return False
    return all(t.is_contiguous() and t.data_ptr() % 16 == 0 for t in experts if t is not None)
