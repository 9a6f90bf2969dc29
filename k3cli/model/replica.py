"""Calls that every rank makes alike: their wire form, and one rank's carrying them out.

A call is one message of fixed size from rank 0, with a tail when many token ids belong to it. A commit that only moves
numbers travels with the next call. States and window logs go
by numbers that rank 0 gives; every rank lets go of them at the same point in the row of calls, so that their pools take
the same decisions. A call refused with a K3Error is refused by every rank before anything was computed; the message
carries how many were, and how much of the pool is free: a rank that counts otherwise holds another state, and ends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from k3_sessions.types import Array, RestoredState
from torch import Tensor

from k3cli.errors import DamagedError, K3Error
from k3cli.model.fields import CONV_FIELDS, to_host
from k3cli.model.network import K3Model
from k3cli.model.placement import most_memory
from k3cli.model.state import State
from k3cli.model.step import WindowLog
from k3cli.model.world import World

Result = TypeVar("Result")
NOTHING = (0, 0, 0)
HEAD, INLINE = 11, 21
"""Numbers in front of every message, and further ones that fit into it."""
LOGITS = ("none", "last", "all")
MODES = ((False, False), (True, False), (False, True))
"""(eager, apart) of `K3Model.set_mode`."""


class Op(IntEnum):
    """What is called. a, b, n: number of a state, of a log or second state, a count."""

    NEW = 1
    KNOWN = 2
    PREFILL = 3
    VERIFY = 4
    COMMIT = 5
    FORK = 6
    RESERVE = 7
    CHECKPOINT = 8
    LOAD = 9
    PUBLISH = 10
    MODE = 11
    END = 12
    FORGET = 13
    MEMORY = 14


@dataclass(frozen=True)
class Call:
    """One call. ids: token ids, int64 [T] on the host. What comes before it: committed, a (state, log, rows) or zeros,
    and dropped, states and logs let go of."""

    op: Op
    a: int = 0
    b: int = 0
    n: int = 0
    ids: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    committed: tuple[int, int, int] = NOTHING
    dropped: tuple[int, ...] = ()

    def send(self, world: World, refused: int, free: int) -> None:
        dropped, ids = len(self.dropped), self.ids.numel()
        head = [self.op, self.a, self.b, self.n, *self.committed, dropped, ids, refused, free]
        if dropped + ids <= INLINE:
            world.post([*head, *self.dropped, *self.ids.tolist(), *[0] * (INLINE - dropped - ids)])
            return
        world.post(head + [0] * INLINE)
        world.tell(torch.cat((torch.tensor(self.dropped, dtype=torch.int64), self.ids)))

    @staticmethod
    def receive(world: World) -> tuple[Call, int, int]:
        """(call, calls refused so far, granules free) as rank 0 has them."""
        header = world.fetch(HEAD + INLINE)
        op, a, b, n, state, log, rows, dropped, ids, refused, free = header[:HEAD]
        numbers = torch.tensor(header[HEAD : HEAD + dropped + ids], dtype=torch.int64)
        if dropped + ids > INLINE:
            numbers = torch.empty(dropped + ids, dtype=torch.int64)
            world.tell(numbers)
        before = (state, log, rows), tuple(numbers[:dropped].tolist())
        return Call(Op(op), a, b, n, numbers[dropped:], *before), refused, free


class Replica:
    """One rank's model and what it holds for the numbers of states and logs."""

    def __init__(self, model: K3Model, world: World) -> None:
        self.model, self.world = model, world
        self.held: dict[int, State | WindowLog] = {}
        self.refused = 0
        self.busy = False
        """In the middle of a call."""

    def catch_up(self, call: Call) -> None:
        """What a call brings along from before it."""
        state, log, n = call.committed
        if n:
            mine: Any = self.held[state]
            window: Any = self.held[log]
            self.model.commit(mine, window, n)
        self.drop(call.dropped)

    def commits_alone(self, state: int, log: int) -> bool:
        """See `K3Model.settles_alone`."""
        mine: Any = self.held[state]
        window: Any = self.held[log]
        return self.model.settles_alone(mine, window)

    def drop(self, numbers: tuple[int, ...]) -> None:
        for number in numbers:
            del self.held[number]

    def run(self, call: Call, restored: RestoredState | None = None) -> Any:
        """Carries a call out, in step with the other ranks. restored: rank 0's, for LOAD."""
        model, held = self.model, self.held
        if call.op == Op.NEW:
            held[call.a] = made = model.new_state()
            return made
        if call.op == Op.KNOWN:
            if model.device.type == "cuda":
                # What is found must not depend on how far a device has come.
                torch.cuda.synchronize(model.device)
            known = model.known_prefix(call.ids)
            if known is not None:
                held[call.a] = known
            return known
        if call.op == Op.MODE:
            return model.set_mode(*MODES[call.n])
        if call.op == Op.FORGET:
            return model.forget_steps()
        if call.op == Op.MEMORY:
            return self._memory()
        state: Any = held[call.a]
        if call.op == Op.PREFILL:
            taps: list[Tensor] = []
            logits: Any = LOGITS[call.n]
            return model.prefill(call.ids, state, logits=logits, taps=taps), taps
        if call.op == Op.VERIFY:
            found, log = model.verify(call.ids, state)
            held[call.b] = log
            return found, log
        if call.op == Op.COMMIT:
            log_: Any = held[call.b]
            return model.commit(state, log_, call.n)
        if call.op == Op.FORK:
            held[call.b] = twin = state.fork()
            return twin
        if call.op == Op.RESERVE:
            return state.reserve(call.n)
        if call.op == Op.CHECKPOINT:
            return self._checkpoint(state)
        if call.op == Op.LOAD:
            return state.load(Spread(self.world, state, call.n, restored))
        assert call.op == Op.PUBLISH, call.op
        return state.publish(call.ids)

    def _memory(self) -> list[tuple[str, int]]:
        """(device, `most_memory`) of every rank, on rank 0."""
        world, device = self.world, self.world.device
        mine = torch.tensor([-1 if device.index is None else device.index, most_memory(device)])
        parts = [torch.empty_like(mine) for _ in range(world.size)] if world.rank == 0 else None
        dist.gather(mine, parts, dst=0, group=world.calls)
        numbers = [part.tolist() for part in parts or ()]
        return [(device.type if index < 0 else f"{device.type}:{index}", size) for index, size in numbers]

    def _checkpoint(self, state: State) -> dict[str, Array]:
        """The checkpoint fields of all heads, on rank 0."""
        state.settle()
        pool, found = state.pool, {}
        parts = {"recurrent": pool.recurrent[state.slot]}
        parts |= zip(CONV_FIELDS, pool.conv[state.slot].chunk(3, dim=-1), strict=True)
        for spec in state.layout.fields:
            if spec.scope == "checkpoint":
                whole = self.world.gather(parts[spec.name], head_axis(spec.name))
                if self.world.rank == 0:
                    self.world.settled()
                    found[spec.name] = to_host(whole)
        return found


