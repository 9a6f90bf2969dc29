"""The K3 text model in the form that trains fastest at nano size. Parameter names are the checkpoint's (after
`language_model.`), except that experts are stacked: `experts.w1`, `experts.w3` [E, I, L], `experts.w2` [E, L, I].

Three liberties, none of which changes the function: every expert is computed for every token with its routing weight
(zero when not selected) folded in before W2; pointwise work runs on flat [tokens, channels] tensors, so that one
compiled kernel serves all sequence lengths; attention pads values to the key width.
KDA runs in FLA's kernels on a GPU and as the plain recurrence elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EPS, LATENT_EPS, L2_EPS = 1e-5, 1e-6, 1e-6
SITU_BETA, SITU_LINEAR_BETA = 4.0, 25.0
GATE_LOWER_BOUND = -5.0
CONV = 4


@dataclass(frozen=True)
class NanoConfig:
    vocab: int
    hidden: int = 256
    layers: int = 9
    mla_layers: tuple[int, ...] = (3, 7, 8)
    block: int = 4
    kda_heads: int = 4
    kda_dim: int = 64
    heads: int = 4
    nope: int = 64
    rope: int = 32
    v_dim: int = 64
    kv_lora: int = 128
    q_lora: int = 192
    dense: int = 768
    experts: int = 32
    top_k: int = 4
    latent: int = 128
    expert_dim: int = 160
    shared: int = 256
    context: int = 131072

    @property
    def kda_width(self) -> int:
        return self.kda_heads * self.kda_dim


# -- pointwise pieces; train.py compiles them


def rms_norm(x: Tensor, weight: Tensor, eps: float = EPS) -> Tensor:
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return (y * weight).to(x.dtype)


def mix(sources: list[Tensor], norm: Tensor, proj: Tensor) -> Tensor:
    """Softmax over depth: sources [N, D] each, one fixed pseudo-query."""
    query = norm.float() * proj[0].float()
    values = [s.float() for s in sources]
    scores = [(v * query).sum(-1) * torch.rsqrt(v.square().mean(-1) + EPS) for v in values]
    weights = torch.softmax(torch.stack(scores, -1), -1)
    out = sum(weights[:, i : i + 1] * v for i, v in enumerate(values))
    return out.to(sources[0].dtype)  # type: ignore[union-attr]


def situ(gate: Tensor, up: Tensor) -> Tensor:
    g, u = gate.float(), up.float()
    out = (
        SITU_BETA * torch.tanh(g / SITU_BETA) * torch.sigmoid(g) * (SITU_LINEAR_BETA * torch.tanh(u / SITU_LINEAR_BETA))
    )
    return out.to(gate.dtype)


def situ_routed(gate: Tensor, up: Tensor, weights: Tensor) -> Tensor:
    """gate, up [N, E*I], weights [N, E]: the expert activations times their routing weights."""
    n, e = weights.shape
    return (situ(gate.view(n, e, -1), up.view(n, e, -1)).float() * weights[:, :, None]).to(gate.dtype).view(n, -1)


def short_conv(x: Tensor, weight: Tensor, offset: Tensor) -> Tensor:
    """Causal depthwise convolution and SiLU on flat rows. x [N, C], weight [C, 1, 4], offset [N]: place in its row."""
    y = x.float() * weight[:, 0, CONV - 1]
    for back in range(1, CONV):
        shifted = F.pad(x, (0, 0, back, 0))[: x.shape[0]].float()
        y = y + torch.where((offset >= back)[:, None], shifted, 0.0) * weight[:, 0, CONV - 1 - back]
    return F.silu(y).to(x.dtype)


def gated_norm(o: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    """o, gate [N, H, K]: norm per head first, then the sigmoid gate."""
    y = o.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + EPS) * weight
    return (y * torch.sigmoid(gate.float())).to(o.dtype)


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    return (x.float() * torch.sigmoid(gate.float())).to(x.dtype)


POINTWISE: dict[str, Callable[..., Tensor]] = {
    f.__name__: f for f in (rms_norm, mix, situ, situ_routed, short_conv, gated_norm, sigmoid_gate)
}


def kda_plain(q: Tensor, k: Tensor, v: Tensor, s: Tensor, beta: Tensor, a_log: Tensor, dt_bias: Tensor) -> Tensor:
    """The recurrence token by token, for CPU tests. q, k, v, s [B, T, H, K], beta logits [B, T, H]."""
    q, k, v = (t.float() for t in (q, k, v))
    q = q * torch.rsqrt(q.square().sum(-1, keepdim=True) + L2_EPS) * q.shape[-1] ** -0.5
    k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + L2_EPS)
    gate = torch.exp(a_log)[:, None] * (s.float() + dt_bias.view(s.shape[-2:]))
    decay = torch.exp(GATE_LOWER_BOUND * torch.sigmoid(gate))
    b = torch.sigmoid(beta.float())
    state = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
    out = []
    for t in range(q.shape[1]):
        state = state * decay[:, t, :, :, None]
        u = b[:, t, :, None] * (v[:, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, t]))
        state = state + k[:, t, :, :, None] * u[:, :, None, :]
        out.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return torch.stack(out, 1)


def pin_kernels() -> None:
    """Lets each of FLA's kernels be built in one configuration. Trying all of them (hundreds of builds) took over five
    minutes on the machine used, a large part of this model's training time."""
    from triton.runtime.autotuner import Autotuner, Config

    tune = Autotuner.run

    def distance(tuner: Autotuner, config: Config) -> float:
        warps = 2 if "intra" in tuner.base_fn.__name__ else 4
        tiles = sum(abs(config.kwargs.get(k, 64) - 64) / 32 for k in ("BK", "BV"))
        return abs(config.num_warps - warps) + abs(config.num_stages - 2) / 4 + tiles

    def run(self: Autotuner, *args: object, **kwargs: object) -> object:
        if len(self.configs) > 1:
            self.configs = [min(self.configs, key=lambda c: distance(self, c))]
        return tune(self, *args, **kwargs)

    Autotuner.run = run


