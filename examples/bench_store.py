#!/usr/bin/env python3
"""How fast the session store saves and restores, beside what the same disk does, measured in one run.

    python examples/bench_store.py --dir /data/tmp [--tokens 32768] [--parts speed,turns,forks]

State has the shapes of Kimi K3 (69 KDA layers of 96 x 128 x 128 in fp32, 24 MLA layers 576 wide in bf16) and random
contents whose exponents spread like real activations; nothing is loaded but numpy.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import resource
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import xxhash
from k3_sessions import (
    DTYPES,
    HASH_BLOCK,
    FieldSpec,
    Identity,
    StateLayout,
    Store,
    StoreConfig,
    StreamedState,
    TurnDraft,
    codec,
    layout_digest,
)
from k3_sessions.source import Memory
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


@dataclass
class Span:
    """What `timed` found. rate: MiB of state a second; disk: MiB of stored bytes a second."""

    rate: float = 0.0
    disk: float = 0.0


@contextmanager
def timed(what: str, raw: int, stored: Callable[[], int] | None = None) -> Iterator[Span]:
    """Prints and collects rates; the peak of resident memory above the start is sampled meanwhile."""
    out = Span()
    stop = threading.Event()
    base = peak = resident()

    def watch() -> None:
        nonlocal peak
        while not stop.wait(0.01):
            peak = max(peak, resident())

    watcher = threading.Thread(target=watch)
    watcher.start()
    began, used = time.perf_counter(), os.times()
    yield out
    seconds, after = time.perf_counter() - began, os.times()
    stop.set()
    watcher.join()
    size = stored() if stored else raw
    out.rate, out.disk = raw / MIB / seconds, size / MIB / seconds
    cpu = f"{after.user - used.user:5.2f} + {after.system - used.system:5.2f} s CPU"
    print(
        f"{what:34} {seconds:6.2f} s {out.rate:6.0f} {out.disk:6.0f} {cpu}  +{(peak - base) / MIB:5.0f} MiB", flush=True
    )


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


def disk(folder: Path, size: int) -> tuple[float, float]:
    """Baselines like `dd bs=16M`: write with a final fsync, then the faster of two cold reads. MiB/s each."""
    block = os.urandom(16 * MIB)
    path = folder / "baseline"
    with timed("disk: sequential write, fsync", size) as written, open(path, "wb", buffering=0) as file:
        for _ in range(size // len(block)):
            file.write(block)
        os.fsync(file.fileno())
    reads = []
    for _ in range(2):
        cold(folder)
        with timed("disk: cold sequential read", size) as read, open(path, "rb", buffering=0) as file:
            buffer = bytearray(len(block))
            while file.readinto(buffer):
                pass
        reads.append(read.rate)
    cold(folder)
    with timed("disk: cold read into new memory", size), open(path, "rb", buffering=0) as file:
        new = np.empty(size, dtype=np.uint8)
        for at in range(0, size, len(block)):
            file.readinto(memoryview(new[at : at + len(block)]))
    path.unlink()
    return written.rate, max(reads)


def stages(state: RandomState) -> None:
    """What one core does of each piece of work, in MiB a second of CPU time: the limit where no disk waits."""
    latents = state.page_rows("kv_latent", 0, 512)
    table, parts = codec.encode(latents, 1)
    packed, out = memoryview(b"".join(parts)), np.empty_like(latents)
    plain = state.checkpoint()["recurrent"][:2]
    work: dict[str, tuple[int, Callable[[], object]]] = {
        "sha256 of stored bytes": (len(packed), lambda: hashlib.sha256(packed).digest()),
        "XXH3-128 of stored bytes": (len(packed), lambda: xxhash.xxh3_128_digest(packed)),
        "latents to frames": (latents.nbytes, lambda: codec.encode(latents, 1)),
        "frames to latents": (latents.nbytes, lambda: codec.decode(Memory(packed), table, out)),
        "recurrent state to frames": (plain.nbytes, lambda: codec.encode(plain, 1)),
        "first touch of new memory": (64 * MIB, lambda: np.empty(64 * MIB, dtype=np.uint8).fill(1)),
    }
    for what, (size, run) in work.items():
        best = float("inf")
        for _ in range(5):
            used = time.process_time()
            run()
            best = min(best, time.process_time() - used)
        print(f"one core: {what:34} {size / MIB / max(best, 1e-9):7.0f} MiB/s")


class Pool:
    """Memory of an engine, there before a restore begins, into which it copies what it is handed."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.checkpoint: dict[str, np.ndarray] = {}
        self.rows: dict[str, np.ndarray] = {}
        for f in LAYOUT.fields:
            rows = () if f.scope == "checkpoint" else (tokens,)
            into = self.checkpoint if f.scope == "checkpoint" else self.rows
            into[f.name] = np.empty((len(f.layers), *rows, *f.shape), DTYPES[f.dtype])
        self.clear()

    def clear(self) -> None:
        for array in (*self.checkpoint.values(), *self.rows.values()):
            array.fill(1)

    def load(self, state: StreamedState) -> None:
        for name, first, part in state.checkpoint_parts():
            self.checkpoint[name][first : first + len(part)] = part
        for start in range(0, self.tokens, HASH_BLOCK):
            stop = min(start + HASH_BLOCK, self.tokens)
            for name, rows in self.rows.items():
                rows[:, start:stop] = state.page_rows(name, start, stop)

    def compare(self, state: RandomState) -> None:
        for name, array in self.checkpoint.items():
            assert np.array_equal(array.view("u1"), state.checkpoint()[name].view("u1")), name
        for name, rows in self.rows.items():
            for start in range(0, self.tokens, HASH_BLOCK):
                stop = min(start + HASH_BLOCK, self.tokens)
                assert np.array_equal(rows[:, start:stop], state.page_rows(name, start, stop)), (name, start)


