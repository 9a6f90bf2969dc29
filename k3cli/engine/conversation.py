"""A conversation: a stored session, a live timeline, and the chat format between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from k3cli.engine.events import Event
from k3cli.engine.head import Head
from k3cli.engine.sampling import Sampling
from k3cli.engine.timeline import Cancel, never

if TYPE_CHECKING:
    from k3cli.engine.engine import Engine

Mode = Literal["create", "resume", "fork", "ephemeral"]
Emit = Callable[[Event], None]


def silent(event: Event) -> None:
    """The `Emit` of callers who do not listen."""


class Conversation:
    """Open one with `Conversation.open`; use it as a context manager, or call `close`."""

    name: str | None
    """Session name; None for an ephemeral fork."""
    head: Head
    turn_id: str | None
    """Newest turn that is durable, None before the first."""
    queued: int
    """Turns that live in memory only because saving failed."""

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

        mode "create": a new session `name` with `head` (keys of head.OPTIONS; the rest are defaults).
        mode "resume": an existing session `name`, at its newest turn or at turn id `at`. Going on from an older turn
        moves the session there with the first turn that is saved, not before.
        mode "fork": a new session `new` that shares the history of `name` up to `at` (default: the newest turn).
        mode "ephemeral": like fork, but nothing is written: no name, no turn.
        head: for existing sessions, options that must equal the recorded ones (absent or None: not asked).
        require_cached: refuse (SessionError) instead of evaluating old tokens again, other than pending ones.
        emit: gets Notice and Progress events while opening (the cost of a replay before it starts), and SessionOpened
        last. cancel: asked between steps of a replay; stopping there raises Interrupted.
        Raises UsageError, SessionError, ContextError, and the store's errors; nothing is left open then.
        """
        raise NotImplementedError

    def turn(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling: Sampling | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        tool_choice: str | None = None,
        response_format: Mapping[str, Any] | None = None,
        cancel: Cancel = never,
    ) -> Iterator[Event]:
        """Run one turn: render only `messages`, evaluate, answer, save. Yields events as they happen, `Done` last.

        messages: new user, system or tool messages (chat.messages shapes), at least one. tools: declared from here on
        by the format's append-only message. Refused before anything is evaluated: no message, answers to calls nobody
        made, no room in the context. A cancel between any two tokens ends the answer; what was said is saved and
        marked. Closing the iterator early counts as a cancel. When saving fails, `Notice` and `NotSaved` say so, the
        conversation goes on in memory, and the next successful save contains every turn.
        """
        raise NotImplementedError

    def fork(self, new: str | None) -> Conversation:
        """A conversation that goes on from here independently, sharing state in memory: session `new`, or ephemeral."""
        raise NotImplementedError

    def undo(self, *, emit: Emit = silent, cancel: Cancel = never) -> str | None:
        """Go back to the turn before the newest; returns its id. The session moves there with the next saved turn."""
        raise NotImplementedError

    def save(self) -> Iterator[Event]:
        """Try again to save the turns that are queued in memory. Nothing happens when none are."""
        raise NotImplementedError

    def open_calls(self) -> list[dict[str, Any]]:
        """Tool calls of the last answer that still wait for a result: `id`, `name`, `arguments`, `index`."""
        raise NotImplementedError

    def transcript(self) -> list[dict[str, Any]]:
        """The whole conversation as messages, read back from its token ids."""
        raise NotImplementedError

    def info(self) -> dict[str, Any]:
        """Name, head, turn, tokens, position, pending, context limit, queued turns, for `/info` and --json."""
        raise NotImplementedError

    def close(self) -> None:
        """Release the session lock and the state. Queued turns that could not be saved are lost; `queued` tells."""
        raise NotImplementedError

    def __enter__(self) -> Conversation:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
