"""The K3 network: prefill of a chunk, verification of a window, commit.

Bits depend on absolute positions only. A window is always computed as W rows; the row of position p sits in slot
p mod W, so that every matrix product and every element-wise operation treats a token alike whether it is decoded
alone or verified behind others. Attention sums over the pages up to the row's own, never over how far a window reaches.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Literal

import torch
from k3_kernels.kda import StepWeights
from k3_sessions.types import StateLayout
from torch import Tensor

from k3cli.model.blocks import KdaWeights, Weights
from k3cli.model.choices import eager_reason, kernel_choices
from k3cli.model.config import ModelConfig
from k3cli.model.fields import state_layout
from k3cli.model.layers import Layers
from k3cli.model.passes import Chunk, stacked
from k3cli.model.placement import prefill_chunk
from k3cli.model.pool import Pool
from k3cli.model.state import State
from k3cli.model.step import Stepper, WindowLog
from k3cli.model.world import World

DEFAULT_WINDOW = 8
SERIAL_WEIGHTS = 128 << 20
"""On a CPU, a model with fewer bytes of weights decodes on one thread: waking a second one for each of the small
products costs more than it saves, and much more when other programs use the cores."""


class K3Model:
    """A loaded network on one device. What a sequence needs is in its `State`; all states of a model share one pool.

    prefill_chunk: tokens of the chunks a prompt is best cut into, at multiples of it."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        device: torch.device,
        dtype: torch.dtype,
        window: int = DEFAULT_WINDOW,
        world: World | None = None,
        granules: int | None = None,
        chunk: int | None = None,
    ) -> None:
        """window: rows of every decode and verify step, W >= 1. granules: of the pool; None: what fits. chunk: tokens
        of a prefill chunk; None: by the size of the weights.

        world: the ranks this one computes together with, None for a model in one piece. config and weights are then the
        rank's (`parallel.held`), every rank makes the same calls in the same order, and logits are rank 0's alone:
        what others return is [n, their part of V].
        """
        assert window >= 1, window
        if device.type == "cuda":
            torch.cuda.set_device(device)  # kernels are launched where the thread's device is
        self.config = config
        self.weights = weights
        self.device = device
        self.dtype = dtype
        self.window = window
        self._world, self._granules = world, granules
        self._layers = Layers(config, weights, world)
        self._layout = state_layout(config, dtype)
        size = sum(sink.nbytes for sink in weights.sinks().values())
        self._serial = device.type == "cpu" and size < SERIAL_WEIGHTS
        self.prefill_chunk = chunk or prefill_chunk(size, device.type)

    def state_layout(self) -> StateLayout:
        """The state's named fields, as the store keeps them."""
        return self._layout

    @property
    def tap_layers(self) -> tuple[int, ...]:
        """0-based layers, ascending, behind which the residual stream is handed out with every evaluated token.

        Other layers than before drop what was recorded of steps. Over several ranks all of them have to drop it.
        """
        return self._layers.taps

    @tap_layers.setter
    def tap_layers(self, layers: tuple[int, ...]) -> None:
        if layers != self._layers.taps:
            self._layers.taps = layers
            self.forget_steps()

    @cached_property
    def pool(self) -> Pool:
        """Where the states of this model live, made with the first of them. Raises FitError."""
        return Pool(
            self.config,
            self._layout.hash_block,
            self.device,
            self.dtype,
            self._granules,
            chunk=self.prefill_chunk,
        )

    @cached_property
    def kernels(self) -> str:
        """The operations that run as kernels, on which bits depend; "reference" when none does."""
        found = kernel_choices(self.config, self.device, self.dtype, self.window)
        return ", ".join(name for name, choice in found.items() if choice.kernel) or "reference"

    @cached_property
    def _steps(self) -> Stepper:
        cfg = self.config
        kda = [w for layer in self.weights.layers if isinstance(w := layer.attention, KdaWeights)]
        bound, eps = cfg.kda.gate_lower_bound, cfg.norm_eps
        stack = stacked(kda, bound, eps) if kda else None
        each = [StepWeights(w.conv, w.A_log, w.dt_bias, w.o_norm, bound, eps) for w in kda]
        pages = -(-cfg.context_limit // self._layout.hash_block) + 1
        eager = eager_reason(cfg, self.device, self.dtype, self.window)
        return Stepper(self.pool, self.window, pages, each, stack, self._layers.logits, eager)

    def new_state(self) -> State:
        """An empty state at position 0. Raises FitError when the pool has no room for it."""
        return State(self.config, self._layout, self.pool, self._steps.settle, self.prefill_chunk)

    def known_prefix(self, ids: Tensor) -> State | None:
        """A state behind the longest prefix of ids, int64 [T], that this process has evaluated and still has.

        Its position is a multiple of the hash block, and its bits are those of prefilling these tokens in whole chunks.
        None when nothing is known.
        """
        state = self.new_state()
        return state if state.begin_with(ids) else None

    @torch.no_grad()
    def prefill(
        self,
        ids: Tensor,
        state: State,
        *,
        logits: Literal["all", "last", "none"] = "last",
        taps: list[Tensor] | None = None,
    ) -> Tensor | None:
        """Evaluates one chunk of T >= 0 tokens, int64 [T], and advances the state by T once all of it is computed.

        Returns fp32 logits [T, V] ("all"), [V] ("last"), or None ("none", or T = 0). The bits depend on how a sequence
        is cut into chunks: the caller cuts at fixed absolute positions. Raises FitError when the pool is full.
        taps: [T, taps D] of these tokens is appended to it.
        """
        T = ids.numel()
        if T == 0:
            return None
        state.settle()
        state.reserve(T)
        target = self.pool.slot()
        try:
            now = Chunk(
                self.pool,
                self._steps.use_table(state),
                state.position,
                state.slot,
                target,
                self.config.kda.gate_lower_bound,
                self.config.norm_eps,
            )
            seen: list[Tensor] = []
            hidden = self._layers.hidden(ids.to(self.device), now, seen)
        except BaseException:
            self.pool.release_slot(target)
            raise
        found = None
        if logits == "all":
            found = self._layers.head(hidden)
        elif logits == "last":
            found = self._layers.head(hidden[-1:])[0]
        if taps is not None and seen:
            taps.append(torch.cat(seen, -1))
        state.advance(ids, target)
        return found

    @torch.no_grad()
    def verify(self, ids: Tensor, state: State) -> tuple[Tensor, WindowLog]:
        """Evaluates a window of 1 <= n <= W tokens, int64 [n], behind the committed state, whose contents stay.

        Returns (fp32 logits [n, V], log for `commit`). Row i equals, bit for bit, the logits of decoding the same
        tokens one by one. Raises FitError when the pool is full. A step that fails on the way spoils the state.
        """
        assert 1 <= ids.numel() <= self.window, (ids.numel(), self.window)
        with _threads(1 if self._serial else None):
            return self._steps.verify(ids, state)

    @torch.no_grad()
    def commit(self, state: State, log: WindowLog, n: int) -> None:
        """Accepts the first n rows of a log, 0 <= n <= log.rows: of the state that was verified, or of a fork of it.

        Afterwards the state is bit for bit that of decoding these n tokens one by one. Its state must not have been
        verified again. The rows are replayed when the state is next needed, as part of its next step if it can be.
        """
        assert log.position == state.position, (log.position, state.position)
        assert 0 <= n <= log.rows, (n, log.rows)
        if n:
            self._steps.commit(state, log, n)

    @contextmanager
    def eager(self) -> Iterator[None]:
        """Steps inside are run plainly, not from a recorded graph: for a profiler, which sees no parts in a graph."""
        self.set_mode(eager=True)
        try:
            yield
        finally:
            self.set_mode()

    def set_mode(self, eager: bool = False, apart: bool = False) -> None:
        """How steps run from here on. eager: plainly; apart: sums between ranks are left out, what is computed is wrong
        (for who measures what they cost). Both off: as usual."""
        self._steps.set_mode(eager, apart)
        if self._world is not None:
            self._world.apart = apart

    def settles_alone(self, state: State, log: WindowLog) -> bool:
        """Whether a `commit` of this log to this state would only move numbers, and can't be refused."""
        return self._steps.settles_alone(state, log)

    def forget_steps(self) -> None:
        """Drops what was recorded: a world's connections can't be closed before."""
        if "_steps" in self.__dict__:
            self._steps.forget()


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    """Runs torch on `count` CPU threads; None changes nothing."""
    before = torch.get_num_threads()
    if count is None or count == before:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
