"""What the kernels of this folder take on the device beside arguments and results. Bytes, from shapes alone."""

from __future__ import annotations

import torch

BLOCK = 16384
"""Keys that prefill expands at once, at multiples of it: for 96 heads 1.0 GB of keys and values."""
SPLITS = 64
"""Splits of a row at most in decode, and twice as many far out: with two tiles of 64 pairs for 96 heads they fill 128
of an H200's 132 processors."""


def prefill_scratch(T: int, start: int, H: int, N: int, P: int, R: int, V: int, dtype: torch.dtype) -> int:
    """Of T queries behind `start` keys: a block's keys and values, what is merged so far in fp32.

    A block's own result takes the room of the call's, which is made last, and before it the block's latents do.
    """
    keys = max(T, min(start, BLOCK))
    block = (keys * H * (N + P + V) + max(0, keys * (R + P) - T * H * V)) * dtype.itemsize
    if not start:
        return block + 4 * H * T
    return block + 4 * T * H * V + 8 * H * T


def decode_scratch(n: int, W: int, H: int, R: int, P: int, dtype: torch.dtype) -> int:
    """Of n live rows in a window of W: absorbed queries, the sums of all splits, latents before the projection."""
    sums = 4 if dtype == torch.float32 else 2
    pairs = n * H
    return pairs * ((R + P) * dtype.itemsize + 2 * SPLITS * (R * sums + 8)) + H * W * R * dtype.itemsize
