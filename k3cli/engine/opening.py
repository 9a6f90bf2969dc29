"""How a conversation begins: locks, head, and the state to go on from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from k3cli.engine import events as ev
from k3cli.engine import record
from k3cli.engine.head import Head
from k3cli.engine.limits import Cancel
from k3cli.engine.restore import Restored, restore_turn
from k3cli.engine.saving import Saver
from k3cli.errors import SessionError, UsageError

if TYPE_CHECKING:
    from k3_sessions.types import RestorePlan

    from k3cli.chat.renderer import RenderContext
    from k3cli.engine.engine import Engine

Mode = Literal["create", "resume", "fork", "ephemeral"]
Emit = Callable[[ev.Event], None]


def silent(event: ev.Event) -> None:
    """The `Emit` of callers who do not listen."""


@dataclass(frozen=True)
class Opened:
    """Everything a conversation begins with. saver is None when nothing of it is to be saved.

    how: as in events.SessionOpened. source: the session it was forked from.
    """

    name: str | None
    head: Head
    saver: Saver | None
    restored: Restored
    context: RenderContext
    how: str
    source: str | None = None


def create(engine: Engine, store: Any, name: str, asked: Mapping[str, Any] | None) -> Opened:
    """A new session; it appears in the store with its first turn."""
    renderer = engine.renderer
    head = Head.new(asked, thinking=renderer.default_thinking, effort=renderer.default_effort)
    # Rendered once already, so that a head the format can't say is refused here and not with the first turn.
    renderer.render_head(head.tools, head.thinking, head.effort, head.system)
    context = renderer.new_context(head.thinking, head.tools)
    writer = store.writer(
        name,
        create=True,
        identity=engine.identity,
        layout=engine.layout,
        fixed={"head": head.to_json(), "model": engine.name},
    )
    return Opened(name, head, Saver(store, writer), Restored(engine.timeline(), None, None, 0, 0), context, "created")


def resume(
    engine: Engine,
    store: Any,
    name: str,
    *,
    at: str | None,
    asked: Mapping[str, Any] | None,
    require_cached: bool,
    emit: Emit,
    cancel: Cancel,
) -> Opened:
    """An existing session, at its newest turn or at turn `at`."""
    head = head_of(store, name, asked)
    # The lock comes first: what is restored below then stays the newest turn.
    writer = store.writer(name, create=False, identity=engine.identity, layout=engine.layout)
    try:
        newest = store.session(name).head
        turn_id = at or newest
        if turn_id != newest and all(turn.id != turn_id for turn in store.log(name)):
            raise SessionError(f"session {name} has no turn {turn_id[:10]}", do=f"`k3 log {name}` lists them")
        restored = restore_turn(engine, store, turn_id, require_cached=require_cached, emit=emit, cancel=cancel)
        saver = Saver(store, writer)
        if turn_id != newest:
            saver.move_to = turn_id
            emit(move_notice(name, turn_id))
        return Opened(name, head, saver, restored, _context(restored), "resumed")
    except BaseException:
        writer.close()
        raise


def fork(
    engine: Engine,
    store: Any,
    name: str,
    new: str | None,
    *,
    at: str | None,
    asked: Mapping[str, Any] | None,
    require_cached: bool,
    emit: Emit,
    cancel: Cancel,
) -> Opened:
    """Session `new` with the history of `name` up to `at`; None: in memory only. Written only if it restores."""
    head = head_of(store, name, asked)
    if new is not None and store.exists(new):
        raise SessionError(f"session {new} exists", "a new name", "choose another name for the fork")
    turn_id = at or store.session(name).head
    restored = restore_turn(engine, store, turn_id, require_cached=require_cached, emit=emit, cancel=cancel)
    if new is None:
        return Opened(None, head, None, restored, _context(restored), "ephemeral", name)
    return Opened(new, head, _forked(engine, store, name, new, turn_id), restored, _context(restored), "forked", name)


def fork_stored(
    engine: Engine, store: Any, name: str | None, new: str, turn_id: str | None
) -> tuple[Saver, RestorePlan]:
    """Session `new` with the history of the open session `name` up to its newest turn; plan: of the state there."""
    if turn_id is None:
        raise SessionError(f"session {name} has no turn yet", "a turn to fork from", "send a message first")
    return _forked(engine, store, name, new, turn_id), store.plan(turn_id, engine.identity, engine.layout)


def _forked(engine: Engine, store: Any, name: str | None, new: str, turn_id: str) -> Saver:
    store.fork(name, new, at=turn_id)
    return Saver(store, store.writer(new, create=False, identity=engine.identity, layout=engine.layout))


def turn_before(store: Any, name: str, turn_id: str | None) -> str:
    """The turn to go back to from turn `turn_id`, the newest of session `name`; never a prompt without its answer."""
    if turn_id is None:
        raise SessionError(f"session {name} has no turn yet", "a turn to undo")
    parent = store.turn(turn_id).parent
    if parent is not None and store.turn(parent).meta.get("kind") == "prompt":
        parent = store.turn(parent).parent
    if parent is None:
        raise SessionError(f"session {name} has one turn only", "an earlier turn to go back to", "start a new session")
    found: str = parent
    return found


def open_session(
    engine: Engine,
    store: Any,
    name: str,
    *,
    mode: Mode,
    new: str | None,
    at: str | None,
    asked: Mapping[str, Any] | None,
    require_cached: bool,
    emit: Emit,
    cancel: Cancel,
) -> Opened:
    """See Conversation.open."""
    if mode == "create":
        return create(engine, store, name, asked)
    rest: dict[str, Any] = {"at": at, "asked": asked, "require_cached": require_cached, "emit": emit, "cancel": cancel}
    if mode == "resume":
        return resume(engine, store, name, **rest)
    if mode == "fork" and new is None:
        raise UsageError("a fork without a name", "the name of the new session")
    return fork(engine, store, name, new if mode == "fork" else None, **rest)


def head_of(store: Any, name: str, asked: Mapping[str, Any] | None) -> Head:
    """The recorded head of a session, checked against what was asked for."""
    head = Head.from_json(store.session(name).fixed.get("head", {}))
    head.require(asked, name)
    return head


def move_notice(name: str, turn_id: str) -> ev.Notice:
    """Said when a session goes on from an older turn: what will happen to the newer ones, and how to keep them."""
    return ev.Notice(
        "older-turn",
        f"going on from turn {turn_id[:10]}: the turns after it leave session {name} when the next turn is saved "
        f"(`k3 fork {name}` before that keeps them under another name)",
    )


def _context(restored: Restored) -> RenderContext:
    assert restored.turn is not None
    return record.context_after(restored.turn)
