"""The 256 special ids above the ranks: their names in each family, and what `tokenizer_config.json` says about them.

Offsets are relative to the number of ranks, so that a small vocabulary has the same names at its own ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from k3cli.errors import ModelError
from k3cli.model_files import lies_there, read_object, shown

Family = Literal["k3", "k2"]

N_SPECIALS = 256
"""Ids reserved above the ranks, in every family."""
MOST_DIGITS = 20
"""Digits of an id, zeros in front included: more is no id, and thousands are more than `int` takes."""

_MEDIA = {18: "<|media_begin|>", 19: "<|media_content|>", 20: "<|media_end|>", 21: "<|media_pad|>"}
_COMMON = {0: "[BOS]", 1: "[EOS]", 9: "[EOT]", 254: "[UNK]", 255: "[PAD]"} | _MEDIA

K3_NAMES: Mapping[int, str] = _COMMON | {
    2: "<|end_of_msg|>",
    3: "<|open|>",
    4: "<|close|>",
    5: "<|sep|>",
    6: "[start_header_id]",
    7: "[end_header_id]",
    65: "<osagent_mode>",
}

K2_NAMES: Mapping[int, str] = _COMMON | {
    2: "<|im_end|>",
    3: "<|im_user|>",
    4: "<|im_assistant|>",
    6: "<|start_header_id|>",
    7: "<|end_header_id|>",
    10: "<|im_system|>",
    11: "<|tool_calls_section_begin|>",
    12: "<|tool_calls_section_end|>",
    13: "<|tool_call_begin|>",
    14: "<|tool_call_argument_begin|>",
    15: "<|tool_call_end|>",
    17: "<|im_middle|>",
}

_NAMES: Mapping[Family, Mapping[int, str]] = {"k3": K3_NAMES, "k2": K2_NAMES}

# The marks that the chat format cannot do without; they also tell the families apart.
_MARKS: Mapping[Family, tuple[str, ...]] = {
    "k3": ("<|end_of_msg|>", "<|open|>", "<|close|>", "<|sep|>"),
    "k2": ("<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>"),
}

MODEL_FAMILIES: Mapping[str, Family] = {"kimi_k3": "k3", "kimi_linear": "k2"}
"""Chat family by the top-level `model_type` of config.json."""


@dataclass(frozen=True)
class Specials:
    """Name of every special id, and why these names.

    names: token id -> name, all `N_SPECIALS` of them, unlisted ones as `<|reserved_token_ID|>`. family: whose chat
    format they serve. reason: the file or default that decided.
    """

    names: Mapping[int, str]
    family: Family
    reason: str
    listed: bool = False
    """Whether a file says which id each name has; else they follow from the number of ranks."""


def read_specials(folder: Path, n_ranks: int) -> Specials:
    """The specials of a model folder.

    `tokenizer_config.json` decides when it is there; else the `model_type` of `config.json`; else K3.
    Raises ModelError when a file cannot be read, contradicts itself, or names an unknown family.
    """
    listed = _listed(folder / "tokenizer_config.json", n_ranks)
    if listed is not None:
        family = _family_of(set(listed.values()), folder)
        return Specials(_complete(listed, n_ranks), family, "names in tokenizer_config.json", listed=True)
    config = folder / "config.json"
    if lies_there(config):
        model_type = read_object(config, "a JSON object").get("model_type")
        if not isinstance(model_type, str) or model_type not in MODEL_FAMILIES:
            raise ModelError(
                f"{config} has model_type {shown(model_type)}",
                " or ".join(sorted(MODEL_FAMILIES)),
                "add the model's tokenizer_config.json, which names its special tokens",
            )
        return default_specials(MODEL_FAMILIES[model_type], n_ranks, f"model_type {model_type} in config.json")
    return default_specials("k3", n_ranks, "default: neither tokenizer_config.json nor config.json is in the folder")


def default_specials(family: Family, n_ranks: int, reason: str) -> Specials:
    """The published names of a family, placed above `n_ranks` ranks."""
    listed = {n_ranks + offset: name for offset, name in _NAMES[family].items()}
    return Specials(_complete(listed, n_ranks), family, reason)


def _listed(path: Path, n_ranks: int) -> dict[int, str] | None:
    """Id -> name as `added_tokens_decoder` lists them; None when there is no file or no such key."""
    if not lies_there(path):
        return None
    decoder = read_object(path, "a JSON object").get("added_tokens_decoder")
    if decoder is None:
        return None
    if not isinstance(decoder, dict):
        raise ModelError(f"{path}: added_tokens_decoder is no object", "an object of id: {content}")
    ids: dict[str, int] = {}
    for key, entry in decoder.items():
        name = entry.get("content") if isinstance(entry, dict) else None
        if not isinstance(name, str) or not name:
            raise ModelError(f"{path}: added_tokens_decoder entry {key!r} has no content", "a non-empty token name")
        if any("\ud800" <= char <= "\udfff" for char in name):
            raise ModelError(f"{path}: special token {name!r} has half a character", "a name that UTF-8 can hold")
        token = int(key) if key.isascii() and key.isdigit() and len(key) <= MOST_DIGITS else -1
        if not n_ranks <= token < n_ranks + N_SPECIALS:
            raise ModelError(
                f"{path}: special token {name!r} has id {key}",
                f"an id from {n_ranks} to {n_ranks + N_SPECIALS - 1}, right above the {n_ranks} ranks",
                "use the tokenizer_config.json that was published with this tiktoken.model",
            )
        if name.startswith("<|reserved_token_") and name != _reserved(token):
            raise ModelError(f"{path}: id {token} has the name of another reserved id, {name!r}", _reserved(token))
        if ids.setdefault(name, token) != token:
            raise ModelError(f"{path}: special token {name!r} has ids {ids[name]} and {token}", "one id for each name")
    if len(set(ids.values())) != len(ids):
        raise ModelError(f"{path}: added_tokens_decoder lists an id twice", "one name for each id")
    return {token: name for name, token in ids.items()}


def _family_of(names: set[str], folder: Path) -> Family:
    whole = [family for family, marks in _MARKS.items() if names.issuperset(marks)]
    if len(whole) == 1:
        return whole[0]
    marks = "; ".join(f"{family}: {' '.join(_MARKS[family])}" for family in _MARKS)
    found = "the marks of two chat formats" if whole else "no complete set of chat marks"
    raise ModelError(f"{folder / 'tokenizer_config.json'} names {found}", f"exactly one of {marks}")


def _complete(listed: Mapping[int, str], n_ranks: int) -> dict[int, str]:
    return {token: listed.get(token, _reserved(token)) for token in range(n_ranks, n_ranks + N_SPECIALS)}


def _reserved(token: int) -> str:
    return f"<|reserved_token_{token}|>"
