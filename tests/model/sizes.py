"""Bytes that something holds, for tests that compare them with a plan."""

from __future__ import annotations

import torch


def allocated(thing: object) -> int:
    """Bytes of all tensors in `thing`, its attributes and what these hold; memory that several share counts once."""
    found: dict[int, int] = {}

    def visit(thing: object) -> None:
        if isinstance(thing, torch.Tensor):
            storage = thing.untyped_storage()
            found[storage._cdata] = storage.nbytes()
        elif isinstance(thing, tuple | list):
            for item in thing:
                visit(item)
        elif hasattr(thing, "__dict__"):
            for item in vars(thing).values():
                visit(item)

    visit(thing)
    return sum(found.values())
