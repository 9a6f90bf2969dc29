"""A conversation: a stored session, a live timeline, and the chat format between them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from k3cli.engine import events as ev
from k3cli.engine import record
from k3cli.engine.answer import Answer, check_turn, render_prompt
from k3cli.engine.limits import Cancel, never, room_for_answer
from k3cli.engine.opening import Emit, Mode, Opened, fork_stored, move_notice, open_session, silent, turn_before
from k3cli.engine.restore import Restored, restore_turn
from k3cli.engine.sampling import Sampling
from k3cli.engine.sharing import start_shared
from k3cli.engine.standing import Standing
from k3cli.errors import K3Error, SessionError

if TYPE_CHECKING:
    from k3cli.chat.renderer import RenderContext
    from k3cli.engine.engine import Engine

__all__ = ["Conversation", "Emit", "Mode", "silent"]


class Conversation(Standing):
    """Open one with `Conversation.open`; use it as a context manager, or call `close`. Its fields: see `Standing`."""

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
        opened = open_session(
            engine,
            store,
            name,
            mode=mode,
            new=new,
            at=at,
            asked=head,
            require_cached=require_cached,
            emit=emit,
            cancel=cancel,
        )
        found = cls(engine, store, opened)
        timeline, restored = found._timeline, opened.restored
        emit(
            ev.SessionOpened(
                name=opened.name,
                how=opened.how,
                turn=found.turn_id,
                source=opened.source,
                tokens=len(timeline.tokens),
                reused=restored.reused,
                replayed=restored.replayed,
                pending=len(timeline.pending),
            )
        )
        return found

    def turn(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling: Sampling | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        tool_choice: str | None = None,
        response_format: Mapping[str, Any] | None = None,
        cancel: Cancel = never,
        wait: bool = True,
    ) -> Iterator[ev.Event]:
        """Run one turn: render only `messages`, evaluate, answer, save. Yields events as they happen, `Done` last.

        messages: new user, system or tool messages (chat.messages shapes), at least one. tools: declared from here on
        by the format's append-only message. Refused before anything is evaluated: no message, answers to calls nobody
        made, no room in the context. A cancel between any two tokens ends the answer; what was said is saved and
        marked. Closing the iterator early counts as a cancel. When saving fails, `Notice` and `NotSaved` say so, the
        conversation goes on in memory, and the next successful save contains every turn.
        wait: False ends the iterator as soon as the save has begun, behind the next turn. `Saved` and `Done` come from
        `settle`, or during the prefill of the next turn; that turn's own save waits for this one.
        """
        if self._busy:
            raise K3Error("a turn of this conversation is still running", "one turn at a time", "finish or close it")
        self._recover()
        asked = sampling or Sampling()
        resolved = asked if asked.seed is not None else replace(asked, seed=self.head.seed)
        messages = check_turn(messages, self.open_calls())
        context = self._context.copy()
        given = {"messages": list(messages)} | {
            key: value
            for key, value in (
                ("tools", list(tools)),
                ("tool_choice", tool_choice),
                ("response_format", response_format),
            )
            if value
        }
        first = not self._timeline.tokens
        ids = [*self._close, *render_prompt(self.engine.renderer, self.head, first, given, context)]
        room = room_for_answer(len(self._timeline.tokens), len(ids), self._timeline.limit)
        return self._run(ids, given, resolved, room, context, cancel, wait)

    def _run(
        self,
        ids: list[int],
        given: dict[str, Any],
        sampling: Sampling,
        room: int,
        context: RenderContext,
        cancel: Cancel,
        wait: bool,
    ) -> Iterator[ev.Event]:
        if self._busy or len(self._timeline.tokens) + len(ids) + room != self._timeline.limit:
            raise K3Error("the conversation went on since this turn was asked for", "turns run in the order asked")
        self._busy = True
        fresh = not self._timeline.tokens and self._saves.saver is not None
        answer: Answer | None = None
        try:
            keep_at = 0
            if fresh:
                shared = start_shared(self.engine, self._store, ids)
                self._timeline, self._plan, keep_at = shared.timeline, shared.plan, shared.keep_at
                yield from shared.notices
            answer = Answer(
                self.engine,
                self._timeline,
                ids,
                given,
                sampling,
                context,
                self.head.thinking,
                already=len(self._timeline.tokens) if fresh else 0,
                keep_at=keep_at,
                replayed=self._replayed,
            )
            for event in answer.run(room, cancel):
                yield event
                if isinstance(event, (ev.Prompt, ev.Progress)):  # never in the middle of an answer
                    yield from self._saves.told()
            yield from answer.closing_events()
        except GeneratorExit:
            # The reader went away between two steps: a cancel like any other, but there is nobody to tell.
            if answer is not None and answer.begun:
                if not answer.stop:
                    answer.finish("cancelled")
                self._conclude(answer, wait)
            elif fresh:
                self._timeline, self._plan = self.engine.timeline(), None
            self._busy = False
            if wait:
                self._saves.forget()
            raise
        except BaseException as error:
            self._abandoned = f"{type(error).__name__}: {error}"
            self._busy = False
            raise
        try:
            self._conclude(answer, wait)
        finally:
            self._busy = False
        yield from answer.losses()  # a drafter may fail in what it keeps
        yield from self._saves.told()

    def _conclude(self, answer: Answer, wait: bool) -> None:
        """Take note of the turn and begin to save it; wait: until it is durable or refused."""
        self._context, self._close, self._calls = answer.context, answer.close, answer.calls
        self._replayed = 0
        done = ev.Done(answer.stop, None, False, answer.prefill_rate, answer.decode_rate)
        drafts = answer.drafts(self._plan, self._timeline.snapshot())
        self._plan = None
        self._saves.begin(drafts, self._timeline.fork(), answer.counts, done)
        if wait:
            self._saves.take()

    def fork(self, new: str | None) -> Conversation:
        """A conversation that goes on from here independently, sharing state in memory: session `new`, or ephemeral.

        SessionError while turns wait to be saved, since a stored fork can only share what is stored.
        """
        if new is not None:
            self._saves.take()
        self._recover()
        saver, plan = None, None
        if new is not None:
            self._all_saved("fork")
            if self._saves.saver is None:
                raise SessionError("an ephemeral fork is not on disk", "a saved session", "fork the saved one")
            saver, plan = fork_stored(self.engine, self._store, self.name, new, self.turn_id)
        turn = None if self.turn_id is None else self._store.turn(self.turn_id)
        restored = Restored(self._timeline.fork(), turn, plan, self._timeline.position, 0)
        how = "ephemeral" if new is None else "forked"
        child = Conversation(
            self.engine, self._store, Opened(new, self.head, saver, restored, self._context.copy(), how, self.name)
        )
        child._close, child._calls = list(self._close), list(self._calls)
        if saver is None:
            child._saves.last = child._timeline.fork()
        return child

    def undo(self, *, emit: Emit = silent, cancel: Cancel = never) -> str | None:
        """Go back to the turn before the newest; returns its id. The session moves there with the next saved turn."""
        if self._saves.saver is None:
            raise SessionError("an ephemeral fork keeps no turns", "a saved session")
        assert self.name is not None
        self._saves.take()
        self._all_saved("undo")
        parent = turn_before(self._store, self.name, self.turn_id)
        restored = restore_turn(self.engine, self._store, parent, require_cached=False, emit=emit, cancel=cancel)
        emit(move_notice(self.name, parent))
        self._saves.saver.move_to = parent
        self._adopt(restored, record.context_after(self._store.turn(parent)))
        return self.turn_id
