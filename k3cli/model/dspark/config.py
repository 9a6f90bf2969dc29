"""Configuration of a DSpark draft, of either published kind.

`k3_dspark` drafts have MLA layers with rotated key parts (interleaved pairs), `qwen3` drafts grouped-query layers with
norms on queries and keys (rotation of halves). Both read the same taps and end in the same Markov head.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from k3cli.errors import ModelError
from k3cli.model.config import ModelConfig

DEFAULT_BLOCK = 7
"""Rows of a block where config.json has no block_size: what the published MLA draft was trained with."""


@dataclass(frozen=True)
class Rope:
    """Rotation of `dim` features by position, stretched by YaRN when factor > 1.

    interleaved: pairs are neighbours (2i, 2i+1), else (i, i + dim/2). factor: stretch behind `original` positions;
    beta_fast, beta_slow: rotations over `original` where blending begins and ends. amplitude multiplies cos and sin.
    """

    dim: int
    theta: float
    interleaved: bool
    factor: float = 1.0
    original: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    amplitude: float = 1.0


@dataclass(frozen=True)
class DraftConfig:
    """Everything a draft network needs.

    taps: 0-based target layers, ascending, whose residual stream behind them is read. block: rows of a draft block,
    the anchor's included; row i guesses the i-th token after the anchor. scale: of attention scores.
    q_rank, kv_rank, nope_dim, pe_dim, v_dim: MLA drafts; kv_heads: grouped-query drafts, whose head size is v_dim.
    """

    kind: Literal["mla", "gqa"]
    hidden: int
    intermediate: int
    layers: int
    heads: int
    vocab: int
    eps: float
    block: int
    mask_id: int
    taps: tuple[int, ...]
    markov_rank: int
    confidence: bool
    confidence_markov: bool
    rope: Rope
    scale: float
    v_dim: int
    kv_heads: int = 0
    q_rank: int = 0
    kv_rank: int = 0
    nope_dim: int = 0
    pe_dim: int = 0
    target_layers: int = 0

    @staticmethod
    def from_dir(path: Path | str) -> DraftConfig:
        """Reads `path`/config.json. Raises ModelError."""
        file = Path(path) / "config.json"
        try:
            raw = json.loads(file.read_bytes())
        except (OSError, ValueError, RecursionError) as problem:
            raise ModelError(f"{file}: {problem}", "the config.json of a DSpark draft") from None
        if not isinstance(raw, Mapping):
            raise ModelError(f"{file} holds no object", "the config.json of a DSpark draft")
        try:
            return _resolve(raw)
        except (KeyError, TypeError, ValueError) as problem:
            raise ModelError(f"{file} lacks or misstates {problem}", "the config.json of a DSpark draft") from None

    def check_target(self, target: ModelConfig) -> None:
        """ModelError when this draft was made for a target of another shape."""
        pairs = (
            ("hidden size", self.hidden, target.hidden),
            ("vocabulary", self.vocab, target.vocab),
            ("target layers", self.target_layers or len(target.layers), len(target.layers)),
        )
        for what, own, wanted in pairs:
            if own != wanted:
                raise ModelError(f"the draft has {what} {own}", f"{wanted}, the target's", "use the target's own draft")
        if not self.taps or self.taps[-1] >= len(target.layers) or list(self.taps) != sorted(set(self.taps)):
            raise ModelError(f"the draft taps layers {list(self.taps)}", f"ascending layers below {len(target.layers)}")
        if not 0 <= self.mask_id < target.vocab:
            raise ModelError(f"the draft's mask token is {self.mask_id}", f"an id below {target.vocab}")


def _resolve(raw: Mapping[str, Any]) -> DraftConfig:
    kind = raw.get("model_type")
    if kind not in ("k3_dspark", "qwen3") or (kind == "qwen3" and "dflash_config" not in raw):
        raise ModelError(f"unknown draft: config.json model_type = {kind!r}", "k3_dspark, or qwen3 with dflash_config")
    heads = int(raw["num_attention_heads"])
    shared: dict[str, Any] = {
        "hidden": int(raw["hidden_size"]),
        "intermediate": int(raw["intermediate_size"]),
        "layers": int(raw["num_hidden_layers"]),
        "heads": heads,
        "vocab": int(raw["vocab_size"]),
        "eps": float(raw["rms_norm_eps"]),
        "block": int(raw.get("block_size", DEFAULT_BLOCK)),
        "markov_rank": int(raw["markov_rank"]),
        "confidence": bool(raw.get("enable_confidence_head", True)),
        "confidence_markov": bool(raw.get("confidence_head_with_markov", True)),
    }
    head_type = raw.get("markov_head_type", "vanilla")
    if head_type != "vanilla":
        raise ModelError(f"unsupported config.json markov_head_type = {head_type!r}", '"vanilla"')
    if kind == "k3_dspark":
        nope, pe = int(raw["qk_nope_head_dim"]), int(raw["qk_rope_head_dim"])
        rope, stretch = _rope(raw, pe, interleaved=True)
        return DraftConfig(
            kind="mla",
            mask_id=int(raw["mask_token_id"]),
            taps=tuple(int(i) for i in raw["target_layer_ids"]),
            target_layers=int(raw.get("target_num_hidden_layers", 0)),
            rope=rope,
            scale=(nope + pe) ** -0.5 * stretch**2,
            v_dim=int(raw["v_head_dim"]),
            q_rank=int(raw["q_lora_rank"]),
            kv_rank=int(raw["kv_lora_rank"]),
            nope_dim=nope,
            pe_dim=pe,
            **shared,
        )
    flash = raw["dflash_config"]
    size = int(raw.get("head_dim") or shared["hidden"] // heads)
    rope, _ = _rope(raw, size, interleaved=False)
    return DraftConfig(
        kind="gqa",
        mask_id=int(flash["mask_token_id"]),
        taps=tuple(int(i) for i in flash["target_layer_ids"]),
        target_layers=int(raw.get("num_target_layers", 0)),
        rope=rope,
        scale=size**-0.5,
        v_dim=size,
        kv_heads=int(raw["num_key_value_heads"]),
        **shared,
    )


def _rope(raw: Mapping[str, Any], dim: int, *, interleaved: bool) -> tuple[Rope, float]:
    """(rotation, score stretch m of the MLA kind). Grouped-query drafts carry their stretch in cos and sin."""
    values: Mapping[str, Any] = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = float(values.get("rope_theta", raw.get("rope_theta", 10000.0)))
    kind = values.get("rope_type", values.get("type", "default"))
    if kind in ("default", None):
        return Rope(dim, theta, interleaved), 1.0
    if kind != "yarn":
        raise ModelError(f"unsupported config.json rope_type = {kind!r}", '"yarn" or "default"')
    factor = float(values["factor"])
    logged = 0.1 * math.log(factor)

    def stretched(weight: Any) -> float:
        return 1 + float(weight) * logged

    if interleaved:  # the scale carries mscale_all_dim; cos and sin the ratio of the two
        every = float(values.get("mscale_all_dim", 0.0))
        amplitude = stretched(values.get("mscale", 1.0)) / stretched(every) if every else stretched(1.0)
        stretch = stretched(every) if every else 1.0
    else:
        amplitude, stretch = float(values.get("attention_factor") or stretched(1.0)), 1.0
    return (
        Rope(
            dim,
            theta,
            interleaved,
            factor,
            int(values["original_max_position_embeddings"]),
            float(values.get("beta_fast", 32.0)),
            float(values.get("beta_slow", 1.0)),
            amplitude,
        ),
        stretch,
    )