def kda_fla(q: Tensor, k: Tensor, v: Tensor, s: Tensor, beta: Tensor, a_log: Tensor, dt_bias: Tensor) -> Tensor:
    from fla.ops.kda import chunk_kda

    out, _ = chunk_kda(
        q, k, v, s, beta, A_log=a_log, dt_bias=dt_bias, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True, safe_gate=True, lower_bound=GATE_LOWER_BOUND, disable_recompute=True,
    )  # fmt: skip
    return out


class Linear(nn.Linear):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class Norm(nn.Module):
    def __init__(self, width: int, eps: float = EPS) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return POINTWISE["rms_norm"](x, self.weight, self.eps)


class ConvWeight(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, 1, CONV) * 0.1)
        with torch.no_grad():
            self.weight[:, 0, CONV - 1] += 0.6


class KDA(nn.Module):
    def __init__(self, c: NanoConfig) -> None:
        super().__init__()
        self.shape = (c.kda_heads, c.kda_dim)
        w = c.kda_width
        self.q_proj, self.k_proj, self.v_proj, self.g_proj = (Linear(c.hidden, w) for _ in range(4))
        self.o_proj = Linear(w, c.hidden)
        self.f_a_proj, self.f_b_proj = Linear(c.hidden, c.kda_dim), Linear(c.kda_dim, w)
        self.b_proj = Linear(c.hidden, c.kda_heads)
        self.q_conv1d, self.k_conv1d, self.v_conv1d = (ConvWeight(w) for _ in range(3))
        self.A_log = nn.Parameter(torch.zeros(c.kda_heads))
        # Decay per token exp(-5 sigmoid(dt)): from 0.8 down to 0.9998, so that channels remember 5 to 5,000 tokens.
        rate = torch.exp(torch.empty(w).uniform_(-8.5, -1.5)) / -GATE_LOWER_BOUND
        self.dt_bias = nn.Parameter(torch.log(rate / (1 - rate)))
        self.o_norm = Norm(c.kda_dim)

    def forward(self, x: Tensor, rows: tuple[int, int], offset: Tensor) -> Tensor:
        shape = (*rows, *self.shape)
        conv = POINTWISE["short_conv"]
        q, k, v = (
            conv(proj(x), c.weight, offset).view(shape)
            for proj, c in ((self.q_proj, self.q_conv1d), (self.k_proj, self.k_conv1d), (self.v_proj, self.v_conv1d))
        )
        s = self.f_b_proj(self.f_a_proj(x)).view(shape)
        beta = self.b_proj(x).view(*rows, -1)
        kernel = kda_fla if x.is_cuda else kda_plain
        o = kernel(q, k, v, s, beta, self.A_log, self.dt_bias).to(x.dtype)
        o = POINTWISE["gated_norm"](
            o.reshape(-1, *self.shape), self.g_proj(x).view(-1, *self.shape), self.o_norm.weight
        )
        return self.o_proj(o.view(x.shape[0], -1))


