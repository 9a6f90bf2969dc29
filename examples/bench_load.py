"""How fast weights are loaded from a disk, against what the disk gives to parallel reads.

Writes a checkpoint of K3's widths (random bytes; depth, heads and number of experts cut to `--size`), then, each time
with its files dropped from the page cache: reads them with many threads, and loads them over 1, 2, ... ranks, once
with digests to be computed and once with digests known. Each load is a process of its own.

    python examples/bench_load.py --size 4GB --ranks 1,2 --device cpu
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from k3cli.config import K3_SHAPE, parse_bytes
from k3cli.model.checkpoint import INDEX, PREFIX, SIZES, expected_tensors
from k3cli.model.config import ModelConfig
from k3cli.model.ranks import load_ranks
from k3cli.model.weights import load_model

BLOCK = 8 << 20
"""Bytes of one read request."""
HEADS, VOCAB, LAYER = 32, 16_384, 2 * 10**9


def shape(size: int) -> dict[str, Any]:
    """config.json of about `size` bytes of weights: layers of about LAYER bytes, three of four of them KDA."""
    raw: dict[str, Any] = json.loads((K3_SHAPE / "config.json").read_text())
    text = raw["text_config"]
    layers = max(2, round(size / LAYER))
    mla = [i for i in range(1, layers + 1) if i % 4 == 0 or i == layers]
    text |= {"num_hidden_layers": layers, "vocab_size": VOCAB, "first_k_dense_replace": 0}
    text |= {"num_attention_heads": HEADS, "num_key_value_heads": HEADS}
    text |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3}
    text["linear_attn_config"] |= {"num_heads": HEADS, "full_attn_layers": mla}
    text["linear_attn_config"]["kda_layers"] = [i for i in range(1, layers + 1) if i not in mla]
    few, more = (bytes_of(ModelConfig.from_dict(with_experts(raw, count))) for count in (32, 64))
    each = (more - few) / 32
    return with_experts(raw, max(32, min(896, round((size - few) / each / 32 + 1) * 32)))


def with_experts(raw: dict[str, Any], count: int) -> dict[str, Any]:
    copy: dict[str, Any] = json.loads(json.dumps(raw))
    copy["text_config"]["num_experts"] = count
    return copy


def bytes_of(config: ModelConfig) -> int:
    return sum(size for _, _, _, size in tensors(config))


def tensors(config: ModelConfig) -> Iterator[tuple[str, str, tuple[int, ...], int]]:
    """(name, dtype, shape, bytes) of every tensor."""
    for name, want in expected_tensors(config).items():
        found = want.shapes[0] if want.shapes else (want.least or 0,)
        yield name, want.dtypes[0], found, torch.Size(found).numel() * SIZES[want.dtypes[0]]


def write(folder: Path, size: int) -> None:
    """The checkpoint, one file for each layer and one for the rest, on the disk when this returns."""
    raw = shape(size)
    config = ModelConfig.from_dict(raw)
    (folder / "config.json").write_text(json.dumps(raw))
    files: dict[str, list[tuple[str, str, tuple[int, ...], int]]] = {}
    for tensor in tensors(config):
        words = tensor[0].split(".")
        number = int(words[2]) + 1 if words[1] == "layers" else len(config.layers) + 1
        files.setdefault(f"model-{number:05d}-of-{len(config.layers) + 1:06d}.safetensors", []).append(tensor)
    noise = memoryview(os.urandom(64 << 20))
    for file, held in files.items():
        header, at = {}, 0
        for name, dtype, found, count in held:
            header[PREFIX + name] = {"dtype": dtype, "shape": list(found), "data_offsets": [at, at + count]}
            at += count
        text = json.dumps(header).encode()
        with (folder / file).open("wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            for name, _, _, count in held:
                for begin in range(0, count, len(noise)):
                    piece = noise[: min(len(noise), count - begin)]
                    stream.write(bytes(len(piece)) if name.endswith("A_log") else piece)
            stream.flush()
            os.fsync(stream.fileno())
    names = {PREFIX + tensor[0]: file for file, held in files.items() for tensor in held}
    (folder / INDEX).write_text(json.dumps({"weight_map": names}))


def weight_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def drop(folder: Path) -> float:
    """Asks for the files to leave the page cache. Returns the share of them that is still there."""
    stay = total = 0
    libc = ctypes.CDLL(None, use_errno=True)
    for file in weight_files(folder):
        with file.open("rb") as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            size = file.stat().st_size
            pages = -(-size // mmap.PAGESIZE)
            with mmap.mmap(
                stream.fileno(), size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE
            ) as view:
                found = (ctypes.c_ubyte * pages)()
                place = ctypes.addressof(ctypes.c_char.from_buffer(view))
                if libc.mincore(ctypes.c_void_p(place), ctypes.c_size_t(size), found) == 0:
                    stay += sum(byte & 1 for byte in found)
            total += pages
    return stay / total


def disk_rate(folder: Path, threads: int, direct: bool) -> float | None:
    """Bytes per second of reading all files, front to back, `threads` requests at a time; None where it won't."""
    flags = os.O_RDONLY | (os.O_DIRECT if direct else 0)
    handles = []
    try:
        handles = [os.open(file, flags) for file in weight_files(folder)]
        places = [(fd, at) for fd in handles for at in range(0, os.fstat(fd).st_size // BLOCK * BLOCK, BLOCK)]
        buffers = [mmap.mmap(-1, BLOCK) for _ in range(threads)]

        def read(worker: int) -> None:
            for fd, at in places[worker::threads]:
                os.preadv(fd, [buffers[worker]], at)

        began = time.monotonic()
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(read, range(threads)))
        return len(places) * BLOCK / (time.monotonic() - began)
    except OSError:
        return None
    finally:
        for fd in handles:
            os.close(fd)


def load_once(folder: Path, ranks: int, device: str) -> None:
    """One load in this process; prints what it took as JSON."""
    config = ModelConfig.from_dir(folder)
    seen: list[float] = []
    note: Callable[[Any], None] = lambda step: seen.append(step.bytes_done)  # noqa: E731
    began, pids = time.monotonic(), [os.getpid()]
    if ranks == 1:
        torch.empty(1, device=device)  # as for several ranks, a device is ready before the load is timed
        found = load_model(folder, device=device, dtype="auto", progress=note)
    else:
        names = [device if device == "cpu" else f"cuda:{i}" for i in range(ranks)]
        found, peers = load_ranks(folder, config, names, device=device, dtype="auto", window=8, progress=note)
        pids += getattr(peers, "pids", list)()
    said = {
        "seconds": found.seconds,
        "with_start": time.monotonic() - began,
        "bytes": sum(found.ranks_read),
        "ranks": list(found.ranks_read),
        "bar": seen[-1],
        "host_peak": [peak(pid) for pid in pids],
        "disk": [disk_bytes(pid) for pid in pids],
    }
    print("found " + json.dumps(said), flush=True)
    if ranks > 1:
        peers.close()


def peak(pid: int) -> int:
    """Most bytes of host memory that a process of this machine has had."""
    if pid == os.getpid():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    text = Path(f"/proc/{pid}/status").read_text()
    return next((int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("VmHWM")), 0)


def disk_bytes(pid: int) -> int | None:
    """Bytes that a process had fetched from a disk, as the system counts them."""
    try:
        text = Path(f"/proc/{pid}/io").read_text()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in text.splitlines() if line.startswith("read_bytes")), None)


