"""A model over several ranks, as rank 0's engine sees it: the faces of `K3Model` and `State`, each call on every rank.

Calls of all threads go out one at a time: a save that gathers a checkpoint takes its turn between two steps.
"""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Lock
from typing import Any, Literal

import torch
from k3_sessions.errors import StoreError
from k3_sessions.types import RestoredState, StateLayout
from torch import Tensor

from k3cli.errors import K3Error
from k3cli.model.config import ModelConfig
from k3cli.model.fields import state_layout
from k3cli.model.handles import Handle, MirrorLog, MirrorState
from k3cli.model.network import K3Model
from k3cli.model.pool import Pool
from k3cli.model.replica import LOGITS, NOTHING, Call, Op, Replica
from k3cli.model.world import World

Explain = Callable[[BaseException], K3Error]
"""Turns what a broken collective raised into an error that names the rank and the cause; ends the other ranks."""


class MirrorModel:
    """`K3Model` for callers, over all ranks of a world. A call that fails on the way leaves nothing to go on with."""

    def __init__(self, model: K3Model, config: ModelConfig, world: World, explain: Explain) -> None:
        """model: rank 0's part. config: of the whole model."""
        self.close: Callable[[], None] = self.part
        """Ends the ranks; nothing can be called afterwards."""
        self.config = config
        self.world = world
        self.device, self.dtype, self.window = model.device, model.dtype, model.window
        self.kernels, self.prefill_chunk = model.kernels, model.prefill_chunk
        self._layout = state_layout(config, model.dtype)
        self._replica = Replica(model, world)
        self._explain = explain
        self._lock = Lock()
        if world.watch is not None:
            world.watch.busy = lambda: self._lock.locked() or self._under_way
        self._numbers = itertools.count(1)
        self._dropped: deque[int] = deque()
        self._committed = NOTHING
        self._broken: K3Error | None = None
        self._under_way = False

    def state_layout(self) -> StateLayout:
        """The whole model's, as the store keeps it."""
        return self._layout

    @property
    def tap_layers(self) -> tuple[int, ...]:
        """See `K3Model`. Rank 0 alone hands out what is tapped: every rank has the whole residual stream."""
        return self._replica.model.tap_layers

    @tap_layers.setter
    def tap_layers(self, layers: tuple[int, ...]) -> None:
        if layers != self.tap_layers:
            # Steps are recorded and replayed by all ranks alike, or by none.
            self.call(Call(Op.FORGET))
            self._replica.model.tap_layers = layers

    @property
    def pool(self) -> Pool:
        """Rank 0's, made with the first use: all ranks' have the same size, agreed on when the model was loaded."""
        return self._replica.model.pool

    def new_state(self) -> MirrorState:
        """An empty state at position 0. Raises FitError."""
        return self._state(lambda number: Call(Op.NEW, number))

    def known_prefix(self, ids: Tensor) -> MirrorState | None:
        """See `K3Model.known_prefix`."""
        number = next(self._numbers)
        found = self.call(Call(Op.KNOWN, number, ids=ids))
        return None if found is None else MirrorState(self, number)

    def prefill(
        self,
        ids: Tensor,
        state: MirrorState,
        *,
        logits: Literal["all", "last", "none"] = "last",
        taps: list[Tensor] | None = None,
    ) -> Tensor | None:
        """See `K3Model.prefill`."""
        if ids.numel() == 0:
            return None
        found, seen = self.call(Call(Op.PREFILL, state.number, n=LOGITS.index(logits), ids=ids))
        if taps is not None:
            taps += seen
        rows: Tensor | None = found
        return rows

    def verify(self, ids: Tensor, state: MirrorState) -> tuple[Tensor, MirrorLog]:
        """See `K3Model.verify`."""
        assert 1 <= ids.numel() <= self.window, (ids.numel(), self.window)
        found = self.begin(ids, state)
        self.ready()
        return found

    def begin(self, ids: Tensor, state: MirrorState) -> tuple[Tensor, MirrorLog]:
        """`verify` that doesn't wait: what it returns is being computed, and must not be read on the host before
        `ready`, where a rank that is lost would be waited for without end. Device work with it may be launched."""
        number = next(self._numbers)
        logits, _ = self.call(Call(Op.VERIFY, state.number, number, ids=ids), wait=False)
        return logits, MirrorLog(self, number)

    def ready(self) -> None:
        """Waits for what was begun, and for whatever was launched behind it. K3Error when a rank was lost.

        Where nothing was begun, too: a copy to the host, say, of rows that were waited for earlier.
        """
        with self._lock:
            self._check()
            try:
                self._under_way = False
                self.world.settled()
            except RuntimeError as error:
                raise self._break(error) from error
            except BaseException as error:
                self._break(error)
                raise

    def commit(self, state: MirrorState, log: MirrorLog, n: int) -> None:
        """See `K3Model.commit`. The other ranks follow at the next call, where that changes nothing for anybody."""
        if n == 0:
            return
        with self._lock:
            self._check()
            if self._committed == NOTHING and self._replica.commits_alone(state.number, log.number):
                self._committed = (state.number, log.number, n)
                self._replica.run(Call(Op.COMMIT, *self._committed))
                return
        self.call(Call(Op.COMMIT, state.number, log.number, n))

    @contextmanager
    def eager(self) -> Iterator[None]:
        """See `K3Model.eager`."""
        yield from self._in_mode(1)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Calls inside leave out the sums between ranks: what they compute is wrong, and what they take is the rest."""
        yield from self._in_mode(2)

    def _in_mode(self, mode: int) -> Iterator[None]:
        self.call(Call(Op.MODE, n=mode))
        try:
            yield
        finally:
            self.call(Call(Op.MODE, n=0))

    def memory(self) -> list[tuple[str, int]]:
        """(device, most bytes its process has had of it) of every rank, rank 0 first. See `most_memory`."""
        found: list[tuple[str, int]] = self.call(Call(Op.MEMORY))
        return found

    def forget(self, handle: Handle, number: int) -> None:
        """Every rank lets go of a number, at the first call after its handle went."""
        weakref.finalize(handle, self._dropped.append, number).atexit = False

    def held(self, number: int) -> Any:
        """Rank 0's state or log of a number. A handle holds none itself: another thread may make the next call between
        the news that a handle went and its end, and what it held would outlive that call on this rank alone."""
        return self._replica.held[number]

    def twin(self, state: MirrorState) -> MirrorState:
        """A fork of a state."""
        return self._state(lambda number: Call(Op.FORK, state.number, number))

    def call(self, call: Call, restored: RestoredState | None = None, wait: bool = True) -> Any:
        """Makes a call on every rank, and returns what rank 0 has of it. wait: until it is computed."""
        refusal: K3Error | StoreError
        with self._lock:
            self._check()
            replica, pool = self._replica, self._replica.model.pool
            gone = tuple(self._dropped.popleft() for _ in range(len(self._dropped)))
            ids = call.ids.to("cpu", torch.int64)
            call = Call(call.op, call.a, call.b, call.n, ids, self._committed, gone)
            self._committed = NOTHING
            try:
                self._settle()
                replica.drop(gone)
                call.send(self.world, replica.refused, pool.free)
                self._under_way = True
                found = replica.run(call, restored)
                if wait:
                    self._settle()
                return found
            except (K3Error, StoreError) as error:
                # Without its frames, which would keep states alive here that other ranks let go of.
                refusal = error.with_traceback(None)
                replica.refused += 1
            except RuntimeError as error:
                raise self._break(error) from error
            except BaseException as error:
                self._break(error)
                raise
        raise refusal

    def _settle(self) -> None:
        if self._under_way:
            self._under_way = False
            self.world.settled()

    def _break(self, error: BaseException) -> K3Error:
        self._broken = self._explain(error)
        return self._broken

    def _check(self) -> None:
        if self._broken is not None:
            raise K3Error(self._broken.found, self._broken.expected, self._broken.do)

    def part(self) -> None:
        """Lets the other ranks end, if nothing is under way, so that connections can be closed; nothing can be called
        afterwards."""
        if self._lock.acquire(blocking=False):
            if self._broken is None:
                self._broken = K3Error("the ranks have ended")
                with suppress(RuntimeError):
                    Call(Op.END).send(self.world, 0, 0)
                    self.world.told()
            self._lock.release()
        self._replica.model.forget_steps()

    def _state(self, call: Callable[[int], Call]) -> MirrorState:
        number = next(self._numbers)
        self.call(call(number))
        return MirrorState(self, number)
