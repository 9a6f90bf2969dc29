"""What the engine needs of a model and its state, and the state of one moment for the store."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor


class StateLike(Protocol):
    """What the engine needs of `k3cli.model.state.State`."""

    @property
    def position(self) -> int: ...

    def fork(self) -> StateLike: ...

    def reserve(self, n: int) -> None: ...

    def checkpoint(self) -> Mapping[str, Any]: ...

    def page_rows(self, field: str, start: int, stop: int) -> Any: ...


class ModelLike(Protocol):
    """What the engine needs of `k3cli.model.network.K3Model`; see there for the contract of each call."""

    @property
    def window(self) -> int: ...

    @property
    def prefill_chunk(self) -> int: ...

    def prefill(
        self, ids: Tensor, state: Any, *, logits: str = "last", taps: list[Tensor] | None = None
    ) -> Tensor | None: ...

    def verify(self, ids: Tensor, state: Any) -> tuple[Tensor, Any]: ...

    def commit(self, state: Any, log: Any, n: int) -> None: ...


class Snapshot:
    """A `StateSource`: the state of a timeline at one moment, unchanged by whatever the timeline does next.

    Full pages are shared with the timeline, the rest is a copy. May be read by another thread than the timeline's.
    """

    def __init__(
        self, state: StateLike, device: torch.device | None = None, hints: Mapping[str, Any] | None = None
    ) -> None:
        """hints: tensors beside the state that nobody changes any more."""
        self._state = state
        self._hints = dict(hints or {})
        self.position = state.position
        # A thread that reads copies on another stream, which knows nothing of what this one has still to do.
        on_cuda = device is not None and device.type == "cuda"
        self._whole = torch.cuda.current_stream(device).record_event() if on_cuda else None

    def checkpoint(self) -> dict[str, np.ndarray[Any, Any]]:
        """Every checkpoint field, [n_layers, *shape], C-contiguous; bfloat16 as uint16 bits."""
        self._wait()
        return {name: _host(array) for name, array in self._state.checkpoint().items()}

    def page_rows(self, name: str, start: int, stop: int) -> np.ndarray[Any, Any]:
        """Rows [start, stop) of a page field, [n_layers, stop - start, *shape], C-contiguous."""
        self._wait()
        return _host(self._state.page_rows(name, start, stop))

    def hints(self) -> dict[str, np.ndarray[Any, Any]]:
        """What is no state and helps to go on sooner: what a drafter keeps. bfloat16 as uint16 bits."""
        self._wait()
        return {name: _host(array) for name, array in self._hints.items()}

    def _wait(self) -> None:
        if self._whole is not None:
            self._whole.synchronize()


def _host(array: Any) -> np.ndarray[Any, Any]:
    if isinstance(array, Tensor):
        array = array.detach().cpu()
        array = (array.view(torch.uint16) if array.dtype == torch.bfloat16 else array).numpy()
    return np.ascontiguousarray(array)
