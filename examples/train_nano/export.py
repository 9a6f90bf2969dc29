"""Writes the trained model as a K3 checkpoint: names, dtypes and sharding of the public one, MXFP4 experts, configs."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from model import NanoConfig, NanoModel
from mxfp4 import decode, encode, fake_quantise, pack
from safetensors.torch import load_file, save_file
from torch import Tensor
from vocab import N_SPECIALS, SPECIALS, Vocab

PREFIX = "language_model."
FLOAT32 = ("A_log", "dt_bias", "o_norm.weight", "conv1d.weight", "e_score_correction_bias")
SHARDS = 3
SHARED = 2  # shared experts: one MLP of so many times the experts' width
EXPERTS_FILE = "experts-{}.safetensors"
MODULE = re.compile(r"experts\.(w[123])$")


def padded_heads(heads: int) -> int:
    """Length of A_log in the file: like K3's 96 heads in 128 entries, the next multiple of 32."""
    return -(-heads // 32) * 32


def widened(name: str, value: Tensor, width: int) -> Tensor:
    """A shared expert's matrix with zero channels up to `width`, which the format ties to the experts' width. A zero
    channel adds nothing: situ(0, 0) = 0."""
    rows, columns = value.shape
    if "down_proj" in name:
        return torch.cat((value, value.new_zeros(rows, width - columns)), 1)
    return torch.cat((value, value.new_zeros(width - rows, columns)), 0)


def checkpoint_tensors(model: NanoModel) -> dict[str, Tensor]:
    """Every tensor of the checkpoint by its full name."""
    out: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        value = value.detach().cpu()
        found = MODULE.search(name)
        if found:
            codes, scales = encode(fake_quantise(value))
            base = PREFIX + name.removesuffix(found[1])
            for e in range(value.shape[0]):
                out[f"{base}{e}.{found[1]}.weight_packed"] = pack(codes[e]).contiguous()
                out[f"{base}{e}.{found[1]}.weight_scale"] = scales[e].contiguous()
            continue
        if "shared_experts" in name:
            value = widened(name, value, SHARED * model.config.expert_dim)
        if name.endswith("A_log"):
            value = torch.cat((value, value.new_zeros(padded_heads(len(value)) - len(value))))
        out[PREFIX + name] = value.to(torch.float32 if name.endswith(FLOAT32) else torch.bfloat16).contiguous()
    return out


def layer_of(name: str) -> int | None:
    found = re.search(r"model\.layers\.(\d+)\.", name)
    return int(found[1]) if found else None


def text_config(c: NanoConfig, bos: int, eos: int, pad: int) -> dict[str, Any]:
    quantisation = {
        "config_groups": {
            "group_0": {
                "format": "mxfp4-pack-quantized",
                "input_activations": None,
                "output_activations": None,
                "targets": ["Linear"],
                "weights": {
                    "actorder": None,
                    "block_structure": None,
                    "dynamic": False,
                    "group_size": 32,
                    "num_bits": 4,
                    "observer": "minmax",
                    "observer_kwargs": {},
                    "scale_dtype": "torch.uint8",
                    "strategy": "group",
                    "symmetric": True,
                    "type": "float",
                    "zp_dtype": None,
                },
            }
        },
        "format": "mxfp4-pack-quantized",
        "global_compression_ratio": None,
        "ignore": [
            "re:.*self_attn.*",
            "re:.*shared_experts.*",
            "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
            "re:.*lm_head.*",
            "re:.*vision_tower.*",
            "re:.*mm_projector.*",
        ],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }
    return {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "dtype": "bfloat16",
        "vocab_size": c.vocab,
        "hidden_size": c.hidden,
        "num_hidden_layers": c.layers,
        "intermediate_size": c.dense,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.heads,
        "rms_norm_eps": 1e-5,
        "hidden_act": "situ",
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "attn_res_block_size": c.block,
        "q_lora_rank": c.q_lora,
        "kv_lora_rank": c.kv_lora,
        "qk_nope_head_dim": c.nope,
        "qk_rope_head_dim": c.rope,
        "v_head_dim": c.v_dim,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "linear_attn_config": {
            "full_attn_layers": [i + 1 for i in c.mla_layers],
            "kda_layers": [i + 1 for i in range(c.layers) if i not in c.mla_layers],
            "gate_lower_bound": -5.0,
            "head_dim": c.kda_dim,
            "num_heads": c.kda_heads,
            "short_conv_kernel_size": 4,
            "use_full_rank_gate": True,
        },
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "num_experts": c.experts,
        "num_experts_per_token": c.top_k,
        "num_shared_experts": SHARED,
        "moe_intermediate_size": c.expert_dim,
        "routed_expert_hidden_size": c.latent,
        "latent_moe_use_norm": True,
        "moe_router_activation_func": "sigmoid",
        "moe_renormalize": True,
        "routed_scaling_factor": 1.0,
        "use_grouped_topk": True,
        "num_expert_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "num_nextn_predict_layers": 0,
        "max_position_embeddings": c.context,
        "initializer_range": 0.02,
        "use_cache": True,
        "bos_token_id": bos,
        "eos_token_id": eos,
        "pad_token_id": pad,
        "tie_word_embeddings": False,
        "quantization_config": quantisation,
    }


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def export(model: NanoModel, vocab: Vocab, tokenizer: Path, out: Path, *, experts_too: bool = False) -> None:
    """Fills the folder `out`. With `experts_too` the unquantised experts go beside it, for a continued run."""
    tensors = checkpoint_tensors(model)
    c = model.config
    weight_map, sizes = {}, 0
    for shard in range(SHARDS):
        # Whole layers to a shard; what belongs to no layer goes to the last.
        chosen = {
            n: t
            for n, t in tensors.items()
            if (SHARDS - 1 if layer_of(n) is None else layer_of(n) * SHARDS // c.layers) == shard
        }  # type: ignore[operator]
        file = f"model-{shard + 1:05d}-of-{SHARDS:06d}.safetensors"
        save_file(chosen, out / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(chosen, file)
        sizes += sum(t.numel() * t.element_size() for t in chosen.values())
    write_json(
        out / "model.safetensors.index.json",
        {"metadata": {"total_size": sizes}, "weight_map": dict(sorted(weight_map.items()))},
    )
    bos, eos, pad = (vocab.special(name) for name in ("[BOS]", "<|end_of_msg|>", "[PAD]"))
    ids = {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": pad}
    top = {"architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3", "dtype": "bfloat16", **ids}
    media = {"media_placeholder_token_id": vocab.special("<|media_pad|>"), "tie_word_embeddings": False}
    write_json(out / "config.json", top | media | {"text_config": text_config(c, bos, eos, pad)})
    write_json(out / "generation_config.json", {**ids, "do_sample": True, "temperature": 1.0, "top_p": 0.95})
    names = {vocab.n_ranks + offset: name for name, offset in SPECIALS.items()}
    added = {
        str(i): {
            "content": names.get(i, f"<|reserved_token_{i}|>"),
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": True,
        }
        for i in range(vocab.n_ranks, vocab.n_ranks + N_SPECIALS)
    }
    tokens = {"bos_token": "[BOS]", "eos_token": "[EOS]", "pad_token": "[PAD]", "unk_token": "[UNK]"}
    write_json(
        out / "tokenizer_config.json",
        {
            "added_tokens_decoder": added,
            **tokens,
            "model_max_length": c.context,
            "tokenizer_class": "TikTokenTokenizer",
        },
    )
    if tokenizer.resolve() != (out / "tiktoken.model").resolve():
        shutil.copyfile(tokenizer, out / "tiktoken.model")
    if experts_too:
        experts = {n: v.detach().cpu().bfloat16() for n, v in model.state_dict().items() if MODULE.search(n)}
        names_of = sorted(experts)
        for part in range(3):
            save_file({n: experts[n] for n in names_of[part::3]}, out / EXPERTS_FILE.format(part))


def restore(model: NanoModel, folder: Path) -> None:
    """Loads an exported folder back; experts unquantised where their files lie beside it."""
    stored: dict[str, Tensor] = {}
    for file in sorted(folder.glob("model-*.safetensors")):
        stored |= load_file(file)
    loose: dict[str, Tensor] = {}
    for file in sorted(folder.glob("experts-*.safetensors")):
        loose |= load_file(file)
    state = model.state_dict()
    for name, target in state.items():
        found = MODULE.search(name)
        if not found:
            value = stored[PREFIX + name]
            if name.endswith("A_log") or "shared_experts" in name:
                value = value[tuple(slice(n) for n in target.shape)]  # without the padding of the file
            if value.shape != target.shape:
                raise SystemExit(f"{folder}: {name} is {list(value.shape)}, this model's is {list(target.shape)}")
            target.copy_(value)
        elif name in loose:
            target.copy_(loose[name])
        else:
            base = PREFIX + name.removesuffix(found[1])
            for e in range(target.shape[0]):
                packed = stored[f"{base}{e}.{found[1]}.weight_packed"]
                codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
                target[e] = decode(codes, stored[f"{base}{e}.{found[1]}.weight_scale"])
