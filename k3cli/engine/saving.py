"""Handing turns to the store behind the conversation's back, and keeping them when the disk refuses."""

from __future__ import annotations

from dataclasses import dataclass, replace
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

from k3_sessions.errors import BadDraft, StoreError
from k3_sessions.types import TurnDraft

from k3cli.engine import events as ev
from k3cli.engine.sharing import SHARED_MARK
from k3cli.engine.snapshot import Snapshot

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from k3_sessions.types import CommitReport


@dataclass(frozen=True)
class SaveResult:
    """report: of the commit that made the newest turn durable, None when it failed. error: why. turns: made durable.

    notices: what else there is to say about it.
    """

    report: CommitReport | None
    error: BaseException | None
    turns: int = 0
    bytes_written: int = 0
    bytes_pages: int = 0
    bytes_checkpoint: int = 0
    seconds: float = 0.0
    notices: tuple[str, ...] = ()

    @property
    def refused(self) -> bool:
        """The store could not take it, which is said and got over; any other error is to be raised."""
        return isinstance(self.error, StoreError) and not isinstance(self.error, BadDraft)


class Saver:
    """The turns of one session on their way to its writer, oldest first, one save at a time.

    A save runs in a thread of its own: what it stores are snapshots, which nothing changes any more. Its result waits
    to be taken, errors included. Between `start` and `take` the thread alone uses the writer.

    The writer itself keeps a turn whose commit failed and stores it with the next one. Here wait only turns that it
    did not take, because the one before them failed or their state could not be read.

    move_to: an earlier turn that the next save goes on from; to be set while no save runs.
    """

    def __init__(self, store: Any, writer: Any) -> None:
        self.writer = writer
        self.move_to: str | None = None
        self._store = store
        self._held: list[tuple[TurnDraft, Snapshot]] = []
        self._last: Snapshot | None = None
        self._thread: Thread | None = None
        # Not the thread's own end: a Ctrl-C in `join` makes some versions of Python call a running thread dead.
        self._ended = Event()
        self._result: SaveResult | None = None
        self._known = 0

    @property
    def running(self) -> bool:
        """A save is under way: nothing of it may be called durable yet."""
        return self._thread is not None and not self._ended.is_set()

    @property
    def queued(self) -> int:
        """Turns that are in memory only; as it was before, while the result of a save is still to be taken."""
        return self._known if self._thread is not None else len(self._held) + int(self.writer.unsaved)

    def start(self, drafts: Sequence[tuple[TurnDraft, Snapshot]] = ()) -> None:
        """Begin to store turns, oldest first, each with the state after it, and whatever waited before them.

        The result of the save before must have been taken.
        """
        assert self._thread is None, "one save at a time"
        self._known = self.queued
        self._held += drafts
        if drafts:
            self._last = drafts[-1][1]
        # A daemon: leaving without waiting is a crash to the store, which is made for that.
        self._ended.clear()
        thread = Thread(target=self._work, args=(len(drafts) > 1,), name="k3-save", daemon=True)
        thread.start()
        self._thread = thread

    def take(self, timeout: float | None = None) -> SaveResult | None:
        """The result of the save under way, waited for; None when there is none, or not within `timeout` seconds."""
        if self._thread is None:
            return None
        if not self._ended.wait(timeout):
            return None
        self._thread = None
        assert self._result is not None
        return self._result

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        self.close(wait=kind is None or issubclass(kind, (Exception, GeneratorExit)))

    def close(self, *, wait: bool = True) -> None:
        """Give the session back, after the save under way; without waiting, the lock ends with the process."""
        if wait and self._thread is not None:
            self._ended.wait()
        if not self.running:
            self.writer.close()

    def _work(self, shared: bool) -> None:
        try:
            result = self._store_all()
            if shared and result.report is not None and result.report.turn.parent is not None:
                result = replace(result, notices=(*result.notices, *self._keep_shared(result.report.turn.parent)))
            self._result = result
        except BaseException as error:  # the thread that asked raises it
            self._result = SaveResult(None, error)
        finally:
            self._ended.set()

    def _store_all(self) -> SaveResult:
        report: CommitReport | None = None
        turns = written = pages = checkpoint = 0
        seconds = 0.0
        notices: list[str] = []
        try:
            if self.move_to is not None:
                self.writer.set_head(self.move_to)
                self.move_to = None
            while self._held or self.writer.unsaved:
                report = self._commit() if self._held else self.writer.flush(self._last)
                if report is None:
                    break
                turns += report.stored
                written += report.bytes_written
                pages += report.bytes_pages
                checkpoint += report.bytes_checkpoint
                seconds += report.seconds
                notices += report.notices
        except StoreError as error:
            return SaveResult(None, error, turns)
        self._last = None
        return SaveResult(report, None, turns, written, pages, checkpoint, seconds, tuple(notices))

    def _commit(self) -> CommitReport:
        """The oldest turn that waits here. Whatever goes wrong, it is afterwards either here or with the writer."""
        draft, source = self._held[0]
        before = self.writer.accepted
        try:
            report: CommitReport = self.writer.commit(draft, source)
        finally:
            del self._held[: self.writer.accepted - before]
        return report

    def _keep_shared(self, turn_id: str) -> list[str]:
        """Mark the first of two drafts, a prompt that other sessions begin with."""
        try:
            self._store.mark(self.writer.name, turn_id, SHARED_MARK)
        except StoreError as error:
            return [f"the shared prefix could not be marked to stay ({error})"]
        return []


def save_events(result: SaveResult, session: str, counts: Mapping[str, int], queued: int) -> list[ev.Event]:
    """What to tell after an attempt to save. counts: those of the turn (events.Saved)."""
    if result.report is None:
        message = f"this turn could not be saved: {result.error}"
        return [ev.Notice("not-saved", message), ev.NotSaved(str(result.error), **counts, queued=queued)]
    report = result.report
    told: list[ev.Event] = [ev.Notice("store", line) for line in result.notices]
    told += [
        ev.Notice("evicted", f"the state of session {name} was dropped to make room; its turns are kept")
        for name in report.evicted
    ]
    told.append(
        ev.Saved(
            session=session,
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
    )
    return told
