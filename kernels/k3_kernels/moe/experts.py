"""The expert operators as the network calls them: the device's kernels where they take the arguments."""

from __future__ import annotations

import torch
from torch import Tensor

from k3_kernels import select
from k3_kernels.activation.reference import Activation
from k3_kernels.moe import hopper, reference
from k3_kernels.moe.reference import MX_GROUP, Experts

MOST_EXPERTS, MOST_ROWS = 4096, 16


def window_choice(z: Tensor, experts: Experts) -> select.Choice:
    """What `experts_window` runs with for rows like z [W, L], and why."""
    refused = _refusal(z, experts, MX_GROUP)
    if refused is None and z.shape[0] > MOST_ROWS:
        refused = f"window of {z.shape[0]} rows: the kernel takes up to {MOST_ROWS}"
    return select.choose(z.device, refused)


def grouped_choice(z: Tensor, experts: Experts) -> select.Choice:
    """What `experts_grouped` runs with for rows like z [T, L], and why."""
    return select.choose(z.device, _refusal(z, experts, 128))


def _refusal(z: Tensor, experts: Experts, unit: int) -> str | None:
    if z.dtype not in (torch.bfloat16, torch.float32):
        return f"{z.dtype}: the kernel takes bfloat16 and float32"
    if experts.w13_scale is None and experts.w13.dtype != z.dtype:
        return f"dense experts in {experts.w13.dtype}, rows in {z.dtype}: the kernel takes one type"
    F = experts.w13.shape[1] // 2
    if F % unit or z.shape[-1] % unit:
        return f"experts of {z.shape[-1]} x {F}: the kernel takes multiples of {unit}"
    return None


def route_choice(x: Tensor, gate: Tensor, groups: int) -> select.Choice:
    """What `route` runs with for rows like x [T, D], and why."""
    refused = None
    if groups > 1:
        refused = f"{groups} groups of experts: the kernel has no groups"
    elif gate.shape[0] > MOST_EXPERTS:
        refused = f"{gate.shape[0]} experts: the kernel takes up to {MOST_EXPERTS}"
    elif not (x.is_contiguous() and gate.is_contiguous()):
        refused = "rows or gate not contiguous"
    elif x.dtype not in (torch.bfloat16, torch.float32) or gate.dtype not in (x.dtype, torch.float32):
        refused = f"rows in {x.dtype}, gate in {gate.dtype}: the kernel takes bfloat16 and float32"
    return select.choose(x.device, refused)


def route(
    x: Tensor,
    gate: Tensor,
    bias: Tensor,
    *,
    top_k: int,
    groups: int,
    top_groups: int,
    renormalize: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Sigmoid router with a selection bias and group-limited top-k, in fp32.

    x [T, D] (fp32 or bf16), gate [E, D] fp32 (or x's dtype), bias [E] fp32. The bias takes part in the choice only; a
    group's rank is the sum of its two best biased scores and only `top_groups` groups may be chosen from. Of equal
    scores the lower id goes first.
    Returns (expert ids [T, k] int64, weights [T, k] fp32 = score (/ their sum + 1e-20) * scale), best choice first.
    """
    if route_choice(x, gate, groups).kernel:
        from k3_kernels.moe import route_triton

        return route_triton.route(x, gate, bias, top_k, renormalize, scale)
    return reference.route(
        x, gate, bias, top_k=top_k, groups=groups, top_groups=top_groups, renormalize=renormalize, scale=scale
    )


def experts_window(
    z: Tensor,
    ids: Tensor,
    weights: Tensor,
    experts: Experts,
    act: Activation,
    cursor: Tensor,
    n: int,
) -> Tensor:
    """`sum_e w_e f_e(z)` for the n live rows of a decode window, those of positions cursor[0] + 0 .. n-1, each in slot
    `position mod W`.

    z [W, L] (fp32 or bf16, L contiguous), ids [W, k] int64, weights [W, k] fp32, cursor int64 [4] on z's device; idle
    slots may hold anything and nothing is read for them. A row may name an expert again where its weights are 0.
    A row's bits depend on its own values alone: not on n, not on its slot, not on experts it shares with others.
    Products are summed in fp32, experts in the order of ids. Nothing waits for the device. Returns [W, L] in z's dtype,
    idle rows zero.
    """
    assert 0 <= n <= z.shape[0], (n, z.shape)
    if window_choice(z, experts).kernel:
        if hopper.window_takes(z, ids.shape[1], experts):
            from k3_kernels.moe import window_hopper_triton

            return window_hopper_triton.experts_window(z, ids, weights, experts, act, cursor, n)
        from k3_kernels.moe import window_triton

        return window_triton.experts_window(z, ids, weights, experts, act, cursor, n)
    return reference.experts_window(z, ids, weights, experts, act, cursor, n)


def experts_grouped(z: Tensor, ids: Tensor, weights: Tensor, experts: Experts, act: Activation) -> Tensor:
    """`sum_e w_e f_e(z)` for many tokens: pairs of token and expert are sorted by expert, so that weights are decoded
    once for many tokens.

    z [T, L] (fp32 or bf16, L contiguous), ids [T, k] int64, weights [T, k] fp32. Products are summed in fp32, experts
    in the order of ids; inner values and experts' outputs are rounded to z's dtype. The same call gives the same bits;
    another T may not. Returns [T, L] in z's dtype.
    """
    if grouped_choice(z, experts).kernel:
        if hopper.grouped_takes(z, experts):
            from k3_kernels.moe import grouped_hopper_triton

            return grouped_hopper_triton.experts_grouped(z, ids, weights, experts, act)
        from k3_kernels.moe import grouped_triton

        return grouped_triton.experts_grouped(z, ids, weights, experts, act)
    return reference.experts_grouped(z, ids, weights, experts, act)
