"""States and window logs of a model over several ranks, as rank 0's engine holds them: numbers, by which every rank
finds its own part."""

from __future__ import annotations

from typing import TYPE_CHECKING

from k3_sessions.types import Array, RestoredState
from torch import Tensor

from k3cli.model.replica import Call, Op
from k3cli.model.state import State
from k3cli.model.step import WindowLog

if TYPE_CHECKING:
    from k3cli.model.mirror import MirrorModel


class Handle:
    """A number of a model's ranks. Every rank lets go of it some time after its handle went."""

    def __init__(self, model: MirrorModel, number: int) -> None:
        self.number = number
        self._model = model
        model.forget(self, number)


class MirrorState(Handle):
    """`State` for callers: rank 0's is read here, changes happen on every rank."""

    @property
    def _local(self) -> State:
        found: State = self._model.held(self.number)
        return found

    @property
    def position(self) -> int:
        """Tokens evaluated into this state."""
        return self._local.position

    def fork(self) -> MirrorState:
        """An independent state at the same position."""
        return self._model.twin(self)

    def reserve(self, n: int) -> None:
        """Pages for n more tokens. Raises FitError."""
        self._model.call(Call(Op.RESERVE, self.number, n=n))

    def checkpoint(self) -> dict[str, Array]:
        """See `State.checkpoint`: all heads, gathered from the ranks."""
        found: dict[str, Array] = self._model.call(Call(Op.CHECKPOINT, self.number))
        return found

    def page_rows(self, name: str, start: int, stop: int) -> Array:
        """See `State.page_rows`; every rank has all latents."""
        return self._local.page_rows(name, start, stop)

    def load(self, restored: RestoredState) -> None:
        """See `State.load`."""
        self._model.call(Call(Op.LOAD, self.number, n=restored.position), restored)

    def publish(self, ids: Tensor) -> None:
        """See `State.publish`."""
        self._model.call(Call(Op.PUBLISH, self.number, ids=ids))


class MirrorLog(Handle):
    """`WindowLog` for callers."""

    @property
    def _local(self) -> WindowLog:
        found: WindowLog = self._model.held(self.number)
        return found

    @property
    def position(self) -> int:
        return self._local.position

    @property
    def rows(self) -> int:
        return self._local.rows

    @property
    def taps(self) -> Tensor | None:
        return self._local.taps
