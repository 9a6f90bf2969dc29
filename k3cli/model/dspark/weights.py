"""Loading a DSpark draft: every tensor checked by name, shape and type before the first is read."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from k3cli.errors import ModelError
from k3cli.model.config import ModelConfig
from k3cli.model.digest import DigestCache, combine
from k3cli.model.dspark.config import DraftConfig
from k3cli.model.dspark.network import DraftLayer, DraftModel, DraftWeights

AGAIN = "fetch the draft again"
NOT_USED = ("embed_tokens.weight", "lm_head.weight")
"""Copies of the target's tables that a draft may carry."""

Shapes = dict[str, tuple[int, ...]]


def layer_names(config: DraftConfig) -> dict[str, str]:
    """Field of DraftLayer -> checkpoint name behind `layers.N.`."""
    names = {"input_norm": "input_layernorm", "post_norm": "post_attention_layernorm", "o_proj": "self_attn.o_proj"}
    names |= {field: f"mlp.{field}" for field in ("gate_proj", "up_proj", "down_proj")}
    if config.kind == "mla":
        parts = {"q_a_norm": "q_a_layernorm", "kv_a_proj": "kv_a_proj_with_mqa", "kv_a_norm": "kv_a_layernorm"}
        names |= {
            field: f"self_attn.{parts.get(field, field)}" for field in ("q_a_proj", "q_b_proj", "kv_b_proj", *parts)
        }
    else:
        names |= {field: f"self_attn.{field}" for field in ("q_proj", "k_proj", "v_proj", "q_norm", "k_norm")}
    return {field: f"{name}.weight" for field, name in names.items()}


def shared_names(config: DraftConfig) -> dict[str, str]:
    """Field of DraftWeights -> checkpoint name."""
    if config.kind == "mla":
        names = {"context_proj": "context_proj", "context_norm": "context_norm", "final_norm": "final_norm"}
    else:
        names = {"context_proj": "fc", "context_norm": "hidden_norm", "final_norm": "norm"}
    found = {field: f"{name}.weight" for field, name in names.items()}
    found |= {f"markov_w{i}": f"markov_head.markov_w{i}.weight" for i in (1, 2)}
    if config.confidence:
        found |= {"confidence": "confidence_head.proj.weight", "confidence_bias": "confidence_head.proj.bias"}
    return found


def expected_shapes(config: DraftConfig) -> Shapes:
    """Every tensor a draft's files must hold, by name."""
    cfg, D, F = config, config.hidden, config.intermediate
    layer: dict[str, tuple[int, ...]] = {
        "input_norm": (D,),
        "post_norm": (D,),
        "o_proj": (D, cfg.heads * cfg.v_dim),
        "gate_proj": (F, D),
        "up_proj": (F, D),
        "down_proj": (D, F),
    }
    if cfg.kind == "mla":
        layer |= {
            "q_a_proj": (cfg.q_rank, D),
            "q_a_norm": (cfg.q_rank,),
            "q_b_proj": (cfg.heads * (cfg.nope_dim + cfg.pe_dim), cfg.q_rank),
            "kv_a_proj": (cfg.kv_rank + cfg.pe_dim, D),
            "kv_a_norm": (cfg.kv_rank,),
            "kv_b_proj": (cfg.heads * (cfg.nope_dim + cfg.v_dim), cfg.kv_rank),
        }
    else:
        rows = cfg.kv_heads * cfg.v_dim
        layer |= {"q_proj": (cfg.heads * cfg.v_dim, D), "k_proj": (rows, D), "v_proj": (rows, D)}
        layer |= {"q_norm": (cfg.v_dim,), "k_norm": (cfg.v_dim,)}
    shared: dict[str, tuple[int, ...]] = {
        "context_proj": (D, len(cfg.taps) * D),
        "context_norm": (D,),
        "final_norm": (D,),
        "markov_w1": (cfg.vocab, cfg.markov_rank),
        "markov_w2": (cfg.vocab, cfg.markov_rank),
        "confidence": (1, D + cfg.markov_rank * cfg.confidence_markov),
        "confidence_bias": (1,),
    }
    names = layer_names(config)
    found = {f"layers.{i}.{names[field]}": shape for i in range(cfg.layers) for field, shape in layer.items()}
    return found | {name: shared[field] for field, name in shared_names(config).items()}


