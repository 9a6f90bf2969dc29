"""One turn while it runs: prompt in, tokens out through the stream parser, and the record of it all."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from k3_sessions.types import TurnDraft

from k3cli.chat import events as chat
from k3cli.chat.messages import check_messages, content_parts
from k3cli.engine import events as ev
from k3cli.engine.limits import Cancel
from k3cli.engine.record import VERSION
from k3cli.engine.snapshot import Snapshot
from k3cli.engine.timeline import Timeline
from k3cli.errors import UsageError
from k3cli.words import counted

if TYPE_CHECKING:
    from k3_sessions.types import RestorePlan

    from k3cli.chat.renderer import RenderContext, Renderer
    from k3cli.engine.engine import Engine
    from k3cli.engine.head import Head
    from k3cli.engine.sampling import Sampling


def check_turn(
    messages: Sequence[Mapping[str, Any]], open_calls: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """The messages of a turn, checked: shapes, roles, something to answer, and tool results that answer open calls."""
    checked = check_messages(messages)
    spoken = 0
    results: list[Mapping[str, Any]] = []
    for number, message in enumerate(checked):
        where = f"messages[{number}]"
        if message["role"] == "assistant":
            raise UsageError(f"{where} is an assistant message", "user, system or tool messages: the model answers")
        if message["role"] == "tool":
            results.append(message)
        spoken += message["role"] == "tool" or (
            message["role"] == "user" and any(content_parts(message.get("content"), where))
        )
    if not spoken:
        raise UsageError("a turn without input", "at least one user message with text, or a tool result")
    if len(results) > len(open_calls):
        raise UsageError(
            f"{counted(len(results), 'tool result')} for {counted(len(open_calls), 'open tool call')}",
            "at most one for each",
        )
    known = {call["id"] for call in open_calls}
    for message in results:
        answered = message.get("tool_call_id") or message.get("id")
        if answered is not None and answered not in known:
            raise UsageError(
                f"a tool result for call {answered!r}", f"an open call: {', '.join(sorted(known))}", "see `k3 show`"
            )
    return checked


def render_prompt(
    renderer: Renderer, head: Head, first: bool, given: Mapping[str, Any], context: RenderContext
) -> list[int]:
    """Ids of what a turn gives: head (first turn only), new tools, messages, wishes for the answer, its opening.

    given: `messages` and, where asked for, `tools`, `tool_choice`, `response_format`. Updates `context`.
    """
    declared = [{"role": "system", "tools": given["tools"]}] if given.get("tools") else []
    return [
        *(renderer.render_head(head.tools, head.thinking, head.effort, head.system) if first else ()),
        *renderer.render_messages([*declared, *given["messages"]], context),
        *renderer.render_tail(given.get("tool_choice"), given.get("response_format"), context),
        *renderer.generation_prompt(head.thinking),
    ]


class Answer:
    """The turn under way. `begun` once ids were appended; `stop` is known after `finish`.

    kept: state at the boundary `keep_at`, where the session keeps a checkpoint because other sessions share the tokens.
    close: ids that end the answer if it was cut. calls: the complete tool calls of the answer.
    """

    def __init__(
        self,
        engine: Engine,
        timeline: Timeline,
        ids: Sequence[int],
        given: Mapping[str, Any],
        sampling: Sampling,
        context: RenderContext,
        thinking: bool,
        *,
        already: int = 0,
        keep_at: int = 0,
        replayed: int = 0,
    ) -> None:
        """ids: the whole prompt of the turn, of which the timeline holds the first `already`. sampling: seed resolved.

        context: after the prompt was rendered; belongs to this turn. replayed: tokens evaluated again before it.
        """
        self.begun = False
        self.stop = ""
        self.kept: Snapshot | None = None
        self.close: list[int] = []
        self.calls: list[dict[str, Any]] = []
        self.context = context
        self._engine = engine
        self._timeline = timeline
        self._ids = list(ids)
        self._given = given
        self._sampling = sampling
        self._thinking = thinking
        self._already = already
        self._keep_at = keep_at
        self._replayed = replayed
        self._start = len(timeline.tokens) - already
        self._position = 0 if already else timeline.position
        self._reused = timeline.position
        self._prefilled = 0
        self._seconds = {"prefill": 0.0, "decode": 0.0}
        self._parser = engine.renderer.parser(thinking)
        self._rest: list[ev.Event] = []

    @property
    def generated(self) -> list[int]:
        """Ids drawn so far."""
        return self._timeline.tokens[self._start + len(self._ids) :] if self.begun else []

    @property
    def counts(self) -> dict[str, int]:
        """See events.Saved."""
        return {
            "reused": self._reused - self._replayed,
            "replayed": self._replayed,
            "prefilled": self._prefilled,
            "generated": len(self.generated),
        }

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens per second; 0 when nothing was prefilled."""
        return _rate(self._prefilled, self._seconds["prefill"])

    @property
    def decode_rate(self) -> float:
        """Drawn tokens per second; 0 when nothing was drawn."""
        return _rate(len(self.generated), self._seconds["decode"])

    def run(self, room: int, cancel: Cancel) -> Iterator[ev.Event]:
        """Evaluate the prompt, draw the answer. room: tokens the context has left for it. Cancel ends it anywhere."""
        timeline = self._timeline
        limit = room if self._sampling.max_tokens is None else self._sampling.max_tokens
        if limit > room:
            yield ev.Notice(
                "clipped", f"the context has room for {room} more tokens, not {limit}: the answer is cut there"
            )
            limit = room
        new = self._ids[self._already :]
        total = len(timeline.pending) + len(new)
        yield ev.Prompt(reused=timeline.position, prefill=total, room=limit)
        timeline.extend(new)
        self.begun = True
        began = time.perf_counter()
        first = timeline.position
        # A boundary that others are to begin from is the end of a chunk.
        stops = [self._keep_at] if first < self._keep_at < first + total else []
        for stop in (*stops, first + total):
            for _ in timeline.prefill_to(stop, cancel):
                self._prefilled = timeline.position - first
                if timeline.position == self._keep_at:
                    self.kept = timeline.snapshot()
                if total > timeline.model.prefill_chunk:
                    yield ev.Progress("prefill", self._prefilled, total)
        self._seconds["prefill"] = time.perf_counter() - began
        if timeline.pending:
            self.finish("cancelled")
            return
        began = time.perf_counter()
        for token in timeline.generate(self._sampling, self._engine.renderer.stop_ids, limit, cancel):
            self._seconds["decode"] = time.perf_counter() - began
            yield from self.losses()
            yield from self._translate(self._parser.feed(token))
        self.finish(timeline.stop_reason)

    def finish(self, reason: str) -> None:
        """The answer ends here: "stop", "length" or "cancelled". Closing ids and the final record follow from it."""
        self.close = self._engine.renderer.close_turn(self._parser)
        self._rest = self._translate(self._parser.finish(reason))
        self.stop = "tool_calls" if reason == "stop" and self.calls else reason
        self.context.reply(self._parser.message())

    def closing_events(self) -> list[ev.Event]:
        """What is left to tell after `finish`."""
        return [*self.losses(), *self._rest, ev.Stopped(self.stop, len(self.generated)), self._speculation()]

    def losses(self) -> list[ev.Event]:
        """A notice for each drafter that was turned off since this was asked last."""
        speculator = self._timeline.speculator
        found: list[ev.Event] = []
        for loss in () if speculator is None else speculator.take_losses():
            left = f"with {loss.left} alone" if loss.left else "without drafts"
            found.append(ev.Notice("drafter-failed", f"the {loss.name} drafter failed ({loss.why}): going on {left}"))
        return found

    def _speculation(self) -> ev.Speculation:
        stats, speculator = self._timeline.decoding, self._timeline.speculator
        times = {"draft": stats.draft_seconds, "verify": stats.verify_seconds, "commit": stats.commit_seconds}
        return ev.Speculation(
            drafter="off" if speculator is None else speculator.drafter.name,
            failed=None if speculator is None else speculator.failure or None,
            window=1 if speculator is None else speculator.policy.rows,
            steps=stats.steps,
            tokens=stats.tokens,
            tokens_per_step=round(stats.tokens / stats.steps, 3) if stats.steps else 0.0,
            acceptance=stats.acceptance(),
            tested=[n for n in stats.tested if n],
            rows=stats.rows[1:],
            seconds={key: round(value, 6) for key, value in times.items()},
            inputs={} if speculator is None else speculator.describe(),
        )

    def _translate(self, events: Sequence[chat.ChatEvent]) -> list[ev.Event]:
        out: list[ev.Event] = []
        for event in events:
            if isinstance(event, chat.ThinkingDelta):
                out.append(ev.Thinking(event.text))
            elif isinstance(event, chat.TextDelta):
                out.append(ev.Text(event.text))
            elif isinstance(event, chat.Malformed):
                out.append(ev.Malformed(event.reason, event.detail))
            elif isinstance(event, chat.ToolCall):
                call = ev.ToolCall(event.id, event.name, event.arguments_json, event.index)
                self.calls.append({"id": call.id, "name": call.name, "arguments": call.arguments, "index": call.index})
                out.append(call)
                if call.name not in self.context.tool_names:
                    declared = ", ".join(self.context.tool_names) or "none"
                    out.append(
                        ev.Notice(
                            "undeclared-tool",
                            f"the model calls {call.name!r}, a tool nobody declared (declared: {declared}); "
                            "send a new prompt to go on, or a result that says so",
                        )
                    )
        return out

    def drafts(self, plan: RestorePlan | None, state: Snapshot) -> list[tuple[TurnDraft, Snapshot]]:
        """The turn as the store takes it, with the state after it. plan: what the state before it was restored from.

        Where a boundary is kept for its shared prefix, the prompt is a turn of its own, and the answer a second one.
        """
        timeline, start, begin, given = self._timeline, self._start, self._position, len(self._ids)
        drafts: list[tuple[TurnDraft, Snapshot]] = []
        if self.kept is not None:
            drafts.append((self._prompt_draft(plan), self.kept))
            plan, start, begin, given = None, start + given, self._keep_at, 0
        meta = self._meta("chat", given, begin, timeline.position) | {
            "stop": self.stop,
            "close": self.close,
            "context": self.context.to_json(),
            "answer": self._parser.message(),
            "calls": self.calls,
            "counts": self.counts,
        }
        drafts.append((TurnDraft(tuple(timeline.tokens[start:]), timeline.position, meta, plan), state))
        return drafts

    def _prompt_draft(self, plan: RestorePlan | None) -> TurnDraft:
        """The first prompt, evaluated up to `keep_at`; by itself, a prompt whose answer was cut before it began."""
        unanswered = self._engine.renderer.parser(self._thinking)
        context = self.context.copy()
        context.reply(unanswered.message())
        meta = self._meta("prompt", len(self._ids), self._position, self._keep_at) | {
            "stop": "prompt",
            "close": self._engine.renderer.close_turn(unanswered),
            "context": context.to_json(),
            "counts": self.counts | {"prefilled": self._keep_at - self._reused, "generated": 0},
        }
        return TurnDraft(tuple(self._ids), self._keep_at, meta, plan)

    def _meta(self, kind: str, prompt: int, begin: int, end: int) -> dict[str, Any]:
        return {
            "v": VERSION,
            "kind": kind,
            "prompt": prompt,
            "schedule": self._timeline.schedule.between(begin, end).to_json(),
            "sampling": self._sampling.to_json(),
            "given": dict(self._given) if prompt else {},
            "shared": self._already,
            "seconds": {key: round(value, 6) for key, value in self._seconds.items()},
            "runtime": self._engine.runtime(),
        }


def _rate(tokens: int, seconds: float) -> float:
    return round(tokens / seconds, 3) if tokens and seconds > 0 else 0.0
