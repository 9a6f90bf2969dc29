"""One allocation for everything that sequences keep on a device: MLA pages and KDA states.

The arena is cut into granules of one page: 512 positions of every MLA layer. A page takes one granule, a KDA state (the
slot: recurrent state and convolution windows of every KDA layer) a run of them. Pages are taken from the bottom,
slots from the top, in places aligned to their length, so that the two don't break each other's runs. On a CPU the
arena costs address space only until it is written.

Both are reference counted. Whoever writes owns alone what is written: `State` copies a shared slot or a shared tail
page first. The prefix index holds references, too; what it alone holds is given up when room is needed.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field

import torch

from k3cli.errors import FitError
from k3cli.model.config import ModelConfig
from k3cli.model.placement import available_memory
from k3cli.model.prefixes import Prefixes
from k3cli.model.sizing import workspace

ALIGN = 512
"""Bytes that every granule is a multiple of: a layer's part of any page has the same alignment everywhere."""
SLOTS = 8
"""KDA states a pool is made for: live ones, one spare for a prefill, those being saved, those kept for sharing."""
KEPT_FREE = 0.1
"""Share of the free memory that stays outside the pool."""
CONTEXTS = 2
"""Full contexts a pool is made for, where the memory is there: a fork may go its own way to the end."""


@dataclass(frozen=True)
class Geometry:
    """Sizes in bytes and granules. `run`: granules of a slot; `conv`: bytes from a slot's start to its windows."""

    page: int
    rows: int
    granule: int
    slot: int
    conv: int
    run: int

    @staticmethod
    def of(config: ModelConfig, rows: int, dtype: torch.dtype) -> Geometry:
        """rows: positions of a page."""
        kda = config.kda
        page = len(config.mla_layers) * rows * config.mla.row * dtype.itemsize
        recurrent = len(config.kda_layers) * kda.heads * kda.head_dim**2 * torch.float32.itemsize
        windows = len(config.kda_layers) * (kda.conv_width - 1) * 3 * kda.width * dtype.itemsize
        conv = _up(recurrent, ALIGN)
        granule = _up(max(page, 1), ALIGN)
        return Geometry(page, rows, granule, conv + windows, conv, -(-max(conv + windows, 1) // granule))


def _up(size: int, step: int) -> int:
    return -(-size // step) * step


def granules_for(
    config: ModelConfig, geometry: Geometry, free: int | None, dtype: torch.dtype, chunk: int | None = None
) -> int:
    """Granules of a pool in `free` bytes (None: unknown, no bound), for CONTEXTS contexts and SLOTS states.

    A tenth of the free memory and the work space of a prefill of `chunk` tokens (a page's, when None) stay outside.
    Raises FitError when not even one state, its spare and one page fit.
    """
    per_context = -(-config.context_limit // geometry.rows) + 1
    wanted = CONTEXTS * per_context + SLOTS * geometry.run
    if free is None:
        return wanted
    room = int(free * (1 - KEPT_FREE)) - workspace(config, dtype, chunk or geometry.rows)
    fits = min(wanted, max(room, 0) // geometry.granule)
    least = least_granules(geometry)
    if fits < least:
        raise FitError(
            f"the state of one sequence needs {least * geometry.granule / 1e9:.2f} GB at least, "
            f"{max(room, 0) / 1e9:.2f} GB are left beside the weights",
            "room for one sequence",
            "use a smaller model or another --device",
        )
    return fits


def least_granules(geometry: Geometry) -> int:
    """Granules that one sequence needs to begin with: its slot, one for the next prefill, and a page."""
    return 2 * geometry.run + 1


def room(geometry: Geometry, granules: int) -> int:
    """Positions that one sequence alone can have: a slot is its own, one is for the next prefill."""
    return max(0, granules - 2 * geometry.run) * geometry.rows


@dataclass
class Holding:
    """What one sequence holds: its pages, first position first, and its slot (its first granule; -1 for none)."""

    pages: list[int] = field(default_factory=list)
    slot: int = -1


class Pool:
    """The arena, its reference counts and its prefix index. One thread allocates; any thread may `drop`."""

    def __init__(
        self,
        config: ModelConfig,
        rows: int,
        device: torch.device,
        dtype: torch.dtype,
        granules: int | None = None,
        chunk: int | None = None,
    ) -> None:
        """rows: positions of a page. granules: size; None: what fits beside chunks of `chunk` tokens, or FitError."""
        self.geometry = geometry = Geometry.of(config, rows, dtype)
        if granules is None:
            granules = granules_for(config, geometry, available_memory(device), dtype, chunk)
        self.granules = granules
        try:
            self.arena = torch.empty(granules * geometry.granule, dtype=torch.uint8, device=device)
        except (RuntimeError, MemoryError) as error:
            raise FitError(
                f"{granules * geometry.granule / 1e9:.2f} GB for the state could not be allocated on {device}",
                "memory for pages and states",
                "free some, or use another --device",
            ) from error
        self._views(config, dtype)
        self.prefixes = Prefixes(self)
        self._refs = [0] * granules
        self._taken = [False] * granules
        self._low = list(range(granules))
        self._free = granules
        self._dropped: deque[Holding] = deque()

    def _views(self, config: ModelConfig, dtype: torch.dtype) -> None:
        """The arena as tensors: pages [G, page, R + P] for each MLA layer; of KDA layers, indexed by a slot's first
        granule, recurrent [S, L, H, V, K] fp32 and conv [S, L, w-1, 3 H K]."""
        kda, row, geo = config.kda, config.mla.row, self.geometry
        full, typed = self.arena.view(torch.float32), self.arena.view(dtype)
        step, n_kda, n_mla = geo.granule // dtype.itemsize, len(config.kda_layers), len(config.mla_layers)
        layer = geo.rows * row
        self.pages = [typed.as_strided((self.granules, geo.rows, row), (step, row, 1), i * layer) for i in range(n_mla)]
        self.blocks = typed.as_strided((self.granules, n_mla, geo.rows, row), (step, layer, row, 1))
        slots, K, C, w = self.granules - geo.run + 1, kda.head_dim, 3 * kda.width, kda.conv_width - 1
        self.recurrent = full.as_strided(
            (slots, n_kda, kda.heads, K, K), (geo.granule // 4, kda.heads * K * K, K * K, K, 1)
        )
        self.conv = typed.as_strided((slots, n_kda, w, C), (step, w * C, C, 1), geo.conv // dtype.itemsize)
        self._flat = self.arena.view(self.granules, geo.granule)

    @property
    def free(self) -> int:
        """Granules nobody holds; what only the prefix index holds is not among them."""
        self._collect()
        return self._free

    def shared(self, granule: int) -> bool:
        """Whether a page or slot has another holder."""
        self._collect()
        return self._refs[granule] > 1

    def only_indexed(self, granule: int) -> bool:
        """Whether a page or slot that the prefix index holds has no other holder."""
        return self._refs[granule] == 1

    def ask(self, pages: int, tokens: int) -> None:
        """Raises FitError when `pages` more and a slot can't be had, even if all that only the index holds is given up.

        tokens: what they are for. The slot is for the sequence's next prefill.
        """
        run = self.geometry.run
        if pages + run <= self.free:
            return
        held, slots = self.prefixes.pages_and_slots()
        spare = self._free + sum(map(self.only_indexed, held)) + run * sum(map(self.only_indexed, slots))
        if pages + run > spare:
            size, left = self.geometry.granule, max(spare - run, 0)
            raise FitError(
                f"{tokens:,} more tokens need {pages * size / 1e6:,.1f} MB of pages, "
                f"{left * size / 1e6:,.1f} of the pool's {self.granules * size / 1e6:,.1f} MB can be had",
                f"at most {left * self.geometry.rows:,} tokens",
                "send less, close a session or a fork, or free memory on the device",
            )

    def page(self) -> int:
        """A page of zeros, held once. Raises FitError when nothing can be given up for it."""
        self._collect()
        while True:
            while self._low:
                granule = heapq.heappop(self._low)
                if not self._taken[granule]:
                    self._take(granule, 1)
                    # Rows behind a position are read and masked by some kernels: they must be numbers.
                    self._flat[granule].zero_()
                    return granule
            if not self.prefixes.evict_page():
                raise self._full("page", 1)

    def slot(self) -> int:
        """A KDA state's first granule, held once; its contents are anything. Raises FitError."""
        self._collect()
        run = self.geometry.run
        while True:
            for base in range(self.granules - run, -1, -run):
                if not any(self._taken[base : base + run]):
                    self._take(base, run)
                    return base
            if not (self.prefixes.evict_slot() or self.prefixes.evict_page()):
                raise self._full("KDA state", run)

    def copy_slot(self, source: int, target: int) -> None:
        """Copies a KDA state, in stream order."""
        run = self.geometry.run
        self._flat[target : target + run].copy_(self._flat[source : source + run])

    def copy_rows(self, source: int, target: int, first: int, last: int) -> None:
        """Copies rows [first, last) of a page, every layer, in stream order."""
        self.blocks[target, :, first:last] = self.blocks[source, :, first:last]

    def hold(self, *granules: int) -> None:
        """One more holder for each page or slot."""
        for granule in granules:
            assert self._refs[granule] > 0, granule
            self._refs[granule] += 1

    def release_page(self, granule: int) -> None:
        """One holder less; without holders the page is free."""
        self._release(granule, 1)

    def release_slot(self, base: int) -> None:
        """The same for a slot."""
        self._release(base, self.geometry.run)

    def drop(self, holding: Holding) -> None:
        """Release all of it, at the next allocation; from any thread, also while objects are being finalized."""
        self._dropped.append(holding)

    def _collect(self) -> None:
        while self._dropped:
            holding = self._dropped.popleft()
            for page in holding.pages:
                self.release_page(page)
            if holding.slot >= 0:
                self.release_slot(holding.slot)

    def _take(self, base: int, run: int) -> None:
        self._taken[base : base + run] = [True] * run
        self._refs[base] = 1
        self._free -= run

    def _release(self, base: int, run: int) -> None:
        assert self._refs[base] > 0, base
        self._refs[base] -= 1
        if self._refs[base] == 0:
            self._taken[base : base + run] = [False] * run
            self._free += run
            for granule in range(base, base + run):
                heapq.heappush(self._low, granule)

    def _full(self, what: str, run: int) -> FitError:
        size, geo = self.geometry.granule, self.geometry
        return FitError(
            f"no room for another {what} of {run * size / 1e6:.1f} MB: the pool has {self.granules * size / 1e9:.2f} "
            f"GB, {self._free * size / 1e9:.2f} GB of it free",
            f"room for pages ({size / 1e6:.1f} MB for {geo.rows} tokens) and states ({geo.run * size / 1e6:.1f} MB)",
            "close a session or a fork, shorten the context, or free memory on the device",
        )
