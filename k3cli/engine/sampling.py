"""Drawing tokens: Gumbel-max with noise that is a pure function of (seed, position, token id).

A resumed, forked, replayed or speculated run draws the same noise, because nothing but those three numbers enters it.
Every row is computed by itself, with one-dimensional tensors of the vocabulary's length, so that a row's bits do not
depend on how many rows are drawn together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from k3cli.errors import K3Error, UsageError

_MASK = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15
_MUL_1 = 0xBF58476D1CE4E5B9
_MUL_2 = 0x94D049BB133111EB
MAX_SEED = (1 << 63) - 1


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn.

    temperature: 0 is greedy (ties go to the lowest id). top_k: 0 keeps all. top_p: 1 keeps all. min_p: 0 keeps all.
    seed: None means the session's own seed. max_tokens: None means as many as the context has room for.
    The filters act on softmax(logits / temperature), in the order top_k, top_p, min_p.
    Raises UsageError, naming the valid range.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        _check("temperature", self.temperature, math.isfinite(self.temperature) and self.temperature >= 0, "0 or more")
        _check("top-p", self.top_p, 0 < self.top_p <= 1, "a number above 0 and at most 1")
        _check("top-k", self.top_k, self.top_k >= 0, "0 (keep all) or more")
        _check("min-p", self.min_p, 0 <= self.min_p <= 1, "a number from 0 to 1")
        _check("seed", self.seed, self.seed is None or 0 <= self.seed <= MAX_SEED, f"an integer from 0 to {MAX_SEED}")
        _check("max-tokens", self.max_tokens, self.max_tokens is None or self.max_tokens >= 1, "1 or more")

    def to_json(self) -> dict[str, Any]:
        """Every field, for the record of a turn."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Sampling:
        """The inverse of `to_json`; keys it does not know are refused."""
        unknown = sorted(set(data) - set(cls.__dataclass_fields__))
        if unknown:
            raise K3Error(
                f"recorded sampling has unknown keys {', '.join(unknown)}",
                ", ".join(cls.__dataclass_fields__),
                "update k3 to the version that recorded the turn",
            )
        return cls(**data)


def _check(name: str, value: object, ok: bool, expected: str) -> None:
    if not ok:
        raise UsageError(f"{name} is {value}", expected)


def _mix(z: int) -> int:
    """One splitmix64 finaliser over a 64-bit integer."""
    z = ((z ^ (z >> 30)) * _MUL_1) & _MASK
    z = ((z ^ (z >> 27)) * _MUL_2) & _MASK
    return z ^ (z >> 31)


def _signed(z: int) -> int:
    """The int64 with the same bits."""
    return z - (1 << 64) if z >> 63 else z


def _shift(z: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64: torch's is arithmetic."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def uniform(seed: int, position: int, vocab: int, device: torch.device | str = "cpu") -> Tensor:
    """Noise in (0, 1): float64 [vocab], entry i a function of (seed, position, i) alone.

    The key of the row is mixed in exact integers; the ids follow by the splitmix64 step and finaliser in wrapping
    int64, so every device gets the same 53 bits.
    """
    key = _mix((_mix((seed + _STEP) & _MASK) + (position + 1) * _STEP) & _MASK)
    ids = torch.arange(1, vocab + 1, dtype=torch.int64, device=device)
    z = ids * _signed(_STEP) + _signed(key)
    z = (z ^ _shift(z, 30)) * _signed(_MUL_1)
    z = (z ^ _shift(z, 27)) * _signed(_MUL_2)
    z = z ^ _shift(z, 31)
    # 53 bits and a half step: never 0, never 1
    return (_shift(z, 11).to(torch.float64) + 0.5) * 2.0**-53


def gumbel(seed: int, position: int, vocab: int, device: torch.device | str = "cpu") -> Tensor:
    """Standard Gumbel noise -log(-log(u)) from `uniform`, float64 [vocab]."""
    return -torch.log(-torch.log(uniform(seed, position, vocab, device)))


def keep_mask(logits: Tensor, sampling: Sampling) -> Tensor | None:
    """Which ids survive top_k, top_p and min_p at a temperature above 0: bool [V], or None when all do.

    logits: float64 [V], already divided by the temperature. Equal logits rank by id, lowest first. The most likely id
    always survives.
    """
    vocab = logits.shape[0]
    if sampling.top_k in (0, vocab) and sampling.top_p == 1 and sampling.min_p == 0:
        return None
    ranked, order = torch.sort(logits, descending=True, stable=True)
    keep = torch.ones(vocab, dtype=torch.bool, device=logits.device)
    if 0 < sampling.top_k < vocab:
        keep[sampling.top_k :] = False
    if sampling.top_p < 1:
        probs = torch.softmax(ranked.masked_fill(~keep, -math.inf), dim=0)
        # mass before each id: the id that crosses top_p is still kept
        keep &= (torch.cumsum(probs, dim=0) - probs) < sampling.top_p
    if sampling.min_p > 0:
        keep &= ranked >= ranked[0] + math.log(sampling.min_p)
    keep[0] = True
    mask = torch.empty_like(keep)
    mask[order] = keep
    return mask


def scores(logits: Tensor, position: int, sampling: Sampling) -> Tensor:
    """Perturbed scores of one row: float64 [V] whose argmax is the drawn id.

    logits: [V], finite. At temperature 0 these are the logits; else logits / temperature + noise, -inf where filtered.
    sampling.seed must be set.
    """
    row = logits.to(torch.float64)
    if sampling.temperature == 0:
        return row
    assert sampling.seed is not None, "the caller resolves the seed"
    row = row / sampling.temperature
    mask = keep_mask(row, sampling)
    row = row + gumbel(sampling.seed, position, row.shape[0], row.device)
    return row if mask is None else row.masked_fill(~mask, -math.inf)


def draw(
    logits: Tensor, positions: Sequence[int], sampling: Sampling, ready: Callable[[], None] | None = None
) -> list[int]:
    """The ids drawn from rows of logits.

    logits: [n, V]. positions: n absolute positions, the index each drawn id will have in the token list.
    Row i depends on logits[i], positions[i] and `sampling` alone. One transfer from the device, whatever n.
    ready: waits for the device; called when all is launched, before anything is looked at.
    Raises K3Error when the logits are not finite.
    """
    if logits.shape[0] != len(positions):
        raise ValueError(f"{logits.shape[0]} rows of logits for {len(positions)} positions")
    if not positions:
        return []
    drawn = [
        torch.argmax(scores(row, position, sampling)) for row, position in zip(logits.unbind(0), positions, strict=True)
    ]
    finite = torch.isfinite(logits).all(-1)
    both = torch.stack((torch.stack(drawn), finite.long()))
    if ready is not None:
        both = both.to("cpu", non_blocking=True)
        ready()
    found: list[list[int]] = both.tolist()
    for position, fine in zip(positions, found[1], strict=True):
        if not fine:
            raise K3Error(
                f"the model produced non-finite logits for position {position}",
                "finite numbers",
                "try --dtype float32, and check the model with k3 doctor",
            )
    return found[0]


def margin(logits: Tensor, position: int, sampling: Sampling) -> float:
    """Best minus second-best perturbed score of one row [V]; infinite when only one id survives the filters."""
    best = torch.topk(scores(logits, position, sampling), 2).values
    return float(best[0] - best[1])
