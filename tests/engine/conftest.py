"""A model small enough to read: a decaying sum as recurrent state, one latent row per token, and logits from both.

Prefill and decode sum in different orders on purpose, as the real model does: a test that mixes up the paths sees
different bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from k3_sessions.types import FieldSpec, StateLayout
from torch import Tensor

from k3cli.engine.timeline import Timeline

VOCAB = 384
WIDTH = 16
DECAY = 0.9
LAYOUT = StateLayout(
    (
        FieldSpec("recurrent", "checkpoint", (0,), (WIDTH,), "float32"),
        FieldSpec("kv_latent", "page", (1,), (WIDTH,), "float32"),
    )
)


class FakeState:
    def __init__(self) -> None:
        self.recurrent = torch.zeros(WIDTH)
        self.rows: list[Tensor] = []

    @property
    def position(self) -> int:
        return len(self.rows)

    def fork(self) -> FakeState:
        child = FakeState()
        child.recurrent = self.recurrent.clone()
        child.rows = list(self.rows)
        return child

    def checkpoint(self) -> dict[str, Any]:
        return {"recurrent": self.recurrent.numpy()[None].copy()}

    def page_rows(self, field: str, start: int, stop: int) -> Any:
        assert field == "kv_latent"
        rows = torch.stack(self.rows[start:stop]) if stop > start else torch.zeros(0, WIDTH)
        return rows.numpy()[None].copy()

    def load(self, position: int, checkpoint: Mapping[str, Any], pages: Mapping[str, Any]) -> None:
        recurrent = torch.from_numpy(np.array(checkpoint["recurrent"][0]))
        rows = list(torch.from_numpy(np.array(pages["kv_latent"][0, :position])).unbind(0))
        assert len(rows) == position
        self.recurrent, self.rows = recurrent, rows


class FakeModel:
    def __init__(self, window: int = 4, seed: int = 0) -> None:
        maker = torch.Generator().manual_seed(seed)
        self.window = window
        self.embed = torch.randn(VOCAB, WIDTH, generator=maker)
        self.out = torch.randn(2 * WIDTH, VOCAB, generator=maker)
        self.calls: list[tuple[str, int]] = []
        self.fail_at: int | None = None

    def state_layout(self) -> StateLayout:
        return LAYOUT

    def new_state(self) -> FakeState:
        return FakeState()

    def _logits(self, recurrent: Tensor, rows: list[Tensor]) -> Tensor:
        mean = torch.zeros(WIDTH)
        for row in rows[-64:]:
            mean = mean + row / 64
        return torch.cat([recurrent, mean]) @ self.out

    def prefill(self, ids: Tensor, state: FakeState, *, logits: str = "last") -> Tensor | None:
        self.calls.append(("prefill", len(ids)))
        vectors = self.embed[ids]
        n = len(ids)
        start, rows = state.recurrent.clone(), list(state.rows)
        if self.fail_at is not None and state.position + n > self.fail_at:
            state.recurrent += 1  # half a step
            raise RuntimeError("the device failed")
        out = []
        for i in range(n):
            powers = DECAY ** torch.arange(i, -1, -1, dtype=torch.float32)
            recurrent = start * DECAY ** (i + 1) + (powers[:, None] * vectors[: i + 1]).sum(0)
            state.rows.append(vectors[i] * 0.5)
            if logits == "all" or i == n - 1:
                out.append(self._logits(recurrent, rows + state.rows[len(rows) :]))
        state.recurrent = recurrent
        return torch.stack(out)

    def verify(self, ids: Tensor, state: FakeState) -> tuple[Tensor, Any]:
        assert 1 <= len(ids) <= self.window
        self.calls.append(("verify", len(ids)))
        child = state.fork()
        out = []
        for vector in self.embed[ids]:
            child.recurrent = child.recurrent * DECAY + vector
            child.rows.append(vector * 0.5)
            out.append(self._logits(child.recurrent, child.rows))
        return torch.stack(out), self.embed[ids]

    def commit(self, state: FakeState, log: Tensor, n: int) -> None:
        for vector in log[:n]:
            state.recurrent = state.recurrent * DECAY + vector
            state.rows.append(vector * 0.5)


@pytest.fixture
def fake_model() -> FakeModel:
    return FakeModel()


@pytest.fixture
def make_fake_model() -> Callable[..., FakeModel]:
    return FakeModel


@pytest.fixture
def fake_timeline(fake_model: FakeModel) -> Callable[..., Timeline]:
    def make(tokens: list[int] | None = None, limit: int = 4096) -> Timeline:
        return Timeline(fake_model, fake_model.new_state(), tokens or [], limit=limit)

    return make


@pytest.fixture
def state_bytes() -> Callable[[Any], Mapping[str, bytes]]:
    """Every bit of a timeline's state, for equality."""

    def read(timeline: Timeline) -> Mapping[str, bytes]:
        source = timeline.snapshot()
        fields = {name: array.tobytes() for name, array in source.checkpoint().items()}
        layout = SimpleNamespace(pages=["kv_latent"])
        return fields | {name: source.page_rows(name, 0, source.position).tobytes() for name in layout.pages}

    return read
