"""The ladder: prefill, decode and verify measured at each depth, on a state that grows from one depth to the next.

Engine only: no tokenising, no rendering; a decode step ends when its token is known to the host, as in a conversation.
Prompts are fresh random tokens in every cell.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from k3cli.bench.floors import parts, total
from k3cli.bench.record import Results, Row, measured
from k3cli.errors import FitError
from k3cli.model.config import ModelConfig

FLUSH_BYTES = 256 << 20
"""Written between cold steps: several times the L2 of any GPU."""


@dataclass(frozen=True)
class Plan:
    """depths: positions to measure at, ascending. prompt: tokens of a prefill cell, 0: none.

    windows: rows of verify cells. steps: decode steps of a cell. repeats: prefill samples. chunk: tokens of a prefill
    chunk. cold: empty the L2 first.
    """

    depths: tuple[int, ...]
    prompt: int
    windows: tuple[int, ...]
    chunk: int
    steps: int = 24
    repeats: int = 3
    cold: bool = True


class Ladder:
    """One model climbing. model: a `K3Model`, or a `MirrorModel` over ranks. ceilings: measured (bytes per second,
    operations per second). kept: a state that lies beyond one depth and not beyond another, if an earlier start of the
    run has left one."""

    def __init__(
        self,
        model: Any,
        config: ModelConfig,
        plan: Plan,
        ceilings: tuple[float, float],
        kept: Callable[[int, int], Any | None] | None = None,
    ) -> None:
        self.model, self.config, self.plan, self.ceilings, self.kept = model, config, plan, ceilings, kept
        self.state: Any = model.new_state()
        self.random = torch.Generator().manual_seed(1)
        cuda = model.device.type == "cuda"
        self._sync: Callable[[], None] = torch.cuda.synchronize if cuda else _nothing
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=model.device) if cuda and plan.cold else None

    @property
    def own(self) -> int:
        """Bytes on the device that the measuring itself holds."""
        return 0 if self._flush is None else self._flush.nbytes

    def climb(
        self, results: Results, left: Callable[[int], bool], behind: Callable[[int], Iterator[Row]]
    ) -> Iterator[Row]:
        """Measures every cell that `results` lacks and yields its row, finished or failed.

        behind(depth): rows after the cells of a depth. left: whether the state has to be there for them.
        """
        for depth in self.plan.depths:
            open_cells = [(cell, work) for cell, work in self._cells(depth) if results.done(**cell) is None]
            if (open_cells or left(depth)) and self.state.position < depth:
                yield results.add(self._extend(depth))
                if self.state.position < depth:
                    return  # the way there failed; every deeper cell would too
            for cell, work in open_cells:
                yield results.add({**cell, **self._guarded(work)})
            yield from behind(depth)

    def _cells(self, depth: int) -> Iterator[tuple[Row, Callable[[], Row]]]:
        if self.plan.prompt:
            yield (
                {"row": "prefill", "depth": depth, "tokens": self.plan.prompt},
                lambda: self._prefill_cell(depth),
            )
        for n in self.plan.windows:
            kind = "decode" if n == 1 else "verify"
            yield {"row": kind, "depth": depth, "tokens": n}, lambda n=n: self._step_cell(depth, n)  # type: ignore[misc]

    def _extend(self, depth: int) -> Row:
        """Evaluates random tokens up to `depth`, from where the state is or one was kept."""
        first, how = self.state.position, "extended from"
        found = None if self.kept is None else self.kept(first, depth)
        if found is not None:
            self.state, first, how = found, found.position, "restored, then extended from"
        began = time.perf_counter()
        row: Row = {"row": "extend", "depth": depth, "tokens": depth - first, "cached_tokens": first}
        filled = self._guarded(lambda: self._fill(self.state, depth - first))
        took = time.perf_counter() - began
        return row | (filled if "error" in filled else measured([took]) | {"state": f"{how} {first}"})

    def _fill(self, state: Any, count: int) -> Row:
        ids, done = self._ids(count), 0
        while done < count:
            # Chunks end at multiples of their size, as the engine cuts them.
            step = min(self.plan.chunk - state.position % self.plan.chunk, count - done)
            self.model.prefill(ids[done : done + step], state, logits="last")
            done += step
        self._sync()
        return {}

    def _prefill_cell(self, depth: int) -> Row:
        work = total(self._prefill_work(depth))
        samples, rest = self._apart(lambda: self._prefills(self.plan.repeats))
        return self._row(samples, self.plan.prompt, work.bytes, work.flops, depth, rest)

    def _prefills(self, repeats: int) -> list[float]:
        samples = []
        for number in range(repeats + 1):
            state = self.state.fork()
            self._empty_cache()
            began = time.perf_counter()
            self._fill(state, self.plan.prompt)
            if number:  # the first one warms up
                samples.append(time.perf_counter() - began)
            del state
        return samples

    def _apart(self, run: Callable[[], list[float]]) -> tuple[list[float], list[float]]:
        """Samples, and those of the same without the sums between ranks: with, without, without, with, as a clock may
        drift. None without for a model in one piece."""
        if not hasattr(self.model, "apart"):
            return run(), []
        first = run()
        with self.model.apart():
            rest = run() + run()
        return first + run(), rest

    def _prefill_work(self, depth: int) -> dict[str, Any]:
        """Work of the prompt in the chunks it is cut into: weights are read once per chunk."""
        found: dict[str, Any] = {}
        at, end = depth, depth + self.plan.prompt
        while at < end:
            step = min(self.plan.chunk - at % self.plan.chunk, end - at)
            for name, work in parts(self.config, self.model.dtype, step, at, prefill=True).items():
                before = found.get(name)
                found[name] = work if before is None else total({"a": before, "b": work})
            at += step
        return found

    def _step_cell(self, depth: int, n: int) -> Row:
        """Steps of n rows, all accepted. One row is plain decoding."""
        work = total(parts(self.config, self.model.dtype, n, depth))
        samples, rest = self._apart(lambda: self._steps(n))
        return self._row(samples, n, work.bytes, work.flops, depth, rest)

    def _steps(self, n: int) -> list[float]:
        state, samples = self.state.fork(), []
        for number in range(self.plan.steps + 3):
            ids = self._ids(n)
            self._empty_cache()
            began = time.perf_counter()
            if (begin := getattr(self.model, "begin", None)) is None:
                logits, log = self.model.verify(ids, state)
                drawn = logits.argmax(-1)
            else:  # over ranks, as the engine does it
                logits, log = begin(ids, state)
                drawn = logits.argmax(-1).to("cpu", non_blocking=True)
            self.model.commit(state, log, n)
            if begin is not None:
                self.model.ready()
            drawn.tolist()
            if number >= 3:
                samples.append(time.perf_counter() - began)
        return samples

    def _row(
        self, samples: Sequence[float], tokens: int, size: float, flops: float, depth: int, rest: Sequence[float]
    ) -> Row:
        """rest: samples without sums; what these, and waiting for each other in them, take is what it does not take."""
        row = measured(samples)
        if rest:
            apart = measured(rest)["seconds"]
            row |= {"apart_seconds": apart, "sums_seconds": row["seconds"] - apart}
        floor = max(size / self.ceilings[0], flops / self.ceilings[1])
        return row | {
            "tokens_per_second": tokens / row["seconds"],
            "bytes": size,
            "flops": flops,
            "of_bandwidth": size / row["seconds"] / self.ceilings[0],
            "of_matrix_rate": flops / row["seconds"] / self.ceilings[1],
            "floor_seconds": floor,
            "of_floor": floor / row["seconds"],
            "cached_tokens": depth,
            "cache": "cold" if self._flush is not None else "as it comes",
        }

    def _ids(self, count: int) -> Tensor:
        return torch.randint(0, self.config.vocab, (count,), generator=self.random)

    def _empty_cache(self) -> None:
        if self._flush is not None:
            self._flush.fill_(0)
        self._sync()

    def _guarded(self, work: Callable[[], Row]) -> Row:
        """The row, or what went wrong: a failed cell stays in the table."""
        try:
            return work()
        except (RuntimeError, MemoryError, FitError) as problem:
            return {"error": f"{type(problem).__name__}: {' '.join(str(problem).split())[:300]}"}


def _nothing() -> None:
    """A CPU finishes before it returns."""
