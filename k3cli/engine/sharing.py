"""Starting a new session from state that another session left for the same first tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from k3_sessions.errors import Damaged, SessionChanged

from k3cli.engine.events import Notice
from k3cli.engine.record import recorded_schedule, runtime_change
from k3cli.engine.restore import recall
from k3cli.engine.schedule import Schedule
from k3cli.engine.timeline import Timeline
from k3cli.words import counted

if TYPE_CHECKING:
    from k3_sessions.types import RestorePlan

    from k3cli.engine.engine import Engine

SHARED_MARK = "shared-prefix"
"""Mark on a turn whose checkpoint stays because other sessions begin with the same tokens."""


@dataclass(frozen=True)
class SharedStart:
    """Where a new session begins: a timeline whose tokens are the reused ones, possibly none.

    plan: what its state came from. keep_at: position at which the session should keep a boundary of its own, because
    another session has evaluated the same tokens up to there and none has kept its state; 0 for nowhere.
    """

    timeline: Timeline
    plan: RestorePlan | None
    keep_at: int
    notices: tuple[Notice, ...] = ()


def start_shared(engine: Engine, store: Any, ids: Sequence[int]) -> SharedStart:
    """Look for the longest stored prefix of a first prompt. At least one of `ids` is left to evaluate.

    State that can't be read costs a prefill, and a Notice says so.
    """
    # The last id is left out: its logits are needed, and those are not stored.
    plan = store.find_prefix(engine.identity, engine.layout, ids[:-1])
    if plan is None:
        return SharedStart(engine.timeline(), None, 0)
    if plan.turn is None or not plan.boundary:
        return SharedStart(engine.timeline(), None, plan.matched)
    # The steps that made this state belong to the record of the new session, so that it can be replayed by itself.
    steps = recorded_schedule(store.lineage(plan.turn), 0, plan.boundary)
    found = Notice(
        "shared-prefix",
        f"the prompt begins with {counted(plan.boundary, 'token')} of another session, whose state is reused",
    )
    keep_at = plan.matched if plan.matched > plan.boundary else 0
    known = engine.known_timeline(ids[: plan.boundary]) if canonical(steps, engine.model.prefill_chunk) else None
    if known is not None and known.position == plan.boundary:
        known.schedule = steps
        return SharedStart(known, plan, keep_at, (found, *recall(engine, store, plan, known)))
    here = canonical(steps, engine.model.prefill_chunk) and not runtime_change(store.turn(plan.turn), engine)
    try:
        with store.stream(plan, engine.identity, engine.layout) as stored:
            timeline = engine.restored_timeline(stored, ids[: plan.boundary], share=here)
    except (Damaged, SessionChanged) as error:
        lost = Notice(
            "shared-prefix-unusable",
            f"the prompt begins with {counted(plan.boundary, 'token')} of another session, whose state can't be read "
            f"({error}): evaluating them",
        )
        return SharedStart(engine.timeline(), None, 0, (lost,))
    timeline.schedule = steps
    return SharedStart(timeline, plan, keep_at, (found, *recall(engine, store, plan, timeline)))


def canonical(steps: Schedule, chunk: int) -> bool:
    """Whether these steps are the ones that this process would take for the same tokens, whole chunks from 0 on."""
    return steps.start == 0 and all(step == ("prefill", chunk) for step in steps)
