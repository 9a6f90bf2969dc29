"""What a run says of the device and of what runs there."""

from __future__ import annotations

import torch

from k3cli.model.choices import kernel_choices
from k3cli.model.config import ModelConfig
from k3cli.model.parallel import held


def references(
    config: ModelConfig, place: torch.device, kind: torch.dtype, window: int, world: int = 1
) -> dict[str, str]:
    """Operation -> why it runs as reference, for those that do on each of `world` ranks."""
    found = kernel_choices(held(config, world), place, kind, window)
    return {name: choice.reason for name, choice in found.items() if not choice.kernel}


def device_name(place: torch.device) -> str:
    return torch.cuda.get_device_name(place) if place.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
