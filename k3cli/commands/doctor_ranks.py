"""What `k3 doctor` says of several ranks: what each holds by the plan, whether it fits, how they reach each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from k3cli.commands.doctor_checks import Check
from k3cli.commands.output import human_bytes
from k3cli.errors import Exit

if TYPE_CHECKING:
    import torch

    from k3cli.model.config import ModelConfig
    from k3cli.model.fit import Device
    from k3cli.model.parallel import Holding


def ranks(config: ModelConfig, dtype: torch.dtype, devices: Sequence[Device]) -> Iterator[Check]:
    """One row a rank: its device, what it holds, what it needs of what is free; and the nearest plan if one lacks."""
    from k3cli.model.fit import needs, shortage
    from k3cli.model.parallel import holding
    from k3cli.model.sizing import state_size, weigh

    world = len(devices)
    parts, state = weigh(config, dtype, world), state_size(config, dtype, world=world)
    dense = 0
    for rank, (device, need) in enumerate(zip(devices, needs(config, dtype, devices[0].kind, world), strict=True)):
        held = holding(config, rank, world)
        fits = device.free is None or need.total <= device.free
        free = "unknown" if device.free is None else human_bytes(device.free)
        components = {entry.name: entry.ranks[rank] for entry in parts}
        if dense := need.weights - sum(components.values()):
            components["experts, dequantised"] = dense
        data: dict[str, Any] = {
            "rank": rank,
            "device": device.name,
            "free": device.free,
            "needs": need.total,
            "weights": need.weights,
            "components": components,
            "state_fixed": state.checkpoint,
            "state_per_token": state.row,
            "holds": {key: [span.start, span.stop] for key, span in asdict(held).items() if span},
        }
        value = f"{device.name}, weights {human_bytes(need.weights)}; needs {human_bytes(need.total)}, {free} free"
        yield Check("ranks", f"rank {rank}", value, _words(config, held), Exit.OK if fits else Exit.NO_FIT, data)
    problem = shortage(config, dtype, devices)
    if problem is not None:
        yield Check("ranks", "plan", f"does not fit: {problem.found}", problem.do or "", Exit.NO_FIT)
    else:
        most = sum(max(entry.ranks) for entry in parts) + dense
        yield Check("ranks", "plan", "fits", f"{human_bytes(most)} of weights on the fullest rank; latents are on each")


def _words(config: ModelConfig, held: Holding) -> str:
    """`KDA heads 0-47 of 96, ...`"""
    moe = config.moe
    wholes = {
        "KDA heads": (held.kda_heads, config.kda.heads),
        "MLA heads": (held.mla_heads, config.mla.heads),
        "ids": (held.ids, config.vocab),
        "dense columns": (held.dense_columns, config.intermediate),
        "shared columns": (held.shared_columns, moe.shared if moe else 0),
        "experts": (held.experts, moe.experts if moe else 0),
        "columns of each expert": (held.expert_columns, moe.intermediate if moe else 0),
    }
    return ", ".join(_span(what, span, size) for what, (span, size) in wholes.items() if span)


def _span(what: str, span: range, size: int) -> str:
    return f"all {size:,} {what}" if len(span) == size else f"{what} {span.start:,}-{span.stop - 1:,} of {size:,}"


def links(names: Sequence[str]) -> Iterator[Check]:
    """How ranks on these devices reach each other, one row for each kind of link."""
    from k3cli.model.links import links as found

    if names[0].partition(":")[0] != "cuda":
        yield Check("links", "between ranks", "main memory", "processes of one CPU; gloo over the loopback device")
        return
    numbers = [int(name.partition(":")[2]) for name in names]
    every = found(numbers)
    for way in dict.fromkeys(link.way for link in every):
        alike = [link for link in every if link.way == way]
        pairs = "all pairs" if len(alike) == len(every) > 1 else " ".join(f"{x.first}-{x.second}" for x in alike)
        data = {"way": way, "pairs": [[link.first, link.second] for link in alike]}
        yield Check("links", pairs, way, alike[0].source, data=data)
    yield Check("links", "multicast", "off", "of NVLink: a program that ends badly can take the links of a host along")
