"""Random checkpoints of small configurations, one K3-like and one Kimi-Linear-like, loaded once."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from k3cli.model.config import ModelConfig
from k3cli.model.random_weights import write_random_checkpoint
from k3cli.model.ranks import load_ranks
from k3cli.model.weights import LoadedModel, load_model

K3 = {
    "architectures": ["KimiK3ForConditionalGeneration"],
    "model_type": "kimi_k3",
    "text_config": {
        "model_type": "kimi_linear",
        "hidden_size": 40,
        "num_hidden_layers": 6,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "intermediate_size": 56,
        "attn_res_block_size": 2,
        "q_lora_rank": 24,
        "kv_lora_rank": 20,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 6,
        "v_head_dim": 10,
        "num_experts": 8,
        "num_experts_per_token": 3,
        "num_shared_experts": 2,
        "moe_intermediate_size": 32,
        "routed_expert_hidden_size": 64,
        "routed_scaling_factor": 1.0,
        "use_grouped_topk": True,
        "num_expert_group": 1,
        "topk_group": 1,
        "vocab_size": 131,
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "hidden_act": "situ",
        "rms_norm_eps": 1e-5,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "latent_moe_use_norm": True,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 3,
        "dtype": "bfloat16",
        "linear_attn_config": {
            "full_attn_layers": [3, 6],
            "kda_layers": [1, 2, 4, 5],
            "gate_lower_bound": -5.0,
            "head_dim": 16,
            "num_heads": 5,
            "short_conv_kernel_size": 4,
            "use_full_rank_gate": True,
        },
        "quantization_config": {
            "format": "mxfp4-pack-quantized",
            "quant_method": "compressed-tensors",
            "kv_cache_scheme": None,
            "config_groups": {
                "group_0": {
                    "format": "mxfp4-pack-quantized",
                    "input_activations": None,
                    "weights": {"group_size": 32, "num_bits": 4, "strategy": "group", "type": "float"},
                }
            },
        },
    },
}

LINEAR = {
    "architectures": ["KimiLinearForCausalLM"],
    "model_type": "kimi_linear",
    "vocab_size": 97,
    "hidden_size": 36,
    "num_hidden_layers": 4,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "intermediate_size": 52,
    "hidden_act": "silu",
    "rope_scaling": None,
    "rms_norm_eps": 1e-5,
    "linear_attn_config": {
        "full_attn_layers": [3],
        "kda_layers": [1, 2, 4],
        "head_dim": 12,
        "num_heads": 3,
        "short_conv_kernel_size": 4,
    },
    "model_max_length": 4096,
    "num_experts": 8,
    "num_experts_per_token": 2,
    "num_shared_experts": 1,
    "moe_intermediate_size": 22,
    "kv_lora_rank": 18,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 14,
    "q_lora_rank": None,
    "mla_use_nope": True,
    "moe_router_activation_func": "sigmoid",
    "moe_renormalize": True,
    "routed_scaling_factor": 2.446,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "use_grouped_topk": True,
    "num_expert_group": 4,
    "topk_group": 2,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
    "dtype": "bfloat16",
}


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Matrices this small only lose by threads, most of all when tests run side by side."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def k3_config() -> dict:
    return copy.deepcopy(K3)


@pytest.fixture(scope="session")
def k3_config_wide() -> dict:
    """Sizes that every kernel takes in its form for Hopper, too: K3's own head and latent sizes among them."""
    wide = copy.deepcopy(K3)
    text = wide["text_config"]
    text |= {
        "hidden_size": 512,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "intermediate_size": 512,
        "q_lora_rank": 128,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "num_experts": 16,
        "num_experts_per_token": 4,
        "moe_intermediate_size": 512,
        "routed_expert_hidden_size": 512,
        "vocab_size": 1024,
    }
    text["linear_attn_config"] |= {"head_dim": 128, "num_heads": 2}
    return wide


@pytest.fixture
def linear_config() -> dict:
    return copy.deepcopy(LINEAR)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders that tests may read; copy before damaging one."""
    base = tmp_path_factory.mktemp("checkpoints")
    found = {}
    for i, (name, raw) in enumerate({"k3": K3, "linear": LINEAR}.items()):
        found[name] = write_random_checkpoint(base / name, json.loads(json.dumps(raw)), seed=i)
    return found


@pytest.fixture(scope="session")
def loaded(checkpoints: dict[str, Path]) -> dict[str, LoadedModel]:
    return {name: load_model(path) for name, path in checkpoints.items()}


@pytest.fixture(scope="session")
def split_configs() -> dict[str, dict]:
    """Configurations with four heads of either kind: K3's experts can be cut in four, the others only have owners."""
    found = {"k3": copy.deepcopy(K3), "linear": copy.deepcopy(LINEAR)}
    for name, raw in found.items():
        text = raw.get("text_config", raw)
        text |= {"num_attention_heads": 4, "num_key_value_heads": 4, "num_shared_experts": 4}
        text |= {"moe_intermediate_size": 128 if name == "k3" else 24}
        text["linear_attn_config"]["num_heads"] = 4
    return found


@pytest.fixture(scope="session")
def split_folders(tmp_path_factory: pytest.TempPathFactory, split_configs: dict[str, dict]) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("ranks")
    return {name: write_random_checkpoint(base / name, raw, seed=7) for name, raw in split_configs.items()}


@dataclass
class Both:
    """The same checkpoint in one process and over `size` ranks."""

    folder: Path
    one: LoadedModel
    many: LoadedModel
    peers: Any
    size: int
    seen: Any = None


@pytest.fixture(scope="session")
def load_both():
    """Loads (folder, size) twice. One process can be in one world at a time: close `peers` before the next.

    fresh: the ranks hash the files; else they know the digests.
    """

    def load(folder: Path, size: int, *, fresh: bool = False, **more: Any) -> Both:
        one = None if fresh else load_model(folder)
        config = ModelConfig.from_dir(folder)
        many, peers = load_ranks(folder, config, ["cpu"] * size, device="cpu", dtype="float32", window=8, **more)
        return Both(folder, one or load_model(folder), many, peers, size)

    return load
