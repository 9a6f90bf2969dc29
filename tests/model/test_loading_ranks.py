"""Loading over several ranks, the ranks being threads: what each reads, what arrives where, and what stops all."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from k3cli.config import K3_SHAPE
from k3cli.errors import K3Error, ModelError
from k3cli.model import delivery, staging
from k3cli.model.blocks import Sinks, Weights
from k3cli.model.checkpoint import PREFIX, Shard, open_checkpoint
from k3cli.model.config import ModelConfig
from k3cli.model.delivery import Delivery, OthersFailedError
from k3cli.model.parallel import experts_by_width, part, worlds
from k3cli.model.random_weights import write_random_checkpoint
from k3cli.model.ranks import load_ranks
from k3cli.model.reading import batches, hashers, staging_bytes, total_bytes
from k3cli.model.slices import Slices
from k3cli.model.staging import Staging

LONG = pytest.mark.skipif(os.environ.get("K3_LONG") != "1", reason="slow: K3_LONG=1")
SMALL = 20_000
"""Bytes of a batch: the checkpoints of these tests take many."""


class Table:
    """Where the threads of a world meet."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=20)
        self.counts = [0] * size
        self.letters: dict[tuple[int, int], torch.Tensor] = {}


class ThreadRing:
    def __init__(self, table: Table, rank: int) -> None:
        self.rank, self.size, self._table = rank, table.size, table

    def counts(self, done: int) -> list[int]:
        self._table.counts[self.rank] = done
        self._table.barrier.wait()
        found = list(self._table.counts)
        self._table.barrier.wait()
        return found

    def swap(self, send: torch.Tensor, to: Sequence[int], found: torch.Tensor, taken: Sequence[int]) -> None:
        for other, piece in enumerate(send.split(list(to))):
            self._table.letters[self.rank, other] = piece
        self._table.barrier.wait()
        came = [self._table.letters[other, self.rank] for other in range(self.size)]
        assert [piece.numel() for piece in came] == list(taken)
        found.copy_(torch.cat(came))
        self._table.barrier.wait()


@dataclasses.dataclass
class Rank:
    sinks: Sinks
    staging: Staging
    reported: list[int]
    error: Exception | None = None


def load(folder: Path, size: int, known: list[bool], batch: int = SMALL) -> tuple[list[Rank], tuple[Shard, ...]]:
    config = ModelConfig.from_dir(folder)
    shards, slices, table = open_checkpoint(folder, config).shards, Slices(config, size), Table(size)
    ranks = []
    for rank in range(size):
        weights = Weights(config, torch.device("cpu"), torch.float32, rank, size)
        for sink in weights.sinks().values():
            sink.fill_(255 if sink.dtype == torch.uint8 else torch.nan)
        hashed = [number for number, (who, _) in hashers(known, size).items() if who == rank]
        plan = batches(shards, known, slices, rank, size, batch)
        ranks.append(Rank(weights.sinks(), Staging(shards, plan, rank, hashed, alone=size == 1), []))

    def run(rank: int) -> None:
        mine = ranks[rank]
        ring = None if size == 1 else ThreadRing(table, rank)
        try:
            Delivery(mine.sinks, slices, rank, torch.device("cpu"), ring).run(mine.staging, mine.reported.append)
        except (ModelError, OthersFailedError) as error:
            mine.error = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    return ranks, shards