def load(folder: Path, ranks: int, device: str, cache: Path) -> dict[str, Any]:
    """One load in a process of its own."""
    command = [sys.executable, __file__, "--one", str(ranks), "--device", device, "--folder", str(folder)]
    # As the command k3 does: threads that spin while they wait take the cores from those that read.
    env = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ, "K3_CACHE": str(cache)}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    for line in done.stdout.splitlines():
        if line.startswith("found "):
            found: dict[str, Any] = json.loads(line[6:])
            return found
    raise SystemExit(f"a load over {ranks} ranks failed:\n{done.stderr[-3000:]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", default="4GB", help="bytes of the checkpoint to write")
    parser.add_argument("--ranks", default="1,2", help="numbers of ranks, each to be tried")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--folder", type=Path, help="where the checkpoint is, or is left; default: temporary")
    parser.add_argument("--threads", default="32,64", help="requests at a time when the disk is measured")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one is not None:
        load_once(args.folder, args.one, args.device)
        return
    base = args.folder or Path(tempfile.mkdtemp(prefix="k3-load-"))
    base.mkdir(parents=True, exist_ok=True)
    try:
        if not weight_files(base):
            began = time.monotonic()
            write(base, parse_bytes(args.size))
            print(f"written in {time.monotonic() - began:.1f} s")
        measure(base, [int(word) for word in args.ranks.split(",")], args)
    finally:
        if args.folder is None:
            shutil.rmtree(base)


def measure(base: Path, worlds: list[int], args: argparse.Namespace) -> None:
    size = sum(file.stat().st_size for file in weight_files(base))
    load_now = os.getloadavg()[0]
    print(f"{size / 1e9:.2f} GB in {len(weight_files(base))} files; {os.cpu_count()} CPUs, load {load_now:.1f}")
    rates = []
    for threads in (int(word) for word in args.threads.split(",")):
        for direct in (True, False):
            left = drop(base)
            rate = disk_rate(base, threads, direct)
            if rate is not None:
                rates.append(rate)
                kind = f"{'past' if direct else 'through'} the page cache"
                print(
                    f"disk, {threads} requests at a time, {kind}: {rate / 1e9:.2f} GB/s ({100 * left:.0f} % was cached)"
                )
    best = max(rates)
    head = ("ranks", "digests", "seconds", "started in", "GB/s", "of disk")
    print(" ".join(f"{word:>10}" for word in head) + "  host memory and bytes read, by rank", flush=True)
    for ranks in worlds:
        with tempfile.TemporaryDirectory() as cache:
            for digests in ("computed", "known"):
                left = drop(base)
                found = load(base, ranks, args.device, Path(cache))
                rate = found["bytes"] / found["seconds"]
                peaks = "/".join(f"{count / 1e9:.2f}" for count in found["host_peak"])
                read = "/".join(f"{count / 1e9:.2f}" for count in found["ranks"])
                fetched = sum(count or 0 for count in found["disk"])
                row = (ranks, digests, f"{found['seconds']:.2f}", f"{found['with_start'] - found['seconds']:.2f}")
                row += (f"{rate / 1e9:.2f}", f"{100 * rate / best:.0f}%")
                print(
                    " ".join(f"{word:>10}" for word in row)
                    + f"  {peaks} GB, {read} GB; from the disk {fetched / 1e9:.2f} "
                    f"GB ({100 * left:.0f} % was cached)",
                    flush=True,
                )


if __name__ == "__main__":
    main()