class MLA(nn.Module):
    def __init__(self, c: NanoConfig) -> None:
        super().__init__()
        self.c = c
        self.q_a_proj, self.q_a_layernorm = Linear(c.hidden, c.q_lora), Norm(c.q_lora, LATENT_EPS)
        self.q_b_proj = Linear(c.q_lora, c.heads * (c.nope + c.rope))
        self.kv_a_proj_with_mqa = Linear(c.hidden, c.kv_lora + c.rope)
        self.kv_a_layernorm = Norm(c.kv_lora, LATENT_EPS)
        self.kv_b_proj = Linear(c.kv_lora, c.heads * (c.nope + c.v_dim))
        self.g_proj = Linear(c.hidden, c.heads * c.v_dim)
        self.o_proj = Linear(c.heads * c.v_dim, c.hidden)

    def forward(self, x: Tensor, rows: tuple[int, int], offset: Tensor) -> Tensor:
        c = self.c
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).view(*rows, c.heads, -1)
        latent, k_rope = self.kv_a_proj_with_mqa(x).split((c.kv_lora, c.rope), -1)
        k_nope, v = self.kv_b_proj(self.kv_a_layernorm(latent)).view(*rows, c.heads, -1).split((c.nope, c.v_dim), -1)
        k = torch.cat((k_nope, k_rope.view(*rows, 1, -1).expand(-1, -1, c.heads, -1)), -1)
        v = F.pad(v, (0, c.nope + c.rope - c.v_dim))
        o = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        o = o[..., : c.v_dim].transpose(1, 2).reshape(x.shape[0], -1)
        return self.o_proj(POINTWISE["sigmoid_gate"](o, self.g_proj(x)))


class MLP(nn.Module):
    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (
            Linear(hidden, width),
            Linear(hidden, width),
            Linear(width, hidden),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(POINTWISE["situ"](self.gate_proj(x), self.up_proj(x)))


class Gate(nn.Module):
    def __init__(self, c: NanoConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(c.experts, c.hidden))
        self.register_buffer("e_score_correction_bias", torch.zeros(c.experts))
        self.register_buffer("load", torch.zeros(c.experts), persistent=False)


class Experts(nn.Module):
    def __init__(self, c: NanoConfig) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(c.experts, c.expert_dim, c.latent))
        self.w3 = nn.Parameter(torch.empty(c.experts, c.expert_dim, c.latent))
        self.w2 = nn.Parameter(torch.empty(c.experts, c.latent, c.expert_dim))


class MoE(nn.Module):
    def __init__(self, c: NanoConfig) -> None:
        super().__init__()
        self.top_k = c.top_k
        self.gate, self.experts = Gate(c), Experts(c)
        self.routed_expert_down_proj, self.routed_expert_up_proj = (
            Linear(c.hidden, c.latent),
            Linear(c.latent, c.hidden),
        )
        self.routed_expert_norm = Norm(c.latent)
        self.shared_experts = MLP(c.hidden, c.shared)
        self.quantise: Callable[[Tensor], Tensor] | None = None  # set for the MXFP4-aware finish

    def forward(self, x: Tensor) -> Tensor:
        # fp32 without autocast: a router in bf16 selects other experts.
        with torch.autocast(x.device.type, enabled=False):
            scores = torch.sigmoid(x.float() @ self.gate.weight.t())
        chosen = (scores.detach() + self.gate.e_score_correction_bias).topk(self.top_k, -1).indices
        picked = scores.gather(-1, chosen)
        picked = picked / (picked.sum(-1, keepdim=True) + 1e-20)
        weights = torch.zeros_like(scores).scatter(-1, chosen, picked)
        if self.training:
            self.gate.load += (weights.detach() > 0).sum(0)
        q = self.quantise or (lambda w: w)
        w1, w3, w2 = q(self.experts.w1).to(x.dtype), q(self.experts.w3).to(x.dtype), q(self.experts.w2).to(x.dtype)
        z = self.routed_expert_down_proj(x)
        h = POINTWISE["situ_routed"](z @ w1.flatten(0, 1).t(), z @ w3.flatten(0, 1).t(), weights)
        out = h @ w2.transpose(1, 2).flatten(0, 1)
        return self.routed_expert_up_proj(self.routed_expert_norm(out)) + self.shared_experts(x)


