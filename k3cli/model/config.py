"""Model configuration: `config.json` of K3 and Kimi-Linear, resolved once and checked by name.

Sizes are in elements, positions in tokens. Every switch follows from the presence of its key; a value this network
does not implement is refused, never ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from k3cli.errors import ModelError
from k3cli.model.config_keys import LEAST_EPS, MOST_IDS, MOST_LAYERS, MOST_WIDTH, Keys
from k3cli.model.config_layers import KdaConfig, MlaConfig, MoeConfig, read_kda, read_mla, read_moe
from k3cli.model_files import lies_there, read_object, shown

LayerKind = Literal["kda", "mla"]

WRAPPERS = ("kimi_k3",)
TEXT_TYPES = ("kimi_linear",)
ARCHITECTURES = ("KimiK3ForConditionalGeneration", "KimiLinearForCausalLM")
DTYPES = ("bfloat16", "float32")
# Keys by which relatives announce attention this network does not have.
FOREIGN_ATTENTION = (
    "index_topk",
    "index_n_heads",
    "index_head_dim",
    "sparse_attn_layers",
    "sparse_attention_config",
    "sparse_mla_layers",
    "sliding_window",
)


@dataclass(frozen=True)
class ModelConfig:
    """Everything the network needs. `layers[i]`: the kind of layer i; `moe_layers[i]`: whether its MLP is a mixture."""

    model_type: str
    hidden: int
    vocab: int
    context_limit: int
    norm_eps: float
    intermediate: int
    layers: tuple[LayerKind, ...]
    moe_layers: tuple[bool, ...]
    kda: KdaConfig
    mla: MlaConfig
    moe: MoeConfig | None
    attn_res_block: int | None
    situ: tuple[float, float] | None
    stored_dtype: str
    nested: bool

    @property
    def kda_layers(self) -> tuple[int, ...]:
        return tuple(i for i, kind in enumerate(self.layers) if kind == "kda")

    @property
    def mla_layers(self) -> tuple[int, ...]:
        return tuple(i for i, kind in enumerate(self.layers) if kind == "mla")

    @staticmethod
    def from_dir(path: Path | str) -> ModelConfig:
        """Reads `path`/config.json. Raises ModelError."""
        file = Path(path) / "config.json"
        if not lies_there(file):
            raise ModelError(
                f"no config.json in {path}", "a model folder", "pass --model a folder with config.json and safetensors"
            )
        return ModelConfig.from_dict(read_object(file, "the model's config.json", "fetch the file again"))

    @staticmethod
    def from_path(path: Path | str) -> ModelConfig:
        """Of a model folder, or of a config.json of any name. Raises ModelError."""
        if Path(path).suffix != ".json":
            return ModelConfig.from_dir(path)
        return ModelConfig.from_dict(read_object(Path(path), "a model's config.json"), str(path))

    @staticmethod
    def from_dict(raw: Any, file: str = "config.json") -> ModelConfig:
        """Resolves a parsed config.json, called `file` in messages. Raises ModelError naming the key."""
        if not isinstance(raw, Mapping):
            raise ModelError(f"{file} holds no object", "a JSON object")
        return _resolve(raw, file)


def _resolve(raw: Mapping[str, Any], file: str) -> ModelConfig:
    top = Keys(raw, file=file)
    nested = "text_config" in raw
    text = top.section("text_config") if nested else top
    model_type = raw.get("model_type")
    known = WRAPPERS if nested else TEXT_TYPES
    if model_type not in known:
        raise ModelError(f"unknown architecture: {file} model_type = {shown(model_type)}", " or ".join(known))
    for keys in (top, text) if nested else (top,):
        names = keys.get("architectures")
        if names is not None and not isinstance(names, list):
            raise keys.refused("architectures", "a list of names")
        unknown = [name for name in names or () if name not in ARCHITECTURES]
        if unknown:
            raise ModelError(f"unknown architecture {shown(unknown[0])}", " or ".join(ARCHITECTURES))
    text.only("model_type", TEXT_TYPES)
    for key in FOREIGN_ATTENTION:
        if text.get(key):
            raise ModelError(
                f"unsupported {text.name(key)} = {shown(text.get(key))}",
                "only KDA and dense MLA layers",
                "no such key",
            )
    for keys in (top, text):
        keys.only("tie_word_embeddings", (False, None))
    text.only("attention_bias", (False, None))
    text.only("num_nextn_predict_layers", (0, None))

    hidden = text.integer("hidden_size", most=MOST_WIDTH)
    layers = _layer_kinds(text)
    moe_layers = _moe_layers(text, len(layers))
    limit_key = "max_position_embeddings" if text.get("max_position_embeddings") is not None else "model_max_length"
    named = ((text, "dtype"), (text, "torch_dtype"), (top, "dtype"))
    keys, key = next(((keys, key) for keys, key in named if keys.get(key) is not None), named[0])
    stored = "bfloat16" if keys.get(key) is None else keys.get(key)
    if stored not in DTYPES:
        raise ModelError(f"unsupported {keys.name(key)} = {shown(stored)}", " or ".join(DTYPES))
    block = text.get("attn_res_block_size")
    return ModelConfig(
        model_type=str(model_type),
        hidden=hidden,
        vocab=text.integer("vocab_size", most=MOST_IDS),
        context_limit=text.integer(limit_key, most=MOST_IDS),
        norm_eps=text.number("rms_norm_eps", least=LEAST_EPS, most=1),
        intermediate=text.integer("intermediate_size", most=MOST_WIDTH),
        layers=layers,
        moe_layers=moe_layers,
        kda=read_kda(text),
        mla=read_mla(text),
        moe=read_moe(text) if any(moe_layers) else None,
        attn_res_block=None if block is None else text.integer("attn_res_block_size", most=MOST_LAYERS),
        situ=_activation(text),
        stored_dtype=stored,
        nested=nested,
    )


def _layer_kinds(text: Keys) -> tuple[LayerKind, ...]:
    count = text.integer("num_hidden_layers", most=MOST_LAYERS)
    linear = text.section("linear_attn_config")
    listed: dict[str, set[int]] = {}
    for key in ("kda_layers", "full_attn_layers"):
        values = linear.get(key)
        if not isinstance(values, list) or not all(isinstance(x, int) and not isinstance(x, bool) for x in values):
            raise linear.refused(key, "a list of 1-based layer numbers")
        outside = [x for x in values if not 1 <= x <= count]
        if outside:
            raise ModelError(f"{linear.name(key)} names layer {outside[0]}", f"layer numbers 1 to {count}")
        listed[key] = set(values)
    kinds: list[LayerKind] = []
    for number in range(1, count + 1):
        kda, mla = number in listed["kda_layers"], number in listed["full_attn_layers"]
        if kda == mla:
            found = "both of" if kda else "neither of"
            raise ModelError(
                f"{text.file} layer {number} (counted from 1) is in {found} kda_layers and full_attn_layers",
                "each layer in exactly one list",
            )
        kinds.append("kda" if kda else "mla")
    return tuple(kinds)


def _moe_layers(text: Keys, count: int) -> tuple[bool, ...]:
    if text.get("num_experts") is None:
        return (False,) * count
    first = text.integer("first_k_dense_replace", default=0, least=0)
    every = text.integer("moe_layer_freq", default=1)
    return tuple(i >= first and i % every == 0 for i in range(count))


def _activation(text: Keys) -> tuple[float, float] | None:
    """(beta, linear_beta) of SiTU, or None for SwiGLU."""
    kind = text.get("hidden_act")
    if kind == "silu":
        return None
    if kind == "situ":
        beta, linear = (
            text.number(key, least=1e-6, most=1e6) for key in ("activation_situ_beta", "activation_situ_linear_beta")
        )
        return beta, linear
    raise ModelError(f"unsupported {text.name('hidden_act')} = {shown(kind)}", '"situ" or "silu"')
