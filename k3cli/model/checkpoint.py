"""Reading a safetensors checkpoint: headers first, every check before anything is allocated.

Format: 8 bytes little-endian header length, JSON header, tensor bytes without gaps. Pickle files are never opened.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import torch

from k3cli.errors import ModelError
from k3cli.model.blocks import Weights
from k3cli.model.config import ModelConfig
from k3cli.model_files import LARGEST_INDEX, lies_there, parse_object, read_object, shown

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PREFIX = "language_model."
VISION = ("vision_tower.", "mm_projector.")
KEPT_FP32 = ("A_log", "dt_bias", "_conv1d.weight", "o_norm.weight", "e_score_correction_bias")
HEADER_LIMIT = 100 << 20
MOST_DIMENSIONS = 8
DTYPES: Mapping[str, torch.dtype] = {
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "U8": torch.uint8,
}
SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
SIZES |= {"U16": 2, "U32": 4, "U64": 8, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "C64": 8}
AGAIN = "fetch the checkpoint again"


@dataclass(frozen=True)
class Entry:
    """One stored tensor; `start` and `stop` are byte offsets behind the header. name is without the text prefix."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class Shard:
    """One file: its header bytes (length word included) and its tensors in file order."""

    path: Path
    header: bytes
    entries: tuple[Entry, ...]
    size: int


@dataclass(frozen=True)
class Expected:
    """What a tensor must look like: any of the shapes, any of the dtypes; `least` only for A_log, its least length."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    least: int | None = None

    def fits(self, shape: tuple[int, ...]) -> bool:
        if self.least is not None:
            return math.prod(shape) >= self.least and sorted(shape)[:-1] == [1] * (len(shape) - 1)
        return shape in self.shapes

    def shown(self) -> str:
        if self.least is not None:
            return f"one dimension of at least {self.least}"
        return "shape " + " or ".join(str(list(shape)) for shape in self.shapes)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose headers fit the configuration. `bytes_total` counts the shards with text tensors, whole."""

    path: Path
    shards: tuple[Shard, ...]

    @property
    def bytes_total(self) -> int:
        return sum(shard.size for shard in self.shards)


def expected_tensors(config: ModelConfig) -> dict[str, Expected]:
    """Every text tensor a checkpoint of `config` must hold, without the prefix; nothing is allocated."""
    plain = "BF16" if config.stored_dtype == "bfloat16" else "F32"
    kept = ("F32",) if plain == "F32" else ("F32", plain)
    found: dict[str, Expected] = {}
    for name, sink in Weights(config, torch.device("meta"), torch.float32).sinks().items():
        shape = tuple(sink.shape)
        if name.endswith("A_log"):
            found[name] = Expected((), kept, least=shape[0])
        elif name.endswith("dt_bias"):
            found[name] = Expected(((math.prod(shape),),), kept)
        elif name.endswith("_conv1d.weight"):
            found[name] = Expected(((shape[0], 1, shape[1]), shape), kept)
        elif name.endswith("_res_proj.weight"):
            found[name] = Expected(((1, *shape),), (plain,))
        elif name.endswith(("weight_packed", "weight_scale")):
            found[name] = Expected((shape,), ("U8",))
        else:
            found[name] = Expected((shape,), kept if name.endswith(KEPT_FP32) else (plain,))
    return found


def open_checkpoint(path: Path, config: ModelConfig) -> Checkpoint:
    """Reads and checks every header. Raises ModelError naming the tensor, what was found and what was expected."""
    shards = [_read_header(path / file, names) for file, names in sorted(_files(path).items())]
    found: dict[str, tuple[Entry, Path]] = {}
    for shard in shards:
        for entry in shard.entries:
            if entry.name.startswith(VISION):
                continue
            if entry.name in found:
                raise ModelError(
                    f"tensor {entry.name} is both in {found[entry.name][1].name} and {shard.path.name}",
                    "it once",
                    AGAIN,
                )
            found[entry.name] = entry, shard.path
    _as_many(found, config)
    expected = expected_tensors(config)
    _same_names(found, expected)
    for name, (entry, file) in found.items():
        want = expected[name]
        if not want.fits(entry.shape):
            raise ModelError(f"tensor {name} in {file.name} has shape {list(entry.shape)}", want.shown(), AGAIN)
        if entry.dtype not in want.dtypes:
            raise ModelError(
                f"tensor {name} in {file.name} has dtype {entry.dtype}", f"dtype {' or '.join(want.dtypes)}", AGAIN
            )
    return Checkpoint(path, tuple(shards))


def _as_many(found: Mapping[str, Any], config: ModelConfig) -> None:
    """Refuses a config.json that counts more than the files have, before as many tensors are thought of."""
    experts = 0 if config.moe is None else sum(config.moe_layers) * config.moe.experts
    for many, what in ((len(config.layers), "layers"), (experts, "experts in all layers")):
        if many > len(found):
            raise ModelError(
                f"config.json has {many:,} {what}, the checkpoint {len(found):,} tensors",
                "a tensor for each at least",
                "check that config.json and weights belong together",
            )


