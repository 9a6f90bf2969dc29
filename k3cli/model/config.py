"""Model configuration: `config.json` of K3 and Kimi-Linear, resolved once and checked by name.

Sizes are in elements, positions in tokens. Every switch follows from the presence of its key; a value this network
does not implement is refused, never ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from k3cli.errors import ModelError

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
class KdaConfig:
    """KDA layers. `gate_lower_bound` None: the unbounded softplus gate; `full_rank_gate`: one output-gate matrix."""

    heads: int
    head_dim: int
    conv_width: int
    full_rank_gate: bool
    gate_lower_bound: float | None

    @property
    def width(self) -> int:
        return self.heads * self.head_dim


@dataclass(frozen=True)
class MlaConfig:
    """MLA layers without positions. `q_rank` None means one query matrix; `output_gate` a sigmoid gate on the output.

    `latent_norm_eps` belongs to the norms of the query and key-value latents: the published code builds them without
    passing the configured eps, so its default 1e-6 applies.
    """

    heads: int
    q_rank: int | None
    kv_rank: int
    nope_dim: int
    pe_dim: int
    v_dim: int
    output_gate: bool
    latent_norm_eps: float

    @property
    def row(self) -> int:
        """Elements kept per token and layer: latent, then the shared key part."""
        return self.kv_rank + self.pe_dim


@dataclass(frozen=True)
class MoeConfig:
    """Mixture-of-experts layers. `latent` None: experts work at full width; `shared`: width of the shared MLP."""

    experts: int
    top_k: int
    groups: int
    top_groups: int
    renormalize: bool
    scale: float
    intermediate: int
    shared: int
    latent: int | None
    latent_norm: bool
    packed: bool


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
    bos_id: int | None
    eos_ids: tuple[int, ...]
    pad_id: int | None
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
        try:
            raw = json.loads(file.read_bytes())
        except FileNotFoundError:
            raise ModelError(
                f"no config.json in {path}", "a model folder", "pass --model a folder with config.json and safetensors"
            ) from None
        except OSError as error:
            raise ModelError(f"cannot read {file}: {error.strerror}", "a readable config.json") from error
        except (ValueError, RecursionError) as error:
            raise ModelError(
                f"{file} is not JSON: {error}", "the model's config.json", "fetch the file again"
            ) from error
        return ModelConfig.from_dict(raw)

    @staticmethod
    def from_dict(raw: Any) -> ModelConfig:
        """Resolves a parsed config.json. Raises ModelError naming the key."""
        if not isinstance(raw, Mapping):
            raise ModelError("config.json holds no object", "a JSON object")
        return _resolve(raw)


class _Keys:
    """Typed look-ups that name the key when something is wrong."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def name(self, key: str) -> str:
        return f"config.json key {self.where}{key}"

    def get(self, key: str) -> Any:
        return self.values.get(key)

    def section(self, key: str) -> _Keys:
        value = self.values.get(key)
        if not isinstance(value, Mapping):
            raise ModelError(f"{self.name(key)} is {_shown(value)}", "an object")
        return _Keys(value, f"{self.where}{key}.")

    def integer(self, key: str, default: int | None = None, least: int = 1) -> int:
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ModelError(f"{self.name(key)} is {_shown(value)}", f"an integer of at least {least}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ModelError(f"{self.name(key)} is {_shown(value)}", "a number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ModelError(f"{self.name(key)} is {_shown(value)}", "true or false")
        return value

    def only(self, key: str, allowed: tuple[Any, ...]) -> None:
        """Refuses a present value that is not one of `allowed`."""
        value = self.values.get(key)
        if key in self.values and value not in allowed:
            shown = " or ".join(_shown(item) for item in allowed)
            raise ModelError(f"unsupported {self.name(key)} = {_shown(value)}", shown, "use a model of the K3 family")


def _shown(value: Any) -> str:
    return "missing" if value is None else json.dumps(value)[:80]


def _resolve(raw: Mapping[str, Any]) -> ModelConfig:
    top = _Keys(raw, "")
    nested = "text_config" in raw
    text = top.section("text_config") if nested else top
    model_type = raw.get("model_type")
    known = WRAPPERS if nested else TEXT_TYPES
    if model_type not in known:
        raise ModelError(f"unknown architecture: config.json model_type = {_shown(model_type)}", " or ".join(known))
    for keys in (top, text) if nested else (top,):
        names = keys.get("architectures") or []
        unknown = [name for name in names if name not in ARCHITECTURES]
        if unknown:
            raise ModelError(f"unknown architecture {unknown[0]}", " or ".join(ARCHITECTURES))
    text.only("model_type", TEXT_TYPES)
    for key in FOREIGN_ATTENTION:
        if text.get(key):
            raise ModelError(
                f"unsupported {text.name(key)} = {_shown(text.get(key))}",
                "only KDA and dense MLA layers",
                "no such key",
            )
    for keys in (top, text):
        keys.only("tie_word_embeddings", (False, None))
    text.only("attention_bias", (False, None))
    text.only("num_nextn_predict_layers", (0, None))

    hidden = text.integer("hidden_size")
    layers = _layer_kinds(text)
    moe_layers = _moe_layers(text, len(layers))
    limit_key = "max_position_embeddings" if text.get("max_position_embeddings") is not None else "model_max_length"
    stored = text.get("dtype") or text.get("torch_dtype") or raw.get("dtype") or "bfloat16"
    if stored not in DTYPES:
        raise ModelError(f"unsupported {text.name('dtype')} = {_shown(stored)}", " or ".join(DTYPES))
    block = text.get("attn_res_block_size")
    eos = text.get("eos_token_id") if text.get("eos_token_id") is not None else raw.get("eos_token_id")
    return ModelConfig(
        model_type=str(model_type),
        hidden=hidden,
        vocab=text.integer("vocab_size"),
        context_limit=text.integer(limit_key),
        norm_eps=text.number("rms_norm_eps"),
        intermediate=text.integer("intermediate_size"),
        layers=layers,
        moe_layers=moe_layers,
        kda=_kda(text),
        mla=_mla(text),
        moe=_moe(text) if any(moe_layers) else None,
        attn_res_block=None if block is None else text.integer("attn_res_block_size"),
        situ=_activation(text),
        stored_dtype=stored,
        bos_id=_token_id(text, "bos_token_id"),
        eos_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (int(eos),),
        pad_id=_token_id(text, "pad_token_id"),
        nested=nested,
    )


def _token_id(text: _Keys, key: str) -> int | None:
    return None if text.get(key) is None else text.integer(key, least=0)


def _layer_kinds(text: _Keys) -> tuple[LayerKind, ...]:
    count = text.integer("num_hidden_layers")
    linear = text.section("linear_attn_config")
    listed: dict[str, set[int]] = {}
    for key in ("kda_layers", "full_attn_layers"):
        values = linear.get(key)
        if not isinstance(values, list) or not all(isinstance(x, int) and not isinstance(x, bool) for x in values):
            raise ModelError(f"{linear.name(key)} is {_shown(values)}", "a list of 1-based layer numbers")
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
                f"config.json layer {number} (counted from 1) is in {found} kda_layers and full_attn_layers",
                "each layer in exactly one list",
            )
        kinds.append("kda" if kda else "mla")
    return tuple(kinds)


