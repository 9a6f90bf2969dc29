"""DSpark drafts of both kinds against a plain reference: one row, one head, one key at a time, in fp64."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from k3cli.config import K3_SHAPE
from k3cli.errors import ModelError
from k3cli.model.config import ModelConfig
from k3cli.model.dspark.config import DraftConfig, Rope
from k3cli.model.dspark.network import DraftModel
from k3cli.model.dspark.rope import rotate, table
from k3cli.model.dspark.weights import expected_shapes, load_draft

D, V, LAYERS_OF_TARGET = 24, 61, 6
SHARED = {
    "hidden_size": D,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": V,
    "rms_norm_eps": 1e-5,
    "markov_rank": 5,
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
MLA: dict[str, Any] = SHARED | {
    "model_type": "k3_dspark",
    "q_lora_rank": 14,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 7,
    "qk_rope_head_dim": 8,
    "v_head_dim": 9,
    "target_layer_ids": [1, 3, 5],
    "target_num_hidden_layers": LAYERS_OF_TARGET,
    "mask_token_id": 60,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 50.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 8,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}
GQA: dict[str, Any] = SHARED | {
    "model_type": "qwen3",
    "architectures": ["DSparkDraftModel"],
    "num_key_value_heads": 2,
    "head_dim": 6,
    "block_size": 5,
    "dflash_config": {"mask_token_id": 59, "target_layer_ids": [0, 4]},
    "num_target_layers": LAYERS_OF_TARGET,
    "rope_theta": 100.0,
    "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32},
}
KINDS = {"mla": MLA, "gqa": GQA}


def target() -> ModelConfig:
    import dataclasses

    whole = ModelConfig.from_dir(K3_SHAPE)
    return dataclasses.replace(whole, hidden=D, vocab=V, layers=("kda",) * LAYERS_OF_TARGET)


def write(folder: Path, raw: dict[str, Any], seed: int = 0) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in expected_shapes(DraftConfig.from_dir(folder)).items():
        mean = 1.0 if "norm" in name else 0.0
        tensors[name] = torch.randn(shape, generator=random) * (0.3 if len(shape) < 2 else shape[-1] ** -0.5) + mean
    tensors["embed_tokens.weight"] = torch.zeros(V, D)  # a copy of the target's, not used
    save_file(tensors, folder / "model.safetensors")
    return folder


def tables(seed: int = 7) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(V, D, generator=random), torch.randn(V, D, generator=random) * 0.5


@pytest.fixture(params=["mla", "gqa"])
def draft(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[DraftModel, dict[str, Tensor], dict[str, Any]]:
    folder = write(tmp_path / "draft", KINDS[request.param])
    tensors = {k: v.double() for k, v in load_file(folder / "model.safetensors").items()}
    return load_draft(folder, target(), *tables()), tensors, KINDS[request.param]


# The reference: written from the description of the algorithm, sharing nothing with the network.


def norm(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    return x / math.sqrt(float((x * x).mean()) + eps) * weight


def angles(raw: dict[str, Any], dim: int) -> tuple[list[float], float, float]:
    """(frequencies, amplitude of cos and sin, factor on scores)."""
    values = raw.get("rope_parameters") or raw["rope_scaling"]
    theta = values.get("rope_theta", raw.get("rope_theta"))
    factor, original = values["factor"], values["original_max_position_embeddings"]

    def bound(beta: float) -> float:
        return dim * math.log(original / (2 * math.pi * beta)) / (2 * math.log(theta))

    low = max(0, math.floor(bound(values.get("beta_fast", 32))))
    high = min(dim - 1, math.ceil(bound(values.get("beta_slow", 1))))
    found = []
    for i in range(dim // 2):
        plain = theta ** (-2 * i / dim)
        share = min(1.0, max(0.0, (i - low) / max(high - low, 0.001)))
        found.append(plain * (1 - share) + plain / factor * share)
    m = 1 + 0.1 * math.log(factor)
    return (found, 1.0, m * m) if "rope_parameters" in raw else (found, m, 1.0)


def turned(x: Tensor, position: int, raw: dict[str, Any]) -> Tensor:
    dim = x.numel()
    frequencies, amplitude, _ = angles(raw, dim)
    out = torch.empty_like(x)
    for i, frequency in enumerate(frequencies):
        a, b = (2 * i, 2 * i + 1) if raw is MLA else (i, i + dim // 2)
        c, s = math.cos(position * frequency) * amplitude, math.sin(position * frequency) * amplitude
        out[a], out[b] = x[a] * c - x[b] * s, x[b] * c + x[a] * s
    return out


def keys_and_values(w: dict[str, Tensor], at: str, x: Tensor, position: int, raw: dict[str, Any]) -> list[Any]:
    """[(key, value)] of each query head."""
    heads = raw["num_attention_heads"]
    if raw is MLA:
        rank, nope, v = raw["kv_lora_rank"], raw["qk_nope_head_dim"], raw["v_head_dim"]
        low = w[f"{at}.kv_a_proj_with_mqa.weight"] @ x
        wide = w[f"{at}.kv_b_proj.weight"] @ norm(low[:rank], w[f"{at}.kv_a_layernorm.weight"])
        pe = turned(low[rank:], position, raw)
        per_head = wide.view(heads, nope + v)
        return [(torch.cat((row[:nope], pe)), row[nope:]) for row in per_head]
    size, groups = raw["head_dim"], raw["num_key_value_heads"]
    k, v = ((w[f"{at}.{name}_proj.weight"] @ x).view(groups, size) for name in "kv")
    pairs = [(turned(norm(row, w[f"{at}.k_norm.weight"]), position, raw), v[i]) for i, row in enumerate(k)]
    return [pairs[h * groups // heads] for h in range(heads)]


def queries(w: dict[str, Tensor], at: str, x: Tensor, position: int, raw: dict[str, Any]) -> list[Tensor]:
    heads = raw["num_attention_heads"]
    if raw is MLA:
        nope = raw["qk_nope_head_dim"]
        low = norm(w[f"{at}.q_a_proj.weight"] @ x, w[f"{at}.q_a_layernorm.weight"])
        rows = (w[f"{at}.q_b_proj.weight"] @ low).view(heads, -1)
        return [torch.cat((row[:nope], turned(row[nope:], position, raw))) for row in rows]
    rows = (w[f"{at}.q_proj.weight"] @ x).view(heads, -1)
    return [turned(norm(row, w[f"{at}.q_norm.weight"]), position, raw) for row in rows]


def reference(
    w: dict[str, Tensor], raw: dict[str, Any], taps: Tensor, first: int, anchor: int, block: int
) -> tuple[list[Tensor], list[float], list[int]]:
    """(logits, confidence, greedy ids) of a block behind context rows at positions first, first + 1, ..."""
    embed, head = (t.double() for t in tables())
    names = ("context_proj", "context_norm", "final_norm") if raw is MLA else ("fc", "hidden_norm", "norm")
    proj, context_norm, final_norm = (w[f"{name}.weight"] for name in names)
    features = [norm(proj @ row, context_norm) for row in taps.double()]
    mask = raw["mask_token_id"] if raw is MLA else raw["dflash_config"]["mask_token_id"]
    anchor_at = first + len(features)
    rows = [embed[token].clone() for token in [anchor] + [mask] * (block - 1)]
    for i in range(raw["num_hidden_layers"]):
        at = f"layers.{i}.self_attn"
        normed = [norm(x, w[f"layers.{i}.input_layernorm.weight"]) for x in rows]
        seen = [keys_and_values(w, at, c, first + j, raw) for j, c in enumerate(features)]
        seen += [keys_and_values(w, at, x, anchor_at + j, raw) for j, x in enumerate(normed)]
        size = queries(w, at, normed[0], 0, raw)[0].numel()
        scale = size**-0.5 * angles(raw, raw["qk_rope_head_dim"] if raw is MLA else raw["head_dim"])[2]
        mixed = []
        for j, x in enumerate(normed):
            out = []
            for h, q in enumerate(queries(w, at, x, anchor_at + j, raw)):
                scores = torch.stack([q @ pair[h][0] for pair in seen]) * scale
                out.append(sum(p * pair[h][1] for p, pair in zip(scores.softmax(0), seen, strict=True)))
            mixed.append(w[f"{at}.o_proj.weight"] @ torch.cat(out))
        rows = [x + m for x, m in zip(rows, mixed, strict=True)]
        for j, x in enumerate(rows):
            y = norm(x, w[f"layers.{i}.post_attention_layernorm.weight"])
            gate, up = w[f"layers.{i}.mlp.gate_proj.weight"] @ y, w[f"layers.{i}.mlp.up_proj.weight"] @ y
            rows[j] = x + w[f"layers.{i}.mlp.down_proj.weight"] @ (gate / (1 + torch.exp(-gate)) * up)
    logits, confidence, ids, token = [], [], [], anchor
    for x in rows:
        hidden = norm(x, final_norm)
        memory = w["markov_head.markov_w1.weight"][token]
        seen_by = torch.cat((hidden, memory))
        score = w["confidence_head.proj.weight"][0] @ seen_by + w["confidence_head.proj.bias"][0]
        confidence.append(float(1 / (1 + torch.exp(-score))))
        logits.append(head @ hidden + w["markov_head.markov_w2.weight"] @ memory)
        token = int(logits[-1].argmax())
        ids.append(token)
    return logits, confidence, ids


@pytest.mark.parametrize("context", [0, 1, 9])
def test_a_draft_is_the_reference(draft: tuple[DraftModel, dict[str, Tensor], dict[str, Any]], context: int):
    model, weights, raw = draft
    taps = torch.randn(context, len(model.config.taps) * D, generator=torch.Generator().manual_seed(3))
    first, anchor = 17, 5
    cache = model.new_cache()
    half = context // 2
    model.extend(cache, taps[:half], first)
    model.extend(cache, taps[half:], first + half)
    seen: list[Tensor] = []

    def pick(logits: Tensor, position: int) -> int:
        assert position == first + context + 1 + len(seen), "a draft is drawn with the noise of its own position"
        seen.append(logits)
        return int(logits.argmax())

    ids, confidence = model.draft(cache, anchor, first + context, model.config.block, pick)
    logits, expected_confidence, expected = reference(weights, raw, taps, first, anchor, model.config.block)
    assert ids == expected
    assert torch.stack(seen).double().allclose(torch.stack(logits), atol=2e-4)
    assert confidence == pytest.approx(expected_confidence, abs=1e-4)


def test_fewer_drafts_are_the_first_of_more(draft: tuple[DraftModel, dict[str, Tensor], dict[str, Any]]):
    model = draft[0]
    cache = model.new_cache()
    model.extend(cache, torch.randn(4, len(model.config.taps) * D), 0)
    many, _ = model.draft(cache, 3, 4, 99, lambda logits, _: int(logits.argmax()))
    few, _ = model.draft(cache, 3, 4, 2, lambda logits, _: int(logits.argmax()))
    assert len(many) == model.config.block
    assert few == many[:2]


def test_drafts_end_where_hardly_any_would_be_accepted(draft: tuple[DraftModel, dict[str, Tensor], dict[str, Any]]):
    model = draft[0]
    cache = model.new_cache()
    model.extend(cache, torch.randn(4, len(model.config.taps) * D), 0)

    def drawn(least: float) -> tuple[list[int], list[float]]:
        return model.draft(cache, 3, 4, 99, lambda logits, _: int(logits.argmax()), least)

    ids, confidence = drawn(0.0)
    chances = [math.prod(confidence[: i + 1]) for i in range(len(ids))]
    for count in range(1, len(ids)):
        least = (chances[count] + chances[count - 1]) / 2
        assert drawn(least) == (ids[:count], confidence[:count])
    assert drawn(1.0) == (ids[:1], confidence[:1]), "the first one is always made"


def test_forked_caches_go_their_own_ways(draft: tuple[DraftModel, dict[str, Tensor], dict[str, Any]]):
    model = draft[0]
    width = len(model.config.taps) * D
    common, left, right = (torch.randn(n, width) for n in (300, 3, 5))
    cache = model.new_cache()
    model.extend(cache, common, 0)
    twin = cache.fork()
    model.extend(cache, left, 300)
    model.extend(twin, right, 300)
    alone = model.new_cache()
    model.extend(alone, torch.cat((common, right)), 0)
    for layer in range(model.config.layers):
        assert torch.allclose(twin.layer(layer), alone.layer(layer), atol=1e-6)
        assert cache.layer(layer).shape[0] == 303


def test_published_rotations():
    """Where YaRN blends in the two public drafts: pairs 15 to 26 and 20 to 33."""
    wide = table(Rope(64, 50000.0, True, 32.0, 32768), torch.device("cpu")).frequencies
    plain = 50000.0 ** (-torch.arange(32).double() * 2 / 64)
    ratio = wide / plain
    assert (ratio[:16] == 1).all()
    assert ratio[16] < 1
    assert torch.allclose(ratio[26:], torch.full((6,), 1 / 32).double())
    assert ratio[25] > 1 / 32
    half = table(Rope(64, 10000.0, False, 16.0, 65536), torch.device("cpu")).frequencies
    ratio = half / 10000.0 ** (-torch.arange(32).double() * 2 / 64)
    assert (ratio[:21] == 1).all()
    assert ratio[21] < 1
    assert ratio[31] > 1 / 16


def test_published_scores_of_the_mla_draft(tmp_path: Path):
    raw = MLA | {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
    raw["rope_parameters"] = MLA["rope_parameters"] | {"factor": 32.0}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = DraftConfig.from_dir(tmp_path)
    assert config.scale == pytest.approx(0.13086080, abs=1e-8)
    assert config.rope.amplitude == 1.0
    assert config.block == 7


def test_a_rotation_depends_on_distance_only():
    rope = table(Rope(8, 100.0, True), torch.device("cpu"))
    a, b = torch.randn(8), torch.randn(8)
    products = [rotate(a, torch.tensor(p + 5), rope) @ rotate(b, torch.tensor(p), rope) for p in (0, 3, 1000, 900_000)]
    assert torch.allclose(torch.stack(products), products[0].expand(4), atol=1e-4)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": 23}, "hidden size 23"),
        ({"vocab_size": 60}, "vocabulary 60"),
        ({"target_num_hidden_layers": 5}, "target layers 5"),
        ({"target_layer_ids": [1, 6]}, "taps layers"),
        ({"target_layer_ids": [3, 1]}, "taps layers"),
        ({"mask_token_id": 61}, "mask token"),
        ({"model_type": "llama"}, "unknown draft"),
        ({"markov_head_type": "gated"}, "markov_head_type"),
        ({"markov_rank": None}, "config.json"),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope_type"),
    ],
)
def test_drafts_of_another_shape_are_refused(tmp_path: Path, change: dict[str, Any], words: str):
    write(tmp_path / "draft", MLA)
    (tmp_path / "draft" / "config.json").write_text(json.dumps(MLA | change))
    with pytest.raises(ModelError, match=words):
        load_draft(tmp_path / "draft", target(), *tables())


YARN = GQA["rope_scaling"]


@pytest.mark.parametrize(
    ("raw", "change", "words"),
    [
        (MLA, {"num_hidden_layers": 10**12}, "num_hidden_layers is 1000000000000; expected an integer from 1 to 1,024"),
        (MLA, {"num_hidden_layers": True}, "num_hidden_layers is true"),
        (GQA, {"block_size": 0}, "block_size is 0; expected an integer from 1 to"),
        (GQA, {"block_size": -3}, "block_size is -3"),
        (GQA, {"block_size": 10**12}, "block_size is 1000000000000"),
        (MLA, {"markov_rank": 2.5}, r"markov_rank is 2\.5"),
        (MLA, {"intermediate_size": math.inf}, "intermediate_size is Infinity"),
        (MLA, {"rms_norm_eps": math.nan}, "rms_norm_eps is NaN; expected a number from"),
        (MLA, {"rms_norm_eps": 10**400}, "rms_norm_eps is 1000"),
        (MLA, {"qk_rope_head_dim": 7}, "qk_rope_head_dim is 7; expected an even number"),
        (MLA, {"target_layer_ids": "135"}, 'target_layer_ids is "135"; expected a list of layer numbers'),
        (MLA, {"target_layer_ids": [1, 2.5]}, "target_layer_ids"),
        (MLA, {"enable_confidence_head": "no"}, 'enable_confidence_head is "no"; expected true or false'),
        (GQA, {"num_attention_heads": 0}, "num_attention_heads is 0"),
        (GQA, {"num_key_value_heads": 3}, "num_key_value_heads is 3; expected a number that divides the 4"),
        (GQA, {"head_dim": 0}, "head_dim is 0"),
        (GQA, {"head_dim": None, "num_attention_heads": 8}, "head_dim is missing; expected an even number"),
        (GQA, {"rope_theta": 0}, "rope_theta is 0"),
        (GQA, {"rope_scaling": 5}, "rope_scaling is 5; expected an object"),
        (GQA, {"rope_scaling": YARN | {"factor": 0}}, r"rope_scaling\.factor is 0; expected a number from 1"),
        (
            GQA,
            {"rope_scaling": YARN | {"original_max_position_embeddings": 0}},
            "original_max_position_embeddings is 0",
        ),
        (GQA, {"rope_scaling": YARN | {"beta_slow": 0}}, "beta_slow is 0"),
        (GQA, {"dflash_config": []}, r"dflash_config is \[\]; expected an object"),
        (GQA, {"dflash_config": {"mask_token_id": -1, "target_layer_ids": [0]}}, r"dflash_config\.mask_token_id is -1"),
    ],
)
def test_numbers_out_of_bounds_are_refused_by_name(tmp_path: Path, raw: dict[str, Any], change: Any, words: str):
    """Before anything is made by them: with so many layers a list of their tensors alone would fill memory."""
    (tmp_path / "config.json").write_text(json.dumps(raw | change))
    with pytest.raises(ModelError, match=words) as refused:
        DraftConfig.from_dir(tmp_path)
    assert str(tmp_path / "config.json") in str(refused.value)


@pytest.mark.parametrize("damage", ["missing", "unexpected", "shape", "cut", "absent"])
def test_damaged_drafts_are_refused(tmp_path: Path, damage: str):
    folder = write(tmp_path / "draft", GQA)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    if damage == "missing":
        del tensors["fc.weight"]
    elif damage == "unexpected":
        tensors["layers.9.extra.weight"] = torch.zeros(1)
    elif damage == "shape":
        tensors["norm.weight"] = torch.zeros(D + 1)
    save_file(tensors, file)
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-10])
    elif damage == "absent":
        file.unlink()
    with pytest.raises(ModelError):
        load_draft(folder, target(), *tables())
