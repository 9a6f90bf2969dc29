"""config.json: what is accepted, what is refused, and that refusals name the key."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from k3cli.errors import ModelError
from k3cli.model.checkpoint import expected_tensors
from k3cli.model.config import ModelConfig

SIZES = {"BF16": 2, "F32": 4, "U8": 1}


def refused(raw: dict, *words: str) -> None:
    with pytest.raises(ModelError) as error:
        ModelConfig.from_dict(raw)
    for word in words:
        assert word in str(error.value), (word, str(error.value))


def stored_bytes(config: ModelConfig, kept: str, a_log: int) -> tuple[int, int]:
    """(tensors, bytes) of a checkpoint whose fp32-kept tensors have type `kept` except A_log and dt_bias."""
    count = size = 0
    for name, want in expected_tensors(config).items():
        count += 1
        if name.endswith("A_log"):
            size += 4 * a_log
        else:
            always = name.endswith("dt_bias")
            dtype = "F32" if always else kept if len(want.dtypes) > 1 else want.dtypes[0]
            size += math.prod(want.shapes[0]) * SIZES[dtype]
    return count, size


def test_k3_inventory_is_the_published_one(shared_dir: Path):
    raw = json.loads((shared_dir / "facts" / "k3-config.json").read_text())
    config = ModelConfig.from_dict(raw)
    assert len(config.kda_layers) == 69
    assert config.mla_layers[-2:] == (91, 92)
    assert config.moe is not None
    assert (config.moe.experts, config.moe.top_k, config.moe.latent) == (896, 16, 3584)
    assert not config.moe_layers[0]
    assert all(config.moe_layers[1:])
    assert config.mla.latent_norm_eps == 1e-6
    assert config.norm_eps == 1e-5
    vision = 894_717_952
    assert stored_bytes(config, "F32", 128) == (497_052, 1_560_860_324_864 - vision)


def test_kimi_linear_inventory_is_the_published_one(shared_dir: Path):
    raw = json.loads((shared_dir / "facts" / "kimi-linear-48b-config.json").read_text())
    config = ModelConfig.from_dict(raw)
    assert config.kda.gate_lower_bound is None
    assert not config.kda.full_rank_gate
    assert config.situ is None
    assert config.moe is not None
    assert config.moe.scale == 2.446
    assert stored_bytes(config, "BF16", 32) == (20_493, 98_245_528_576)


def test_switches_follow_their_keys(k3_config: dict):
    text = k3_config["text_config"]
    for key in ("attn_res_block_size", "routed_expert_hidden_size", "q_lora_rank", "mla_use_output_gate"):
        del text[key]
    del text["linear_attn_config"]["gate_lower_bound"], text["linear_attn_config"]["use_full_rank_gate"]
    text["hidden_size"] = 64
    config = ModelConfig.from_dict(k3_config)
    assert config.attn_res_block is None
    assert config.moe is not None
    assert config.moe.latent is None
    assert not config.moe.latent_norm
    assert config.mla.q_rank is None
    assert not config.mla.output_gate
    assert config.kda.gate_lower_bound is None
    names = expected_tensors(config)
    assert "model.layers.0.self_attn.g_a_proj.weight" in names
    assert "model.layers.2.self_attn.q_proj.weight" in names
    assert not [name for name in names if "_res_" in name or "routed_expert" in name]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_act", "gelu"),
        ("mla_use_nope", False),
        ("mla_use_nope", None),
        ("tie_word_embeddings", True),
        ("moe_router_activation_func", "softmax"),
        ("topk_method", "greedy"),
        ("rope_scaling", {"type": "yarn"}),
        ("num_key_value_heads", 1),
        ("num_nextn_predict_layers", 1),
        ("index_topk", 2048),
        ("sliding_window", 4096),
        ("hidden_size", "wide"),
        ("hidden_size", 0),
        ("rms_norm_eps", None),
        ("rms_norm_eps", math.nan),
        ("rms_norm_eps", 10**400),
        ("rms_norm_eps", -1e-5),
        ("rms_norm_eps", 0),
        ("routed_scaling_factor", -2.5),
        ("activation_situ_beta", 0),
        ("dtype", {}),
        ("architectures", 5),
        ("architectures", "KimiLinearForCausalLM"),
        ("architectures", {}),
        ("hidden_size", 10**12),
        ("num_hidden_layers", 10**12),
        ("num_attention_heads", 10**12),
        ("kv_lora_rank", 10**12),
        ("num_experts", 10**12),
        ("moe_intermediate_size", 10**12),
        ("max_position_embeddings", 10**12),
        ("dtype", "float16"),
        ("model_type", "llama"),
        ("linear_attn_config", None),
        ("activation_situ_beta", None),
        ("moe_renormalize", "yes"),
    ],
)
def test_unsupported_values_name_their_key(k3_config: dict, key: str, value: object):
    k3_config["text_config"][key] = value
    refused(k3_config, f"text_config.{key}")


@pytest.mark.parametrize(
    ("key", "value"),
    [("head_dim", 10**12), ("num_heads", 10**12), ("short_conv_kernel_size", 10**12), ("gate_lower_bound", -1e300)],
)
def test_numbers_beyond_any_model_are_refused(k3_config: dict, key: str, value: float):
    k3_config["text_config"]["linear_attn_config"][key] = value
    refused(k3_config, f"linear_attn_config.{key} is -1" if value < 0 else f"linear_attn_config.{key} is 1000")


def test_nesting_that_can_be_read_and_not_written_is_shown_all_the_same(k3_config: dict):
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    k3_config["text_config"]["hidden_size"] = deep
    refused(k3_config, "text_config.hidden_size is nested too deep")


def test_layer_lists_cover_each_layer_once(k3_config: dict):
    linear = k3_config["text_config"]["linear_attn_config"]
    linear["kda_layers"] = [1, 2, 4]
    refused(k3_config, "layer 5", "neither")
    linear["kda_layers"] = [1, 2, 3, 4, 5]
    refused(k3_config, "layer 3", "both")
    linear["kda_layers"] = [1, 2, 4, 5, 7]
    refused(k3_config, "kda_layers", "layer 7")
    linear["kda_layers"] = [0, 1, 2, 4, 5]
    refused(k3_config, "layer 0")


def test_unknown_architectures(k3_config: dict, linear_config: dict):
    refused({**k3_config, "model_type": "kimi_k4"}, "kimi_k4")
    refused({**k3_config, "architectures": ["OtherForCausalLM"]}, "OtherForCausalLM")
    refused({**linear_config, "model_type": "kimi_k3"}, "kimi_k3")
    refused({}, "model_type")
    refused([1], "object")


def test_quantisation_formats(k3_config: dict):
    quant = k3_config["text_config"]["quantization_config"]
    quant["format"] = "nvfp4-pack-quantized"
    refused(k3_config, "nvfp4-pack-quantized", "mxfp4-pack-quantized")
    quant["format"] = "mxfp4-pack-quantized"
    quant["config_groups"]["group_0"]["weights"]["group_size"] = 16
    refused(k3_config, "group_size", "16", "32")
    quant["config_groups"]["group_0"]["weights"]["group_size"] = 32
    quant["kv_cache_scheme"] = {"num_bits": 8}
    refused(k3_config, "kv_cache_scheme")


def test_groups_must_hold_enough_experts(linear_config: dict):
    linear_config["num_experts_per_token"] = 5
    refused(linear_config, "5 of 8 experts in 2 of 4 groups")


def test_files_that_are_no_config(tmp_path: Path):
    with pytest.raises(ModelError, match=r"no config\.json"):
        ModelConfig.from_dir(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="not JSON"):
        ModelConfig.from_dir(tmp_path)
