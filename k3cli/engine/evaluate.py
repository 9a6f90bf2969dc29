"""Evaluating recorded ids under the loaded model, whatever made them: scores, and whole sessions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from k3_sessions.types import TurnDraft

from k3cli.engine import events as ev
from k3cli.engine import record
from k3cli.engine.head import Head
from k3cli.engine.limits import Cancel, never, overflow
from k3cli.engine.restore import InterruptedWorkError
from k3cli.engine.saving import Saver, save_events
from k3cli.errors import ModelError
from k3cli.words import counted

if TYPE_CHECKING:
    from k3cli.engine.engine import Engine


def score(engine: Engine, store: Any, name: str, *, cancel: Cancel = never) -> Iterator[ev.Event]:
    """Yield a Score per turn: log-likelihood of the recorded ids under this engine's model, other weights allowed.

    Everything is evaluated as one prefill from the start, so that scores of different models compare; temperature and
    filters play no part. Only the tokenizer must be the recorded one (ModelError). The last pending ids of the session
    are scored, too; the very first id, which nothing predicts, is not.
    """
    turns = store.log(name)
    _same_tokenizer(engine, store, name)
    tokens = [int(i) for i in store.tokens(turns[-1].id)]
    _fits(engine, len(tokens))
    timeline = engine.timeline(tokens)
    bounds = [
        (turn.start, turn.start + record.meta_of(turn)["prompt"], turn.start + len(turn.tokens)) for turn in turns
    ]
    nats = np.zeros(len(tokens))
    for first, rows in timeline.evaluate_all(cancel):
        known = tokens[first : first + len(rows)]
        if known:
            picked = torch.tensor(known, device=rows.device)[:, None]
            logp = torch.log_softmax(rows[: len(known)].double(), dim=-1).gather(1, picked)[:, 0]
            nats[first : first + len(known)] = logp.cpu().numpy()
        yield ev.Progress("score", timeline.position, len(tokens))
    if timeline.position < len(tokens):
        raise InterruptedWorkError(
            f"stopped after {timeline.position:,} of {counted(len(tokens), 'token')}", do="run it again"
        )
    for number, (turn, (start, begin, end)) in enumerate(zip(turns, bounds, strict=True), 1):
        answer = float(nats[begin:end].sum())
        given = max(start, 1)
        yield ev.Score(
            turn=turn.id,
            number=number,
            tokens=end - begin,
            nats=answer,
            perplexity=math.exp(min(-answer / (end - begin), 700.0)) if end > begin else None,
            prompt_tokens=max(begin - given, 0),
            prompt_nats=float(nats[given:begin].sum()),
        )


def replay_into(
    engine: Engine,
    store: Any,
    name: str,
    new: str,
    *,
    head: Mapping[str, Any] | None = None,
    cancel: Cancel = never,
) -> Iterator[ev.Event]:
    """Evaluate the recorded turns under this engine's model (and another head, if asked) into a new session.

    The recorded ids are kept as they are, only the ids of the head change; one turn is saved for each recorded one,
    while the next one is evaluated. Nothing is generated. The tokenizer and the chat format must be the recorded ones
    (ModelError); thinking can't be switched, since it is part of every recorded answer. On a cancel the turns saved so
    far stay.
    """
    _same_tokenizer(engine, store, name)
    session = store.session(name)
    if session.identity.chat_format != engine.identity.chat_format:
        raise ModelError(
            f"session {name} has chat format {session.identity.chat_format}",
            engine.identity.chat_format,
            "use a model of the same family",
        )
    old = Head.from_json(session.fixed.get("head", {}))
    fresh = old.evaluated_under(head)
    renderer = engine.renderer
    old_ids, new_ids = (renderer.render_head(h.tools, h.thinking, h.effort, h.system) for h in (old, fresh))
    turns = store.log(name)
    if list(turns[0].tokens[: len(old_ids)]) != old_ids:
        raise ModelError(
            f"the first turn of session {name} does not begin with its head",
            "the recorded chat format",
            "run `k3 verify`",
        )
    shift = len(new_ids) - len(old_ids)
    _fits(engine, turns[-1].start + len(turns[-1].tokens) + shift)
    declared = {tool["function"]["name"] for tool in fresh.tools}
    before = {tool["function"]["name"] for tool in old.tools}
    fixed = {"head": fresh.to_json(), "model": engine.name}
    timeline = engine.timeline()
    total = turns[-1].start + len(turns[-1].tokens) + shift
    counts: dict[str, int] = {}
    writer = store.writer(new, create=True, identity=engine.identity, layout=engine.layout, fixed=fixed)
    with Saver(store, writer) as saver:
        for number, turn in enumerate(turns, 1):
            meta = record.meta_of(turn)
            ids, prompt = list(turn.tokens), meta["prompt"]
            if number == 1:
                ids, prompt = new_ids + ids[len(old_ids) :], prompt + shift
            begin = timeline.position
            timeline.extend(ids)
            # The last id stays pending, as after an answer: the next turn evaluates it with its prompt.
            for _ in timeline.prefill_to(len(timeline.tokens) - 1, cancel):
                yield ev.Progress("replay", timeline.position, total)
            # Until here the turn before was being saved.
            yield from _saved(saver, new, counts)
            if timeline.position < len(timeline.tokens) - 1:
                raise InterruptedWorkError(
                    f"stopped in turn {number}",
                    do=f"session {new} holds {counted(number - 1, 'turn')}" if number > 1 else None,
                )
            context = dict(meta["context"])
            later = [tool for tool in context["tool_names"] if tool not in before]
            context["tool_names"] = [*sorted(declared), *later]
            kept = {key: value for key, value in meta.items() if key not in ("seconds", "counts")}
            done = kept | {
                "kind": "evaluated",
                "prompt": prompt,
                "schedule": timeline.schedule.between(begin, timeline.position).to_json(),
                "context": context,
                "shared": 0,
                "runtime": engine.runtime(),
                "evaluated_from": {"session": name, "turn": turn.id},
            }
            counts = {"reused": 0, "replayed": timeline.position - begin, "prefilled": 0, "generated": 0}
            saver.start([(TurnDraft(tuple(ids), timeline.position, done), timeline.snapshot())])
        yield from _saved(saver, new, counts)


def _saved(saver: Saver, session: str, counts: Mapping[str, int]) -> list[ev.Event]:
    """Wait for the save under way; what there is to tell of it. A save that failed is raised: nobody tries again."""
    result = saver.take()
    if result is None:
        return []
    if result.error is not None:
        raise result.error
    return save_events(result, session, counts, saver.queued)


def _same_tokenizer(engine: Engine, store: Any, name: str) -> None:
    recorded = store.session(name).identity.tokenizer
    if recorded != engine.identity.tokenizer:
        raise ModelError(
            f"session {name} was made with tokenizer {recorded}",
            f"{engine.identity.tokenizer}, that of the loaded model: its ids would mean other text",
            "use a model with the same tokenizer",
        )


def _fits(engine: Engine, tokens: int) -> None:
    if tokens > engine.context_limit:
        raise overflow(0, tokens, engine.context_limit)
