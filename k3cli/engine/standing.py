"""Where a conversation stands between two turns: its timeline, what the next prompt needs, and what is saved."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Self

from k3cli.engine import events as ev
from k3cli.engine import record
from k3cli.engine.limits import never
from k3cli.engine.opening import Opened, silent
from k3cli.engine.restore import Restored, restore_turn
from k3cli.engine.saves import Saves
from k3cli.engine.timeline import Timeline
from k3cli.engine.transcript import transcript
from k3cli.errors import SessionError
from k3cli.words import counted

if TYPE_CHECKING:
    from k3_sessions.types import RestorePlan

    from k3cli.chat.renderer import RenderContext
    from k3cli.engine.engine import Engine


class Standing:
    """The part of a conversation that outlasts a turn. For one thread at a time.

    name: session name, None for an ephemeral fork. head: the fixed part. turn_id: newest turn that is known to be
    durable, None before the first; a save that ends meanwhile is known with the next call.
    """

    _timeline: Timeline
    _plan: RestorePlan | None
    _replayed: int
    _context: RenderContext
    _close: list[int]
    _calls: list[dict[str, Any]]

    def __init__(self, engine: Engine, store: Any, opened: Opened) -> None:
        """Use `open`."""
        self.engine = engine
        self.name = opened.name
        self.head = opened.head
        self._store = store
        self._saves = Saves(opened.saver, opened.name)
        self._abandoned = ""
        self._busy = False
        self._adopt(opened.restored, opened.context)

    @property
    def turn_id(self) -> str | None:
        return self._saves.turn_id

    @property
    def queued(self) -> int:
        """Turns that live in memory only because saving failed. One that is being saved counts when that has failed."""
        return self._saves.queued

    @property
    def saving(self) -> bool:
        """A turn is on its way to the disk: not durable yet."""
        return self._saves.running

    def settle(self, timeout: float | None = None) -> list[ev.Event]:
        """Wait for the save under way, `timeout` seconds at most; what there is to tell: `Saved` or `NotSaved`, `Done`.

        [] when nothing ended since it was asked last. An error that is no refusal of the store is raised.
        """
        return list(self._saves.told(timeout))

    def save(self) -> Iterator[ev.Event]:
        """Try again to save the turns that are queued in memory. Nothing happens when none are."""
        yield from self._saves.told(None)
        self._saves.retry()
        yield from self._saves.told(None)

    def open_calls(self) -> list[dict[str, Any]]:
        """Tool calls of the last answer that still wait for a result: `id`, `name`, `arguments`, `index`."""
        return self._calls[self._context.tool_index :]

    def transcript(self) -> list[dict[str, Any]]:
        """The whole conversation as messages, read back from its token ids."""
        return transcript(self.engine.renderer, self._timeline.tokens)

    def info(self) -> dict[str, Any]:
        """Name, head, turn, tokens, position, pending, context limit, turns not on disk, for `/info` and --json."""
        self._saves.take(0)
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
            "saving": self.saving,
            "thinking": self.head.thinking,
            "effort": self.head.effort,
            "system": self.head.system is not None,
            "tools": list(self._context.tool_names),
            "seed": self.head.seed,
        }

    def close(self, *, wait: bool = True) -> None:
        """Release the session lock and the state, after the save under way; use `settle` before to learn how it ended.

        Queued turns that could not be saved are lost; `queued` tells. wait: False is for a process that ends at once:
        the turn being saved is then there or not, as after a crash.
        """
        self._timeline.close()
        self._saves.close(wait=wait)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        self.close(wait=kind is None or issubclass(kind, Exception))

    def _recover(self) -> None:
        """After a turn that failed half way: back to the state of the last whole turn, wherever that is."""
        if not self._abandoned:
            return
        if self._saves.last is not None:
            self._timeline = self._saves.last.fork()
        elif self.turn_id is not None:
            again = restore_turn(
                self.engine, self._store, self.turn_id, require_cached=False, emit=silent, cancel=never
            )
            self._adopt(again, record.context_after(self._store.turn(self.turn_id)))
        else:
            self._timeline, self._plan = self.engine.timeline(), None
        self._abandoned = ""

    def _adopt(self, restored: Restored, context: RenderContext) -> None:
        turn = restored.turn
        self._timeline = restored.timeline
        self._plan = restored.plan
        self._replayed = restored.replayed
        self._context = context
        self._saves.turn_id = None if turn is None else turn.id
        self._close = record.close_ids(turn)
        # All calls of the recorded answer; how many of them are answered is in the context.
        self._calls = [] if turn is None else list(turn.meta.get("calls") or [])

    def _all_saved(self, what: str) -> None:
        if self.queued:
            raise SessionError(
                f"{counted(self.queued, 'turn')} of {self.name} in memory only",
                "a saved session",
                f"save it first, then {what}",
            )
