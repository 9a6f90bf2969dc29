"""What a turn's `meta` holds, and the look-ups over recorded turns: schedule, close ids, render context.

Keys, all JSON:
    v           version of the record
    kind        "chat"; "prompt": a first prompt kept for its shared prefix, answered by the next turn; "evaluated":
                made by `replay_into`
    prompt      how many leading ids of the turn were given; the rest was generated
    schedule    runs that cover the positions since the turn before; a first turn that started from shared state
                records the runs that made that state, too
    shared      tokens whose state came from another session
    sampling    with the seed resolved
    stop        "stop", "tool_calls", "length", "cancelled", or "prompt"
    close       ids that end a cut answer; they go in front of the next prompt
    context     what rendering the next message needs
    given       messages and what else was asked for; answer, calls: what came back. For people: the ids are the truth
    counts, seconds, runtime    as reported; where it ran
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from k3cli.chat.renderer import RenderContext
from k3cli.engine.schedule import Schedule
from k3cli.errors import DamagedError
from k3cli.words import in_words

if TYPE_CHECKING:
    from k3_sessions.types import Turn

    from k3cli.engine.engine import Engine

VERSION = 1


def meta_of(turn: Turn) -> Mapping[str, Any]:
    """The checked meta of a turn. DamagedError when this version can't read it."""
    meta = turn.meta
    if meta.get("v") != VERSION:
        raise DamagedError(
            f"turn {turn.id[:10]} has a record of version {meta.get('v')!r}",
            f"version {VERSION}",
            "use the version of k3 that wrote it",
        )
    missing = [key for key in ("kind", "prompt", "schedule", "sampling", "close", "context") if key not in meta]
    if missing or not 0 <= meta["prompt"] <= len(turn.tokens):
        what = f"lacks {', '.join(missing)}" if missing else f"has a prompt of {meta['prompt']} ids"
        raise DamagedError(f"the record of turn {turn.id[:10]} {what}", "a whole record", "run `k3 verify`")
    return meta


def recorded_schedule(turns: Sequence[Turn], start: int, stop: int) -> Schedule:
    """How positions [start, stop) were evaluated, from turns that begin with the session's first."""
    whole = Schedule()
    for turn in turns:
        part = Schedule.from_json(whole.stop, meta_of(turn)["schedule"])
        if part.stop != turn.position:
            raise DamagedError(
                f"the schedule of turn {turn.id[:10]} ends at {part.stop}",
                f"its position {turn.position}",
                "run `k3 verify`",
            )
        whole.extend(part)
    return whole.between(start, stop)


def close_ids(turn: Turn | None) -> list[int]:
    """Ids that end the answer of a turn that was cut; empty for others."""
    return [] if turn is None else [int(i) for i in meta_of(turn)["close"]]


def context_after(turn: Turn) -> RenderContext:
    """What rendering the next message needs to know."""
    return RenderContext.from_json(meta_of(turn)["context"])


def open_calls(turn: Turn | None) -> list[dict[str, Any]]:
    """Tool calls of a turn's answer that wait for a result: `id`, `name`, `arguments`, `index`."""
    return [] if turn is None else list(turn.meta.get("calls") or [])[context_after(turn).tool_index :]


def runtime_change(turn: Turn, engine: Engine) -> str:
    """What differs between the machine a turn was made on and this one, as one line; "" when nothing does."""
    # Turns that say nothing of ranks are from before there could be more than one.
    then, now = {"ranks": 1} | (turn.meta.get("runtime") or {}), engine.runtime()
    other = [key for key in now if then.get(key) != now[key]]
    if not other:
        return ""
    return (
        "the session was last extended with "
        + ", ".join(f"{key} {in_words(then.get(key))}" for key in other)
        + "; now "
        + ", ".join(f"{key} {in_words(now[key])}" for key in other)
        + ": answers may differ in rounding from a run that never stopped"
    )
