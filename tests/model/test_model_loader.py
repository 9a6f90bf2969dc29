"""The loader refuses damaged checkpoints by name, before it allocates, and reads and hashes each file once."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from k3cli.errors import FitError, ModelError, UsageError
from k3cli.model import placement, staging, weights
from k3cli.model.checkpoint import INDEX
from k3cli.model.digest import DigestCache
from k3cli.model.weights import LoadProgress, load_model

EMBED = "language_model.model.embed_tokens.weight"
A_LOG = "language_model.model.layers.0.self_attn.A_log"
CONV = "language_model.model.layers.0.self_attn.q_conv1d.weight"


@pytest.fixture
def folder(checkpoints: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoints["k3"], tmp_path / "model"))


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], None], holding: str = EMBED) -> Path:
    """Rewrites the shard that holds a tensor, index included."""
    index = json.loads((folder / INDEX).read_text())
    file = index["weight_map"][holding]
    tensors = load_file(folder / file)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / file)
    kept = {name: where for name, where in index["weight_map"].items() if where != file}
    (folder / INDEX).write_text(json.dumps({"weight_map": kept | dict.fromkeys(tensors, file)}))
    return folder / file


@pytest.fixture
def refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Loading raises ModelError with these words, and never got to allocating."""

    def check(*words: str) -> None:
        def allocated(*args: object) -> None:
            raise AssertionError("weights were allocated")

        with monkeypatch.context() as patch:
            patch.setattr(weights, "Weights", allocated)
            with pytest.raises(ModelError) as error:
                load_model(folder)
        for word in words:
            assert word in str(error.value), (word, str(error.value))
        assert "\n" not in str(error.value)

    return check


def test_missing_tensor(folder: Path, refused):
    edit(folder, lambda tensors: tensors.pop(EMBED))
    refused("model.embed_tokens.weight", "missing", "[131, 40]", "BF16")


def test_unexpected_tensor(folder: Path, refused):
    edit(folder, lambda tensors: tensors.update({"language_model.model.layers.0.bias": torch.zeros(3)}))
    refused("unexpected tensor model.layers.0.bias")


def test_wrong_shape(folder: Path, refused):
    edit(folder, lambda tensors: tensors.update({EMBED: torch.zeros(131, 41, dtype=torch.bfloat16)}))
    refused("model.embed_tokens.weight", "[131, 41]", "[131, 40]")


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.int8, torch.float64])
def test_wrong_dtype(folder: Path, refused, dtype: torch.dtype):
    edit(folder, lambda tensors: tensors.update({EMBED: tensors[EMBED].to(dtype)}))
    refused("model.embed_tokens.weight", "dtype", "BF16")


def test_expert_of_wrong_dtype(folder: Path, refused):
    name = "language_model.model.layers.1.block_sparse_moe.experts.2.w2.weight_packed"
    edit(folder, lambda tensors: tensors.update({name: tensors[name].to(torch.int8)}), name)
    refused("experts.2.w2.weight_packed", "I8", "U8")


def test_a_log_too_short(folder: Path, refused):
    edit(folder, lambda tensors: tensors.update({A_LOG: torch.zeros(4)}), A_LOG)
    refused("layers.0.self_attn.A_log", "[4]", "at least 5")


def test_truncated_file(folder: Path, refused):
    file = sorted(folder.glob("*.safetensors"))[-1]
    size = file.stat().st_size
    os.truncate(file, size - 5)
    refused(file.name, "truncated", str(size - 5), str(size), "tensor ")


@pytest.mark.parametrize("size", [0, 4, 12])
def test_file_cut_in_its_header(folder: Path, refused, size: int):
    file = sorted(folder.glob("*.safetensors"))[0]
    os.truncate(file, size)
    refused(file.name, "truncated")


def test_file_with_a_tail(folder: Path, refused):
    file = sorted(folder.glob("*.safetensors"))[0]
    with file.open("ab") as stream:
        stream.write(b"xx")
    refused(file.name, "too long")


def test_damaged_header(folder: Path, refused):
    file = sorted(folder.glob("*.safetensors"))[0]
    body = bytearray(file.read_bytes())
    body[8] = ord("x")
    file.write_bytes(body)
    refused(file.name, "header", "not JSON")


def rewrite(folder: Path, change: Callable[[dict, str], str | None]) -> str:
    """Changes the header of the first file: change(header, its last tensor) may return the text. Returns that name."""
    file = sorted(folder.glob("*.safetensors"))[0]
    body = file.read_bytes()
    (length,) = struct.unpack("<Q", body[:8])
    header = json.loads(body[8 : 8 + length])
    victim = max((name for name in header if name != "__metadata__"), key=lambda name: header[name]["data_offsets"][0])
    text = (change(header, victim) or json.dumps(header)).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + body[8 + length :])
    return victim


