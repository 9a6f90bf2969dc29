"""State of one sequence in a pool: KDA states and conv windows of all KDA layers, latent pages of all MLA layers."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from k3_sessions.types import Array, RestoredState, StateLayout
from torch import Tensor

from k3cli.errors import DamagedError
from k3cli.model.config import ModelConfig
from k3cli.model.fields import CONV_FIELDS, checked, checkpoint_parts, to_host
from k3cli.model.pool import Holding, Pool
from k3cli.model.prefixes import ROOT, block_key


class State:
    """Mutable state of one timeline, in a pool; not safe for use by two threads.

    What lies in front of `position` is never written again while anybody else holds it: a shared slot or tail page is
    copied before it is written. Rows at and behind `position` are scratch and invisible.
    """

    def __init__(
        self,
        config: ModelConfig,
        layout: StateLayout,
        pool: Pool,
        settle: Callable[[State], None],
        chunk: int | None = None,
    ) -> None:
        """An empty state. settle: brings the KDA state of a state with `accepted` rows up to its position.

        chunk: tokens of a whole prefill chunk, a multiple of the page (None: one page).
        """
        self.chunk = chunk or layout.hash_block
        self.config = config
        self.layout = layout
        self.page = layout.hash_block
        self.pool = pool
        self.position = 0
        """Tokens evaluated into this state."""
        self.accepted = 0
        """The last of them that are in the model's log only, not yet in the KDA state."""
        self.torn = False
        """A step failed on the way: neither the state before it nor the one behind it."""
        self.version = 0
        """Changes whenever the list of pages does."""
        self.chain: list[bytes] = []
        """Keys of the blocks evaluated in whole chunks from position 0 on."""
        self._settle = settle
        self._held = Holding()
        self._owner = weakref.finalize(self, pool.drop, self._held)
        self._owner.atexit = False
        self._held.slot = pool.slot()
        pool.recurrent[self.slot].zero_()
        pool.conv[self.slot].zero_()

    @property
    def slot(self) -> int:
        """First granule of the KDA state."""
        return self._held.slot

    @property
    def pages(self) -> list[int]:
        """Granules of the latent pages, first position first; those behind `position` hold nothing."""
        return self._held.pages

    def settle(self) -> None:
        """Replays accepted rows into the KDA state, so that it is that of `position`."""
        if self.accepted:
            self._settle(self)
            self.accepted = 0

    def fork(self) -> State:
        """An independent state at the same position. Everything is shared until one of the two writes."""
        assert not self.torn, "a step of this state failed"
        self.settle()
        twin = object.__new__(State)
        twin.config, twin.layout, twin.page, twin.pool = self.config, self.layout, self.page, self.pool
        twin.chunk = self.chunk
        twin.position, twin.accepted, twin.torn, twin.version = self.position, 0, False, 0
        twin.chain = self.chain.copy()
        twin._settle = self._settle
        pages = self.pages[: -(-self.position // self.page)]
        self.pool.hold(self.slot, *pages)
        twin._held = Holding(pages, self.slot)
        twin._owner = weakref.finalize(twin, self.pool.drop, twin._held)
        twin._owner.atexit = False
        return twin

    def reserve(self, n: int) -> None:
        """Pages for n more tokens, and the tail page for this state alone. Raises FitError when there is no room."""
        pool, pages = self.pool, self.pages
        index, filled = divmod(self.position, self.page)
        missing = -(-(self.position + n) // self.page) - len(pages)
        if missing > 0:
            pool.ask(missing, n)
        if filled and pool.shared(pages[index]):
            fresh = pool.page()
            pool.copy_rows(pages[index], fresh, 0, filled)
            pool.release_page(pages[index])
            pages[index] = fresh
            self.version += 1
        while len(pages) * self.page < self.position + n:
            pages.append(pool.page())
            self.version += 1

    def own_slot(self) -> None:
        """Makes the KDA state this state's alone."""
        if self.pool.shared(self.slot):
            fresh = self.pool.slot()
            self.pool.copy_slot(self.slot, fresh)
            self.replace_slot(fresh)

    def replace_slot(self, fresh: int) -> None:
        """Takes over another slot, held once, and releases the old one."""
        old, self._held.slot = self._held.slot, fresh
        self.pool.release_slot(old)

    def advance(self, ids: Tensor, slot: int) -> None:
        """Moves on over a prefilled chunk, int64 [T], whose latents are in the pages and whose KDA state is in `slot`,
        which passes to this state. A whole block in an unbroken row of such blocks becomes known to others."""
        start = self.position
        self.replace_slot(slot)
        self.position += ids.numel()
        if ids.numel() == self.chunk and start == len(self.chain) * self.page:
            self.publish(ids)

    def publish(self, ids: Tensor) -> None:
        """Makes the last blocks in front of `position`, all of ids, known to others, with the KDA state behind them.

        Only for states that are to the bit what prefilling in whole chunks gives.
        """
        assert self.position == len(self.chain) * self.page + ids.numel()
        written = None
        if self.pool.arena.is_cuda:
            written = torch.cuda.current_stream(self.pool.arena.device).record_event()
        known, last = self.pool.prefixes, self.chain[-1] if self.chain else ROOT
        for block in ids.cpu().split(self.page):
            before = self.chain[-1] if self.chain else ROOT
            key = block_key(before, block.numpy().tobytes())
            if not known.add(before, key, self.pages[len(self.chain)], written):
                return
            self.chain.append(key)
        # One KDA state for each sequence is enough: the last one, and those that others have asked for.
        if known.keep_slot(self.chain[-1], self.slot, written):
            known.give_up_slot(last)

    def begin_with(self, ids: Tensor) -> bool:
        """Goes from position 0 to the end of the longest known prefix of ids, int64 [T]; False when there is none.

        Its bits are those of prefilling these tokens in whole chunks.
        """
        assert self.position == 0
        key, keys = ROOT, []
        for block in ids.cpu().split(self.page):
            if block.numel() == self.page:
                keys.append(key := block_key(key, block.numpy().tobytes()))
        match = self.pool.prefixes.match(keys)
        if not match.pages:
            return False
        self.replace_slot(match.slot)
        for page in self._held.pages:
            self.pool.release_page(page)
        self._held.pages = list(match.pages)
        self.position = len(match.pages) * self.page
        self.chain = keys[: len(match.pages)]
        self.version += 1
        return True

    def checkpoint(self) -> dict[str, Array]:
        """Host copies of the checkpoint fields at `position`, each [n_kda, *shape]; bf16 as uint16 bits."""
        self.settle()
        parts = self.pool.conv[self.slot].split(self.config.kda.width, dim=-1)
        found = dict(zip(("recurrent", *CONV_FIELDS), (self.pool.recurrent[self.slot], *parts), strict=True))
        return {field.name: to_host(found[field.name]) for field in self.layout.fields if field.scope == "checkpoint"}

    def page_rows(self, name: str, start: int, stop: int) -> Array:
        """Host copy of rows [start, stop) of a page field: [n_mla, stop - start, *shape]."""
        if not 0 <= start <= stop <= self.position:
            raise ValueError(f"rows {start} to {stop} of a state at position {self.position}")
        blocks = self.pool.blocks[..., self._columns(name)]
        parts = [blocks[0, :, :0]]
        row = start
        while row < stop:
            index, first = divmod(row, self.page)
            last = min(self.page, first + stop - row)
            parts.append(blocks[self.pages[index], :, first:last])
            row += last - first
        return to_host(torch.cat(parts, 1))

    def load(self, restored: RestoredState) -> None:
        """Takes over stored state. Everything is checked and copied before this state changes, so that a state that is
        still being read while it is copied is taken over whole or not at all.

        Raises DamagedError when a field is missing, unknown, or of another shape or type, FitError when it has no room;
        the state is then as before.
        """
        position = restored.position
        if position < 0:
            raise DamagedError(f"stored position {position}", "zero or more")
        fields = {field.name: field for field in self.layout.fields}
        held, pool = Holding(), self.pool
        try:
            held.slot = pool.slot()
            self._load_checkpoint(restored, held.slot)
            for start in range(0, position, self.page):
                stop = min(start + self.page, position)
                held.pages.append(pool.page())
                for name, field in fields.items():
                    if field.scope == "page":
                        rows = checked(restored.page_rows(name, start, stop), field, (stop - start,))
                        pool.blocks[held.pages[-1], :, : stop - start, self._columns(name)] = rows
        except BaseException:
            pool.drop(held)
            raise
        old = Holding(self._held.pages, self._held.slot)
        self._held.pages, self._held.slot = held.pages, held.slot
        pool.drop(old)
        self.position, self.accepted, self.chain = position, 0, []
        self.version += 1

    def _load_checkpoint(self, restored: RestoredState, slot: int) -> None:
        """Every checkpoint field into a slot of the pool."""
        fields = {field.name: field for field in self.layout.fields if field.scope == "checkpoint"}
        arrived = dict.fromkeys(fields, 0)
        places: dict[str, Tensor] = {}
        if fields:
            parts = self.pool.conv[slot].split(self.config.kda.width, dim=-1)
            places = dict(zip(("recurrent", *CONV_FIELDS), (self.pool.recurrent[slot], *parts), strict=True))
        for name, first, array in checkpoint_parts(restored):
            if name not in fields:
                raise DamagedError(f"stored checkpoint field {name}", f"{sorted(fields)}")
            part = checked(array, fields[name], (), layers=len(array))
            if first != arrived[name] or first + len(part) > len(fields[name].layers):
                raise DamagedError(f"stored field {name} goes on with layer {first}", f"{arrived[name]}")
            places[name][first : first + len(part)] = part
            arrived[name] += len(part)
        for name, field in fields.items():
            if arrived[name] != len(field.layers):
                raise DamagedError(f"stored field {name} has {arrived[name]} layers", f"{len(field.layers)}")

    def _columns(self, name: str) -> slice:
        rank, row = self.config.mla.kv_rank, self.config.mla.row
        spans = {"kv_latent": slice(0, rank), "k_pe": slice(rank, row)}
        if name not in spans:
            raise ValueError(f"{name} is no page field")
        return spans[name]
