"""A conversation: a stored session, a live timeline, and the chat format between them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from k3_sessions.errors import Damaged, SessionChanged

from k3cli.chat.renderer import RenderContext
from k3cli.engine import events as ev
from k3cli.engine import record
from k3cli.engine.answer import Answer, check_turn
from k3cli.engine.head import Head
from k3cli.engine.restore import Restored, restore_turn, shared_prefix
from k3cli.engine.sampling import Sampling
from k3cli.engine.saving import Saver, SaveResult
from k3cli.engine.timeline import Cancel, Timeline, never, room_for_answer
from k3cli.engine.transcript import transcript
from k3cli.errors import K3Error, SessionError, UsageError

if TYPE_CHECKING:
    from k3_sessions.types import Turn

    from k3cli.engine.engine import Engine

Mode = Literal["create", "resume", "fork", "ephemeral"]
Emit = Callable[[ev.Event], None]
SHARED_MARK = "shared-prefix"
"""Mark on a turn whose checkpoint stays because other sessions begin with the same tokens."""


def silent(event: ev.Event) -> None:
    """The `Emit` of callers who do not listen."""


class Conversation:
    """Open one with `Conversation.open`; use it as a context manager, or call `close`.

    name: session name, None for an ephemeral fork. head: the fixed part. turn_id: newest turn that is durable, None
    before the first.
    """

    def __init__(
        self,
        engine: Engine,
        store: Any,
        name: str | None,
        head: Head,
        saver: Saver | None,
        restored: Restored,
        context: RenderContext,
    ) -> None:
        """Use `open`. restored: where it goes on; a turn of None is a new session."""
        self.engine = engine
        self.name = name
        self.head = head
        self.turn_id = None if restored.turn is None else restored.turn.id
        self._store = store
        self._saver = saver
        self._timeline = restored.timeline
        self._plan = restored.plan
        self._replayed = restored.replayed
        self._context = context
        self._close = record.close_ids(restored.turn)
        self._calls = _open_calls(restored.turn)
        self._last: Timeline | None = None
        self._abandoned = ""
        self._busy = False

    @classmethod
    def open(
        cls,
        engine: Engine,
        store: Any,
        name: str,
        *,
        mode: Mode,
        new: str | None = None,
        at: str | None = None,
        head: Mapping[str, Any] | None = None,
        require_cached: bool = False,
        emit: Emit = silent,
        cancel: Cancel = never,
    ) -> Conversation:
        """Open a conversation and bring its state back.

        mode "create": a new session `name` with `head` (keys of head.OPTIONS; the rest are the format's defaults).
        mode "resume": an existing session `name`, at its newest turn or at turn id `at`. Going on from an older turn
        moves the session there with the first turn that is saved, not before.
        mode "fork": a new session `new` that shares the history of `name` up to `at` (default: the newest turn).
        mode "ephemeral": like fork, but nothing is written: no name, no turn.
        head: for existing sessions, options that must equal the recorded ones (absent or None: not asked).
        require_cached: refuse (SessionError) instead of evaluating old tokens again, other than pending ones.
        emit: gets Notice and Progress events while opening (the cost of a replay before it starts), and SessionOpened
        last. cancel: asked between steps of a replay; stopping there raises InterruptedWorkError.
        Raises UsageError, SessionError, ContextError, and the store's errors; nothing is left open then.
        """
        if mode == "create":
            return cls._create(engine, store, name, head, emit)
        session = store.session(name)
        fixed = Head.from_json(session.fixed.get("head", {}))
        fixed.require(head, name)
        if mode == "fork" and new is None:
            raise UsageError("a fork without a name", "the name of the new session")
        if mode == "fork" and store.exists(new):
            raise SessionError(f"session {new} exists", "a new name", "choose another name for the fork")
        writer = None
        try:
            if mode == "resume":
                # The lock comes first: what is restored below then stays the newest turn.
                writer = store.writer(name, create=False, identity=engine.identity, layout=engine.layout)
                session = store.session(name)
            turn_id = at or session.head
            restored = restore_turn(engine, store, turn_id, require_cached=require_cached, emit=emit, cancel=cancel)
            if mode == "fork":
                store.fork(name, new, at=turn_id)
                writer = store.writer(new, create=False, identity=engine.identity, layout=engine.layout)
            saver = None if writer is None else Saver(writer)
            if saver is not None and mode == "resume" and turn_id != session.head:
                saver.move_to = turn_id
                emit(_move_notice(name, turn_id))
            shown = {"resume": name, "fork": new, "ephemeral": None}[mode]
            assert restored.turn is not None
            context = record.context_after(restored.turn)
            found = cls(engine, store, shown, fixed, saver, restored, context)
        except BaseException:
            if writer is not None:
                writer.close()
            raise
        how = {"resume": "resumed", "fork": "forked", "ephemeral": "ephemeral"}[mode]
        emit(found._opened(how, None if mode == "resume" else name, restored.reused, restored.replayed))
        return found

    @classmethod
    def _create(
        cls, engine: Engine, store: Any, name: str, asked: Mapping[str, Any] | None, emit: Emit
    ) -> Conversation:
        renderer = engine.renderer
        head = Head.new(asked, thinking=renderer.default_thinking, effort=renderer.default_effort)
        # Rendered once already, so that a head the format can't say is refused before the session exists.
        renderer.render_head(head.tools, head.thinking, head.effort, head.system)
        context = renderer.new_context(head.thinking, head.tools)
        writer = store.writer(
            name,
            create=True,
            identity=engine.identity,
            layout=engine.layout,
            fixed={"head": head.to_json(), "model": engine.name},
        )
        empty = Restored(engine.timeline(), None, None, 0, 0)
        found = cls(engine, store, name, head, Saver(writer), empty, context)
        emit(found._opened("created", None, 0, 0))
        return found

    @property
    def queued(self) -> int:
        """Turns that live in memory only because saving failed."""
        return 0 if self._saver is None else self._saver.queued

    def turn(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling: Sampling | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        tool_choice: str | None = None,
        response_format: Mapping[str, Any] | None = None,
        cancel: Cancel = never,
    ) -> Iterator[ev.Event]:
        """Run one turn: render only `messages`, evaluate, answer, save. Yields events as they happen, `Done` last.

        messages: new user, system or tool messages (chat.messages shapes), at least one. tools: declared from here on
        by the format's append-only message. Refused before anything is evaluated: no message, answers to calls nobody
        made, no room in the context. A cancel between any two tokens ends the answer; what was said is saved and
        marked. Closing the iterator early counts as a cancel. When saving fails, `Notice` and `NotSaved` say so, the
        conversation goes on in memory, and the next successful save contains every turn.
        """
        if self._busy:
            raise K3Error("a turn of this conversation is still running", "one turn at a time", "finish or close it")
        self._recover()
        asked = sampling or Sampling()
        resolved = asked if asked.seed is not None else replace(asked, seed=self.head.seed)
        messages = check_turn(messages, self.open_calls())
        context = self._context.copy()
        renderer = self.engine.renderer
        declared = [{"role": "system", "tools": list(tools)}] if tools else []
        ids = list(self._close)
        if not self._timeline.tokens:
            ids += renderer.render_head(self.head.tools, self.head.thinking, self.head.effort, self.head.system)
        ids += renderer.render_messages([*declared, *messages], context)
        ids += renderer.render_tail(tool_choice, response_format, context)
        ids += renderer.generation_prompt(self.head.thinking)
        room = room_for_answer(len(self._timeline.tokens), len(ids), self._timeline.limit)
        given = {"messages": list(messages)} | {
            key: value
            for key, value in (("tools", list(tools)), ("tool_choice", tool_choice), ("format", response_format))
            if value
        }
        return self._run(ids, given, resolved, room, context, cancel)

    def _run(
        self,
        ids: list[int],
        given: dict[str, Any],
        sampling: Sampling,
        room: int,
        context: RenderContext,
        cancel: Cancel,
    ) -> Iterator[ev.Event]:
        self._busy = True
        fresh = not self._timeline.tokens and self._saver is not None
        answer: Answer | None = None
        try:
            keep_at = already = 0
            if fresh:
                keep_at = yield from self._share(ids)
                already = len(self._timeline.tokens)
            answer = Answer(
                self.engine,
                self._timeline,
                ids,
                given,
                sampling,
                context,
                self.head.thinking,
                already=already,
                keep_at=keep_at,
                replayed=self._replayed,
            )
            self._replayed = 0
            yield from answer.run(room, cancel)
        except GeneratorExit:
            # The reader went away between two steps: a cancel like any other, but there is nobody to tell.
            if answer is not None and answer.begun and not self._timeline.torn:
                answer.finish("cancelled")
                for _ in self._finish(answer):
                    pass
            elif fresh:
                self._timeline, self._plan = self.engine.timeline(), None
            self._busy = False
            raise
        except BaseException as error:
            self._abandoned = f"{type(error).__name__}: {error}"
            self._busy = False
            raise
        try:
            yield from self._finish(answer)
        finally:
            self._busy = False

    def _share(self, ids: list[int]) -> Generator[ev.Event, None, int]:
        """Start a new session from stored state with the same first tokens, where there is some.

        Returns the position at which to keep a boundary of our own (0: nowhere): some session has evaluated the tokens
        up to there as well, but none has kept its state.
        """
        plan, matched = shared_prefix(self.engine, self._store, ids)
        restored = None
        if plan is not None:
            try:
                restored = self._store.restore(plan, self.engine.identity, self.engine.layout)
            except (Damaged, SessionChanged) as error:
                yield ev.Notice(
                    "shared-prefix-unusable",
                    f"{plan.boundary} tokens are known from another session, but their state can't be read ({error}): "
                    "evaluating them",
                )
        if plan is not None and restored is not None:
            turns = record.lineage(self._store, plan.turn)
            timeline = self.engine.restored_timeline(restored, ids[: plan.boundary])
            timeline.schedule = record.recorded_schedule(turns, 0, plan.boundary)
            self._timeline = timeline
            self._plan = plan
            yield ev.Notice(
                "shared-prefix",
                f"the first {plan.boundary} tokens are known from another session: their state is reused",
            )
        return matched if matched > self._timeline.position else 0

    def _finish(self, answer: Answer) -> Iterator[ev.Event]:
        """Save the turn and take note of it."""
        timeline = self._timeline
        yield from answer.closing_events()
        self._context = answer.context
        self._close = answer.close
        self._calls = answer.calls
        counts = answer.counts
        if self._saver is None:
            self._last = timeline.fork()
            yield ev.NotSaved("ephemeral", **counts, queued=0)
            yield ev.Done(answer.stop, None, False, answer.prefill_rate, answer.decode_rate)
            return
        kept = answer.kept
        if kept is not None:
            self._saver.save(answer.prompt_draft(self._plan), kept)
            self._plan = None
        result = self._saver.save(answer.draft(self._plan), timeline.snapshot())
        self._plan = None
        if result.error is not None:
            self._last = timeline.fork()
        yield from self._saved(result, answer.counts, kept is not None)
        yield ev.Done(
            answer.stop,
            self.turn_id if result.report is not None else None,
            result.report is not None,
            answer.prefill_rate,
            answer.decode_rate,
        )

    def _saved(self, result: SaveResult, counts: Mapping[str, int], mark: bool = False) -> Iterator[ev.Event]:
        assert self._saver is not None
        assert self.name is not None
        if result.error is not None:
            yield ev.Notice(
                "not-saved",
                f"this turn could not be saved ({result.error}); the conversation goes on in memory, and the next "
                "save will contain it",
            )
            yield ev.NotSaved(str(result.error), **counts, queued=self.queued)
            return
        report = result.report
        assert report is not None
        self._last = None
        self.turn_id = report.turn.id
        for line in report.notices:
            yield ev.Notice("store", line)
        for evicted in report.evicted:
            yield ev.Notice("evicted", f"the state of session {evicted} was dropped to make room; its turns are kept")
        if mark and report.turn.parent is not None:
            self._store.mark(self.name, report.turn.parent, SHARED_MARK)
        yield ev.Saved(
            session=self.name,
            turn=report.turn.id,
            position=report.turn.position,
            pending=report.turn.total - report.turn.position,
            **counts,
            bytes_written=result.bytes_written,
            bytes_pages=result.bytes_pages,
            bytes_checkpoint=result.bytes_checkpoint,
            seconds=round(result.seconds, 6),
            turns=result.turns,
        )

    def save(self) -> Iterator[ev.Event]:
        """Try again to save the turns that are queued in memory. Nothing happens when none are."""
        if self._saver is None or not self._saver.queued:
            return
        none = dict.fromkeys(("reused", "replayed", "prefilled", "generated"), 0)
        yield from self._saved(self._saver.retry(), none)

    def fork(self, new: str | None) -> Conversation:
        """A conversation that goes on from here independently, sharing state in memory: session `new`, or ephemeral.

        SessionError while turns wait to be saved, since a stored fork can only share what is stored.
        """
        self._recover()
        if new is not None and self.queued:
            raise SessionError(
                f"{self.queued} turns of {self.name} are in memory only", "a saved session", "save it first, then fork"
            )
        turn = None if self.turn_id is None else self._store.turn(self.turn_id)
        saver, plan = None, None
        if new is not None:
            if turn is None:
                raise SessionError(
                    f"session {self.name} has no turn yet", "a turn to fork from", "send a message first"
                )
            if self._saver is None:
                raise SessionError("an ephemeral fork is not on disk", "a saved session", "fork the saved one")
            self._store.fork(self.name, new, at=turn.id)
            saver = Saver(
                self._store.writer(new, create=False, identity=self.engine.identity, layout=self.engine.layout)
            )
            plan = self._store.plan(turn.id, self.engine.identity, self.engine.layout)
        restored = Restored(self._timeline.fork(), turn, plan, self._timeline.position, 0)
        child = Conversation(self.engine, self._store, new, self.head, saver, restored, self._context.copy())
        child._close = list(self._close)
        child._calls = list(self._calls)
        return child

    def undo(self, *, emit: Emit = silent, cancel: Cancel = never) -> str | None:
        """Go back to the turn before the newest; returns its id. The session moves there with the next saved turn."""
        if self._saver is None:
            raise SessionError("an ephemeral fork keeps no turns", "a saved session")
        if self.queued:
            raise SessionError(f"{self.queued} turns are in memory only", "a saved session", "save it first, then undo")
        if self.turn_id is None:
            raise SessionError(f"session {self.name} has no turn yet", "a turn to undo")
        parent = self._store.turn(self.turn_id).parent
        if parent is not None and self._store.turn(parent).meta.get("kind") == "prompt":
            parent = self._store.turn(parent).parent
        if parent is None:
            raise SessionError(
                f"session {self.name} has one turn only", "an earlier turn to go back to", "start a new session"
            )
        assert self.name is not None
        restored = restore_turn(self.engine, self._store, parent, require_cached=False, emit=emit, cancel=cancel)
        emit(_move_notice(self.name, parent))
        self._saver.move_to = parent
        self._adopt(restored)
        return self.turn_id

    def open_calls(self) -> list[dict[str, Any]]:
        """Tool calls of the last answer that still wait for a result: `id`, `name`, `arguments`, `index`."""
        return self._calls[self._context.tool_index :]

    def transcript(self) -> list[dict[str, Any]]:
        """The whole conversation as messages, read back from its token ids."""
        return transcript(self.engine.renderer, self._timeline.tokens)

    def info(self) -> dict[str, Any]:
        """Name, head, turn, tokens, position, pending, context limit, queued turns, for `/info` and --json."""
        timeline = self._timeline
        return {
            "session": self.name,
            "model": self.engine.name,
            "turn": self.turn_id,
            "tokens": len(timeline.tokens),
            "position": timeline.position,
            "pending": len(timeline.pending),
            "context_limit": timeline.limit,
            "queued": self.queued,
            "thinking": self.head.thinking,
            "effort": self.head.effort,
            "system": self.head.system is not None,
            "tools": list(self._context.tool_names),
            "seed": self.head.seed,
        }

    def close(self) -> None:
        """Release the session lock and the state. Queued turns that could not be saved are lost; `queued` tells."""
        if self._saver is not None:
            self._saver.close()
        self._timeline.close()
        self._last = None

    def __enter__(self) -> Conversation:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _recover(self) -> None:
        """After a turn that failed half way: back to the state of the last whole turn, wherever that is."""
        if not self._abandoned:
            return
        if self._last is not None:
            self._timeline = self._last.fork()
        elif self.turn_id is not None:
            self._adopt(
                restore_turn(self.engine, self._store, self.turn_id, require_cached=False, emit=silent, cancel=never)
            )
        else:
            self._timeline = self.engine.timeline()
            self._plan = None
        self._abandoned = ""

    def _adopt(self, restored: Restored) -> None:
        assert restored.turn is not None
        self._timeline = restored.timeline
        self._plan = restored.plan
        self._replayed = restored.replayed
        self.turn_id = restored.turn.id
        self._close = record.close_ids(restored.turn)
        self._context = record.context_after(restored.turn)
        self._calls = _open_calls(restored.turn)

    def _opened(self, how: str, source: str | None, reused: int, replayed: int) -> ev.SessionOpened:
        return ev.SessionOpened(
            name=self.name,
            how=how,
            turn=self.turn_id,
            source=source,
            tokens=len(self._timeline.tokens),
            reused=reused,
            replayed=replayed,
            pending=len(self._timeline.pending),
        )


def _open_calls(turn: Turn | None) -> list[dict[str, Any]]:
    """All calls of a recorded answer; how many are answered is in the render context."""
    return [] if turn is None else list(turn.meta.get("calls") or [])


def _move_notice(name: str, turn_id: str) -> ev.Notice:
    return ev.Notice(
        "older-turn",
        f"going on from turn {turn_id[:12]}: the turns after it leave session {name} when the next turn is saved "
        f"(`k3 fork {name}` before that keeps them under another name)",
    )
