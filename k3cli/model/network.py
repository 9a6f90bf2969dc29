"""The K3 network: prefill of a chunk, verification of a window, commit.

Bits depend on absolute positions only. A window is always computed as W rows; the row of position p sits in slot
p mod W, so that every matrix product and every element-wise operation treats a token alike whether it is decoded
alone or verified behind others. Attention sums over the pages up to the row's own, never over how far a window reaches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from k3_kernels import attnres, conv, kda, mla, moe
from k3_kernels.activation import Activation, Situ, Swiglu
from k3_kernels.norm import gated_rms_norm, rms_norm
from k3_sessions.types import StateLayout
from torch import Tensor
from torch.profiler import record_function

from k3cli.model.blocks import KdaWeights, MlaWeights, MlpWeights, MoeWeights, Weights
from k3cli.model.config import ModelConfig
from k3cli.model.state import State, state_layout

DEFAULT_WINDOW = 8
SERIAL_WEIGHTS = 128 << 20
"""On a CPU, a model with fewer bytes of weights decodes on one thread: waking a second one for each of the small
products costs more than it saves, and much more when other programs use the cores."""


@dataclass(frozen=True)
class WindowLog:
    """What `verify` leaves for `commit`: rows in time order, from `position` on.

    conv [n_kda, n, 3 H K] convolution inputs, kda: per-layer rows stacked [n, n_kda, H, ...], latents
    [n_mla, n, R + P].
    """

    position: int
    rows: int
    conv: Tensor
    kda: kda.KdaLog | None
    latents: Tensor


@dataclass
class _Pass:
    """One run through the layers. `rows` are the rows that count, in time order; None in a prefill.

    What the layers leave behind is collected here, in layer order.
    """

    state: State
    rows: Sequence[int] | None
    positions: Tensor
    order: Tensor
    inverse: Tensor
    recurrent: list[Tensor]
    conv: list[Tensor]
    logs: list[kda.KdaLog]
    latents: list[Tensor]


class K3Model:
    """A loaded network on one device. Stateless between calls: everything a sequence needs is in its `State`."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        device: torch.device,
        dtype: torch.dtype,
        window: int = DEFAULT_WINDOW,
    ) -> None:
        """window: rows of every decode and verify step, W >= 1."""
        assert window >= 1, window
        self.config = config
        self.weights = weights
        self.device = device
        self.dtype = dtype
        self.window = window
        self.act: Activation = Swiglu() if config.situ is None else Situ(*config.situ)
        self._layout = state_layout(config, dtype)
        small = sum(sink.nbytes for sink in weights.sinks().values()) < SERIAL_WEIGHTS
        self._serial = device.type == "cpu" and small
        self._scale = (config.mla.nope_dim + config.mla.pe_dim) ** -0.5

    def state_layout(self) -> StateLayout:
        """The state's named fields, as the store keeps them."""
        return self._layout

    def new_state(self) -> State:
        """An empty state at position 0."""
        return State(self.config, self._layout, self.device, self.dtype)

    @torch.no_grad()
    def prefill(self, ids: Tensor, state: State, *, logits: Literal["all", "last", "none"] = "last") -> Tensor | None:
        """Evaluates one chunk of T >= 0 tokens, int64 [T], and advances the state by T once all of it is computed.

        Returns fp32 logits [T, V] ("all"), [V] ("last"), or None ("none", or T = 0). The bits depend on how a sequence
        is cut into chunks: the caller cuts at fixed absolute positions.
        """
        T = ids.numel()
        if T == 0:
            return None
        none = torch.empty(0)
        now = _Pass(state, None, none, none, none, [], [], [], [])
        hidden = self._layers(ids.to(self.device), now)
        found = None
        if logits == "all":
            found = F.linear(hidden, self.weights.head).float()
        elif logits == "last":
            found = F.linear(hidden[-1:], self.weights.head).float()[0]
        self._advance(state, now, T)
        return found

    @torch.no_grad()
    def verify(self, ids: Tensor, state: State) -> tuple[Tensor, WindowLog]:
        """Evaluates a window of 1 <= n <= W tokens, int64 [n], behind the committed state, which stays as it is.

        Returns (fp32 logits [n, V], log for `commit`). Row i equals, bit for bit, the logits of decoding the same
        tokens one by one.
        """
        n, W = ids.numel(), self.window
        assert 1 <= n <= W, (n, W)
        start = state.position
        slots = [(start + i) % W for i in range(W)]
        order = torch.tensor(slots, device=self.device)
        rows = slots[:n]
        padded = torch.zeros(W, dtype=torch.int64, device=self.device)
        padded[order[:n]] = ids.to(self.device)
        positions = torch.empty_like(order)
        positions[order] = torch.arange(start, start + W, device=self.device)
        now = _Pass(state, rows, positions, order, torch.argsort(order), [], [], [], [])
        with _threads(1 if self._serial else None):
            hidden = self._layers(padded, now)
            with _marked("head"):
                found = F.linear(hidden, self.weights.head).float()[order[:n]]
        log = None
        if now.logs:
            log = kda.KdaLog(*(torch.stack(parts, 1) for parts in zip(*now.logs, strict=True)))
        return found, WindowLog(start, n, _stack(now.conv, state.now.conv, n), log, _stack(now.latents, state.tail, n))

    @torch.no_grad()
    def commit(self, state: State, log: WindowLog, n: int) -> None:
        """Applies the first n rows of a log, 0 <= n <= log.rows, to the state it was computed from.

        Afterwards the state is bit for bit that of decoding these n tokens one by one.
        """
        assert log.position == state.position, (log.position, state.position)
        assert 0 <= n <= log.rows, (n, log.rows)
        if n == 0:
            return
        now = state.now
        recurrent = now.recurrent if log.kda is None else kda.replay(now.recurrent, log.kda, n)
        window = now.conv if log.kda is None else conv.advance_window(now.conv, log.conv, n)
        state.advance(recurrent, window, log.latents[:, :n])

    def _advance(self, state: State, now: _Pass, T: int) -> None:
        recurrent = torch.stack(now.recurrent) if now.recurrent else state.now.recurrent
        window = torch.stack(now.conv) if now.conv else state.now.conv
        state.advance(recurrent, window, _stack(now.latents, state.tail, T))

    def _layers(self, ids: Tensor, now: _Pass) -> Tensor:
        """Embedding to final norm: [T] -> [T, D]."""
        block = self.config.attn_res_block
        x = F.embedding(ids, self.weights.embed)
        return self._plain(x, now) if block is None else self._mixed(x, now, block)

    def _plain(self, x: Tensor, now: _Pass) -> Tensor:
        eps = self.config.norm_eps
        for i, layer in enumerate(self.weights.layers):
            x = x + self._attention(i, rms_norm(x, layer.attn_norm, eps), now)
            x = x + self._mlp(i, rms_norm(x, layer.mlp_norm, eps), now)
        return rms_norm(x, self.weights.norm, eps)

    def _mixed(self, x: Tensor, now: _Pass, block: int) -> Tensor:
        """Attention residuals: `slab` holds the snapshots and behind them the running prefix."""
        eps = self.config.norm_eps
        count = -(-len(self.weights.layers) // block)
        slab = torch.empty(count + 1, *x.shape, dtype=x.dtype, device=x.device)
        slab[0] = x
        top = 0
        for i, layer in enumerate(self.weights.layers):
            assert layer.attn_mix is not None
            assert layer.mlp_mix is not None
            with _marked("mix"):
                if top:
                    h = attnres.mix_norm(slab[: top + 1], layer.attn_mix.query, layer.attn_norm, eps, eps)
                else:
                    h = rms_norm(slab[0], layer.attn_norm, eps)
            fresh = i % block == 0
            if fresh:  # the raw prefix becomes a snapshot and a new prefix starts from nothing
                top += 1
            out = self._attention(i, h, now)
            if fresh:
                slab[top] = out
            else:
                slab[top] += out
            with _marked("mix"):
                h = attnres.mix_norm(slab[: top + 1], layer.mlp_mix.query, layer.mlp_norm, eps, eps)
            slab[top] += self._mlp(i, h, now)
        assert self.weights.mix is not None
        with _marked("mix"):
            return attnres.mix_norm(slab[: top + 1], self.weights.mix.query, self.weights.norm, eps, eps)

    def _attention(self, index: int, x: Tensor, now: _Pass) -> Tensor:
        weights = self.weights.layers[index].attention
        if isinstance(weights, KdaWeights):
            with _marked("kda"):
                return self._kda(weights, x, now)
        with _marked("mla"):
            return self._mla(weights, x, now)

    def _kda(self, w: KdaWeights, x: Tensor, now: _Pass) -> Tensor:
        """x [T, D] normed -> [T, D]."""
        cfg, T = self.config.kda, x.shape[0]
        layer = len(now.conv)
        projected = F.linear(x, w.proj)
        qkv, gate, f_a, b = projected.split([3 * cfg.width, w.gate_width, cfg.head_dim, cfg.heads], dim=-1)
        gate = gate if w.g_b is None else F.linear(gate, w.g_b)
        f = F.linear(f_a, w.f_b).view(T, cfg.heads, cfg.head_dim)
        window, state = now.state.now.conv[layer], now.state.now.recurrent[layer]
        if now.rows is None:
            y, left = conv.short_conv(qkv, window, w.conv)
            now.conv.append(left)
        else:
            timed = qkv.index_select(0, now.order)
            y = F.silu(conv.taps(timed, window, w.conv).index_select(0, now.inverse)).to(x.dtype)
            now.conv.append(timed[: len(now.rows)])
        q, k, v = (part.reshape(T, cfg.heads, cfg.head_dim) for part in y.split(cfg.width, dim=-1))
        if now.rows is None:
            o, new = kda.prefill(q, k, v, f, b, w.A_log, w.dt_bias, cfg.gate_lower_bound, state)
            now.recurrent.append(new)
        else:
            o, log = kda.verify(q, k, v, f, b, w.A_log, w.dt_bias, cfg.gate_lower_bound, state, now.rows)
            now.logs.append(log)
        gated = gated_rms_norm(o, gate.reshape(o.shape), w.o_norm, self.config.norm_eps)
        return F.linear(gated.view(T, cfg.width), w.o_proj)

    def _mla(self, w: MlaWeights, x: Tensor, now: _Pass) -> Tensor:
        """x [T, D] normed -> [T, D]."""
        cfg, T = self.config.mla, x.shape[0]
        projected = F.linear(x, w.proj).split(list(w.parts.values()), dim=-1)
        q, latent = projected[0], projected[1]
        if w.q_norm is not None and w.q_b is not None:
            q = F.linear(rms_norm(q, w.q_norm, cfg.latent_norm_eps), w.q_b)
        q = q.reshape(T, cfg.heads, cfg.nope_dim + cfg.pe_dim)
        c, k_pe = latent.split([cfg.kv_rank, cfg.pe_dim], dim=-1)
        row = torch.cat((rms_norm(c, w.kv_norm, cfg.latent_norm_eps), k_pe), -1)
        layer = len(now.latents)
        if now.rows is None:
            now.latents.append(row)
            out = mla.prefill_blocks(q, _blocks(now.state, layer, row), w.kv_b, now.state.position, self._scale)
        else:
            timed = row.index_select(0, now.order[: len(now.rows)])
            now.latents.append(timed)
            out = self._window_attention(q, _pages(now.state, layer, timed), w, now)
        out = out.reshape(T, cfg.heads * cfg.v_dim)
        if cfg.output_gate:
            out = out * torch.sigmoid(projected[2])
        return F.linear(out, w.o_proj)

    def _window_attention(self, q: Tensor, pages: Sequence[Tensor], w: MlaWeights, now: _Pass) -> Tensor:
        """A window that crosses a page is computed once per page count, so that a row's sums end at its own page."""
        assert now.rows is not None
        size = now.state.page
        first = now.state.position // size + 1
        out = mla.decode_blocks(q, pages[:first], w.w_uk, w.w_uv, now.positions, self._scale)
        for count in range(first + 1, len(pages) + 1):
            later = mla.decode_blocks(q, pages[:count], w.w_uk, w.w_uv, now.positions, self._scale)
            inside = (now.positions >= (count - 1) * size).view(-1, 1, 1)
            out = torch.where(inside, later, out)
        return out

    def _mlp(self, index: int, x: Tensor, now: _Pass) -> Tensor:
        """x [T, D] normed -> [T, D]."""
        w = self.weights.layers[index].mlp
        if isinstance(w, MlpWeights):
            with _marked("mlp"):
                gate, up = F.linear(x, w.gate_up).chunk(2, dim=-1)
                return F.linear(self.act(gate, up), w.down)
        with _marked("moe"):
            return self._moe(w, x, now)

    def _moe(self, w: MoeWeights, x: Tensor, now: _Pass) -> Tensor:
        cfg = self.config.moe
        assert cfg is not None
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
        z, shared = x, None
        if w.proj is not None:
            projected = F.linear(x, w.proj)
            inner = cfg.latent or 0
            z = projected[:, :inner].contiguous() if inner else x
            shared = projected[:, inner:]
        if now.rows is None:
            routed = moe.experts_grouped(z, ids, weights, w.experts, self.act)
        else:
            routed = moe.experts_window(z, ids, weights, w.experts, self.act, now.rows)
        if w.latent_norm is not None:
            routed = rms_norm(routed, w.latent_norm, self.config.norm_eps)
        if w.latent_up is not None:
            routed = F.linear(routed, w.latent_up)
        if shared is not None and w.shared_down is not None:
            gate, up = shared.chunk(2, dim=-1)
            routed = routed + F.linear(self.act(gate, up), w.shared_down)
        return routed


def _marked(part: str) -> AbstractContextManager[object]:
    """A profiler range `k3:PART`, for who asks where a step's time goes; nothing when nobody does."""
    return record_function(f"k3:{part}") if torch.autograd._profiler_enabled() else nullcontext()


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


def _stack(parts: list[Tensor], like: Tensor, n: int) -> Tensor:
    """Per-layer rows as one tensor; with no such layer, no rows of the right width."""
    return torch.stack(parts) if parts else like.new_empty(0, n, like.shape[-1])


def _blocks(state: State, layer: int, rows: Tensor) -> list[Tensor]:
    """Latent rows of one MLA layer, committed and new, cut at absolute page boundaries."""
    filled = state.position % state.page
    fresh = torch.cat((state.tail[layer, :filled], rows))
    return [page[layer] for page in state.now.pages] + list(fresh.split(state.page))


def _pages(state: State, layer: int, rows: Tensor) -> list[Tensor]:
    """The same as whole pages, zeros behind the last row; the state's own tail stays untouched."""
    filled = state.position % state.page
    count = -(-(filled + rows.shape[0]) // state.page)
    fresh = rows.new_zeros(count, state.page, rows.shape[-1])
    flat = fresh.view(-1, rows.shape[-1])
    flat[:filled] = state.tail[layer, :filled]
    flat[filled : filled + rows.shape[0]] = rows
    return [page[layer] for page in state.now.pages] + list(fresh)
