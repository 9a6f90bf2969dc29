"""What a model's layers are made of, KDA, MLA and mixture of experts, each with how it is read from config.json.

Sizes are in elements. Every switch follows from the presence of its key; a value this network does not implement is
refused, never ignored.
"""

from __future__ import annotations

from dataclasses import dataclass

from k3cli.errors import ModelError
from k3cli.model.config_keys import LEAST_EPS, MOST_EXPERTS, MOST_HEADS, MOST_ROWS, MOST_WIDTH, Keys
from k3cli.model_files import shown


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


def read_kda(text: Keys) -> KdaConfig:
    """The KDA layers by `linear_attn_config`. Raises ModelError naming the key."""
    linear = text.section("linear_attn_config")
    bound = linear.get("gate_lower_bound")
    if bound is not None and linear.number("gate_lower_bound", least=-1e4, most=0) == 0:
        raise linear.refused("gate_lower_bound", "a negative number (log decay)")
    for key in ("head_k_dim", "head_v_dim"):
        linear.only(key, (linear.get("head_dim"), None))
    for key in ("num_k_heads", "num_v_heads"):
        linear.only(key, (linear.get("num_heads"), None))
    return KdaConfig(
        heads=linear.integer("num_heads", most=MOST_HEADS),
        head_dim=linear.integer("head_dim", most=MOST_WIDTH),
        conv_width=linear.integer("short_conv_kernel_size", least=2, most=MOST_ROWS),
        full_rank_gate=linear.flag("use_full_rank_gate", False),
        gate_lower_bound=None if bound is None else float(bound),
    )


def read_mla(text: Keys) -> MlaConfig:
    """The MLA layers. Raises ModelError naming the key."""
    text.only("rope_scaling", (None,))
    if not text.flag("mla_use_nope", False):
        raise text.refused("mla_use_nope", "true (no rotation)")
    heads = text.integer("num_attention_heads", most=MOST_HEADS)
    text.only("num_key_value_heads", (heads, None))
    return MlaConfig(
        heads=heads,
        q_rank=None if text.get("q_lora_rank") is None else text.integer("q_lora_rank", most=MOST_WIDTH),
        kv_rank=text.integer("kv_lora_rank", most=MOST_WIDTH),
        nope_dim=text.integer("qk_nope_head_dim", most=MOST_WIDTH),
        pe_dim=text.integer("qk_rope_head_dim", most=MOST_WIDTH),
        v_dim=text.integer("v_head_dim", most=MOST_WIDTH),
        output_gate=text.flag("mla_use_output_gate", False),
        latent_norm_eps=text.number("mla_latent_norm_eps", 1e-6, least=LEAST_EPS, most=1),
    )


def read_moe(text: Keys) -> MoeConfig:
    """The mixture of experts of a model that has one. Raises ModelError naming the key."""
    text.only("moe_router_activation_func", ("sigmoid",))
    text.only("topk_method", ("noaux_tc", None))
    experts = text.integer("num_experts", most=MOST_EXPERTS)
    key = "num_experts_per_token" if text.get("num_experts_per_token") is not None else "num_experts_per_tok"
    top_k = text.integer(key)
    grouped = text.flag("use_grouped_topk", False)
    groups = text.integer("num_expert_group", default=1) if grouped else 1
    top_groups = text.integer("topk_group", default=1) if grouped else 1
    if experts % groups or top_groups > groups or top_k > top_groups * (experts // groups):
        raise ModelError(
            f"{text.file} asks for the best {top_k} of {experts} experts in {top_groups} of {groups} groups",
            "groups that divide the experts and hold enough of them",
        )
    width = text.integer("moe_intermediate_size", most=MOST_WIDTH)
    latent = text.get("routed_expert_hidden_size")
    packed = _packed_experts(text)
    inner = text.integer("hidden_size" if latent is None else "routed_expert_hidden_size", most=MOST_WIDTH)
    if packed and (inner % 32 or width % 32):
        raise ModelError(f"{text.file} expert sizes {inner} and {width} with MXFP4 weights", "multiples of 32")
    return MoeConfig(
        experts=experts,
        top_k=top_k,
        groups=groups,
        top_groups=top_groups,
        renormalize=text.flag("moe_renormalize", True),
        scale=text.number("routed_scaling_factor", 1.0, least=1e-6, most=1e6),
        intermediate=width,
        shared=width * text.integer("num_shared_experts", default=0, least=0, most=MOST_ROWS),
        latent=None if latent is None else inner,
        latent_norm=latent is not None and text.flag("latent_moe_use_norm", False),
        packed=packed,
    )


def _packed_experts(text: Keys) -> bool:
    """Whether routed experts are MXFP4. Any other quantisation is refused."""
    if text.get("quantization_config") is None:
        return False
    quant = text.section("quantization_config")
    quant.only("quant_method", ("compressed-tensors",))
    if quant.get("format") != "mxfp4-pack-quantized":
        raise ModelError(f"unsupported {quant.name('format')} = {shown(quant.get('format'))}", "mxfp4-pack-quantized")
    quant.only("kv_cache_scheme", (None,))
    groups = quant.section("config_groups")
    for name in groups.values:
        group = groups.section(name)
        group.only("format", ("mxfp4-pack-quantized", None))
        group.only("input_activations", (None,))
        weights = group.section("weights")
        for key, value in (("num_bits", 4), ("type", "float"), ("group_size", 32), ("strategy", "group")):
            if weights.get(key) != value:
                raise ModelError(f"unsupported {weights.name(key)} = {shown(weights.get(key))}", shown(value))
    return True