def serve(replica: Replica) -> None:
    """A peer's life: carry out rank 0's calls until it says END. Raises what no rank can go on after."""
    world, pool = replica.world, replica.model.pool
    while True:
        call, refused, free = Call.receive(world)
        replica.catch_up(call)
        if call.op == Op.END:
            return
        if (refused, free) != (replica.refused, pool.free):
            raise K3Error(
                f"it has refused {replica.refused} calls and {pool.free} free granules, rank 0 {refused} and {free}",
                "the same state on every rank",
            )
        replica.busy = True
        try:
            replica.run(call)
        except K3Error:
            replica.refused += 1
        replica.busy = False


def head_axis(name: str) -> int:
    """Along which axis of a checkpoint field, layers first, the heads of the ranks lie: [L, H, V, K], [L, w-1, C]."""
    return 1 if name == "recurrent" else 2


class Spread:
    """Stored state on its way from rank 0 to every rank: each is handed its own heads and all latents.

    A `RestoredState` for `State.load`, which asks for the same parts in the same order everywhere.
    """

    def __init__(self, world: World, state: State, position: int, source: RestoredState | None) -> None:
        """source: what rank 0 has; None on the others."""
        self.position = position
        self._world, self._source = world, source
        self._fields = {spec.name: spec for spec in state.layout.fields}

    def checkpoint(self) -> dict[str, Array]:
        """This rank's heads of every checkpoint field."""
        wanted = [spec for spec in self._fields.values() if spec.scope == "checkpoint"]
        whole: dict[str, Array] = {}
        if self._source is not None:
            whole = dict(self._read(self._source.checkpoint))
            size = self._world.size
            for spec in wanted:
                shape = [len(spec.layers), *spec.shape]
                shape[head_axis(spec.name)] *= size
                array = whole.get(spec.name)
                if array is None or array.shape != tuple(shape) or array.dtype != _kind(spec.dtype):
                    self._refuse(f"stored field {spec.name} is no {spec.dtype} of shape {shape}")
            if len(whole) != len(wanted):
                self._refuse(f"stored checkpoint fields {sorted(whole)}")
        self._agree()
        found = {}
        for spec in wanted:
            part = np.empty((len(spec.layers), *spec.shape), _kind(spec.dtype))
            parts = None
            if self._source is not None:
                pieces = np.split(whole[spec.name], self._world.size, axis=head_axis(spec.name))
                parts = [_bytes(np.ascontiguousarray(piece)) for piece in pieces]
            dist.scatter(_bytes(part), parts, src=0, group=self._world.calls)
            found[spec.name] = part
        return found

    def page_rows(self, name: str, start: int, stop: int) -> Array:
        """Rows of a page field, as rank 0 reads them."""
        spec = self._fields[name]
        shape, kind = (len(spec.layers), stop - start, *spec.shape), _kind(spec.dtype)
        array = np.empty(shape, kind)
        if self._source is not None:
            source = self._source
            array = np.array(self._read(lambda: source.page_rows(name, start, stop)), order="C")
            if array.shape != shape or array.dtype != kind:
                self._refuse(f"stored field {name} has shape {list(array.shape)} and type {array.dtype}")
        self._agree()
        self._world.tell(_bytes(array))
        return array

    def _read(self, work: Callable[[], Result]) -> Result:
        try:
            return work()
        except Exception:
            self._agree(1)
            raise

    def _refuse(self, found: str) -> None:
        self._agree(1)
        raise DamagedError(found, "the fields and shapes of this model's state")

    def _agree(self, trouble: int = 0) -> None:
        """Whether what comes next is good, from rank 0 to all."""
        word = torch.tensor([trouble])
        self._world.tell(word)
        if self._source is None and word.item():
            raise DamagedError("rank 0 could not read the stored state", "all of it")


def _kind(dtype: str) -> np.dtype[Any]:
    return np.dtype("<u2") if dtype == "bfloat16" else np.dtype("<f4")


def _bytes(array: Array) -> Tensor:
    return torch.from_numpy(array.reshape(-1).view(np.uint8))
