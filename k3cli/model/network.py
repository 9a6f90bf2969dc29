"""The K3 network: prefill of a chunk, verification of a window, commit.

Bits depend on absolute positions only. A window is always computed as W rows; the row of position p sits in slot
p mod W, so that every matrix product and every element-wise operation treats a token alike whether it is decoded
alone or verified behind others. Attention sums over the pages up to the row's own, never over how far a window reaches.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import Literal

import torch
import torch.nn.functional as F
from k3_kernels import attnres, moe, ranks
from k3_kernels.activation import Activation, Situ, Swiglu
from k3_kernels.kda import StepWeights
from k3_kernels.norm import rms_norm
from k3_sessions.types import StateLayout
from torch import Tensor

from k3cli.model.blocks import KdaWeights, MlaWeights, MlpWeights, MoeWeights, Weights
from k3cli.model.choices import eager_reason, kernel_choices
from k3cli.model.config import ModelConfig
from k3cli.model.marks import marked
from k3cli.model.passes import Chunk, Pass, stacked
from k3cli.model.placement import prefill_chunk
from k3cli.model.pool import Pool
from k3cli.model.state import State, state_layout
from k3cli.model.step import Stepper, WindowLog
from k3cli.model.world import World

DEFAULT_WINDOW = 8
SERIAL_WEIGHTS = 128 << 20
"""On a CPU, a model with fewer bytes of weights decodes on one thread: waking a second one for each of the small
products costs more than it saves, and much more when other programs use the cores."""

ROUTE, SHARED = 0, 1
"""What runs beside a step's main row of kernels: the router, and the shared experts."""


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
        self._taps: tuple[int, ...] = ()
        self.act: Activation = Swiglu() if config.situ is None else Situ(*config.situ)
        self._layout = state_layout(config, dtype)
        size = sum(sink.nbytes for sink in weights.sinks().values())
        self._serial = device.type == "cpu" and size < SERIAL_WEIGHTS
        self.prefill_chunk = chunk or prefill_chunk(size, device.type)
        self._scale = (config.mla.nope_dim + config.mla.pe_dim) ** -0.5
        # Layers counted by kind.
        kinds = (config.kda_layers, config.mla_layers)
        self._place = {layer: place for kind in kinds for place, layer in enumerate(kind)}

    def state_layout(self) -> StateLayout:
        """The state's named fields, as the store keeps them."""
        return self._layout

    @property
    def tap_layers(self) -> tuple[int, ...]:
        """0-based layers, ascending, behind which the residual stream is handed out with every evaluated token.

        Other layers than before drop what was recorded of steps. Over several ranks all of them have to drop it.
        """
        return self._taps

    @tap_layers.setter
    def tap_layers(self, layers: tuple[int, ...]) -> None:
        if layers != self._taps:
            self._taps = layers
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
        return Stepper(self.pool, self.window, pages, each, stack, self._logits, eager)

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
            hidden = self._layers(ids.to(self.device), now, seen)
        except BaseException:
            self.pool.release_slot(target)
            raise
        found = None
        if logits == "all":
            found = self._head(hidden)
        elif logits == "last":
            found = self._head(hidden[-1:])[0]
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

    def _logits(self, ids: Tensor, now: Pass) -> tuple[Tensor, Tensor | None]:
        """(fp32 logits [T, V], taps [T, taps D] if there are any)."""
        seen: list[Tensor] = []
        hidden = self._layers(ids, now, seen)
        with marked("head"):
            return self._head(hidden), torch.cat(seen, -1) if seen else None

    def _head(self, hidden: Tensor) -> Tensor:
        """fp32 logits [T, V]."""
        logits = F.linear(hidden, self.weights.head)
        if self._world is None:
            return logits.float()
        return self._world.gather(logits, 1)[:, : self.config.vocab].float()

    def _embed(self, ids: Tensor) -> Tensor:
        table = self.weights.embed
        if self._world is None:
            return F.embedding(ids, table)
        return self._sum(ranks.embed(ids, table, self.weights.first))

    def _sum(self, part: Tensor) -> Tensor:
        """The sum of every rank's part."""
        return part if self._world is None else self._world.sum(part)

    def _layers(self, ids: Tensor, now: Pass, seen: list[Tensor]) -> Tensor:
        """Embedding to final norm: [T] -> [T, D]. seen: takes the residual stream behind each tapped layer."""
        block = self.config.attn_res_block
        x = self._embed(ids)
        return self._plain(x, now, seen) if block is None else self._mixed(x, now, block, seen)

    def _plain(self, x: Tensor, now: Pass, seen: list[Tensor]) -> Tensor:
        eps = self.config.norm_eps
        for i, layer in enumerate(self.weights.layers):
            x = x + self._attention(i, rms_norm(x, layer.attn_norm, eps), now)
            x = x + self._mlp(i, rms_norm(x, layer.mlp_norm, eps), now)
            if i in self._taps:
                seen.append(x)
        return rms_norm(x, self.weights.norm, eps)

    def _mixed(self, x: Tensor, now: Pass, block: int, seen: list[Tensor]) -> Tensor:
        """Attention residuals: `slab` holds the snapshots and behind them the running prefix."""
        eps = self.config.norm_eps
        count = -(-len(self.weights.layers) // block)
        slab = torch.empty(count + 1, *x.shape, dtype=x.dtype, device=x.device)
        slab[0] = x
        top = 0
        more: Tensor | None = None  # what the last sublayer adds to the prefix, added by the mix behind it
        for i, layer in enumerate(self.weights.layers):
            assert layer.attn_mix is not None
            assert layer.mlp_mix is not None
            with marked("mix"):
                if top:
                    h = attnres.mix_norm(slab[: top + 1], layer.attn_mix.query, layer.attn_norm, eps, eps, more)
                else:
                    h = rms_norm(slab[0], layer.attn_norm, eps)
            if i - 1 in self._taps:  # whole only now that the last sublayer's part was added
                seen.append(slab[top].clone())
            fresh = i % block == 0
            if fresh:  # the raw prefix becomes a snapshot and a new prefix starts from nothing
                top += 1
            more = self._attention(i, h, now)
            with marked("mix"):
                if fresh:
                    slab[top], more = more, None
                h = attnres.mix_norm(slab[: top + 1], layer.mlp_mix.query, layer.mlp_norm, eps, eps, more)
            more = self._mlp(i, h, now)
        assert self.weights.mix is not None
        with marked("mix"):
            x = attnres.mix_norm(slab[: top + 1], self.weights.mix.query, self.weights.norm, eps, eps, more)
        if len(self.weights.layers) - 1 in self._taps:
            seen.append(slab[top].clone())
        return x

    def _attention(self, index: int, x: Tensor, now: Pass) -> Tensor:
        weights, place = self.weights.layers[index].attention, self._place[index]
        with marked("kda" if isinstance(weights, KdaWeights) else "mla"):
            projected = now.linear(x, weights.proj)
            if isinstance(weights, KdaWeights):
                part = self._kda(weights, projected, now, place)
            else:
                part = self._mla(weights, projected, now, place)
            return self._sum(part)

    def _kda(self, w: KdaWeights, projected: Tensor, now: Pass, place: int) -> Tensor:
        """projected [T, q | k | v | gate | ...] -> this rank's part of [T, D]."""
        cfg = self.config.kda
        shape = (projected.shape[0], cfg.heads, cfg.head_dim)
        qkv, gate, f_a, b = projected.split([3 * cfg.width, w.gate_width, cfg.head_dim, cfg.heads], dim=-1)
        gate = (gate if w.g_b is None else now.linear(gate, w.g_b)).view(shape)
        f = now.linear(f_a, w.f_b).view(shape)
        return now.linear(now.kda(place, w, qkv, f, b, gate), w.o_proj)

    def _mla(self, w: MlaWeights, projected: Tensor, now: Pass, place: int) -> Tensor:
        """projected [T, q | latent | ...] -> this rank's part of [T, D]."""
        cfg, T = self.config.mla, projected.shape[0]
        parts = projected.split(list(w.parts.values()), dim=-1)
        q, latent = parts[0], parts[1]
        if w.q_norm is not None and w.q_b is not None:
            q = now.linear(rms_norm(q, w.q_norm, cfg.latent_norm_eps), w.q_b)
        q = q.reshape(T, cfg.heads, cfg.nope_dim + cfg.pe_dim)
        c, k_pe = latent.split([cfg.kv_rank, cfg.pe_dim], dim=-1)
        row = torch.cat((rms_norm(c, w.kv_norm, cfg.latent_norm_eps), k_pe), -1)
        out = now.mla(place, w, q, row, self._scale).reshape(T, cfg.heads * cfg.v_dim)
        if cfg.output_gate:
            out = out * torch.sigmoid(parts[2])
        return now.linear(out, w.o_proj)

    def _mlp(self, index: int, x: Tensor, now: Pass) -> Tensor:
        """x [T, D] normed -> [T, D]."""
        w = self.weights.layers[index].mlp
        if isinstance(w, MlpWeights):
            with marked("mlp"):
                gate, up = now.linear(x, w.gate_up).chunk(2, dim=-1)
                return self._sum(now.linear(self.act(gate, up), w.down))
        with marked("moe"):
            return self._moe(w, x, now)

    def _moe(self, w: MoeWeights, x: Tensor, now: Pass) -> Tensor:
        cfg = self.config.moe
        assert cfg is not None
        with _beside(now, ROUTE):
            ids, weights = moe.route(
                x,
                w.gate,
                w.bias,
                top_k=cfg.top_k,
                groups=cfg.groups,
                top_groups=cfg.top_groups,
                renormalize=cfg.renormalize,
                scale=cfg.scale,
            )
        inner = cfg.latent or 0
        projected = x if w.proj is None else now.linear(x, w.proj)
        z = projected[:, :inner] if inner else x
        shared = None
        if now.aside is not None:
            with now.aside.run(SHARED):
                shared = self._shared(w, projected[:, inner:], now)
        _join(now, ROUTE)
        if w.places is not None:
            ids = w.places[ids]
            weights = weights * (ids < len(w.owned))  # experts of zeros: several of a row may be the same one
        routed = now.experts(z, ids, weights, w.experts, self.act)
        _join(now, SHARED)
        if now.aside is None:
            shared = self._shared(w, projected[:, inner:], now)
        if self._world is not None:
            routed, shared = self._world.sum_both(routed, shared) if shared is not None else (self._sum(routed), None)
        if w.latent_norm is not None:
            routed = rms_norm(routed, w.latent_norm, self.config.norm_eps)
        if w.latent_up is not None:
            return now.linear(routed, w.latent_up, shared)
        return routed if shared is None else shared + routed

    def _shared(self, w: MoeWeights, x: Tensor, now: Pass) -> Tensor | None:
        """What the shared experts put out [T, D] of x [T, gate | up], if there are any."""
        if w.shared_down is None:
            return None
        gate, up = x.chunk(2, dim=-1)
        return now.linear(self.act(gate, up), w.shared_down)


def _beside(now: Pass, number: int) -> AbstractContextManager[None]:
    """What is launched inside may run beside what is launched behind it, until `_join`."""
    return nullcontext() if now.aside is None else now.aside.run(number)


def _join(now: Pass, number: int) -> None:
    if now.aside is not None:
        now.aside.join(number)


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
