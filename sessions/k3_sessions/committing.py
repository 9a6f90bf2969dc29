"""What a commit writes, step by step: state objects, turns, the ref. `writer.py` takes the steps in their order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial

from k3_sessions import upkeep
from k3_sessions.blobs import Batch
from k3_sessions.common import now
from k3_sessions.identity import PrefixDigest
from k3_sessions.objects import Blob
from k3_sessions.opened import OpenStore
from k3_sessions.records import Kept, Page, Ref, Root, TurnRecord
from k3_sessions.staging import Jobs
from k3_sessions.state_objects import check_array, fields_of, groups_of, pack_group, pack_page, row_bytes
from k3_sessions.thinning import choose
from k3_sessions.types import HASH_BLOCK, Array, StateLayout, StateSource, TurnDraft


@dataclass(frozen=True)
class Waiting:
    """A turn that is not on disk yet."""

    draft: TurnDraft
    tokens: Array
    created: str


@dataclass(frozen=True)
class NewState:
    """The state to be stored. checkpoint: its checkpoint fields, checked. digest: of the tokens up to `position`.

    seed: the digest of the identity that it was computed under.
    """

    source: StateSource
    checkpoint: Mapping[str, Array]
    position: int
    digest: PrefixDigest
    seed: bytes


@dataclass(frozen=True)
class WrittenState:
    """Where it lies now: all pages from the first row on, the checkpoint's objects, and the bytes written of each."""

    pages: Sequence[Page]
    page_bytes: int
    checkpoint: tuple[Blob, ...]
    checkpoint_bytes: int


def page_row_bytes(layout: StateLayout) -> int:
    """Raw bytes of one position in all page fields and layers."""
    return sum(len(f.layers) * row_bytes(f) for f in fields_of(layout, "page"))


def write_state(
    store: OpenStore, layout: StateLayout, new: NewState, inherited: Sequence[Page], exact: int, batch: Batch
) -> WrittenState:
    """Write what is not on disk: pages of the whole history in order, and the checkpoint's groups.

    inherited: pages that may hold rows of this state; those before position `exact` are known to. Raises BadDraft for
    rows that are not what the layout declares, and what writing an object does; all jobs have ended by then.
    """
    level, digest = store.config.zstd_level, new.digest
    jobs = Jobs(store)
    fields = fields_of(layout, "page")
    spans = _spans(inherited, new.position)
    known = {(page.start, page.stop): page for page in inherited}
    pages: list[Page | Future[tuple[Blob, int]]] = []
    with jobs.run():
        # The checkpoint first: it is the largest part and needs no copy.
        at = (new.position, digest.at(new.position))
        groups = [
            jobs.put(
                group.raw_bytes,
                partial(pack_group, layout, new.checkpoint, new.seed, group, at, level),
                batch,
            )
            for group in groups_of(layout)
        ]
        for start, stop in spans:
            page = known.get((start, stop))
            if page is not None and stop <= exact and not store.blobs.check(page.blob):
                pages.append(page)
                continue
            size = (stop - start) * page_row_bytes(layout)
            jobs.staging.take(size)
            try:
                arrays = {
                    f.name: check_array(f, new.source.page_rows(f.name, start, stop), (len(f.layers), stop - start))
                    for f in fields
                }
            except BaseException:
                jobs.staging.give(size)
                raise
            prefix = digest.at(stop)
            pages.append(
                jobs.put(
                    size,
                    partial(pack_page, layout, arrays, new.seed, (start, stop), prefix, level),
                    batch,
                    taken=True,
                )
            )
    written = 0
    final: list[Page] = []
    for (start, stop), entry in zip(spans, pages, strict=True):
        if isinstance(entry, Page):
            final.append(entry)
            continue
        blob, size = entry.result()
        written += size
        final.append(Page(start, stop, blob))
    stored = [group.result() for group in groups]
    return WrittenState(final, written, tuple(blob for blob, _ in stored), sum(size for _, size in stored))


def _spans(pages: Sequence[Page], position: int) -> list[tuple[int, int]]:
    """Row ranges of all pages up to `position`: those there are, then up to the end of each hash block."""
    spans = [(page.start, page.stop) for page in pages if page.stop <= position]
    at = spans[-1][1] if spans else 0
    while at < position:
        stop = min(position, at - at % HASH_BLOCK + HASH_BLOCK)
        spans.append((at, stop))
        at = stop
    return spans


def write_turns(
    store: OpenStore,
    parent: TurnRecord | None,
    waiting: Sequence[Waiting],
    digest: PrefixDigest,
    parent_pages: Sequence[Page],
    state: WrittenState,
    kept: Blob | None,
    root: tuple[str, Root],
    batch: Batch,
) -> tuple[TurnRecord, ...]:
    """Write the turn objects, the first below `parent`; state and hints (`kept`) hang on the last one.

    parent_pages: all pages up to `parent`. root: its id and what it says, of which a session's first turn has a copy.
    """
    pages = state.pages
    same = 0
    while same < min(len(parent_pages), len(pages)) and parent_pages[same] == pages[same]:
        same += 1
    end = parent_pages[-1].stop if parent_pages else 0
    pages_from = pages[same].start if same < len(pages) else end
    records: list[TurnRecord] = []
    for number, entry in enumerate(waiting):
        last = number == len(waiting) - 1
        record = TurnRecord(
            parent=parent.id if parent else None,
            root=root[0],
            start=parent.total if parent else 0,
            tokens=entry.tokens,
            position=entry.draft.position,
            prefix=digest.at(entry.draft.position),
            created=entry.created,
            meta=dict(entry.draft.meta),
            pages_from=pages_from if last else end,
            pages=tuple(pages[same:]) if last else (),
            checkpoint=state.checkpoint if last else (),
            root_copy=None if parent else root[1].to_json(),
            hints=kept if last else None,
        )
        blob, _ = store.blobs.put(record.pack(store.config.zstd_level), batch)
        parent = replace(record, id=blob.id, size=blob.size)
        records.append(parent)
    return tuple(records)


def write_ref(store: OpenStore, ref: Ref, path: Sequence[TurnRecord]) -> list[TurnRecord]:
    """Move `ref` to the end of `path`, its turns from the first on, and thin what it keeps; under `changing_refs`.

    Returns the turns whose joint boundary the session gives up.
    """
    head = path[-1]
    new = Kept(head.id, head.position, head.prefix)
    ids = [turn.id for turn in path]
    marked = set(ref.marks.values())
    protected = marked | {head.id} | upkeep.fork_points(store, ref, ids)
    keep = choose(ids, (*ref.keep, new), protected, store.config.thinning)
    apart = tuple(entry for entry in ref.keep if entry.turn in marked and entry.turn not in set(ids))
    store.save_ref(replace(ref, head=head.id, keep=(*apart, *keep), updated=now(), evicted=""))
    staying = {entry.turn for entry in (*apart, *keep)}
    gone = {entry.turn for entry in ref.keep} - staying
    return [turn for turn in path if turn.id in gone]
