#!/usr/bin/env python3
"""What the codecs a session store could use make of model state: ratio, and speed on one core.

    PYTHONPATH=examples:sessions python examples/bench_codecs.py [--state arrays.npz]

Rows: raw, zstd 1 and 3, byte planes + zstd 1 (what the store does where that saves enough), blosc2 where installed.
State has the shapes of Kimi K3 with random contents; `--state` adds real arrays.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import zstandard
from bench_store import MIB, RandomState
from k3_sessions import codec
from k3_sessions.source import Memory


def codecs(state_file: Path | None) -> None:
    """Ratio and speed on one core: raw, zstd 1 and 3, byte planes + zstd 1 (the store's), blosc2 where installed."""
    state = RandomState(2048)
    samples = {
        "KDA state, fp32": state.checkpoint()["recurrent"][:6].reshape(-1),
        "MLA latents, bf16": np.concatenate([state.page_rows("kv_latent", s, s + 512).reshape(-1) for s in (0, 512)]),
    }
    if state_file is not None:
        with np.load(state_file) as arrays:
            samples |= {f"real {name}": arrays[name].reshape(-1) for name in arrays.files}
    for name, array in samples.items():
        print(f"{name}: {array.nbytes / MIB:.1f} MiB")
        for row, press, unpress in coders(array):
            best_in = best_out = float("inf")
            for _ in range(3):
                began = time.perf_counter()
                parts = press()
                best_in = min(best_in, time.perf_counter() - began)
                began = time.perf_counter()
                unpress(parts)
                best_out = min(best_out, time.perf_counter() - began)
            size = sum(len(part) for part in parts)
            rates = f"in {array.nbytes / MIB / best_in:7.0f} MiB/s  out {array.nbytes / MIB / best_out:7.0f} MiB/s"
            print(f"  {row:30} {array.nbytes / size:6.3f}x  {rates}", flush=True)


Coder = tuple[str, Callable[[], list[bytes]], Callable[[list[bytes]], object]]


def coders(array: np.ndarray) -> Iterator[Coder]:
    """Name, compress and decompress for each row of the table; all on one core, in pieces of 2 MiB."""
    data = array.tobytes()
    cut = [data[i : i + 2 * MIB] for i in range(0, len(data), 2 * MIB)]
    yield "raw", lambda: [bytes(bytearray(part)) for part in cut], lambda parts: [bytearray(p) for p in parts]
    for level in (1, 3):
        one, two = zstandard.ZstdCompressor(level=level), zstandard.ZstdDecompressor()
        yield f"zstd {level}", partial(_each, one.compress, cut), partial(_each, two.decompress)
    table: list[tuple[int, int]] = []

    def planes() -> list[bytes]:
        # Asked for whether or not they pay: the store leaves this array plain if they do not.
        with mock.patch.object(codec, "_worth_splitting", return_value=True):
            table[:], parts = codec.encode(array, 1)
        return [b"".join(parts)]

    def merge(parts: list[bytes]) -> None:
        codec.decode(Memory(memoryview(parts[0])), table, np.empty_like(array))

    yield "byte planes, zstd 1 (store)", planes, merge
    try:
        import blosc2
    except ImportError:
        print("  blosc2 is not installed: row left out")
        return
    params = {"codec": blosc2.Codec.ZSTD, "clevel": 1, "filters": [blosc2.Filter.SHUFFLE], "nthreads": 1}
    press = partial(blosc2.compress2, typesize=array.itemsize, **params)
    yield "blosc2 shuffle, zstd 1", partial(_each, press, cut), partial(_each, partial(blosc2.decompress2, nthreads=1))


def _each(function: Callable[[bytes], bytes], parts: list[bytes]) -> list[bytes]:
    return [function(part) for part in parts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state", type=Path, help=".npz of real state arrays")
    codecs(parser.parse_args().state)


if __name__ == "__main__":
    main()
