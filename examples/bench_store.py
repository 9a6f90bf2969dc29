#!/usr/bin/env python3
"""How fast the session store saves and restores, beside what the same disk does, measured in one run.

    python examples/bench_store.py --dir /data/tmp [--tokens 32768] [--parts speed,codecs,turns,forks]

State has the shapes of Kimi K3 (69 KDA layers of 96 x 128 x 128 in fp32, 24 MLA layers 576 wide in bf16) and random
contents whose exponents spread like real activations; nothing is loaded but numpy.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import zstandard
from k3_sessions import FieldSpec, Identity, StateLayout, Store, StoreConfig, TurnDraft, codec, layout_digest
from k3_sessions.upkeep import files

MLA = (*range(3, 93, 4), 92)
KDA = tuple(layer for layer in range(93) if layer not in MLA)
LAYOUT = StateLayout(
    (
        FieldSpec("recurrent", "checkpoint", KDA, (96, 128, 128), "float32"),
        FieldSpec("conv_q", "checkpoint", KDA, (96 * 128, 3), "bfloat16"),
        FieldSpec("conv_k", "checkpoint", KDA, (96 * 128, 3), "bfloat16"),
        FieldSpec("conv_v", "checkpoint", KDA, (96 * 128, 3), "bfloat16"),
        FieldSpec("kv_latent", "page", MLA, (512,), "bfloat16"),
        FieldSpec("k_pe", "page", MLA, (64,), "bfloat16"),
    )
)
IDENTITY = Identity("sha256:bench", "sha256:bench", "xtml", layout_digest(LAYOUT), "bfloat16")
MIB = 1024 * 1024


def bf16(values: np.ndarray) -> np.ndarray:
    return (np.ascontiguousarray(values, dtype="<f4").view("<u4") >> 16).astype("<u2")


class RandomState:
    """Live state of the given length. Page rows are cut from one block, shifted, so that no two pages are equal."""

    def __init__(self, position: int, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.position = position
        # Decayed sums of outer products: the scale differs by head and by row.
        scale = np.exp(rng.normal(0, 1.5, (len(KDA), 96, 128, 1))).astype("f4")
        recurrent = rng.standard_normal((len(KDA), 96, 128, 128), dtype="f4")
        recurrent *= scale
        self._checkpoint = {"recurrent": recurrent}
        for name in ("conv_q", "conv_k", "conv_v"):
            self._checkpoint[name] = bf16(rng.standard_normal((len(KDA), 96 * 128, 3), dtype="f4"))
        self._rows = {
            "kv_latent": bf16(rng.standard_normal((len(MLA), 2048, 512), dtype="f4")),
            "k_pe": bf16(rng.standard_normal((len(MLA), 2048, 64), dtype="f4")),
        }

    def checkpoint(self) -> dict[str, np.ndarray]:
        return self._checkpoint

    def page_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        at = (start * 7919) % 1024
        rows = self._rows[name][:, at : at + stop - start].copy()
        rows[0, 0, :4] = np.frombuffer(start.to_bytes(8, "little"), dtype="<u2")
        return rows


@contextmanager
def timed(what: str, raw: int, stored: Callable[[], int] | None = None) -> Iterator[list[float]]:
    """Prints and collects seconds; the peak of resident memory above the start is sampled meanwhile."""
    out: list[float] = []
    stop = threading.Event()
    base = peak = resident()

    def watch() -> None:
        nonlocal peak
        while not stop.wait(0.01):
            peak = max(peak, resident())

    watcher = threading.Thread(target=watch)
    watcher.start()
    began, used = time.perf_counter(), time.process_time()
    yield out
    out.append(time.perf_counter() - began)
    cpu = time.process_time() - used
    stop.set()
    watcher.join()
    size = stored() if stored else raw
    rates = f"{raw / MIB / out[0]:7.0f} MiB/s of state {size / MIB / out[0]:7.0f} MiB/s of disk"
    print(f"{what:30} {out[0]:6.2f} s {rates} {cpu:6.2f} s CPU  +{(peak - base) / MIB:5.0f} MiB", flush=True)


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def cold(root: Path) -> None:
    """Forget cached content of every file, after it has reached the disk."""
    os.sync()
    for path in root.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def disk(folder: Path, size: int) -> None:
    """Baselines like `dd bs=16M`: write with a final fsync, then read cold."""
    block = os.urandom(16 * MIB)
    path = folder / "baseline"
    with timed("disk: sequential write, fsync", size), open(path, "wb", buffering=0) as file:
        for _ in range(size // len(block)):
            file.write(block)
        os.fsync(file.fileno())
    for number in range(2):
        cold(folder)
        with timed(f"disk: cold sequential read {number + 1}", size), open(path, "rb", buffering=0) as file:
            buffer = bytearray(len(block))
            while file.readinto(buffer):
                pass
    path.unlink()


def stored_bytes(store: Store) -> int:
    return sum(info.size for _, info in files(store))


def speed(folder: Path, tokens: int, config: StoreConfig) -> None:
    state = RandomState(tokens)
    raw = sum(a.nbytes for a in state.checkpoint().values()) + tokens * len(MLA) * 576 * 2
    print(f"state of {tokens} tokens: {raw / MIB:.0f} MiB, staging {config.staging_bytes / MIB:.0f} MiB")
    ids = np.random.default_rng(1).integers(0, 163840, tokens).tolist()
    for run in range(2):
        disk(folder, raw // (16 * MIB) * 16 * MIB)
        root = folder / f"store{run}"
        store = Store.open(root, config=config)
        stored = partial(stored_bytes, store)
        writer = store.writer("s", create=True, identity=IDENTITY, layout=LAYOUT)
        with writer, timed("store: commit", raw, stored):
            report = writer.commit(TurnDraft(ids, tokens), state)
        print(f"  stored {stored() / raw:.3f} of raw: MLA {report.bytes_pages}, KDA {report.bytes_checkpoint} bytes")
        cold(root)
        fresh = Store.open(root, config=config)
        plan = fresh.plan(report.turn.id, IDENTITY, LAYOUT)
        with timed("store: restore, cold", raw, stored):
            back = fresh.restore(plan, IDENTITY, LAYOUT)
        assert back.checkpoint()["recurrent"].tobytes() == state.checkpoint()["recurrent"].tobytes()
        assert back.page_rows("k_pe", 512, 1024).tobytes() == state.page_rows("k_pe", 512, 1024).tobytes()
        del back
        cold(root)
        with timed("store: verify, cold", raw, stored):
            assert not fresh.verify().problems
        store.close()
        fresh.close()
        shutil.rmtree(root)


def codecs(folder: Path, state_file: Path | None) -> None:
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
        table[:], parts = codec.encode(array, 1)
        return [b"".join(parts)]

    def merge(parts: list[bytes]) -> None:
        codec.decode(memoryview(parts[0]), table, np.empty_like(array))

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


SMALL = StateLayout(
    (
        FieldSpec("recurrent", "checkpoint", (0, 1, 2), (4, 32, 32), "float32"),
        FieldSpec("kv_latent", "page", (3,), (64,), "bfloat16"),
    )
)
SMALL_ID = Identity("sha256:bench", "sha256:bench", "xtml", layout_digest(SMALL), "bfloat16")


class SmallState:
    """Distinct content for each position, quick to make."""

    def __init__(self, position: int, seed: int = 0) -> None:
        self.position, self.seed = position, seed

    def checkpoint(self) -> dict[str, np.ndarray]:
        rng = np.random.default_rng([self.position, self.seed])
        return {"recurrent": rng.standard_normal((3, 4, 32, 32), dtype="f4")}

    def page_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        rng = np.random.default_rng([start, stop, self.seed])
        return bf16(rng.standard_normal((1, stop - start, 64), dtype="f4"))


def turns(folder: Path, config: StoreConfig) -> None:
    """A thousand turns, then recovery: opening, listing and restoring the head in a fresh store object."""
    root = folder / "turns"
    store = Store.open(root, config=config)
    written = 0
    with store.writer("s", create=True, identity=SMALL_ID, layout=SMALL) as writer:
        began = time.perf_counter()
        for turn in range(1000):
            written += writer.commit(TurnDraft([turn] * 40, 40 * turn + 40), SmallState(40 * turn + 40)).bytes_written
        print(f"1,000 commits of 40 tokens: {time.perf_counter() - began:.2f} s")
    (root / "objects" / ".tmp-left").write_bytes(b"x")
    cold(root)
    began = time.perf_counter()
    fresh = Store.open(root, config=config)
    (session,) = fresh.sessions()
    back = fresh.restore(fresh.plan(session.head or "", SMALL_ID, SMALL), SMALL_ID, SMALL)
    with fresh.writer("s", create=False, identity=SMALL_ID, layout=SMALL):
        pass
    print(f"recovery of 1,000 turns (open, list, restore, writer): {time.perf_counter() - began:.2f} s")
    assert back.position == 40000
    need = fresh.catalog.need(fresh.catalog.ref("s"))
    log = fresh.log("s")
    mla = sum(need.pages.values())
    every = sum(turn.bytes_checkpoint for turn in log)
    print(
        f"bytes written {written}; final MLA {mla} + one checkpoint a turn {every} = {mla + every}: "
        f"{written / (mla + every):.3f}x; kept checkpoints at the end {sum(need.checkpoints.values())}"
    )


def forks(folder: Path, config: StoreConfig) -> None:
    """A fork at 1k and at 500k tokens, and a hundred forks of 100k tokens."""
    for tokens in (1_000, 100_000, 500_000):
        root = folder / f"forks{tokens}"
        store = Store.open(root, config=config)
        with store.writer("s", create=True, identity=SMALL_ID, layout=SMALL) as writer:
            for start in range(0, tokens, tokens // 10):
                stop = start + tokens // 10
                writer.commit(TurnDraft(list(range(start, stop)), stop), SmallState(stop))
        before = sum(info.allocated for _, info in files(store))
        seconds = []
        count = 100 if tokens == 100_000 else 5
        for number in range(count):
            fresh = Store.open(root, config=config)
            began = time.perf_counter()
            fresh.fork("s", f"f{number}")
            seconds.append(time.perf_counter() - began)
        added = sum(info.allocated for _, info in files(store)) - before
        print(
            f"fork at {tokens:7} tokens, {count:3} times: median {sorted(seconds)[count // 2] * 1000:.1f} ms, "
            f"max {max(seconds) * 1000:.1f} ms, {added / count / 1024:.1f} KiB allocated each, {added / MIB:.2f} MiB"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="folder on the disk to measure")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--parts", default="speed,codecs,turns,forks")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--staging-mib", type=int, default=256)
    parser.add_argument("--state", type=Path, help=".npz of real state arrays, for the codec table")
    args = parser.parse_args()
    config = StoreConfig(free_floor_bytes=0, threads=args.threads, staging_bytes=args.staging_mib * MIB)
    folder = Path(tempfile.mkdtemp(prefix="k3-bench-", dir=args.dir))
    parts = args.parts.split(",")
    unknown = set(parts) - {"speed", "codecs", "turns", "forks"}
    if unknown:
        parser.error(f"unknown part {', '.join(sorted(unknown))}; known: speed, codecs, turns, forks")
    try:
        if "speed" in parts:
            speed(folder, args.tokens, config)
        if "codecs" in parts:
            codecs(folder, args.state)
        if "turns" in parts:
            turns(folder, config)
        if "forks" in parts:
            forks(folder, config)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
