"""Behind `k3 debug logits`: every position's logits under a chosen schedule, for people who doubt a result."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from k3cli.errors import ContextError, K3Error, UsageError
from k3cli.model.config import ModelConfig
from k3cli.model.hub import resolve_model
from k3cli.model.network import K3Model
from k3cli.model.weights import LoadProgress, load_model
from k3cli.words import counted


def write_logits(
    model: str | Path,
    tokens_file: Path,
    out: Path,
    *,
    schedule: str = "prefill",
    device: str = "auto",
    dtype: str = "auto",
    progress: Callable[[LoadProgress], None] | None = None,
) -> tuple[int, int]:
    """Writes `logits` [T, V] float32 for the JSON list of ids in `tokens_file` to the safetensors file `out`.

    schedule: "prefill" (one chunk), "decode" (token by token), or chunk sizes "1,63,64" whose last one repeats.
    Returns (T, V). Before anything is loaded: UsageError for ids or schedules that make no sense, ContextError for more
    ids than the context holds. ModelError for the model.
    """
    from safetensors.torch import save_file

    ids = read_ids(tokens_file)
    sizes = None if schedule == "decode" else list(chunk_sizes(schedule, len(ids)))
    folder = resolve_model(model)
    config = ModelConfig.from_dir(folder)
    vocab, limit = config.vocab, config.context_limit
    outside = [token for token in ids if token >= vocab]
    if outside:
        raise UsageError(f"id {outside[0]} in {tokens_file}", f"ids below the vocabulary size {vocab}")
    if len(ids) > limit:
        raise ContextError(
            f"{tokens_file} holds {counted(len(ids), 'id')}",
            f"at most {limit:,}, the context limit",
            "pass the first of them",
        )
    loaded = load_model(folder, device=device, dtype=dtype, progress=progress)
    logits = compute_logits(loaded.model, torch.tensor(ids, dtype=torch.int64), sizes)
    try:
        save_file({"logits": logits}, out)
    except OSError as error:
        raise K3Error(f"cannot write {out}: {error.strerror or error}", "a writable file") from error
    return len(ids), vocab


def read_ids(file: Path) -> list[int]:
    """A non-empty JSON list of token ids."""
    try:
        ids = json.loads(file.read_bytes())
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}", "a JSON list of ids") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{file} is not JSON: {error}", "a JSON list of ids") from error
    fine = isinstance(ids, list) and ids and all(isinstance(x, int) and not isinstance(x, bool) and x >= 0 for x in ids)
    if not fine:
        raise UsageError(f"{file} holds {str(ids)[:60]}", "a non-empty JSON list of ids, each 0 or more")
    return list(ids)


def chunk_sizes(schedule: str, count: int) -> Iterator[int]:
    """Chunk lengths that add up to `count`."""
    if schedule == "prefill":
        yield count
        return
    parts = schedule.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise UsageError(f"schedule {schedule!r}", "prefill, decode, or chunk sizes like 1,63,64")
    sizes = [int(part) for part in parts]
    while count:
        size = min(sizes.pop(0) if len(sizes) > 1 else sizes[0], count)
        yield size
        count -= size


def compute_logits(model: K3Model, ids: Tensor, sizes: list[int] | None) -> Tensor:
    """fp32 logits [T, V] on the host: prefill in chunks of `sizes`, or token by token when None."""
    state = model.new_state()
    parts: list[Tensor] = []
    if sizes is None:
        for i in range(ids.numel()):
            row, log = model.verify(ids[i : i + 1], state)
            model.commit(state, log, 1)
            parts.append(row.cpu())
    else:
        for chunk in ids.split(sizes):
            logits = model.prefill(chunk, state, logits="all")
            assert logits is not None
            parts.append(logits.cpu())
    return torch.cat(parts)
