"""A toy model: every state array is a function of exactly the tokens it claims to describe.

The rolling number after token i depends on tokens 0..i, so a row or checkpoint of any other prefix differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from k3_sessions import DTYPES, FieldSpec, Identity, StateLayout, StoreConfig, TurnDraft, layout_digest

LAYOUT = StateLayout(
    fields=(
        FieldSpec("recurrent", "checkpoint", (0, 1, 3), (2, 3, 5), "float32"),
        FieldSpec("conv", "checkpoint", (0, 1, 3), (4, 3), "bfloat16"),
        FieldSpec("kv_latent", "page", (2, 4), (6,), "bfloat16"),
        FieldSpec("k_pe", "page", (2, 4), (3,), "float32"),
    )
)
IDENTITY = Identity("sha256:weights", "sha256:tokenizer", "xtml-1", layout_digest(LAYOUT), "bfloat16")
CONFIG = StoreConfig(free_floor_bytes=0, threads=2)


def identity_for(layout: StateLayout, weights: str = "sha256:weights") -> Identity:
    return Identity(weights, "sha256:tokenizer", "xtml-1", layout_digest(layout), "bfloat16")


@dataclass
class Toy:
    """Live state after `tokens[:position]`; `noise` stands for another evaluation schedule (other last bits)."""

    tokens: list[int]
    position: int
    layout: StateLayout = LAYOUT
    noise: int = 0
    calls: list[tuple[str, int, int]] = field(default_factory=list)
    beside: dict[str, np.ndarray] = field(default_factory=dict)

    def _rolling(self) -> np.ndarray:
        value, out = 1 + self.noise, np.empty(self.position + 1, dtype=np.uint64)
        out[0] = value
        for i, token in enumerate(self.tokens[: self.position]):
            value = (value * 6364136223846793005 + token + 1442695040888963407) % 2**64
            out[i + 1] = value
        return out

    def _expand(self, seeds: np.ndarray, spec: FieldSpec, salt: int) -> np.ndarray:
        """`[len(seeds), *shape]` bits derived from each seed."""
        count = int(np.prod(spec.shape, dtype=np.int64))
        with np.errstate(over="ignore"):
            mixed = seeds[:, None] * np.uint64(2654435761 + 2 * salt) + np.arange(count, dtype=np.uint64)
            mixed ^= mixed >> np.uint64(29)
            mixed *= np.uint64(0x9E3779B97F4A7C15)
        bits = mixed >> np.uint64(32) if spec.dtype == "float32" else mixed >> np.uint64(48)
        plain = bits.astype(np.uint32 if spec.dtype == "float32" else np.uint16)
        return plain.view(DTYPES[spec.dtype]).reshape(len(seeds), *spec.shape)

    def checkpoint(self) -> dict[str, np.ndarray]:
        last = self._rolling()[-1:]
        return {
            f.name: np.stack([self._expand(last, f, layer)[0] for layer in f.layers])
            if f.layers
            else np.empty((0, *f.shape), DTYPES[f.dtype])
            for f in self.layout.fields
            if f.scope == "checkpoint"
        }

    def hints(self) -> dict[str, np.ndarray]:
        return self.beside

    def page_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        self.calls.append((name, start, stop))
        spec = next(f for f in self.layout.fields if f.name == name)
        seeds = self._rolling()[start + 1 : stop + 1]
        return np.stack([self._expand(seeds, spec, 100 + layer) for layer in spec.layers])


def ids(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 163840, count).tolist()


def draft(tokens: Sequence[int], position: int, **rest: object) -> TurnDraft:
    return TurnDraft(tuple(tokens), position, **rest)  # type: ignore[arg-type]


def check(restored: object, tokens: Sequence[int], layout: StateLayout = LAYOUT, noise: int = 0) -> None:
    """The restored state is bit for bit the toy's state after `tokens`."""
    position = restored.position  # type: ignore[attr-defined]
    toy = Toy(list(tokens), position, layout, noise)
    for name, array in toy.checkpoint().items():
        found = restored.checkpoint()[name]  # type: ignore[attr-defined]
        assert found.dtype == array.dtype
        assert found.tobytes() == array.tobytes(), name
    for f in layout.fields:
        if f.scope == "page":
            rows = restored.page_rows(f.name, 0, position)  # type: ignore[attr-defined]
            assert rows.tobytes() == toy.page_rows(f.name, 0, position).tobytes(), f.name


def grow(
    store, name: str, lengths: Sequence[int], *, seed: int = 0, pending: int = 1, create: bool = True, layout=LAYOUT
):
    """Write one turn per length; each leaves `pending` tokens unevaluated. Returns all tokens and the turns."""
    tokens: list[int] = []
    turns = []
    with store.writer(name, create=create, identity=identity_for(layout), layout=layout) as writer:
        if writer.head is not None:
            tokens = store.tokens(writer.head.id).tolist()
        for number, length in enumerate(lengths):
            new = ids(length, seed * 1000 + len(tokens) + number)
            before = turns[-1].position if turns else (writer.head.position if writer.head else 0)
            tokens += new
            position = max(before, len(tokens) - min(pending, length))
            report = writer.commit(draft(new, position, meta={"turn": number}), Toy(tokens, position, layout))
            turns.append(report.turn)
    return tokens, turns


def whole(store, name):
    """The session's head is restored bit for bit from its own boundary, and every file it needs is sound."""
    head = store.session(name).head
    plan = store.plan(head, IDENTITY, LAYOUT)
    tokens = store.tokens(head).tolist()
    assert plan.boundary == plan.target == store.turn(head).position
    check(store.restore(plan, IDENTITY, LAYOUT), tokens)
    assert store.verify([name]).problems == ()
    return tokens