def speed(folder: Path, tokens: int, config: StoreConfig, rounds: int) -> None:
    state = RandomState(tokens)
    raw = sum(a.nbytes for a in state.checkpoint().values()) + tokens * len(MLA) * 576 * 2
    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    print(f"state of {tokens} tokens: {raw / MIB:.0f} MiB, staging {config.staging_bytes / MIB:.0f} MiB")
    print(f"{cores} cores, load {load:.1f}; columns: seconds, MiB/s of state, MiB/s of disk, user + system, memory")
    stages(state)
    pool = Pool(tokens)
    ids = np.random.default_rng(1).integers(0, 163840, tokens).tolist()
    for run in range(rounds):
        write, read = disk(folder, raw // (16 * MIB) * 16 * MIB)
        root = folder / f"store{run}"
        store = Store.open(root, config=config)
        stored = partial(stored_bytes, store)
        writer = store.writer("s", create=True, identity=IDENTITY, layout=LAYOUT)
        with writer, timed("store: commit", raw, stored) as commit:
            report = writer.commit(TurnDraft(ids, tokens), state)
        kept = f"MLA {report.bytes_pages}, KDA {report.bytes_checkpoint} bytes"
        share = stored() / raw
        fresh = Store.open(root, config=config)
        plan = fresh.plan(report.turn.id, IDENTITY, LAYOUT)
        pool.clear()
        cold(root)
        into_pool = timed("store: restore into a pool, cold", raw, stored)
        with into_pool as restore, fresh.stream(plan, IDENTITY, LAYOUT) as back:
            pool.load(back)
        pool.compare(state)
        cold(root)
        with timed("store: restore into new memory", raw, stored):
            whole = fresh.restore(plan, IDENTITY, LAYOUT)
        assert whole.checkpoint()["recurrent"].tobytes() == state.checkpoint()["recurrent"].tobytes()
        del whole
        cold(root)
        with timed("store: verify, cold", raw, stored) as verify:
            assert not fresh.verify().problems
        store.close()
        fresh.close()
        shutil.rmtree(root)
        print(f"  stored {share:.3f} of raw: {kept}")
        print("  of the disk's rate, by state and by stored bytes:")
        for what, span, limit, goal in (
            ("commit", commit, write, 60),
            ("restore", restore, read, 70),
            ("verify", verify, read, 80),
        ):
            print(f"    {what:10} {span.rate / limit:5.0%} {span.disk / limit:5.0%}   goal {goal} %", flush=True)


def stored_bytes(store: Store) -> int:
    return sum(info.size for _, info in files(store))


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
    parser.add_argument("--parts", default="speed,turns,forks")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--staging-mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=2, help="of the speed part")
    args = parser.parse_args()
    config = StoreConfig(free_floor_bytes=0, threads=args.threads, staging_bytes=args.staging_mib * MIB)
    folder = Path(tempfile.mkdtemp(prefix="k3-bench-", dir=args.dir))
    parts = args.parts.split(",")
    unknown = set(parts) - {"speed", "turns", "forks"}
    if unknown:
        parser.error(f"unknown part {', '.join(sorted(unknown))}; known: speed, turns, forks")
    try:
        if "speed" in parts:
            speed(folder, args.tokens, config, args.rounds)
        if "turns" in parts:
            turns(folder, config)
        if "forks" in parts:
            forks(folder, config)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
