"""What each operation of a model would run with on a device, and whether its steps are recorded as graphs."""

from __future__ import annotations

import torch
from k3_kernels import attnres, conv, kda, linear, mla, moe, norm, select
from k3_kernels.activation import reference as activation
from k3_kernels.kda.step import choice as step_choice
from k3_kernels.moe import Experts
from k3_kernels.select import Choice
from k3_sessions.types import HASH_BLOCK

from k3cli.model.blocks import Alloc, MoeWeights
from k3cli.model.config import ModelConfig

READS_ON_HOST = ("kda.step", "mla.decode")
"""Operations whose reference reads the cursor on the host: a step with one of them can't be recorded."""


def kernel_choices(config: ModelConfig, device: torch.device, dtype: torch.dtype, window: int) -> dict[str, Choice]:
    """Operation -> kernel or reference and why, for the operations this model has. Nothing of size is allocated."""
    found: dict[str, Choice] = {}
    kda_, mla_ = config.kda, config.mla
    if config.kda_layers:
        found["kda.step"] = step_choice(device, kda_.head_dim, kda_.head_dim, kda_.conv_width)
        found["kda.prefill"] = kda.prefill_choice(device, kda_.head_dim, kda_.head_dim, dtype)
        row = torch.empty(0, 3 * kda_.width, dtype=dtype, device=device)
        found["conv.short_conv"] = conv.choice(row, row)
    if config.mla_layers:
        found["mla.decode"] = mla.choose_decode(device, dtype, window, mla_.kv_rank, mla_.pe_dim, HASH_BLOCK)
        found["mla.prefill"] = mla.choose_prefill(device, dtype, mla_.nope_dim + mla_.pe_dim, mla_.v_dim)
    rows = torch.empty(window, 0, dtype=dtype, device=device)
    if any(config.moe_layers):
        weights, moe_ = MoeWeights(config, Alloc(torch.device("meta"), dtype)), config.moe
        assert moe_ is not None
        gate = torch.empty(moe_.experts, 0, device=device)
        found["moe.route"] = moe.route_choice(rows, gate, moe_.groups)
        z = torch.empty(window, moe_.latent or config.hidden, dtype=dtype, device=device)
        experts = Experts(*weights.experts)
        found["moe.experts_window"] = moe.window_choice(z, experts)
        found["moe.experts_grouped"] = moe.grouped_choice(z, experts)
    if config.attn_res_block is not None:
        deepest = -(-len(config.layers) // config.attn_res_block) + 1
        sources = torch.empty(deepest, 0, config.hidden, dtype=dtype, device=device)
        found["attnres.mix_norm"] = attnres.choice(sources)
    wide = torch.empty(0, config.hidden, dtype=dtype, device=device)
    found["linear.few"] = linear.choice(
        torch.empty(window, config.hidden, dtype=dtype, device=device),
        torch.empty(0, config.hidden, dtype=dtype, device=device),
    )
    found["norm.rms_norm"] = norm.choice(wide)
    found["activation"] = activation.choice(wide)
    return found


def eager_reason(config: ModelConfig, device: torch.device, dtype: torch.dtype, window: int) -> str:
    """Why steps run plainly instead of from a recorded graph; "" when they are to be recorded."""
    if device.type != "cuda":
        return f"device {device.type}: graphs need a CUDA device"
    if not select.for_device(device.type).kernel:
        return select.for_device(device.type).reason
    for name, choice in kernel_choices(config, device, dtype, window).items():
        if name in READS_ON_HOST and not choice.kernel:
            return f"{name} runs as reference ({choice.reason})"
    return ""
