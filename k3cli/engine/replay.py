"""Running recorded turns again and comparing; see engine.evaluate for scores and for evaluating into a new session."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from k3cli.engine import events as ev
from k3cli.engine import record
from k3cli.engine.evaluate import replay_into, score
from k3cli.engine.limits import Cancel, never
from k3cli.engine.restore import InterruptedWorkError
from k3cli.engine.sampling import Sampling, draw, margin
from k3cli.engine.schedule import Schedule
from k3cli.engine.timeline import Timeline
from k3cli.errors import UsageError
from k3cli.words import counted

if TYPE_CHECKING:
    from k3_sessions.types import StateLayout, StateSource, Turn

    from k3cli.engine.engine import Engine

__all__ = ["replay", "replay_into", "score", "state_difference"]


def replay(
    engine: Engine, store: Any, name: str, *, first: int = 1, last: int | None = None, cancel: Cancel = never
) -> Iterator[ev.Event]:
    """Generate turns `first`..`last` (numbers from 1) again from their recorded inputs, schedule and seed.

    Every generated id is drawn again and compared; the recorded id then goes on, so that later turns and the state are
    compared for the recorded tokens. The state (every checkpoint field and every MLA row) is compared bit for bit at
    every turn whose checkpoint is kept. Starts from the nearest joint boundary before turn `first`.
    Yields Notice, Progress, TurnReplayed and Difference events: at most one Difference of a token and one of the state
    for each turn; the caller decides the exit code. Raises UsageError for numbers out of range, InterruptedWorkError on
    a cancel, and the store's errors (another model: IdentityMismatch).
    """
    turns = store.log(name)
    last = len(turns) if last is None else last
    if not 1 <= first <= last <= len(turns):
        raise UsageError(f"turns {first} to {last} of session {name}", f"numbers from 1 to {len(turns)}")
    chosen = turns[first - 1 : last]
    changed = record.runtime_change(chosen[-1], engine)
    if changed:
        yield ev.Notice("runtime-changed", changed)
    start = turns[first - 2].position if first > 1 else 0
    origin = turns[first - 2] if first > 1 else turns[0]
    plan = store.plan(origin.id, engine.identity, engine.layout, upto=start)
    tokens = [int(i) for i in store.tokens(chosen[-1].id)]
    with store.stream(plan, engine.identity, engine.layout) as stored:
        timeline = engine.restored_timeline(stored, tokens)
    if plan.boundary < start:
        yield ev.Notice(
            "replaying",
            f"evaluating {counted(start - plan.boundary, 'token')} before turn {first} again ({plan.reason})",
        )
        ahead = record.recorded_schedule(turns[: first - 1], plan.boundary, start)
        yield from _evaluate(timeline, ahead, start, cancel)
    for number, turn in enumerate(chosen, first):
        yield from _replay_turn(engine, store, timeline, turns, number, turn, cancel)


def _replay_turn(
    engine: Engine, store: Any, timeline: Timeline, turns: Sequence[Turn], number: int, turn: Turn, cancel: Cancel
) -> Iterator[ev.Event]:
    meta = record.meta_of(turn)
    sampling = Sampling.from_json(meta["sampling"])
    schedule = record.recorded_schedule(turns[:number], timeline.position, turn.position)
    # What `replay_into` made was never drawn by this model: only its state can be compared.
    drawn = len(turn.tokens) if meta["kind"] != "evaluated" else meta["prompt"]
    begin, end = turn.start + meta["prompt"], turn.start + drawn
    compared = 0
    found: ev.Difference | None = None
    total = turn.position - timeline.position
    first = timeline.position
    for at, rows in timeline.follow(schedule, cancel):
        yield ev.Progress("replay", timeline.position - first, total)
        seen, other = _compare(turn, number, at, rows, (begin, end), sampling, timeline)
        compared += seen
        found = found or other
    if timeline.position < turn.position:
        raise InterruptedWorkError(f"stopped in turn {number} at position {timeline.position}", do="run it again")
    if found is not None:
        yield found
    state = "no checkpoint"
    if turn.has_checkpoint:
        plan = store.plan(turn.id, engine.identity, engine.layout)
        if plan.boundary == turn.position:
            recorded = store.restore(plan, engine.identity, engine.layout)
            different = state_difference(engine.layout, recorded, timeline.snapshot())
            state = "equal" if different is None else "different"
            if different is not None:
                field, layer, position, size = different
                yield ev.Difference(turn.id, number, position, None, None, None, field, layer, size)
    yield ev.TurnReplayed(turn.id, number, compared, state)


def _compare(
    turn: Turn,
    number: int,
    first: int,
    rows: torch.Tensor,
    span: tuple[int, int],
    sampling: Sampling,
    timeline: Timeline,
) -> tuple[int, ev.Difference | None]:
    """Draw from rows for the tokens at first, first + 1, ...; those inside `span` are compared with the record."""
    inside = [i for i in range(len(rows)) if span[0] <= first + i < span[1]]
    if not inside:
        return 0, None
    drawn = draw(rows[inside], [first + i for i in inside], sampling)
    for i, got in zip(inside, drawn, strict=True):
        recorded = timeline.tokens[first + i]
        if got != recorded:
            gap = margin(rows[i], first + i, sampling)
            shown = gap if math.isfinite(gap) else None
            return len(inside), ev.Difference(turn.id, number, first + i, recorded, got, shown)
    return len(inside), None


def state_difference(
    layout: StateLayout, recorded: StateSource, live: StateSource
) -> tuple[str, int, int, float] | None:
    """First field, layer and position where two states at one position are not the same bits, and the largest gap.

    (field, layer, position, largest absolute difference); None when all bits are equal. For checkpoint fields the
    position is that of the state.
    """
    position = recorded.position  # type: ignore[attr-defined]
    then, now = recorded.checkpoint(), live.checkpoint()
    for field in layout.fields:
        spans = [(position, position)]
        if field.scope == "page":
            block = layout.hash_block
            spans = [(at, min(at + block, position)) for at in range(0, position, block)]
        for start, stop in spans:
            if field.scope == "page":
                a, b = recorded.page_rows(field.name, start, stop), live.page_rows(field.name, start, stop)
            else:
                a, b = then[field.name], now[field.name]
            if a.tobytes() == b.tobytes():
                continue
            other = np.argwhere(_bits(a) != _bits(b))
            layer = int(other[0][0])
            row = start + int(other[:, 1].min()) if field.scope == "page" else position
            return field.name, field.layers[layer], row, _gap(a, b, field.dtype)
    return None


def _bits(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.ascontiguousarray(array).view(np.uint32 if array.dtype.itemsize == 4 else np.uint16)


def _gap(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any], dtype: str) -> float:
    if dtype == "bfloat16":
        a, b = ((x.astype(np.uint32) << 16).view(np.float32) for x in (a, b))
    return float(np.max(np.abs(a.astype(np.float64) - b.astype(np.float64))))


def _evaluate(timeline: Timeline, schedule: Schedule, stop: int, cancel: Cancel) -> Iterator[ev.Event]:
    first = timeline.position
    for _ in timeline.follow(schedule, cancel):
        yield ev.Progress("replay", timeline.position - first, stop - first)
    if timeline.position < stop:
        raise InterruptedWorkError(f"stopped at position {timeline.position}", do="run it again")