@pytest.fixture(scope="module")
def folders_to_split(
    split_folders: dict[str, Path], split_configs: dict[str, dict], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    wide = split_configs["linear"] | {"moe_intermediate_size": 64}
    folder = write_random_checkpoint(tmp_path_factory.mktemp("wide") / "linear", wide, seed=9)
    assert experts_by_width(ModelConfig.from_dir(folder), 2)
    return split_folders | {"linear, wide": folder}


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[tuple[int, int]]]:
    found: dict[int, list[tuple[int, int]]] = {}

    def counting(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        count = os.preadv(descriptor, buffers, offset)
        found.setdefault(os.fstat(descriptor).st_ino, []).append((offset, offset + count))
        return count

    monkeypatch.setattr(staging, "read_at", counting)
    return found


@pytest.mark.parametrize("known", ["all known", "none known", "one known"])
@pytest.mark.parametrize(
    ("name", "size"), [("k3", 1), ("k3", 2), ("k3", 4), ("linear", 2), ("linear", 4), ("linear, wide", 2)]
)
def test_every_byte_is_read_once_and_every_part_arrives(
    folders_to_split: dict[str, Path], read: Any, name: str, size: int, known: str
):
    """linear: whole experts have owners; with wide ones, columns of bf16 are cut."""
    folder = folders_to_split[name]
    config = ModelConfig.from_dir(folder)
    there = [known == "all known" or (known == "one known" and i == 1) for i in range(3)]
    ranks, shards = load(folder, size, there)
    assert [rank.error for rank in ranks] == [None] * size
    for shard, skipped in zip(shards, there, strict=True):
        end = len(shard.header)
        for first, last in sorted(read[shard.path.stat().st_ino]):
            assert first == end
            end = last
        assert end == shard.size
        digests = [d for rank in ranks for number, d in rank.staging.digests.items() if shards[number] is shard]
        assert len(digests) == (0 if skipped else 1)
    slices = Slices(config, size)
    total = total_bytes(shards, there, slices)
    counts = [rank.staging.done for rank in ranks]
    assert sum(counts) == total
    if known == "all known":
        assert max(counts) < 1.25 * total / size
    for rank in ranks:
        assert rank.reported == sorted(rank.reported)
        assert rank.reported[-1] == total
        assert rank.reported[-2] > rank.staging.done or size == 1  # the others' bytes are counted on the way
        assert sum(block.numel() for block in rank.staging._free) <= staging_bytes(size, SMALL)[0] * 1.2
    stored = {key.removeprefix(PREFIX): t for shard in shards for key, t in load_file(shard.path).items()}
    for number, rank in enumerate(ranks):
        for key, sink in rank.sinks.items():
            want = stored[key]
            shape = slices.shapes[key]
            want = want.reshape(-1)[: shape[0]] if key.endswith("A_log") else want.reshape(shape)
            mine = part(config, key, shape, number, size)
            if mine.axis is not None:
                want = want.narrow(mine.axis, mine.start, mine.stop - mine.start)
            assert torch.equal(sink, want.to(sink.dtype)), (key, number)


def test_digests_do_not_depend_on_the_world(split_folders: dict[str, Path]):
    found = []
    for size in (1, 2, 4):
        ranks, _ = load(split_folders["k3"], size, [False] * 3)
        found.append({number: digest for rank in ranks for number, digest in rank.staging.digests.items()})
        assert all(unchanged for _, unchanged in found[-1].values())
    assert len(found[0]) == 3
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("cut", [0, 1, 2])
def test_a_file_that_shrinks_stops_every_rank(
    split_folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: bool, cut: int
):
    """One rank knows why; the others stop with it, and nobody waits."""
    folder = split_folders["k3"]
    victim = sorted(folder.glob("*.safetensors"))[cut]
    inode, end = victim.stat().st_ino, victim.stat().st_size - 3_000

    def short(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if os.fstat(descriptor).st_ino == inode and offset + sum(map(len, buffers)) > end:
            return 0
        return os.preadv(descriptor, buffers, offset)

    monkeypatch.setattr(staging, "read_at", short)
    ranks, _ = load(folder, 4, [known] * 3)
    reasons = [rank.error for rank in ranks if isinstance(rank.error, ModelError)]
    assert reasons
    assert all(f"{victim.name} ended inside tensor" in str(reason) for reason in reasons)
    assert sum(isinstance(rank.error, OthersFailedError) for rank in ranks) == 4 - len(reasons)


@pytest.mark.skipif(not Path("/proc/self/stat").is_file(), reason="reads /proc")
@pytest.mark.parametrize(
    ("how", "said"),
    [
        (signal.SIGKILL, "rank 1 was ended by signal 9"),
        pytest.param(signal.SIGSTOP, "rank 1 has not answered", marks=LONG),
    ],
)
def test_a_rank_lost_while_loading_is_named(
    split_folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, how: int, said: str
):
    """It goes when this process reads its first bytes."""
    gone: list[int] = []

    def read(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if not gone:
            gone.extend(children())
            os.kill(gone[0], how)
            time.sleep(0.5)
        return os.preadv(descriptor, buffers, offset)

    monkeypatch.setattr(staging, "read_at", read)
    monkeypatch.setattr(staging, "READERS", 1)
    monkeypatch.setattr(delivery, "PATIENCE", 2.0)
    config = ModelConfig.from_dir(split_folders["k3"])
    with pytest.raises(K3Error, match=said):
        load_ranks(split_folders["k3"], config, ["cpu"] * 2, device="cpu", dtype="float32", window=8)
    assert len(gone) == 1
    assert children() == []


def children() -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int((folder / "stat").read_text().rpartition(")")[2].split()[1]) == os.getpid():
                found.append(int(folder.name))
    return found


def test_staging_of_k3_stays_under_4_gib_in_every_world():
    config = ModelConfig.from_dir(K3_SHAPE)
    for world in worlds(config):
        host, device = staging_bytes(world)
        assert host + device < 2 << 30, world


def test_batches_of_k3_are_bounded_in_file_order_and_balanced():
    """One layer of true sizes; nothing is read."""
    whole = ModelConfig.from_dir(K3_SHAPE)
    assert whole.moe is not None
    config = dataclasses.replace(
        whole,
        layers=("kda", "mla"),
        moe_layers=(True, True),
        moe=dataclasses.replace(whole.moe, experts=64),
    )
    shard, size = _shard_of(config), 8
    slices = Slices(config, size)
    host, _ = staging_bytes(size)
    seen, met = [], set()
    for rank in range(size):
        done, at = 0, {"own": 0, "shared": 0}
        meetings = 0
        for batch in batches([shard], [True], slices, rank, size):
            shared = () if batch.shared is None else batch.shared[rank]
            assert sum(read.size for read in (*batch.own, *shared)) <= host // staging.BUFFERS * 1.1
            for kind, reads in (("own", batch.own), ("shared", shared)):
                for read in reads:
                    assert read.offset >= at[kind]
                    at[kind] = read.offset + read.size
                    done += read.size
            meetings += batch.shared is not None
        seen.append(done)
        met.add(meetings)
    assert sum(seen) == shard.size - len(shard.header)
    assert max(seen) < 1.02 * min(seen)
    assert len(met) == 1


def _shard_of(config: ModelConfig) -> Shard:
    from k3cli.model.checkpoint import SIZES, Entry, expected_tensors

    entries, at = [], 0
    for name, want in expected_tensors(config).items():
        shape = want.shapes[0] if want.shapes else (want.least or 0,)
        size = torch.Size(shape).numel() * SIZES[want.dtypes[0]]
        entries.append(Entry(name, want.dtypes[0], shape, at, at + size))
        at += size
    return Shard(Path("none"), b"", tuple(entries), at)
