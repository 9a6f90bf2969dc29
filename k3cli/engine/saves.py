"""What a conversation knows of its saves: the newest durable turn, the one on its way, and what there is to tell."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from k3cli.engine import events as ev
from k3cli.engine.saving import Saver, save_events

if TYPE_CHECKING:
    from k3_sessions.types import TurnDraft

    from k3cli.engine.snapshot import Snapshot
    from k3cli.engine.timeline import Timeline

NO_COUNTS = dict.fromkeys(("reused", "replayed", "prefilled", "generated"), 0)


class Saves:
    """The saves of one conversation, seen from its own thread.

    saver: None when nothing of the conversation is to be saved. turn_id: newest turn known to be durable.
    last: a fork of the newest whole turn, as long as it is not known to be durable.
    """

    def __init__(self, saver: Saver | None, name: str | None) -> None:
        self.saver = saver
        self.turn_id: str | None = None
        self.last: Timeline | None = None
        self._name = name
        self._counts = dict(NO_COUNTS)  # of the turn that is being saved, as in events.Saved
        self._done: ev.Done | None = None
        self._untold: deque[ev.Event] = deque()

    @property
    def queued(self) -> int:
        """Turns that live in memory only because saving failed."""
        return 0 if self.saver is None else self.saver.queued

    @property
    def running(self) -> bool:
        return self.saver is not None and self.saver.running

    def begin(
        self, drafts: Sequence[tuple[TurnDraft, Snapshot]], last: Timeline, counts: dict[str, int], done: ev.Done
    ) -> None:
        """Save a turn, once the save before has ended: that one's unexpected error is raised when this one has begun.

        done: told with the outcome, its `turn` and `saved` filled in.
        """
        if self.saver is None:
            self.last = last
            self._untold += [ev.NotSaved("ephemeral", **counts, queued=0), done]
            return
        try:
            self.take()
        finally:
            self.last, self._counts, self._done = last, counts, done
            self.saver.start(drafts)

    def retry(self) -> None:
        """Try again to save what is queued."""
        if self.saver is not None and self.queued:
            self._counts, self._done = dict(NO_COUNTS), None
            self.saver.start()

    def take(self, timeout: float | None = None) -> None:
        """Take note of the save under way once it has ended, waiting for that; an error nobody expected is raised."""
        result = None if self.saver is None else self.saver.take(timeout)
        if result is None:
            return
        assert self._name is not None
        if result.report is None and not result.refused:
            assert result.error is not None
            raise result.error
        saved = result.report is not None
        if result.report is not None:
            self.last = None
            self.turn_id = result.report.turn.id
        self._untold += save_events(result, self._name, self._counts, self.queued)
        if self._done is not None:
            self._untold.append(replace(self._done, turn=self.turn_id if saved else None, saved=saved))

    def told(self, timeout: float | None = 0) -> Iterator[ev.Event]:
        """`take`, then every event that nobody has had yet."""
        self.take(timeout)
        while self._untold:
            yield self._untold.popleft()

    def forget(self) -> None:
        """Nobody listens: drop what there is to tell."""
        self._untold.clear()

    def close(self, *, wait: bool) -> None:
        self.last = None
        if self.saver is not None:
            self.saver.close(wait=wait)
