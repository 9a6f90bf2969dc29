"""From a turn to live state: choose the joint boundary, then read all it needs before returning any of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from k3_sessions.blobs import path_of
from k3_sessions.errors import BadDraft, Damaged, IdentityMismatch, SessionChanged
from k3_sessions.identity import PrefixDigest, check_identity, identity_digest
from k3_sessions.objects import Blob, Kind
from k3_sessions.opened import OpenStore
from k3_sessions.records import Page, Root, TurnRecord
from k3_sessions.state_objects import (
    Group,
    fields_of,
    group_claims,
    groups_of,
    page_claims,
    read_state,
)
from k3_sessions.types import DTYPES, HASH_BLOCK, Array, Identity, RestorePlan, StateLayout


def check_root(root: Root, identity: Identity, layout: StateLayout, what: str) -> None:
    """Raises IdentityMismatch unless state under `root` can be used by a model with this identity and layout."""
    check_identity(root.identity, identity, what)
    if root.layout != layout:
        raise IdentityMismatch(
            f"{what} has another state layout",
            "the layout of the loaded model",
            "load the model it was made with, or evaluate its transcript again with `k3 replay --into`",
            fields=("layout",),
        )


def plan(store: OpenStore, turn: TurnRecord, identity: Identity, layout: StateLayout, upto: int | None) -> RestorePlan:
    """See Store.plan."""
    target = turn.position if upto is None else upto
    if not 0 <= target <= turn.position:
        raise BadDraft(f"position {target} of turn {turn.id[:10]}", f"0 to {turn.position}")
    check_root(store.catalog.root(turn.root), identity, layout, f"turn {turn.id[:10]}")
    path = store.catalog.path(turn.id)
    tokens = store.catalog.tokens(path)
    kept = store.catalog.kept()
    reasons: list[str] = []
    damaged = ""
    for number in range(len(path) - 1, -1, -1):
        candidate = path[number]
        if candidate.position > target or not candidate.checkpoint:
            continue
        if candidate.id not in kept:
            if not reasons:
                lost = candidate.id in store.catalog.lost()
                how = "was damaged, and `k3 repair` gave it up" if lost else "was thinned or evicted"
                reasons.append(f"the checkpoint at {candidate.position} {how}")
            continue
        pages = store.catalog.pages(path[: number + 1])
        blobs = [page.blob for page in pages] + list(candidate.checkpoint)
        wrong = next(((blob, what) for blob in blobs if (what := store.blobs.check(blob))), None)
        if wrong is not None:
            reasons.append(f"object {wrong[0].id[:10]} of the checkpoint at {candidate.position} {wrong[1]}")
            damaged = damaged or f"{path_of(wrong[0].id)} {wrong[1]}"
            continue
        return RestorePlan(
            turn=candidate.id,
            boundary=candidate.position,
            target=target,
            replay=tuple(tokens[candidate.position : target].tolist()),
            read_bytes=sum(blob.size for blob in blobs),
            reason=_reason(candidate.position, target, reasons),
            matched=target,
            damaged=damaged,
        )
    replay = tuple(tokens[:target].tolist())
    return RestorePlan(None, 0, target, replay, 0, _reason(0, target, reasons), target, damaged)


def _reason(boundary: int, target: int, reasons: list[str]) -> str:
    if boundary == target:
        return ""
    return "; ".join(reasons) or f"no checkpoint between {boundary} and {target}"


class State:
    """Restored state: every array read and checked. Page rows sit in one array per hash block and field."""

    def __init__(self, position: int, checkpoint: Mapping[str, Array], blocks: Mapping[str, Sequence[Array]]) -> None:
        self.position = position
        self._checkpoint = checkpoint
        self._blocks = blocks

    def checkpoint(self) -> Mapping[str, Array]:
        """Every checkpoint field, `[len(layers), *shape]`."""
        return self._checkpoint

    def page_rows(self, name: str, start: int, stop: int) -> Array:
        """Rows [start, stop) of a page field, `[len(layers), stop - start, *shape]`; no copy for one whole block."""
        if not 0 <= start <= stop <= self.position:
            raise BadDraft(f"rows {start} to {stop}", f"0 to {self.position}")
        blocks = self._blocks[name]
        first, last = start // HASH_BLOCK, -(-stop // HASH_BLOCK)
        parts = [
            block[:, max(0, start - at) : stop - at]
            for number, block in enumerate(blocks[first:last], first)
            if (at := number * HASH_BLOCK) is not None
        ]
        if not parts:
            # An empty range still has the field's shape.
            return blocks[0][:, :0]
        return np.ascontiguousarray(parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1))


@contextmanager
def reading(store: OpenStore, plan: RestorePlan, identity: Identity, layout: StateLayout) -> Iterator[list[Piece]]:
    """What there is to read for a plan that names a turn, checkpoint first; the store stays locked meanwhile.

    Raises what `Store.restore` does; Damaged from inside the block turns into SessionChanged where that is what it is.
    """
    with store.using():
        assert plan.turn is not None
        path = store.catalog.path(plan.turn)
        turn = path[-1]
        root = store.catalog.root(turn.root)
        check_root(root, identity, layout, f"turn {turn.id[:10]}")
        if turn.position != plan.boundary:
            raise BadDraft(f"a plan for position {plan.boundary} of turn {turn.id[:10]}", str(turn.position))
        seed = identity_digest(root.identity)
        digest = PrefixDigest(seed, store.catalog.tokens(path))
        pages = store.catalog.pages(path)
        try:
            yield _pieces(store, layout, seed, digest, turn, pages)
        except Damaged:
            # Missing objects are no damage if, meanwhile, the last session that kept them let go.
            if turn.id not in store.catalog.kept():
                raise SessionChanged(
                    f"the checkpoint of turn {turn.id[:10]} was dropped by another process", do="plan the restore again"
                ) from None
            raise


def restore(store: OpenStore, plan: RestorePlan, identity: Identity, layout: StateLayout) -> State:
    """See Store.restore."""
    if plan.turn is None:
        return State(0, {}, {})
    with reading(store, plan, identity, layout) as pieces:
        fields = fields_of(layout, "checkpoint")
        checkpoint = {f.name: np.empty((len(f.layers), *f.shape), DTYPES[f.dtype]) for f in fields}
        blocks: dict[str, list[Array]] = {f.name: [] for f in fields_of(layout, "page")}
        jobs: list[Callable[[], None]] = []
        for piece in pieces:
            if piece.group is not None:
                out = {name: checkpoint[name][slice(*span)] for name, span in piece.group.spans.items()}
            else:
                out = {name: np.empty(shape, dtype) for name, (shape, dtype) in piece.arrays.items()}
                for name, array in out.items():
                    blocks[name].append(array)
            jobs.append(partial(piece.fill, out))
        run_all(store, jobs)
        return State(plan.boundary, checkpoint, blocks)


@dataclass(frozen=True)
class Piece:
    """A part of the state that is read by one worker: a group of checkpoint layers, or all rows of one hash block.

    arrays: shape and dtype of each field's part. fill: reads, checks and decodes into arrays like that, C-contiguous.
    """

    arrays: Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]]
    fill: Callable[[Mapping[str, Array]], None]
    group: Group | None = None


def _pieces(
    store: OpenStore, layout: StateLayout, seed: bytes, digest: PrefixDigest, turn: TurnRecord, pages: Sequence[Page]
) -> list[Piece]:
    at = (turn.position, digest.at(turn.position))
    if at[1] != turn.prefix:
        raise Damaged(f"turn {turn.id[:10]} does not describe its own tokens", object=turn.id)
    groups = groups_of(layout)
    if len(groups) != len(turn.checkpoint):
        raise Damaged(
            f"turn {turn.id[:10]} has {len(turn.checkpoint)} checkpoint objects", str(len(groups)), object=turn.id
        )
    pieces: list[Piece] = []
    kept = {f.name: f for f in fields_of(layout, "checkpoint")}
    for group, blob in zip(groups, turn.checkpoint, strict=True):
        arrays = {
            name: ((last - first, *kept[name].shape), DTYPES[kept[name].dtype])
            for name, (first, last) in group.spans.items()
        }
        pieces.append(Piece(arrays, partial(_read_group, store, layout, seed, at, group, blob), group))
    rows = fields_of(layout, "page")
    for start in range(0, turn.position, HASH_BLOCK) if turn.position else (0,):
        stop = min(start + HASH_BLOCK, turn.position)
        arrays = {f.name: ((len(f.layers), stop - start, *f.shape), DTYPES[f.dtype]) for f in rows}
        inside = [page for page in pages if start <= page.start < stop]
        pieces.append(Piece(arrays, partial(_read_block, store, layout, seed, digest, inside)))
    return pieces


def run_all(store: OpenStore, jobs: Sequence[Callable[[], None]]) -> None:
    """Run jobs on the workers; after the first failure the rest is skipped, and that failure is raised."""
    futures: list[Future[None]] = []
    try:
        for job in jobs:
            futures.append(store.submit(job))
        for future in futures:
            future.result()
    except BaseException:
        abandon(futures)
        raise


def abandon(futures: Iterable[Future[Any]]) -> None:
    """Skip what has not begun, and wait for the rest, whatever becomes of it."""
    futures = list(futures)
    for future in futures:
        future.cancel()
    for future in futures:
        if not future.cancelled():
            future.exception()


def _read_group(
    store: OpenStore,
    layout: StateLayout,
    seed: bytes,
    at: tuple[int, str],
    group: Group,
    blob: Blob,
    out: Mapping[str, Array],
) -> None:
    claims = group_claims(group, seed, at)
    read_state(store.blobs, blob, Kind.CHECKPOINT, fields_of(layout, "checkpoint"), claims, out)


def _read_block(
    store: OpenStore,
    layout: StateLayout,
    seed: bytes,
    digest: PrefixDigest,
    pages: Sequence[Page],
    out: Mapping[str, Array],
) -> None:
    fields = fields_of(layout, "page")
    for page in pages:
        claims = page_claims(page, seed, digest.at(page.stop))
        rows, offset = page.stop - page.start, page.start % HASH_BLOCK
        if all(block.shape[1] == rows for block in out.values()):
            read_state(store.blobs, page.blob, Kind.PAGE, fields, claims, out)
            continue
        parts = {
            name: np.empty((block.shape[0], rows, *block.shape[2:]), dtype=block.dtype) for name, block in out.items()
        }
        read_state(store.blobs, page.blob, Kind.PAGE, fields, claims, parts)
        for name, part in parts.items():
            out[name][:, offset : offset + rows] = part
