"""Bringing a stored turn back to life: the nearest joint boundary, then the recorded steps from there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from k3_sessions.errors import Damaged, StoreError

from k3cli.engine.events import Event, Notice, Progress
from k3cli.engine.limits import Cancel
from k3cli.engine.record import recorded_schedule, runtime_change
from k3cli.engine.schedule import Schedule
from k3cli.engine.timeline import Timeline
from k3cli.errors import DamagedError, Exit, K3Error, SessionError
from k3cli.words import counted

if TYPE_CHECKING:
    from k3_sessions.types import RestorePlan, Turn

    from k3cli.engine.engine import Engine

Emit = Callable[[Event], None]


class InterruptedWorkError(K3Error):
    """The user stopped work that leaves nothing to save."""

    exit_code = Exit.INTERRUPTED


@dataclass(frozen=True)
class Restored:
    """A timeline at the end of a turn. plan: what its state came from. reused / replayed: tokens."""

    timeline: Timeline
    turn: Turn | None
    plan: RestorePlan | None
    reused: int
    replayed: int


def restore_turn(
    engine: Engine, store: Any, turn_id: str, *, require_cached: bool, emit: Emit, cancel: Cancel
) -> Restored:
    """The state at the end of a turn, bit for bit as it was when the turn was saved.

    Where its checkpoint was thinned, a Notice tells the cost before the recorded steps since the nearest earlier joint
    boundary are run again; with require_cached that is refused. A checkpoint that should be there and is missing or
    damaged is refused too, with that boundary offered. Raises SessionError, DamagedError, InterruptedWorkError and the
    store's errors.
    """
    turn = store.turn(turn_id)
    plan = store.plan(turn_id, engine.identity, engine.layout)
    if plan.damaged:
        raise _with_offer(turn_id, plan, plan.damaged)
    if plan.boundary < plan.target and require_cached:
        raise SessionError(
            f"turn {turn_id[:10]} can't be restored without evaluating "
            f"{counted(plan.target - plan.boundary, 'old token')} again "
            f"({plan.reason})",
            "a kept checkpoint, because --require-cached was given",
            "resume without it, or go on from another turn (`k3 log` shows which keep one)",
        )
    changed = runtime_change(turn, engine)
    if changed:
        emit(Notice("runtime-changed", changed))
    try:
        with store.stream(plan, engine.identity, engine.layout) as stored:
            timeline = engine.restored_timeline(stored, [int(i) for i in store.tokens(turn_id)])
    except Damaged as error:
        again = store.plan(turn_id, engine.identity, engine.layout)
        raise _with_offer(turn_id, again, error.found) from error
    for notice in recall(engine, store, plan, timeline):
        emit(notice)
    if plan.boundary < plan.target:
        emit(
            Notice(
                "replaying",
                f"turn {turn_id[:10]} keeps no state of its own ({plan.reason}): evaluating "
                f"{plan.target - plan.boundary:,} of {counted(plan.target, 'token')} again as recorded",
            )
        )
        follow(timeline, recorded_schedule(store.lineage(turn_id), plan.boundary, plan.target), emit, cancel)
    return Restored(timeline, turn, plan, plan.boundary, plan.target - plan.boundary)


def recall(engine: Engine, store: Any, plan: RestorePlan, timeline: Timeline) -> tuple[Notice, ...]:
    """Hands the timeline's drafter what was kept for it beside the state that `plan` names. What is to be told: damage.

    Nothing depends on it but how well drafts begin.
    """
    speculator = timeline.speculator
    if speculator is None or not speculator.needs_hidden:
        return ()
    try:
        timeline.recall(store.hints(plan, engine.identity, engine.layout))
    except StoreError as error:
        lost = Notice(
            "draft-context-unusable",
            f"what the draft model had read is lost ({error}): it begins with the tokens to come, and no token changes",
        )
        return (lost,)
    return ()


def follow(timeline: Timeline, schedule: Schedule, emit: Emit, cancel: Cancel) -> None:
    """Evaluate along a schedule, with progress. Raises InterruptedWorkError when cancelled before the end."""
    first, total = timeline.position, schedule.stop - schedule.start
    for _ in timeline.follow(schedule, cancel):
        emit(Progress("replay", timeline.position - first, total))
    if timeline.position < schedule.stop:
        raise InterruptedWorkError(
            f"stopped after {timeline.position - first:,} of {counted(total, 'token')}",
            do="nothing was changed; run it again",
        )


def _with_offer(turn_id: str, plan: RestorePlan, what: str) -> DamagedError:
    """The damage, with the nearest good boundary and its cost: `plan` goes around what is damaged."""
    where = f"the joint boundary at {plan.boundary}" if plan.boundary else "the beginning"
    return DamagedError(
        f"the state of turn {turn_id[:10]} can't be restored: {what}",
        "the bytes that were written",
        f"`k3 repair` sets what is damaged aside; the turn then resumes from {where}, evaluating "
        f"{counted(plan.target - plan.boundary, 'token')} again",
    )
