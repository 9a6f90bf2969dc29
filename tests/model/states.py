"""What tests of several files do with a state: decode from it, and hold what a store would give back of it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

PAGES = ("kv_latent", "k_pe")


class Stored:
    """What a store would give back of a state: plain arrays. Two are equal when every byte is."""

    def __init__(self, state: Any, laid: Callable[[np.ndarray], np.ndarray] = np.asarray) -> None:
        """laid: puts an array somewhere else in memory."""
        self.position = state.position
        self.fields = {name: laid(array) for name, array in state.checkpoint().items()}
        self.rows = {name: laid(state.page_rows(name, 0, state.position)) for name in PAGES}

    def checkpoint(self) -> dict[str, np.ndarray]:
        return self.fields

    def page_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        return self.rows[name][:, start:stop]

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Stored)
        mine, theirs = (found.fields | found.rows for found in (self, other))
        same = self.position == other.position and mine.keys() == theirs.keys()
        return same and all(np.array_equal(mine[name], theirs[name]) for name in mine)

    __hash__ = None  # type: ignore[assignment]


def decode(net: Any, ids: torch.Tensor, state: Any) -> torch.Tensor:
    """Logits [n, V] of ids decoded one by one."""
    rows = []
    for token in ids.split(1):
        logits, log = net.verify(token, state)
        net.commit(state, log, 1)
        rows.append(logits)
    return torch.cat(rows)


def greedy(net: Any, state: Any, token: int, count: int) -> list[int]:
    """The tokens an answer of temperature 0 goes on with behind `token`."""
    found = []
    for _ in range(count):
        row, log = net.verify(torch.tensor([token]), state)
        net.commit(state, log, 1)
        found.append(token := int(row[0].argmax()))
    return found


def windowed(net: Any, ids: torch.Tensor, state: Any, expected: torch.Tensor, seed: int) -> Any:
    """Decodes the rest of ids in windows at random, wrong drafts in them, some settled on the way; returns the state.

    Each row that is kept must be that of `expected`, [rest, V].
    """
    dice, wrong, start = random.Random(seed), ids.flip(0), state.position
    while state.position < ids.numel():
        at = state.position
        n = min(dice.choice((1, 2, 3, net.window, net.window)), ids.numel() - at)
        keep = dice.randint(0, n)
        logits, log = net.verify(torch.cat((ids[at : at + keep], wrong[: n - keep])), state)
        assert torch.equal(logits[:keep], expected[at - start : at - start + keep]), at
        net.commit(state, log, keep)
        if dice.random() < 0.2:
            state = state.fork()
    return state
