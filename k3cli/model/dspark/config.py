"""Configuration of a DSpark draft, of either published kind.

`k3_dspark` drafts have MLA layers with rotated key parts (interleaved pairs), `qwen3` drafts grouped-query layers with
norms on queries and keys (rotation of halves). Both read the same taps and end in the same Markov head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from k3cli.errors import ModelError
from k3cli.model.config import ModelConfig
from k3cli.model.config_keys import LEAST_EPS, MOST_HEADS, MOST_IDS, MOST_LAYERS, MOST_ROWS, MOST_WIDTH, Keys
from k3cli.model_files import read_object, shown

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
        raw = read_object(file, "the config.json of a DSpark draft")
        return _resolve(Keys(raw, file=str(file), do="use a DSpark draft's own file"))

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


def _resolve(keys: Keys) -> DraftConfig:
    kind = keys.get("model_type")
    if kind not in ("k3_dspark", "qwen3") or (kind == "qwen3" and keys.get("dflash_config") is None):
        raise ModelError(
            f"unknown draft: {keys.file} model_type = {shown(kind)}", "k3_dspark, or qwen3 with dflash_config"
        )
    head_type = "vanilla" if keys.get("markov_head_type") is None else keys.get("markov_head_type")
    if head_type != "vanilla":
        raise ModelError(f"unsupported {keys.file} markov_head_type = {shown(head_type)}", '"vanilla"')
    heads = keys.integer("num_attention_heads", most=MOST_HEADS)
    shared: dict[str, Any] = {
        "hidden": keys.integer("hidden_size", most=MOST_WIDTH),
        "intermediate": keys.integer("intermediate_size", most=MOST_WIDTH),
        "layers": keys.integer("num_hidden_layers", most=MOST_LAYERS),
        "heads": heads,
        "vocab": keys.integer("vocab_size", most=MOST_IDS),
        "eps": keys.number("rms_norm_eps", least=LEAST_EPS, most=1),
        "block": keys.integer("block_size", most=MOST_ROWS, default=DEFAULT_BLOCK),
        "markov_rank": keys.integer("markov_rank", most=MOST_WIDTH),
        "confidence": keys.flag("enable_confidence_head", True),
        "confidence_markov": keys.flag("confidence_head_with_markov", True),
    }
    if kind == "k3_dspark":
        nope, pe = keys.integer("qk_nope_head_dim", most=MOST_WIDTH), _even(keys, "qk_rope_head_dim")
        rope, stretch = _rope(keys, pe, interleaved=True)
        return DraftConfig(
            kind="mla",
            mask_id=keys.integer("mask_token_id", most=MOST_IDS, least=0),
            taps=_taps(keys, "target_layer_ids"),
            target_layers=keys.integer("target_num_hidden_layers", most=MOST_LAYERS, least=0, default=0),
            rope=rope,
            scale=(nope + pe) ** -0.5 * stretch**2,
            v_dim=keys.integer("v_head_dim", most=MOST_WIDTH),
            q_rank=keys.integer("q_lora_rank", most=MOST_WIDTH),
            kv_rank=keys.integer("kv_lora_rank", most=MOST_WIDTH),
            nope_dim=nope,
            pe_dim=pe,
            **shared,
        )
    flash = keys.section("dflash_config")
    size = _even(keys, "head_dim", default=shared["hidden"] // heads)
    kv_heads = keys.integer("num_key_value_heads", most=MOST_HEADS)
    if heads % kv_heads:
        raise keys.refused("num_key_value_heads", f"a number that divides the {heads} of num_attention_heads")
    rope, _ = _rope(keys, size, interleaved=False)
    return DraftConfig(
        kind="gqa",
        mask_id=flash.integer("mask_token_id", most=MOST_IDS, least=0),
        taps=_taps(flash, "target_layer_ids"),
        target_layers=keys.integer("num_target_layers", most=MOST_LAYERS, least=0, default=0),
        rope=rope,
        scale=size**-0.5,
        v_dim=size,
        kv_heads=kv_heads,
        **shared,
    )


def _taps(keys: Keys, key: str) -> tuple[int, ...]:
    """A list of 0-based layers."""
    values = keys.get(key)
    fine = isinstance(values, list) and len(values) <= MOST_LAYERS
    if not fine or not all(isinstance(x, int) and not isinstance(x, bool) and 0 <= x < MOST_LAYERS for x in values):
        raise keys.refused(key, f"a list of layer numbers from 0 to {MOST_LAYERS - 1:,}")
    return tuple(values)


def _even(keys: Keys, key: str, default: int | None = None) -> int:
    """A size that is rotated in pairs."""
    found = keys.integer(key, most=MOST_WIDTH, least=2, default=default)
    if found < 2 or found % 2:
        raise keys.refused(key, f"an even number from 2 to {MOST_WIDTH:,}")
    return found


def _rope(keys: Keys, dim: int, *, interleaved: bool) -> tuple[Rope, float]:
    """(rotation, score stretch m of the MLA kind). Grouped-query drafts carry their stretch in cos and sin."""
    name = next((name for name in ("rope_parameters", "rope_scaling") if keys.get(name) not in (None, {})), None)
    values = Keys({}, file=keys.file) if name is None else keys.section(name)
    whose = keys if values.get("rope_theta") is None else values
    theta = whose.number("rope_theta", least=2, most=1e12, default=10000.0)
    kind = values.get("rope_type") or values.get("type") or "default"
    if kind == "default":
        return Rope(dim, theta, interleaved), 1.0
    if kind != "yarn":
        raise ModelError(f"unsupported {keys.file} rope_type = {shown(kind)}", '"yarn" or "default"')
    factor = values.number("factor", least=1, most=1e6)
    logged = 0.1 * math.log(factor)

    def stretched(weight: float) -> float:
        return 1 + weight * logged

    if interleaved:  # the scale carries mscale_all_dim; cos and sin the ratio of the two
        own = stretched(values.number("mscale", least=0, most=100, default=1.0))
        every = values.number("mscale_all_dim", least=0, most=100, default=0.0)
        amplitude, stretch = (own / stretched(every), stretched(every)) if every else (stretched(1.0), 1.0)
    else:
        amplitude, stretch = values.number("attention_factor", least=0.01, most=100, default=stretched(1.0)), 1.0
    return (
        Rope(
            dim,
            theta,
            interleaved,
            factor,
            values.integer("original_max_position_embeddings", most=MOST_IDS),
            values.number("beta_fast", least=1e-3, most=1e6, default=32.0),
            values.number("beta_slow", least=1e-3, most=1e6, default=1.0),
            amplitude,
        ),
        stretch,
    )
