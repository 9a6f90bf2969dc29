"""Checks beside the names: they answer for what is read, and where they do not agree the sha256 decides."""

from __future__ import annotations

import hashlib
import random
from dataclasses import replace

import numpy as np
import pytest
from k3_sessions import DTYPES, Damaged, Store, blobs
from k3_sessions.blobs import Batch
from k3_sessions.objects import MAGIC, Blob, Kind
from k3_sessions.records import read_turn
from k3_sessions.state_objects import read_state

from tests.sessions.toy import CONFIG, IDENTITY, LAYOUT, check, grow


def size_of(parts):
    return sum(len(part) for part in parts)


@pytest.fixture
def stored(tmp_path):
    store = Store.open(tmp_path / "s", config=CONFIG)
    tokens, turns = grow(store, "a", [700, 40])
    return store, tokens, store.catalog.path(turns[-1].id)


def test_state_is_read_by_its_check_alone(stored, monkeypatch):
    store, _, path = stored
    page = path[-1].pages[0].blob

    def never(*args):
        raise AssertionError("sha256 of a whole object")

    monkeypatch.setattr(blobs.hashlib, "sha256", never)
    with store.blobs.passing(page) as source:
        assert bytes(source.take(8)) == MAGIC
    with pytest.raises(AssertionError), store.blobs.passing(Blob(page.id, page.size)):
        pass


def test_every_bit_of_a_page_counts(stored, tmp_path):
    store, _, path = stored
    page = min((page.blob for turn in path for page in turn.pages), key=lambda blob: blob.size)
    file = tmp_path / "s/objects" / page.id[:2] / page.id[2:]
    good = file.read_bytes()
    for at in range(0, len(good) * 8, 7):
        data = bytearray(good)
        data[at // 8] ^= 1 << at % 8
        file.write_bytes(data)
        with pytest.raises(Damaged, match="does not match its hash"), store.blobs.passing(page):
            pass


def test_what_is_parsed_before_it_is_known_to_be_right_does_no_harm(stored, tmp_path):
    """A state object is parsed and decoded while it is hashed: whatever nonsense that is, it ends as damage."""
    store, _, path = stored
    rng = random.Random(5)
    fields = [f for f in LAYOUT.fields if f.scope == "page"]
    page = path[0].pages[0]
    rows = page.stop - page.start
    out = {f.name: np.empty((len(f.layers), rows, *f.shape), DTYPES[f.dtype]) for f in fields}
    file = tmp_path / "s/objects" / page.blob.id[:2] / page.blob.id[2:]
    good = file.read_bytes()
    read_state(store.blobs, page.blob, Kind.PAGE, fields, {}, out)
    header = 16 + int.from_bytes(good[12:16], "little")
    nonsense = [b"9", b"-1", b"null", b"[]", b"{}", b'"x"', b"1e99", b"true", b"\xff", b"[[[[", b"99999999999999999999"]
    for _ in range(1500):
        data = bytearray(good)
        for _ in range(rng.randint(1, 3)):
            at, piece = rng.randrange(header), rng.choice(nonsense)
            data[at : at + len(piece)] = piece[: len(data) - at]
        if data == good:
            continue
        file.write_bytes(data[: len(good)])
        with pytest.raises(Damaged, match="does not match its hash"):
            read_state(store.blobs, page.blob, Kind.PAGE, fields, {}, out)
        store.blobs.bad.clear()


def with_checks(store, turn, change):
    """A copy of a turn whose checks went through `change`, stored as a turn of its own."""

    def changed(blob):
        return Blob(blob.id, blob.size, change(blob.check))

    pages = tuple(replace(page, blob=changed(page.blob)) for page in turn.pages)
    record = replace(turn, pages=pages, checkpoint=tuple(changed(blob) for blob in turn.checkpoint))
    blob, _ = store.blobs.put(record.pack(1), Batch())
    return blob.id


@pytest.mark.parametrize("change", [lambda check: "0" * 32, lambda check: ""], ids=["wrong", "none"])
def test_a_turn_with_another_check_loses_nothing(stored, change):
    """Bytes whose sha256 is their name are what was written, whatever a turn (from an imported file, say) claims."""
    store, tokens, path = stored
    key = with_checks(store, path[-1], change)
    with store.changing_refs():
        ref = store.catalog.ref("a")
        store.save_ref(replace(ref, head=key, keep=tuple(replace_turn(kept, path[-1].id, key) for kept in ref.keep)))
    fresh = Store.open(store.fs.where, config=CONFIG)
    check(fresh.restore(fresh.plan(key, IDENTITY, LAYOUT), IDENTITY, LAYOUT), tokens)
    assert fresh.verify().problems == ()


def replace_turn(kept, old, new):
    return kept._replace(turn=new) if kept.turn == old else kept


@pytest.mark.parametrize("change", [lambda check: "00", lambda check: 7], ids=["short", "number"])
def test_a_garbled_check_is_a_damaged_turn(stored, change):
    _, _, path = stored
    kept = tuple(Blob(blob.id, blob.size, change(blob.check)) for blob in path[-1].checkpoint)
    data = b"".join(replace(path[-1], checkpoint=kept).pack(1))
    with pytest.raises(Damaged, match="is not well formed"):
        read_turn(data, hashlib.sha256(data).hexdigest(), "x")


def test_a_turn_that_was_stored_without_checks_has_the_same_bytes_as_before(stored):
    _, _, path = stored
    plain = [Blob(blob.id, blob.size) for blob in path[-1].checkpoint]
    turn = replace(path[-1], pages=(), checkpoint=tuple(plain))
    assert b"checks" not in b"".join(turn.pack(1))
    assert size_of(turn.pack(1)) < size_of(replace(turn, checkpoint=path[-1].checkpoint).pack(1))
