"""A loaded model and what belongs to it: tokenizer, chat format, identity, limits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from k3cli.engine.timeline import Timeline


class Engine:
    """One loaded model. Timelines and conversations are made from it."""

    identity: Any
    layout: Any
    context_limit: int

    @classmethod
    def load(
        cls,
        model_ref: str,
        *,
        device: str = "auto",
        dtype: str = "auto",
        window: int = 8,
        progress: Callable[[Any], None] | None = None,
    ) -> Engine:
        """Load a model folder, or a hub id found in the local cache.

        device: "auto", "cpu", "cuda" or "cuda:N". dtype: "auto", "float32" or "bfloat16".
        window: rows of a decode step.
        """
        raise NotImplementedError

    def timeline(self) -> Timeline:
        """An empty timeline."""
        raise NotImplementedError

    def describe(self) -> list[dict[str, str]]:
        """What was chosen and why: rows of `what`, `choice`, `reason`."""
        raise NotImplementedError