def test_overlapping_offsets(folder: Path, refused):
    def overlap(header: dict, victim: str) -> None:
        header[victim]["data_offsets"] = [x - 4 for x in header[victim]["data_offsets"]]

    victim = rewrite(folder, overlap)
    refused(victim.removeprefix("language_model."), "takes bytes")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("shape", "x" * 10**6),
        ("shape", [1] * 10**5),
        ("shape", [True]),
        ("shape", [-1]),
        ("shape", [10**400]),
        ("data_offsets", [0, 4, 8]),
        ("data_offsets", None),
        ("dtype", ["BF16"]),
        ("dtype", "Q" * 10**6),
    ],
)
def test_a_header_that_says_something_odd_names_tensor_and_key(folder: Path, refused, key: str, value: object):
    victim = rewrite(folder, lambda header, name: header[name].update({key: value}))
    refused(victim, f" has {key} ")
    with pytest.raises(ModelError) as error:
        load_model(folder)
    assert len(str(error.value)) < 400


@pytest.mark.parametrize("whole", [False, True])
def test_a_header_that_says_something_twice(folder: Path, refused, whole: bool):
    """Which of the two counts, readers don't agree on."""

    def twice(header: dict, victim: str) -> str:
        text, entry = json.dumps(header), json.dumps(header[victim])
        if whole:
            return f"{text[:-1]}, {json.dumps(victim)}: {entry}}}"
        return text.replace(entry, f'{entry[:-1]}, "dtype": "F32"}}')

    victim = rewrite(folder, twice)
    refused("header", "twice", victim if whole else '"dtype"')


def test_missing_shard(folder: Path, refused):
    file = sorted(folder.glob("*.safetensors"))[1]
    file.unlink()
    refused("1 of 3 weight files are missing", file.name)


def test_index_that_lies(folder: Path, refused):
    index = json.loads((folder / INDEX).read_text())
    files = sorted(set(index["weight_map"].values()))
    index["weight_map"][EMBED] = next(file for file in files if file != index["weight_map"][EMBED])
    (folder / INDEX).write_text(json.dumps(index))
    refused("model.embed_tokens.weight", INDEX)


@pytest.mark.parametrize("name", ["../elsewhere.safetensors", "x" * 10**6, ["a.safetensors"], None])
def test_index_that_leaves_the_folder(folder: Path, refused, name: object):
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"][EMBED] = name
    (folder / INDEX).write_text(json.dumps(index))
    refused("names file", json.dumps(name)[1:20] if name else "missing", "same folder")


def test_a_name_that_no_file_can_have_is_a_missing_file(folder: Path, refused):
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"][EMBED] = "y" * 300 + ".safetensors"
    (folder / INDEX).write_text(json.dumps(index))
    refused("1 of 4 weight files are missing", "yyyy")


def test_an_index_without_files(folder: Path, refused):
    (folder / INDEX).write_text('{"weight_map": {}}')
    refused(INDEX, "weight_map {}")


def test_pickle_is_never_opened(folder: Path, refused):
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"not read")
    refused("pytorch_model.bin", "never opened")


def test_a_log_padding_must_be_zero(folder: Path):
    """Needs the data, so it is found while loading."""

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors[A_LOG][6] = 0.25

    edit(folder, spoil, A_LOG)
    with pytest.raises(ModelError, match=r"layers\.0\.self_attn\.A_log holds 0\.25 at index 6.*zero padding"):
        load_model(folder)


def test_accepted_spellings(folder: Path, loaded):
    """conv [C, 4] as well as [C, 1, 4], A_log [1, 1, H, 1], vision tensors skipped, no prefix: the same model."""

    def respell(tensors: dict[str, torch.Tensor]) -> None:
        tensors[CONV] = tensors[CONV].squeeze(1)
        tensors[A_LOG] = tensors[A_LOG][:5].view(1, 1, 5, 1)
        tensors["vision_tower.patch_embed.weight"] = torch.ones(5, dtype=torch.bfloat16)
        for name in list(tensors):
            tensors[name.removeprefix("language_model.")] = tensors.pop(name)

    edit(folder, respell)
    ids = torch.arange(20)
    net, other = load_model(folder).model, loaded["k3"].model
    assert torch.equal(
        net.prefill(ids, net.new_state(), logits="all"), other.prefill(ids, other.new_state(), logits="all")
    )


def test_single_file(folder: Path, loaded):
    tensors = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
        file.unlink()
    (folder / INDEX).unlink()
    save_file(tensors, folder / "model.safetensors")
    ids = torch.arange(9)
    net, other = load_model(folder).model, loaded["k3"].model
    assert torch.equal(net.prefill(ids, net.new_state()), other.prefill(ids, other.new_state()))