def _moe_layers(text: _Keys, count: int) -> tuple[bool, ...]:
    if text.get("num_experts") is None:
        return (False,) * count
    first = text.integer("first_k_dense_replace", default=0, least=0)
    every = text.integer("moe_layer_freq", default=1)
    return tuple(i >= first and i % every == 0 for i in range(count))


def _kda(text: _Keys) -> KdaConfig:
    linear = text.section("linear_attn_config")
    bound = linear.get("gate_lower_bound")
    if bound is not None and linear.number("gate_lower_bound") >= 0:
        raise ModelError(f"{linear.name('gate_lower_bound')} is {_shown(bound)}", "a negative number (log decay)")
    for key in ("head_k_dim", "head_v_dim"):
        linear.only(key, (linear.get("head_dim"), None))
    for key in ("num_k_heads", "num_v_heads"):
        linear.only(key, (linear.get("num_heads"), None))
    return KdaConfig(
        heads=linear.integer("num_heads"),
        head_dim=linear.integer("head_dim"),
        conv_width=linear.integer("short_conv_kernel_size", least=2),
        full_rank_gate=linear.flag("use_full_rank_gate", False),
        gate_lower_bound=None if bound is None else float(bound),
    )


def _mla(text: _Keys) -> MlaConfig:
    text.only("rope_scaling", (None,))
    if not text.flag("mla_use_nope", False):
        raise ModelError(f"{text.name('mla_use_nope')} is {_shown(text.get('mla_use_nope'))}", "true (no rotation)")
    heads = text.integer("num_attention_heads")
    text.only("num_key_value_heads", (heads, None))
    return MlaConfig(
        heads=heads,
        q_rank=None if text.get("q_lora_rank") is None else text.integer("q_lora_rank"),
        kv_rank=text.integer("kv_lora_rank"),
        nope_dim=text.integer("qk_nope_head_dim"),
        pe_dim=text.integer("qk_rope_head_dim"),
        v_dim=text.integer("v_head_dim"),
        output_gate=text.flag("mla_use_output_gate", False),
        latent_norm_eps=text.number("mla_latent_norm_eps", 1e-6),
    )