def _same_names(found: Mapping[str, Any], expected: Mapping[str, Expected]) -> None:
    missing = [name for name in expected if name not in found]
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        want = expected[missing[0]]
        raise ModelError(
            f"tensor {missing[0]}{more} is missing from the checkpoint",
            f"{want.shown()}, dtype {' or '.join(want.dtypes)}",
            AGAIN,
        )
    unexpected = [name for name in found if name not in expected]
    if unexpected:
        more = f" (and {len(unexpected) - 1} more)" if len(unexpected) > 1 else ""
        raise ModelError(
            f"unexpected tensor {unexpected[0]}{more} in {found[unexpected[0]][1].name}",
            "only tensors that config.json accounts for",
            "check that config.json and weights belong together",
        )


def _files(path: Path) -> dict[str, frozenset[str] | None]:
    """Shard file names with the text tensors each must hold; None when there is no index to say so."""
    index = path / INDEX
    if not lies_there(index):
        if (path / SINGLE).is_file():
            return {SINGLE: None}
        pickled = sorted(file.name for file in path.glob("*.bin")) + sorted(file.name for file in path.glob("*.pt*"))
        hint = f"; {pickled[0]} is a pickle file, which is never opened" if pickled else ""
        raise ModelError(f"no {INDEX} and no {SINGLE} in {path}{hint}", "safetensors weights")
    said = read_object(index, "an object with weight_map", AGAIN, most=LARGEST_INDEX)
    weight_map = said.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index} has weight_map {shown(weight_map)}", "the file of each tensor", AGAIN)
    files: dict[str, set[str]] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or os.path.basename(file) != file or not file.endswith(".safetensors"):
            raise ModelError(f"{INDEX} names file {shown(file)}", "a .safetensors file in the same folder", AGAIN)
        if not name.startswith(VISION):
            files.setdefault(file, set()).add(name.removeprefix(PREFIX))
    # Also False for names that no file can have.
    absent = sorted(file for file in files if not os.path.isfile(path / file))
    if absent:
        raise ModelError(
            f"{len(absent)} of {len(files)} weight files are missing, first {absent[0]}", f"it in {path}", AGAIN
        )
    return {file: frozenset(names) for file, names in files.items()}


def _read_header(file: Path, listed: frozenset[str] | None) -> Shard:
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            word = stream.read(8)
            length = struct.unpack("<Q", word)[0] if len(word) == 8 else -1
            if not 0 <= length <= min(HEADER_LIMIT, size - 8):
                raise ModelError(f"{file.name} is truncated or no safetensors file ({size} bytes)", "a header", AGAIN)
            header = stream.read(length)
    except OSError as error:
        raise ModelError(f"cannot read {file}: {error.strerror}", "a readable weight file") from error
    named = parse_object(header, f"the header of {file.name}", "a safetensors header", AGAIN)
    entries = [_entry(name, value, file) for name, value in named.items() if name != "__metadata__"]
    entries.sort(key=lambda entry: entry.start)
    at = 0
    for entry in entries:
        need = math.prod(entry.shape) * SIZES[entry.dtype]
        if entry.start != at or entry.stop - entry.start != need:
            raise ModelError(
                f"tensor {entry.name} in {file.name} takes bytes {entry.start} to {entry.stop}",
                f"{at} to {at + need} by its shape {list(entry.shape)} and dtype {entry.dtype}",
                AGAIN,
            )
        at = entry.stop
    if size != 8 + length + at:
        last = f", tensor {_cut(entries, size - 8 - length)} is cut" if size < 8 + length + at else ""
        kind = "truncated" if last else "too long"
        raise ModelError(f"{file.name} is {kind}: {size} bytes{last}", f"{8 + length + at} bytes", AGAIN)
    if listed is not None:
        held = {entry.name for entry in entries if not entry.name.startswith(VISION)}
        for name in sorted(listed - held):
            raise ModelError(f"tensor {name} is missing from {file.name}", f"it there, as {INDEX} says", AGAIN)
        for name in sorted(held - listed):
            raise ModelError(f"unexpected tensor {name} in {file.name}", f"only tensors that {INDEX} lists", AGAIN)
    return Shard(file, word + header, tuple(entries), size)


def _cut(entries: list[Entry], available: int) -> str:
    return next(entry.name for entry in entries if entry.stop > available)


def _entry(name: str, value: Any, file: Path) -> Entry:
    said = value if isinstance(value, dict) else {}
    shape, offsets, dtype = said.get("shape"), said.get("data_offsets"), said.get("dtype")
    if not _sizes(shape) or len(shape) > MOST_DIMENSIONS:
        key, expected = "shape", f"at most {MOST_DIMENSIONS} sizes"
    elif not _sizes(offsets) or len(offsets) != 2:
        key, expected = "data_offsets", "two offsets"
    elif not isinstance(dtype, str) or dtype not in SIZES:
        key, expected = "dtype", "BF16, F32 or U8"
    else:
        return Entry(name.removeprefix(PREFIX), dtype, tuple(shape), *offsets)
    raise ModelError(f"tensor {name} in {file.name} has {key} {shown(said.get(key))}", expected, AGAIN)


def _sizes(values: Any) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(type(x) is int and 0 <= x < 1 << 63 for x in values)