class Layer(nn.Module):
    def __init__(self, c: NanoConfig, index: int) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = Norm(c.hidden), Norm(c.hidden)
        self.self_attention_res_norm, self.mlp_res_norm = Norm(c.hidden), Norm(c.hidden)
        self.self_attention_res_proj, self.mlp_res_proj = Linear(c.hidden, 1), Linear(c.hidden, 1)
        self.self_attn = MLA(c) if index in c.mla_layers else KDA(c)
        if index == 0:
            self.mlp = MLP(c.hidden, c.dense)
        else:
            self.block_sparse_moe = MoE(c)


class Body(nn.Module):
    def __init__(self, c: NanoConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab, c.hidden)
        self.layers = nn.ModuleList(Layer(c, i) for i in range(c.layers))
        self.norm = Norm(c.hidden)
        self.output_attn_res_norm, self.output_attn_res_proj = Norm(c.hidden), Linear(c.hidden, 1)


class NanoModel(nn.Module):
    """`hidden(ids [B, T])` -> [B*T, D] before the head."""

    def __init__(self, config: NanoConfig, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.config, self.dtype = config, dtype
        self.model = Body(config)
        self.lm_head = Linear(config.hidden, config.vocab)
        for name, p in self.named_parameters():
            if name.endswith("embed_tokens.weight"):
                nn.init.normal_(p, std=0.5)
            elif name.endswith("res_proj.weight"):
                nn.init.zeros_(p)
            elif name.endswith(("lm_head.weight", "gate.weight")):
                nn.init.normal_(p, std=0.02)
            elif p.ndim >= 2 and "conv1d" not in name:
                out = (
                    name.endswith(("o_proj.weight", "down_proj.weight", "up_proj.weight"))
                    and "shared_experts.up" not in name
                )
                nn.init.normal_(p, std=(0.5 if out else 1.0) * p.shape[-1] ** -0.5)

    def hidden(self, ids: Tensor) -> Tensor:
        rows = (ids.shape[0], ids.shape[1])
        offset = torch.arange(ids.shape[1], device=ids.device).repeat(ids.shape[0])
        prefix: Tensor | None = self.model.embed_tokens(ids.flatten()).to(self.dtype)
        blocks: list[Tensor] = []
        mix_of = POINTWISE["mix"]
        for index, layer in enumerate(self.model.layers):
            assert isinstance(layer, Layer)
            assert prefix is not None
            h = (
                mix_of([*blocks, prefix], layer.self_attention_res_norm.weight, layer.self_attention_res_proj.weight)
                if blocks
                else prefix
            )
            if index % self.config.block == 0:
                blocks.append(prefix)
                prefix = None
            a = layer.self_attn(layer.input_layernorm(h), rows, offset)
            prefix = a if prefix is None else prefix + a
            h = mix_of([*blocks, prefix], layer.mlp_res_norm.weight, layer.mlp_res_proj.weight)
            x = layer.post_attention_layernorm(h)
            prefix = prefix + (layer.mlp(x) if index == 0 else layer.block_sparse_moe(x))
        h = mix_of([*blocks, prefix], self.model.output_attn_res_norm.weight, self.model.output_attn_res_proj.weight)
        return self.model.norm(h)

    def forward(self, ids: Tensor) -> Tensor:
        """fp32 logits [B, T, V]."""
        return self.lm_head(self.hidden(ids)).float().view(*ids.shape, -1)
