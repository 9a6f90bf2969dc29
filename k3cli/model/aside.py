"""Work of a step beside its main row of kernels: on streams that leave it and come back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Aside:
    """Two streams of a device. What runs on them begins with what was launched on the main stream so far."""

    def __init__(self, device: torch.device) -> None:
        self._streams = [torch.cuda.Stream(device) for _ in range(2)]
        self._out = [False, False]

    @contextmanager
    def run(self, number: int) -> Iterator[None]:
        """What is launched inside goes to a stream. Its results are to be used, and its inputs let go of, behind
        `join` only."""
        stream = self._streams[number]
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        self._out[number] = True
        with torch.cuda.stream(stream):
            yield

    def clear(self) -> None:
        """Nothing is out: for a step that begins anew, whatever became of the one before."""
        self._out = [False, False]

    def join(self, number: int) -> None:
        """The main stream waits for a stream, if anything was launched there: a recording takes no other waits."""
        if self._out[number]:
            self._out[number] = False
            stream = self._streams[number]
            torch.cuda.current_stream(stream.device).wait_stream(stream)