def _moe(text: _Keys) -> MoeConfig:
    text.only("moe_router_activation_func", ("sigmoid",))
    text.only("topk_method", ("noaux_tc", None))
    experts = text.integer("num_experts")
    key = "num_experts_per_token" if text.get("num_experts_per_token") is not None else "num_experts_per_tok"
    top_k = text.integer(key)
    grouped = text.flag("use_grouped_topk", False)
    groups = text.integer("num_expert_group", default=1) if grouped else 1
    top_groups = text.integer("topk_group", default=1) if grouped else 1
    if experts % groups or top_groups > groups or top_k > top_groups * (experts // groups):
        raise ModelError(
            f"config.json asks for the best {top_k} of {experts} experts in {top_groups} of {groups} groups",
            "groups that divide the experts and hold enough of them",
        )
    width = text.integer("moe_intermediate_size")
    latent = text.get("routed_expert_hidden_size")
    packed = _packed_experts(text)
    inner = text.integer("hidden_size") if latent is None else text.integer("routed_expert_hidden_size")
    if packed and (inner % 32 or width % 32):
        raise ModelError(f"config.json expert sizes {inner} and {width} with MXFP4 weights", "multiples of 32")
    return MoeConfig(
        experts=experts,
        top_k=top_k,
        groups=groups,
        top_groups=top_groups,
        renormalize=text.flag("moe_renormalize", True),
        scale=text.number("routed_scaling_factor", 1.0),
        intermediate=width,
        shared=width * text.integer("num_shared_experts", default=0, least=0),
        latent=None if latent is None else inner,
        latent_norm=latent is not None and text.flag("latent_moe_use_norm", False),
        packed=packed,
    )


def _packed_experts(text: _Keys) -> bool:
    """Whether routed experts are MXFP4. Any other quantisation is refused."""
    if text.get("quantization_config") is None:
        return False
    quant = text.section("quantization_config")
    quant.only("quant_method", ("compressed-tensors",))
    if quant.get("format") != "mxfp4-pack-quantized":
        raise ModelError(f"unsupported {quant.name('format')} = {_shown(quant.get('format'))}", "mxfp4-pack-quantized")
    quant.only("kv_cache_scheme", (None,))
    groups = quant.section("config_groups")
    for name in groups.values:
        group = groups.section(name)
        group.only("format", ("mxfp4-pack-quantized", None))
        group.only("input_activations", (None,))
        weights = group.section("weights")
        for key, value in (("num_bits", 4), ("type", "float"), ("group_size", 32), ("strategy", "group")):
            if weights.get(key) != value:
                raise ModelError(f"unsupported {weights.name(key)} = {_shown(weights.get(key))}", _shown(value))
    return True


def _activation(text: _Keys) -> tuple[float, float] | None:
    """(beta, linear_beta) of SiTU, or None for SwiGLU."""
    kind = text.get("hidden_act")
    if kind == "silu":
        return None
    if kind == "situ":
        return text.number("activation_situ_beta"), text.number("activation_situ_linear_beta")
    raise ModelError(f"unsupported {text.name('hidden_act')} = {_shown(kind)}", '"situ" or "silu"')