def load_draft(path: Path | str, target: ModelConfig, embed: Tensor, head: Tensor) -> DraftModel:
    """Loads the draft in folder `path` for a target whose tables are embed and head [V, D], onto their device.

    Weights take the target's type. Raises ModelError for files that are missing, damaged or of another shape, and for
    a draft made for another target.
    """
    path = Path(path)
    config = check_draft(path, target)
    stored = _each(path, lambda file, name: file.get_tensor(name).to(head.device, head.dtype))
    found: dict[str, Tensor] = {name: tensor for _, name, tensor in stored}
    layers = tuple(
        DraftLayer(**{field: found[f"layers.{i}.{name}"] for field, name in layer_names(config).items()})
        for i in range(config.layers)
    )
    shared: Mapping[str, Tensor | None] = {field: found[name] for field, name in shared_names(config).items()}
    absent = {"confidence": None, "confidence_bias": None}
    weights = DraftWeights(layers, **{**absent, **shared})  # type: ignore[arg-type]
    return DraftModel(config, weights, embed, head, _digest(path))


def check_draft(path: Path, target: ModelConfig) -> DraftConfig:
    """The configuration of a draft in a folder, which suits the target, and whose files have headers that suit it.

    Raises ModelError.
    """
    config = DraftConfig.from_dir(path)
    config.check_target(target)
    expected = expected_shapes(config)
    found: set[str] = set()
    for file, name, shape in _each(path, lambda file, name: tuple(file.get_slice(name).get_shape())):
        _check(name, shape, expected, file)
        found.add(name)
    missing = sorted(set(expected) - found)
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise ModelError(f"tensor {missing[0]}{more} is missing from the draft in {path}", "it there", AGAIN)
    return config


def _digest(path: Path) -> str:
    """Hex SHA-256 over config and weights; files that were hashed before, here or elsewhere, are not read for it."""
    cache, found = DigestCache(), []
    for file in _files(path):
        status = file.stat()
        known = cache.get(status)
        if known is None:
            with file.open("rb") as stream:
                known = hashlib.file_digest(stream, "sha256").hexdigest()
            cache.put(status, known)
        found.append(known)
    if cache.changed:
        cache.save()  # not remembered, it is computed again
    return combine((path / "config.json").read_bytes(), found).removeprefix("sha256:")


def _files(path: Path) -> list[Path]:
    """The weight files in a folder, regular ones: opening a pipe would wait for its writer. Raises ModelError."""
    files = sorted(path.glob("*.safetensors"))
    odd = next((file for file in files if not os.path.isfile(file)), None)
    if odd is not None or not files:
        found = f"no .safetensors file in {path}" if odd is None else f"{odd} is no file"
        raise ModelError(found, "a DSpark draft's weights", AGAIN)
    return files


def _each(path: Path, look: Callable[[Any, str], Any]) -> Iterator[tuple[Path, str, Any]]:
    """(file, name, what `look` gets of the open file by that name) for each tensor that is used. Raises ModelError."""
    for file in _files(path):
        try:
            with safe_open(file, framework="pt") as stored:
                for name in stored.keys():  # noqa: SIM118
                    if not name.endswith(NOT_USED):
                        yield file, name, look(stored, name)
        except (SafetensorError, OSError) as problem:
            raise ModelError(f"{file} cannot be read ({problem})", "a safetensors file", AGAIN) from None


def _check(name: str, shape: tuple[int, ...], expected: Shapes, file: Path) -> None:
    if name not in expected:
        raise ModelError(f"unexpected tensor {name} in {file.name}", "only tensors config.json accounts for", AGAIN)
    if shape != expected[name]:
        raise ModelError(f"tensor {name} in {file.name} has shape {list(shape)}", f"{list(expected[name])}", AGAIN)
