"""Prefix sharing between sessions: the longest stored joint boundary whose tokens begin a new prompt.

Each kept boundary is listed in a ref with the digest of the tokens before it: the chain hash of its whole blocks,
closed with the rest. Comparing digests therefore compares every token, and refs are all that has to be read.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from k3_sessions.errors import Damaged, FormatUnsupported
from k3_sessions.identity import PrefixDigest, identity_digest
from k3_sessions.opened import OpenStore
from k3_sessions.records import Ref
from k3_sessions.restoring import plan
from k3_sessions.types import HASH_BLOCK, Array, Identity, RestorePlan, StateLayout

RECENT = 32
"""Sessions, newest first, whose tokens are compared to see how far a prompt is known beyond any checkpoint."""


def find(store: OpenStore, identity: Identity, layout: StateLayout, ids: Array) -> RestorePlan | None:
    """See Store.find_prefix. Sessions that cannot be read are passed over."""
    if ids.size and (ids.min() < 0 or ids.max() >= 2**32):
        return None
    digest = PrefixDigest(identity_digest(identity), ids)
    refs = [ref for ref in store.catalog.refs()[0] if _usable(store, ref, identity, layout)]
    matched = _matched_blocks(store, refs, digest.ids) * HASH_BLOCK
    offers = {(entry.position, entry.prefix): entry.turn for ref in refs for entry in ref.keep if entry.position > 0}
    for (position, prefix), turn in sorted(offers.items(), reverse=True):
        if position > len(ids) or digest.at(position) != prefix:
            continue
        try:
            found = plan(store, store.record(turn), identity, layout, None)
        except (Damaged, FormatUnsupported):
            continue
        if found.boundary == position and store.catalog.turn(turn).prefix == prefix:
            return replace(found, matched=max(position, matched))
    if matched:
        return RestorePlan(None, 0, 0, (), 0, "no checkpoint within the shared tokens", matched)
    return None


def _usable(store: OpenStore, ref: Ref, identity: Identity, layout: StateLayout) -> bool:
    try:
        root = store.catalog.root(ref.root)
    except (Damaged, FormatUnsupported):
        return False
    return root.identity == identity and root.layout == layout


def _matched_blocks(store: OpenStore, refs: list[Ref], ids: Array) -> int:
    """How many whole hash blocks of `ids` some recent session evaluated, with a checkpoint there or not."""
    best = 0
    # Looking further back would read every turn of every session for what only decides where to keep a checkpoint.
    for ref in sorted(refs, key=lambda ref: ref.updated, reverse=True)[:RECENT]:
        try:
            path = store.catalog.path(ref.head)
        except (Damaged, FormatUnsupported):
            continue
        tokens = store.catalog.tokens(path)[: path[-1].position]
        length = min(len(tokens), len(ids))
        differing = np.flatnonzero(tokens[:length] != ids[:length])
        best = max(best, (int(differing[0]) if differing.size else length) // HASH_BLOCK)
    return best
