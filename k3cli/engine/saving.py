"""Handing turns to the store, and keeping them when the disk refuses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from k3_sessions.errors import BadDraft, StoreError
from k3_sessions.types import TurnDraft

from k3cli.engine import events as ev
from k3cli.engine.timeline import Snapshot

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from k3_sessions.types import CommitReport


@dataclass(frozen=True)
class SaveResult:
    """report: of the commit that made the newest turn durable, None when it failed. error: why. turns: made durable."""

    report: CommitReport | None
    error: StoreError | None
    turns: int = 0
    bytes_written: int = 0
    bytes_pages: int = 0
    bytes_checkpoint: int = 0
    seconds: float = 0.0


class Saver:
    """The turns of one session on their way to its writer, oldest first.

    The writer itself keeps a turn whose commit failed and stores it with the next one. Here wait only turns that it
    could not be given yet, because the one before them failed.

    move_to: an earlier turn that the next save goes on from.
    """

    def __init__(self, writer: Any) -> None:
        self.writer = writer
        self.move_to: str | None = None
        self._held: list[tuple[TurnDraft, Snapshot]] = []
        self._last: Snapshot | None = None

    @property
    def queued(self) -> int:
        """Turns that are in memory only."""
        return len(self._held) + int(self.writer.unsaved)

    def save(self, drafts: Sequence[tuple[TurnDraft, Snapshot]]) -> SaveResult:
        """Store turns, oldest first, each with the state after it, and whatever waited before them."""
        self._held += drafts
        self._last = drafts[-1][1]
        return self.retry()

    def retry(self) -> SaveResult:
        """Try again to store what waits. BadDraft, a bug of ours, is raised; other refusals are in the result."""
        report: CommitReport | None = None
        turns = written = pages = checkpoint = 0
        seconds = 0.0
        try:
            if self.move_to is not None:
                self.writer.set_head(self.move_to)
                self.move_to = None
            while self._held or self.writer.unsaved:
                if self._held:
                    draft, source = self._held.pop(0)
                    report = self.writer.commit(draft, source)
                else:
                    report = self.writer.flush(self._last)
                if report is None:
                    break
                turns += report.stored
                written += report.bytes_written
                pages += report.bytes_pages
                checkpoint += report.bytes_checkpoint
                seconds += report.seconds
        except BadDraft:
            raise
        except StoreError as error:
            return SaveResult(None, error, turns)
        self._last = None
        return SaveResult(report, None, turns, written, pages, checkpoint, seconds)

    def close(self) -> None:
        self.writer.close()


def save_events(result: SaveResult, session: str, counts: Mapping[str, int], queued: int) -> list[ev.Event]:
    """What to tell after an attempt to save. counts: those of the turn (events.Saved)."""
    if result.report is None:
        message = (
            f"this turn could not be saved ({result.error}); the conversation goes on in memory, and the next save "
            "will contain it"
        )
        return [ev.Notice("not-saved", message), ev.NotSaved(str(result.error), **counts, queued=queued)]
    report = result.report
    told: list[ev.Event] = [ev.Notice("store", line) for line in report.notices]
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
