"""Tensor bytes to frames and back: byte planes, each compressed on its own or left raw.

An array is cut into runs of FRAME_ITEMS items; each run is split into one plane per byte of the item, least
significant first, and every plane becomes one frame. Mantissa planes of live state are close to random, so each frame
decides for itself: it is stored raw unless zstd saves at least 5 %.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import zstandard

from k3_sessions.types import Array

FRAME_ITEMS = 512 * 1024
"""Items per run: a plane is 512 KiB, above the 256 KiB under which zstd loses ratio on this data."""

RAW, ZSTD = 0, 1
"""Frame codecs."""

_PROBE = 64 * 1024
_MIN_GAIN = 0.05

_local = threading.local()


class BadFrames(ValueError):  # noqa: N818
    """Frames that do not describe the array they claim to."""


def _compressor(level: int) -> zstandard.ZstdCompressor:
    cache: dict[int, zstandard.ZstdCompressor] = _local.__dict__.setdefault("compressors", {})
    if level not in cache:
        # Level 1 here means zstd's fastest entropy coding without its search for matches: exponent planes have none but
        # by chance, and short chance matches cost time on both ways and make the result larger (README, Measured).
        own = {"min_match": 7, "hash_log": 8, "window_log": 19} if level == 1 else {}
        params = zstandard.ZstdCompressionParameters.from_level(level, write_content_size=True, **own)
        cache[level] = zstandard.ZstdCompressor(compression_params=params)
    return cache[level]


def _decompressor() -> zstandard.ZstdDecompressor:
    found: zstandard.ZstdDecompressor | None = _local.__dict__.get("decompressor")
    if found is None:
        found = _local.decompressor = zstandard.ZstdDecompressor()
    return found


def _encode_plane(plane: Array, level: int) -> tuple[int, bytes]:
    compressor = _compressor(level)
    limit = 1.0 - _MIN_GAIN
    # A random plane is recognised by its middle, without paying for the whole.
    if plane.size > 2 * _PROBE:
        middle = plane.size // 2
        if len(compressor.compress(plane[middle : middle + _PROBE].data)) > limit * _PROBE:
            return RAW, plane.tobytes()
    packed = compressor.compress(plane.data)
    if len(packed) > limit * plane.size:
        return RAW, plane.tobytes()
    return ZSTD, packed


def encode(array: Array, level: int) -> tuple[list[tuple[int, int]], list[bytes]]:
    """Frames of a C-contiguous array: [(codec, stored bytes), ...] and the bytes, in the same order."""
    items = array.reshape(-1).view(np.uint8).reshape(array.size, array.itemsize)
    table: list[tuple[int, int]] = []
    parts: list[bytes] = []
    for start in range(0, len(items), FRAME_ITEMS):
        run = items[start : start + FRAME_ITEMS]
        for plane in range(array.itemsize):
            codec, data = _encode_plane(np.ascontiguousarray(run[:, plane]), level)
            table.append((codec, len(data)))
            parts.append(data)
    return table, parts


def decode(data: memoryview, table: Sequence[Sequence[int]], out: Array) -> None:
    """Fill `out` (C-contiguous) from the frames in `data`. Raises BadFrames; `out` is then worthless."""
    items = out.reshape(-1).view(np.uint8).reshape(out.size, out.itemsize)
    runs = -(-len(items) // FRAME_ITEMS)
    if len(table) != runs * out.itemsize or sum(stored for _, stored in table) != len(data):
        raise BadFrames(f"{len(table)} frames of {len(data)} bytes for {out.size} items of {out.itemsize} bytes")
    at = 0
    for number, (codec, stored) in enumerate(table):
        run, plane = divmod(number, out.itemsize)
        target = items[run * FRAME_ITEMS : (run + 1) * FRAME_ITEMS, plane]
        target[:] = np.frombuffer(_frame(codec, data[at : at + stored], len(target)), dtype=np.uint8)
        at += stored


def _frame(codec: int, stored: memoryview, size: int) -> bytes | memoryview:
    """One plane of `size` bytes."""
    if codec == RAW:
        if len(stored) != size:
            raise BadFrames(f"raw frame of {len(stored)} bytes, {size} expected")
        return stored
    if codec != ZSTD:
        raise BadFrames(f"frame codec {codec}")
    try:
        claimed = zstandard.frame_content_size(stored)
        if claimed != size:
            raise BadFrames(f"zstd frame of {claimed} bytes, {size} expected")
        plain = _decompressor().decompress(stored)
    except zstandard.ZstdError as error:
        raise BadFrames(f"zstd: {error}") from error
    if len(plain) != size:
        raise BadFrames(f"zstd frame gave {len(plain)} bytes, {size} expected")
    return plain
