"""Running recorded turns again: to compare, to score, or into a new session."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from k3cli.engine.events import Event
from k3cli.engine.timeline import Cancel, never

if TYPE_CHECKING:
    from k3cli.engine.engine import Engine


def replay(
    engine: Engine, store: Any, name: str, *, first: int = 1, last: int | None = None, cancel: Cancel = never
) -> Iterator[Event]:
    """Generate turns `first`..`last` (numbers from 1) again from their recorded inputs, schedule and seed.

    Yields Notice, Progress, TurnReplayed and Difference events. A Difference is the first of its turn; the caller
    decides the exit code.
    """
    raise NotImplementedError


def score(engine: Engine, store: Any, name: str, *, cancel: Cancel = never) -> Iterator[Event]:
    """Yield a Score per turn: log-likelihood of the recorded ids under this engine's model, other weights allowed."""
    raise NotImplementedError


def replay_into(
    engine: Engine,
    store: Any,
    name: str,
    new: str,
    *,
    head: Mapping[str, Any] | None = None,
    cancel: Cancel = never,
) -> Iterator[Event]:
    """Evaluate the recorded turns under this engine's model (and another head, if asked) into a new session."""
    raise NotImplementedError
