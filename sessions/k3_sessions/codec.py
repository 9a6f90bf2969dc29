"""Tensor bytes to frames and back: byte planes, each compressed on its own or left raw; or the array as it is.

An array is cut into runs of FRAME_ITEMS items; each run is split into one plane per byte of the item, least
significant first, and every plane becomes one frame. Mantissa planes of live state are close to random, so each frame
decides for itself: it is stored raw unless zstd saves at least 5 %. Where all planes of a larger array together would
save little, splitting and joining them costs more time than the disk needs for the difference: such an array is one
plain frame, its bytes in order.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import zstandard

from k3_sessions.source import Source
from k3_sessions.types import Array

FRAME_ITEMS = 512 * 1024
"""Items per run: a plane is 512 KiB, above the 256 KiB under which zstd loses ratio on this data."""

RAW, ZSTD, PLAIN = 0, 1, 2
"""Frame codecs: a plane as it is, a plane compressed, a whole array as it is."""

CODECS: tuple[int, ...] = (RAW, ZSTD, PLAIN)

PLAIN_ITEMS = 16 * 1024
"""Arrays of fewer items are always split: their time does not matter."""

_PROBE = 64 * 1024
_MIN_GAIN = 0.05
_MIN_SPLIT_GAIN = 0.20

_local = threading.local()


class BadFrames(ValueError):  # noqa: N818
    """Frames that do not describe the array they claim to."""


Frame = bytes | memoryview


def _compressor(level: int) -> zstandard.ZstdCompressor:
    cache: dict[int, zstandard.ZstdCompressor] = _local.__dict__.setdefault("compressors", {})
    if level not in cache:
        # Level 1 here means zstd's fastest entropy coding without its search for matches: exponent planes have none but
        # by chance, and short chance matches cost time on both ways and make the result larger (README, Measured).
        own = {"min_match": 7, "hash_log": 6, "window_log": 19} if level == 1 else {}
        params = zstandard.ZstdCompressionParameters.from_level(level, write_content_size=True, **own)
        cache[level] = zstandard.ZstdCompressor(compression_params=params)
    return cache[level]


def _decompressor() -> zstandard.ZstdDecompressor:
    found: zstandard.ZstdDecompressor | None = _local.__dict__.get("decompressor")
    if found is None:
        found = _local.decompressor = zstandard.ZstdDecompressor()
    return found


def _encode_plane(plane: Array, level: int) -> tuple[int, Frame]:
    compressor = _compressor(level)
    limit = 1.0 - _MIN_GAIN
    # A random plane is recognised by its middle, without paying for the whole.
    if plane.size > 2 * _PROBE:
        middle = plane.size // 2
        if len(compressor.compress(plane[middle : middle + _PROBE].data)) > limit * _PROBE:
            return RAW, plane.data
    packed = compressor.compress(plane.data)
    if len(packed) > limit * plane.size:
        return RAW, plane.data
    return ZSTD, packed


def _split(flat: Array) -> list[Array]:
    """One new uint8 array per byte of the items, least significant first."""
    if flat.itemsize == 2:
        # Casts and shifts of whole words run several times faster than copies with a stride of two bytes.
        words = flat.view("<u2")
        return [words.astype(np.uint8), (words >> np.uint16(8)).astype(np.uint8)]
    items = flat.view(np.uint8).reshape(flat.size, flat.itemsize)
    return [np.ascontiguousarray(items[:, plane]) for plane in range(flat.itemsize)]


def _worth_splitting(flat: Array, level: int) -> bool:
    """Whether planes save enough, judged by slices from all over the array. Equal arrays give equal answers."""
    if flat.size < PLAIN_ITEMS:
        return True
    step, slices = 4096, 16
    sample = flat
    if flat.size > step * slices:
        starts = np.linspace(0, flat.size - step, slices).astype(int)
        sample = np.concatenate([flat[at : at + step] for at in starts])
    packed = sum(len(_encode_plane(plane, level)[1]) for plane in _split(sample))
    return packed <= (1.0 - _MIN_SPLIT_GAIN) * sample.nbytes


def encode(array: Array, level: int) -> tuple[list[tuple[int, int]], list[Frame]]:
    """Frames of a C-contiguous array: [(codec, stored bytes), ...] and the bytes, in the same order.

    A plain frame is a view of `array`, which must then stay unchanged until it is written.
    """
    flat = array.reshape(-1)
    if not _worth_splitting(flat, level):
        return [(PLAIN, flat.nbytes)], [flat.view(np.uint8).data]
    table: list[tuple[int, int]] = []
    parts: list[Frame] = []
    for start in range(0, flat.size, FRAME_ITEMS):
        for plane in _split(flat[start : start + FRAME_ITEMS]):
            codec, data = _encode_plane(plane, level)
            table.append((codec, len(data)))
            parts.append(data)
    return table, parts


def decode(source: Source, table: Sequence[Sequence[int]], out: Array) -> None:
    """Fill `out` (C-contiguous) from frames. Raises BadFrames, EndsEarly; `out` is then worthless."""
    flat = out.reshape(-1)
    runs = -(-flat.size // FRAME_ITEMS)
    size = sum(stored for _, stored in table)
    plain = len(table) == 1 and table[0][0] == PLAIN and size == out.nbytes
    if len(table) != runs * out.itemsize and not plain:
        raise BadFrames(f"{len(table)} frames of {size} bytes for {out.size} items of {out.itemsize} bytes")
    if plain:
        source.into(flat.view(np.uint8).data)
        return
    number = 0
    for start in range(0, flat.size, FRAME_ITEMS):
        run = flat[start : start + FRAME_ITEMS]
        frames = table[number : number + out.itemsize]
        number += out.itemsize
        if any(stored > run.size for _, stored in frames):
            raise BadFrames(f"a frame of more than the {run.size} bytes it stands for")
        data = source.take(sum(stored for _, stored in frames))
        planes: list[Array] = []
        at = 0
        for codec, stored in frames:
            planes.append(np.frombuffer(_frame(codec, data[at : at + stored], run.size), dtype=np.uint8))
            at += stored
        _join(planes, run)


def _join(planes: Sequence[Array], run: Array) -> None:
    """The inverse of `_split`, into `run`."""
    if run.itemsize == 2:
        words = run.view("<u2")
        np.copyto(words, planes[1])
        np.multiply(words, 256, out=words)  # numpy's shift takes nearly twice as long
        np.bitwise_or(words, planes[0], out=words)
        return
    items = run.view(np.uint8).reshape(run.size, run.itemsize)
    for number, plane in enumerate(planes):
        items[:, number] = plane


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