@pytest.fixture
def places_read(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[tuple[int, int]]]:
    """By inode, where each read request began and ended."""
    found: dict[int, list[tuple[int, int]]] = {}

    def read(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        count = os.preadv(descriptor, buffers, offset)
        found.setdefault(os.fstat(descriptor).st_ino, []).append((offset, offset + count))
        return count

    monkeypatch.setattr(staging, "read_at", read)
    return found


@pytest.mark.parametrize("known", [False, True])
def test_everything_is_read_once_and_reported(folder: Path, places_read, known: bool):
    seen: list[LoadProgress] = []
    if known:
        load_model(folder)
        places_read.clear()
    loaded = load_model(folder, progress=seen.append)
    total = 0
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as stream:
            end = 8 + struct.unpack("<Q", stream.read(8))[0]
        total += file.stat().st_size - (end if known else 0)
        for first, last in sorted(places_read[file.stat().st_ino]):
            assert first == end
            end = last
        assert end == file.stat().st_size
    assert loaded.bytes_read == total == seen[-1].bytes_done == seen[-1].bytes_total
    assert loaded.ranks_read == (total,)
    assert all(a.bytes_done <= b.bytes_done for a, b in itertools.pairwise(seen))
    assert seen[-1].rate > 0
    assert seen[-1].left == 0


def test_requests_that_come_back_short_are_asked_on(folder: Path, monkeypatch: pytest.MonkeyPatch):
    def short(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        for buffer in buffers:
            buffer[:] = b"\xaa" * len(buffer)
        return os.preadv(descriptor, [buffers[0][:999]], offset)

    monkeypatch.setattr(staging, "read_at", short)
    assert load_model(folder).weights_digest == digest_of(folder)


def digest_of(folder: Path) -> str:
    total = hashlib.sha256(hashlib.sha256((folder / "config.json").read_bytes()).hexdigest().encode())
    for file in sorted(folder.glob("*.safetensors")):
        total.update(hashlib.sha256(file.read_bytes()).hexdigest().encode())
    return f"sha256:{total.hexdigest()}"


def test_digest_is_of_the_bytes_and_remembered(folder: Path, monkeypatch: pytest.MonkeyPatch):
    first = load_model(folder).weights_digest
    assert first == digest_of(folder)
    assert len(DigestCache().known) == 3

    def hashing(*args: object) -> None:
        raise AssertionError("hashed again")

    with monkeypatch.context() as patch:
        patch.setattr(staging.hashlib, "sha256", hashing)
        patch.setattr(weights, "combine", lambda config, shards: "/".join(shards))
        assert len(load_model(folder).weights_digest.split("/")) == 3
    file = sorted(folder.glob("*.safetensors"))[0]
    body = bytearray(file.read_bytes())
    body[-1] ^= 1
    file.write_bytes(body)
    assert load_model(folder).weights_digest == digest_of(folder) != first


def test_damaged_digest_cache_is_an_empty_one(folder: Path):
    load_model(folder)
    path = DigestCache().path
    path.write_text('{"version": 1, "files": 3}')
    assert load_model(folder).weights_digest == digest_of(folder)
    assert len(DigestCache().known) == 3


def test_unwritable_digest_cache_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("K3_CACHE", str(tmp_path / "file"))
    loaded = load_model(folder)
    assert loaded.weights_digest == digest_of(folder)
    assert "not remembered" in loaded.notices[0]


def test_bf16_on_a_slow_cpu_becomes_fp32(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(placement, "fast_bf16_cpu", lambda: (False, "nothing for it"))
    loaded = load_model(folder, dtype="bfloat16")
    assert loaded.model.dtype == torch.float32
    assert "nothing for it" in loaded.reasons["dtype"]
    monkeypatch.setattr(placement, "fast_bf16_cpu", lambda: (True, "AMX"))
    loaded = load_model(folder, dtype="bfloat16")
    assert loaded.model.dtype == torch.bfloat16
    assert {field.dtype for field in loaded.model.state_layout().fields} == {"float32", "bfloat16"}


def test_unknown_device_and_dtype(folder: Path):
    with pytest.raises(UsageError, match="auto, cpu, cuda"):
        load_model(folder, device="tpu")
    with pytest.raises(UsageError, match="bfloat16"):
        load_model(folder, dtype="float8")
    with pytest.raises(FitError, match="cuda:99"):
        load_model(folder, device="cuda:99")


def test_weights_that_do_not_fit(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(placement, "available_memory", lambda device: 1000)
    with pytest.raises(FitError, match="GB are free"):
        load_model(folder)
