"""The verify step: what of it is fixed, so that a device can record it once and run it again for every token.

One log of window inputs serves all sequences. It belongs to the state that was verified last, whose accepted rows may
still be in it only; before another state is verified, they are replayed (`settle`).
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from k3_kernels import kda
from k3_kernels.kda import StepLog, StepWeights
from torch import Tensor

from k3cli.model.aside import Aside
from k3cli.model.passes import KdaLayer, Window
from k3cli.model.pool import Pool
from k3cli.model.state import State

Result = tuple[Tensor, Tensor | None]
"""fp32 logits [W, V], and taps [W, taps D] when layers are tapped."""


@dataclass(eq=False)
class WindowLog:
    """What `verify` leaves for `commit`: whose window it is. Good until the next step of the same state.

    used: its state has taken rows of it. kept: a copy of its rows, made when another state was verified in between.
    taps [rows, taps D]: residual streams behind the tapped layers, None without such layers.
    """

    state: State
    position: int
    rows: int
    used: bool = False
    kept: StepLog | None = None
    taps: Tensor | None = None


class Stepper:
    """Static buffers of the step and, on a CUDA device, a recorded graph for each number of live rows.

    eager: why steps are not recorded, "" when they are.
    """

    def __init__(
        self,
        pool: Pool,
        window: int,
        max_pages: int,
        layers: list[StepWeights],
        stack: StepWeights | None,
        forward: Callable[[Tensor, Window], Result],
        eager: str,
    ) -> None:
        """forward: (ids int64 [W], pass) -> `Result` of W slots. layers, stack: KDA weights by layer and together."""
        device = pool.arena.device
        self.eager = eager
        self.table = torch.zeros(max_pages, dtype=torch.int32, device=device)
        self._pool = pool
        self._window = window
        self._stack = stack
        self._forward = forward
        self._control = torch.zeros(4 + window, dtype=torch.int64, device=device)
        self._cursor, self._ids = self._control[:4], self._control[4:]
        # Where the host writes them: a recorded step begins with the copy, which costs 20 us less than one in front of
        # it. Written again when it has been copied.
        self._host = torch.zeros(4 + window, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._values = self._host.numpy()
        self._copied = torch.cuda.Event() if device.type == "cuda" else None
        recurrent = pool.recurrent
        _, n_kda, heads, V, K = recurrent.shape
        self._log = log = StepLog.empty(n_kda, window, heads, K, V, pool.conv.dtype, device)
        self._layers = [
            KdaLayer(weights, recurrent[:, i], pool.conv[:, i], log.layer(i)) for i, weights in enumerate(layers)
        ]
        self._active: weakref.ref[State] | None = None
        self._tabled: tuple[weakref.ref[State], int] | None = None
        self._last: weakref.ref[WindowLog] | None = None
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Result]] = {}
        self._warm: set[int] = set()
        self._plain = self._apart = False
        self._aside: tuple[dict[int, tuple[torch.cuda.CUDAGraph, Result]], set[int]] = ({}, set())
        self._graph_pool: Any = None
        self._beside = Aside(device) if device.type == "cuda" else None

    def set_mode(self, eager: bool, apart: bool) -> None:
        """See `K3Model.set_mode`. What was recorded in one mode waits while steps run in the other."""
        self._plain = eager
        if apart != self._apart:
            self._apart = apart
            now = self._graphs, self._warm
            self._graphs, self._warm = self._aside
            self._aside = now

    def forget(self) -> None:
        """Drops all recorded steps."""
        self._graphs.clear()
        self._warm.clear()
        self._aside = ({}, set())
        self._graph_pool = None  # gone with the last of them

    def use_table(self, state: State) -> Tensor:
        """The page table int32 [max_pages] of a state, on the device."""
        if self._tabled is None or self._tabled[0]() is not state or self._tabled[1] != state.version:
            pages = state.pages
            self.table[: len(pages)].copy_(torch.tensor(pages, dtype=torch.int32), non_blocking=True)
            self._tabled = (weakref.ref(state), state.version)
        return self.table

    def verify(self, ids: Tensor, state: State) -> tuple[Tensor, WindowLog]:
        """See `K3Model.verify`."""
        n, W, start = ids.numel(), self._window, state.position
        assert not state.torn, "a step of this state failed"
        self._activate(state)
        state.reserve(n)
        state.own_slot()
        self.use_table(state)
        self._set(ids, start, state)
        # From here on the accepted rows are being replayed: a step that fails leaves a state that is neither.
        state.torn = True
        logits, taps = self._run(n)
        state.torn, state.accepted = False, 0
        log = WindowLog(state, start, n, taps=None if taps is None else self._timed(taps, start % W, n))
        self._last = weakref.ref(log)
        return self._timed(logits, start % W, n), log

    def _timed(self, slots: Tensor, first: int, n: int) -> Tensor:
        """The n live rows of all slots, in order of time; the caller's to keep."""
        if first + n > self._window:
            return torch.cat((slots[first:], slots[: first + n - self._window]))
        rows = slots[first : first + n]
        # A recorded step writes to the same place every time.
        return rows.clone() if n in self._graphs else rows

    def commit(self, state: State, log: WindowLog, n: int) -> None:
        """See `K3Model.commit`."""
        latest = self._last is not None and self._last() is log
        assert latest or log.kept is not None, "its state was verified again since"
        if self.settles_alone(state, log):
            state.accepted = n
        else:
            if log.state is not state:  # a fork takes what its twin has computed
                self._copy_latents(log, state, n)
            self._replay(log.position + n, n, state, log.kept or self._log)
        log.used = log.used or log.state is state
        state.position += n

    def settles_alone(self, state: State, log: WindowLog) -> bool:
        """Whether `commit` would only move numbers: nothing is launched, and nothing can be refused."""
        return log.state is state and log.kept is None and self._last is not None and self._last() is log

    def _copy_latents(self, log: WindowLog, state: State, n: int) -> None:
        state.reserve(n)
        for p in range(log.position, log.position + n):
            index, row = divmod(p, state.page)
            self._pool.copy_rows(log.state.pages[index], state.pages[index], row, row + 1)

    def settle(self, state: State) -> None:
        """Replays the accepted rows of the state the log belongs to."""
        assert self._active is not None
        assert self._active() is state
        self._replay(state.position, state.accepted, state, self._log)

    def _activate(self, state: State) -> None:
        """Makes the log this state's: what it still holds of another one is replayed, or kept for its `commit`."""
        before = None if self._active is None else self._active()
        if before is state:
            return
        log = None if self._last is None else self._last()
        if before is not None and not before.torn:
            before.settle()
            if log is not None and not log.used:
                log.kept = StepLog(*(part.clone() for part in self._log))
        assert state.accepted == 0
        self._active = weakref.ref(state)

    def _replay(self, position: int, rows: int, state: State, log: StepLog) -> None:
        if self._stack is None or rows == 0:
            return
        state.own_slot()
        cursor = torch.tensor([position, rows, state.slot, 0], dtype=torch.int64, device=self.table.device)
        # A thread that saves a state may have another device than the model's.
        with torch.cuda.device(self.table.device) if self.table.is_cuda else nullcontext():
            kda.commit(self._pool.recurrent, self._pool.conv, log, self._stack, cursor)

    def _set(self, ids: Tensor, start: int, state: State) -> None:
        """Says what the next step is, on the host; the step's own first act is to fetch it (`_fetch`)."""
        if self._copied is not None:
            self._copied.synchronize()
        self._values[:4] = start, state.accepted, state.slot, 0
        self._values[4:] = 0
        for i, token in enumerate(ids.tolist()):
            self._values[4 + (start + i) % self._window] = token

    def _fetch(self) -> None:
        self._control.copy_(self._host, non_blocking=True)

    def _pass(self, n: int) -> Window:
        return Window(self._pool, self.table, self._cursor, self._layers, n, self._beside)

    def _run(self, n: int) -> Result:
        """What all W slots give. A number of rows is computed plainly the first time, then recorded."""
        if not self.eager and not self._plain:
            if n in self._warm and n not in self._graphs:
                self._record(n)
            if n in self._graphs:
                graph, found = self._graphs[n]
                graph.replay()
                self._fetched()
                return found
        self._warm.add(n)
        self._fetch()
        self._fetched()
        return self._forward(self._ids, self._pass(n))

    def _fetched(self) -> None:
        """From here on the device's own order says when the host may write again."""
        if self._copied is not None:
            self._copied.record()

    def _record(self, n: int) -> None:
        graph = torch.cuda.CUDAGraph()
        if self._beside is not None:
            self._beside.clear()
        if self._graph_pool is None:
            self._graph_pool = torch.cuda.graph_pool_handle()
        try:
            # Other threads (a save under way) may go on using the device.
            with torch.cuda.graph(graph, pool=self._graph_pool, capture_error_mode="thread_local"):
                self._fetch()
                found = self._forward(self._ids, self._pass(n))
        except RuntimeError as error:
            self.eager = f"recording a step of {n} rows failed: {str(error).splitlines()[0]}"
            warnings.warn(
                f"{self.eager}; steps run plainly from here on, which is slower", RuntimeWarning, stacklevel=2
            )
            return
        self._graphs[n] = (graph, found)
