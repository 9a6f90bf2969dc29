"""MXFP4: 4-bit floats (E2M1) in groups of 32 with one power-of-two scale (E8M0)."""

from __future__ import annotations

import torch
from torch import Tensor

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
EDGES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # midpoints between neighbours
GROUP = 32


def scale_exponent(groups: Tensor) -> Tensor:
    """Exponent of the scale of each group [..., 32]: the largest magnitude lies in (3.5, 7] scales, so that it becomes
    4 or 6 (every group uses its range) and is off by at most a fifth."""
    top = groups.abs().amax(-1, keepdim=True).clamp_min(2.0**-100)
    return torch.ceil(torch.log2(top / 7.0))


def encode(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [..., C] fp32 -> (codes uint8 [..., C] with values 0..15, scales uint8 [..., C/32], bias 127)."""
    groups = weight.float().unflatten(-1, (-1, GROUP))
    exponent = scale_exponent(groups)
    scaled = groups * torch.exp2(-exponent)
    code = torch.bucketize(scaled.abs().contiguous(), scaled.new_tensor(EDGES))
    code = code + 8 * (scaled < 0)
    return code.to(torch.uint8).flatten(-2), (exponent.squeeze(-1) + 127).to(torch.uint8)


def decode(codes: Tensor, scales: Tensor) -> Tensor:
    table = torch.tensor([*VALUES, *(-v for v in VALUES)], device=codes.device)
    values = table[codes.long()].unflatten(-1, (-1, GROUP))
    return (values * torch.exp2(scales.float() - 127)[..., None]).flatten(-2)


def pack(codes: Tensor) -> Tensor:
    """Two codes a byte: column 2j in the low nibble, 2j+1 in the high one."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def fake_quantise(weight: Tensor) -> Tensor:
    """What the checkpoint will hold, with the gradient passed straight through."""
    groups = weight.float().unflatten(-1, (-1, GROUP))
    scale = torch.exp2(scale_exponent(groups))
    scaled = groups / scale
    size = scaled.abs()
    rounded = sum(
        (size > edge).float() * (high - low) for edge, low, high in zip(EDGES, VALUES[:-1], VALUES[1:], strict=True)
    )
    quantised = (torch.copysign(rounded, scaled) * scale).flatten(-2)  # type: ignore[arg-type]
    return weight + (quantised - weight).detach()
