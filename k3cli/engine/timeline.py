"""One mutable history of tokens and the model state behind it.

`tokens` is everything said so far; `position` of them are evaluated into the state; the rest is pending. Between any
two steps (a prefill chunk or a decoded token) the timeline can be forked, saved, continued or dropped. A step that
fails half way tears the timeline: it then refuses every further use, and the caller restores the last saved state.

With drafts, one window evaluates several tokens at once, and they are given out one by one. Seen from outside nothing
differs: the rows that count so far are committed before anything looks at the state, the others never were.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from k3cli.engine.drafting.speculator import DecodeStats, Speculator
from k3cli.engine.limits import Cancel, never, overflow
from k3cli.engine.sampling import Sampling, draw
from k3cli.engine.schedule import Schedule
from k3cli.engine.snapshot import ModelLike, Snapshot, StateLike
from k3cli.engine.window import Window
from k3cli.errors import K3Error


class Timeline:
    """Tokens, state, and the schedule that led there. Not safe for use by two threads at once.

    decoding: what was decoded since the last `extend` or `generate`. speculator: where drafts come from, None for plain
    decoding.
    """

    def __init__(
        self,
        model: ModelLike,
        state: StateLike,
        tokens: Sequence[int] = (),
        *,
        limit: int,
        device: torch.device | str = "cpu",
        speculator: Speculator | None = None,
    ) -> None:
        """state: private to this timeline. tokens: all ids, at least `state.position`. limit: context size."""
        assert state.position <= len(tokens), (state.position, len(tokens))
        self.model = model
        self.limit = limit
        self.device = torch.device(device)
        self.tokens: list[int] = list(tokens)
        self.schedule = Schedule(state.position)
        self.stop_reason = ""
        self.speculator = speculator
        self.decoding = DecodeStats(model.window)
        self._state = state
        self._logits: Tensor | None = None
        self._window: Window | None = None
        self._torn = ""

    @property
    def position(self) -> int:
        """Number of tokens evaluated into the state."""
        return self._state.position + (0 if self._window is None else self._window.used)

    @property
    def pending(self) -> list[int]:
        """Tokens not evaluated yet, oldest first."""
        return self.tokens[self.position :]

    @property
    def torn(self) -> str:
        """Why the timeline can't be used any more, "" when it can."""
        return self._torn

    def extend(self, ids: Sequence[int]) -> None:
        """Append ids; they stay pending until they are evaluated. ContextError when they don't fit."""
        self._usable()
        if len(self.tokens) + len(ids) > self.limit:
            raise overflow(len(self.tokens), len(ids), self.limit)
        self._settle()
        self.decoding = DecodeStats(self.model.window)
        self.tokens.extend(ids)

    def prefill(self, cancel: Cancel = never) -> Iterator[int]:
        """Evaluate every pending token, chunk by chunk; yields how many are evaluated so far.

        Chunks end at multiples of the model's prefill_chunk of the absolute position, and at the last token.
        """
        return self.prefill_to(len(self.tokens), cancel)

    def prefill_to(self, stop: int, cancel: Cancel = never) -> Iterator[int]:
        """Like `prefill`, up to position `stop`. FitError, before anything is evaluated, when memory has no room."""
        self._usable()
        first = self.position
        self._state.reserve(max(stop - first, 0))
        while self.position < stop and not cancel():
            self._prefill_chunk(self._chunk(stop), "last")
            yield self.position - first

    def generate(
        self, sampling: Sampling, stop_ids: Collection[int], max_tokens: int, cancel: Cancel = never
    ) -> Iterator[int]:
        """Draw tokens until a stop id, `max_tokens`, the context limit or a cancel; each is appended and yielded.

        The token drawn last stays pending. More than one pending token at the start is prefilled first. Afterwards
        `stop_reason` is "stop", "length" or "cancelled". Closing the iterator early leaves a usable timeline.
        Drafts change how many steps it takes, and nothing else.
        """
        self._settle()
        self.decoding = DecodeStats(self.model.window)
        self.stop_reason = "cancelled"
        if len(self.pending) > 1:
            for _ in self.prefill(cancel):
                pass
            if self.pending:
                return
        room = min(max_tokens, self.limit - len(self.tokens))
        if self.speculator is not None:
            self.speculator.begin(self.tokens, sampling)
        drawn = 0
        while True:
            if drawn >= room:
                self.stop_reason = "length"
                break
            if cancel():
                break
            if self.pending:
                self._next_row(room - drawn)
            if self._logits is None:
                raise K3Error(
                    "there is nothing to continue from: every token of the history is already evaluated",
                    "at least one pending token",
                    "send a message",
                )
            token = self._draw(sampling)
            self.tokens.append(token)
            drawn += 1
            if token in stop_ids:
                self.stop_reason = "stop"
            yield token
            if self.stop_reason == "stop":
                break
        self._settle()

    def follow(self, schedule: Schedule, cancel: Cancel = never) -> Iterator[tuple[int, Tensor]]:
        """Evaluate pending tokens along a recorded schedule.

        Yields (first, logits) after each step: logits float32 [n, V] are rows for the tokens at positions first,
        first + 1, ...: one row after a prefill chunk, up to `window` rows in a decode run.
        """
        self._usable()
        assert schedule.start == self.position, (schedule.start, self.position)
        assert schedule.stop <= len(self.tokens), (schedule.stop, len(self.tokens))
        for kind, n in schedule:
            stop = self.position + n
            while self.position < stop and not cancel():
                if kind == "prefill":
                    rows = self._prefill_chunk(n, "last")
                else:
                    rows = self._decode(min(self.model.window, stop - self.position))
                yield self.position + 1 - len(rows), rows

    def evaluate_all(self, cancel: Cancel = never) -> Iterator[tuple[int, Tensor]]:
        """Prefill every pending token and yield (first, logits) for each chunk.

        logits: float32 [n, V]; row i is for the token at position first + i.
        """
        self._usable()
        while self.position < len(self.tokens) and not cancel():
            rows = self._prefill_chunk(self._chunk(len(self.tokens)), "all")
            yield self.position + 1 - len(rows), rows

    def fork(self) -> Timeline:
        """An independent timeline at the same point; full MLA pages are shared."""
        self._settle()
        child = Timeline(
            self.model,
            self._state.fork(),
            self.tokens,
            limit=self.limit,
            device=self.device,
            speculator=None if self.speculator is None else self.speculator.fork(),
        )
        child.schedule = self.schedule.copy()
        child._logits = self._logits
        return child

    def snapshot(self) -> Snapshot:
        """The state now, for the store; stays as it is while this timeline goes on."""
        self._settle()
        kept = {} if self.speculator is None else self.speculator.keep(self.position)
        return Snapshot(self._state.fork(), self.device, kept)

    def recall(self, kept: Mapping[str, Any]) -> None:
        """Hands the drafter what it kept when the state at this position was saved."""
        if self.speculator is not None:
            self.speculator.recall(kept, self.position)

    def close(self) -> None:
        """Drop the state. The timeline can't be used afterwards."""
        self._torn = "it was closed"
        self._logits = self._window = self.speculator = None
        del self._state

    def _next_row(self, room: int) -> None:
        """Evaluate the one pending token: as a row of the window at hand, or with a new one, drafts behind it.

        room: tokens to come. Opening a window leaves the state as it is.
        """
        window = self._window
        if window is None or not window.fits(self.tokens):
            self._settle()
            drafts, seconds = ([], 0.0) if self.speculator is None else self.speculator.propose(self.tokens, room - 1)
            with self._whole("decode"):
                window = Window.open(self.model, self._state, [self.tokens[-1], *drafts], seconds)
            self._window = window
        self._logits = window.next_row()
        self.schedule.add("decode", 1)

    def _draw(self, sampling: Sampling) -> int:
        """The token after the last evaluated one. The first draw of a window counts as part of its step: on a GPU it
        is what waits for the logits."""
        assert self._logits is not None
        began = time.perf_counter()
        ready = getattr(self.model, "ready", None)
        token = draw(self._logits.unsqueeze(0), [len(self.tokens)], sampling, ready)[0]
        seconds = time.perf_counter() - began
        if self._window is not None and self._window.used == 1:
            self._window.seconds += seconds
        else:
            self.decoding.verify_seconds += seconds
        return token

    def _settle(self) -> None:
        """Commit the rows that count, and let go of the others."""
        self._usable()
        if (window := self._window) is None:
            return
        began = time.perf_counter()
        with self._whole("decode"):
            self.model.commit(self._state, window.log, window.used)
            self._window = None
        window.account(self.tokens, time.perf_counter() - began, self.decoding, self.speculator)

    def _chunk(self, stop: int) -> int:
        """Tokens of the next chunk on the way to `stop`. Chunks end at fixed places: equal tokens take equal paths."""
        size = self.model.prefill_chunk
        return min((self.position // size + 1) * size, stop) - self.position

    def _prefill_chunk(self, n: int, rows: str) -> Tensor:
        taps: list[Tensor] = []
        wanted = {"taps": taps} if self.speculator is not None and self.speculator.needs_hidden else {}
        with self._step("prefill", n):
            logits = self.model.prefill(self._ids(n), self._state, logits=rows, **wanted)
        assert logits is not None
        if self.speculator is not None and taps:
            self.speculator.observe(self.tokens[self.position - n : self.position], self.position - n, taps[0])
        logits = logits.reshape(-1, logits.shape[-1])
        self._logits = logits[-1]
        return logits

    def _decode(self, n: int) -> Tensor:
        """Evaluate n <= window known tokens as rows of one window; logits [n, V]."""
        with self._step("decode", n):
            logits, log = self.model.verify(self._ids(n), self._state)
            self.model.commit(self._state, log, n)
        if self.speculator is not None and self.speculator.needs_hidden:
            self.speculator.observe(self.tokens[self.position - n : self.position], self.position - n, log.taps)
        self._logits = logits[n - 1]
        return logits[:n]

    def _ids(self, n: int) -> Tensor:
        return torch.tensor(self.tokens[self.position : self.position + n], dtype=torch.long)

    @contextmanager
    def _step(self, kind: str, n: int) -> Iterator[None]:
        """Around one change of the state; recorded when it has ended."""
        self._settle()
        before = self.position
        with self._whole(kind):
            yield
            assert self.position == before + n, (self.position, before, n)
        self.schedule.add(kind, n)

    @contextmanager
    def _whole(self, kind: str) -> Iterator[None]:
        """Around what must not end half way: the timeline is torn until it has ended."""
        self._usable()
        self._torn = f"a {kind} step at position {self._state.position} was interrupted"
        yield
        self._torn = ""

    def _usable(self) -> None:
        if self._torn:
            raise K3Error(
                f"this timeline can't be used: {self._torn}", "a complete state", "restore the last saved turn"
            )
