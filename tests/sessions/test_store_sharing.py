"""Prefixes shared between sessions, and sessions carried between stores."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import os

import pytest
from k3_sessions import Store, portable
from k3_sessions.errors import BadDraft, BadName, Damaged, IdentityMismatch, SessionExists
from k3_sessions.identity import PrefixDigest, chain, identity_digest
from k3_sessions.upkeep import files

from tests.sessions.toy import CONFIG, IDENTITY, LAYOUT, Toy, check, draft, grow, ids


@pytest.fixture
def store(tmp_path):
    return Store.open(tmp_path / "store", config=CONFIG)


def test_the_chain_hash_is_the_documented_one():
    seed = bytes(32)
    tokens = ids(1100, 3)
    raw = b"".join(token.to_bytes(4, "little") for token in tokens)
    first = hashlib.sha256(seed + raw[:2048]).digest()
    second = hashlib.sha256(first + raw[2048:4096]).digest()
    assert chain(seed, tokens) == [first, second]
    digest = PrefixDigest(seed, tokens)
    assert digest.at(1024) == second.hex()
    assert digest.at(1100) == hashlib.sha256(second + raw[4096:]).hexdigest()
    assert digest.at(0) == seed.hex()
    # Fixed for ever: these bytes are in stores on other people's disks.
    assert identity_digest(dataclasses.replace(IDENTITY, layout="x")).hex().startswith(GOLDEN_SEED)


GOLDEN_SEED = "7a25fcda888ccaa9f684876a090d566a"


def test_a_new_session_starts_from_the_longest_stored_boundary(store):
    tokens, turns = grow(store, "a", [700, 600], pending=0)
    for extra, boundary in [([], 1300), (ids(50, 8), 1300)]:
        plan = store.find_prefix(IDENTITY, LAYOUT, tokens + extra)
        assert (plan.boundary, plan.turn, plan.target) == (boundary, turns[1].id, boundary)
        check(store.restore(plan, IDENTITY, LAYOUT), tokens)
    # One token short of the newest boundary: the one before, although whole blocks further on are known.
    plan = store.find_prefix(IDENTITY, LAYOUT, tokens[:1299])
    assert (plan.boundary, plan.matched) == (700, 1024)
    # The last token before the boundary differs: it must not match.
    other = [*tokens[:699], tokens[699] ^ 1, *tokens[700:]]
    plan = store.find_prefix(IDENTITY, LAYOUT, other)
    assert (plan.turn, plan.boundary, plan.matched) == (None, 0, 512)
    assert store.find_prefix(IDENTITY, LAYOUT, ids(700, 99)) is None
    assert store.find_prefix(dataclasses.replace(IDENTITY, weights="sha256:x"), LAYOUT, tokens) is None
    assert store.find_prefix(IDENTITY, LAYOUT, []) is None


def test_a_session_built_on_a_found_prefix_shares_its_pages_and_outlives_it(store):
    tokens, _ = grow(store, "a", [700, 600], pending=0)
    more = tokens + ids(40, 5)
    plan = store.find_prefix(IDENTITY, LAYOUT, more)
    source = Toy(more, len(more))
    with store.writer("b", create=True, identity=IDENTITY, layout=LAYOUT) as writer:
        report = writer.commit(draft(more, len(more), restored=plan), source)
    assert min(start for _, start, _ in source.calls) == 1300
    assert report.bytes_pages < 5000
    store.remove("a")
    assert store.verify().problems == ()
    check(store.restore(store.plan(report.turn.id, IDENTITY, LAYOUT), IDENTITY, LAYOUT), more)


def test_a_plan_for_other_tokens_cannot_become_a_sessions_history(store):
    tokens, _ = grow(store, "a", [700], pending=0)
    plan = store.find_prefix(IDENTITY, LAYOUT, tokens)
    other = ids(800, 4)
    with store.writer("b", create=True, identity=IDENTITY, layout=LAYOUT) as writer, pytest.raises(BadDraft):
        writer.commit(draft(other, 800, restored=plan), Toy(other, 800))
    assert not store.exists("b")


def test_a_checkpoint_at_the_end_of_a_shared_head(store):
    """The second session that shares a head stores a turn there; the third starts from it."""
    head = ids(1024, 1)
    for number in range(3):
        tokens = head + ids(100, 10 + number)
        plan = store.find_prefix(IDENTITY, LAYOUT, tokens)
        matched = plan.matched if plan else 0
        with store.writer(f"s{number}", create=True, identity=IDENTITY, layout=LAYOUT) as writer:
            if plan and plan.boundary < matched:
                writer.commit(draft(tokens[:matched], matched, restored=plan), Toy(tokens, matched))
                writer.commit(draft(tokens[matched:], len(tokens)), Toy(tokens, len(tokens)))
            else:
                writer.commit(draft(tokens, len(tokens), restored=plan), Toy(tokens, len(tokens)))
        assert (plan.boundary if plan else 0, matched) == [(0, 0), (0, 1024), (1024, 1024)][number]
    assert store.verify().problems == ()


# Export and import


def test_export_and_import_carry_a_session_to_another_store(store, tmp_path):
    tokens, turns = grow(store, "a", [700] + [20] * 12)
    store.mark("a", turns[3].id, "m")
    store.fork("a", "child", at=turns[2].id)
    first = store.export("a", tmp_path / "one")
    store.set_meta("child", {"x": 1})
    store.pin("a")
    store.export("a", tmp_path / "two")
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    assert first.bytes == (tmp_path / "one").stat().st_size
    other = Store.open(tmp_path / "other", config=CONFIG)
    assert other.import_(tmp_path / "one").name == "a"
    report = other.import_(tmp_path / "one", "b")
    assert report.written == 0
    for name in ("a", "b"):
        assert [t.id for t in other.log(name)] == [t.id for t in turns]
        assert [t.has_checkpoint for t in other.log(name)] == [t.has_checkpoint for t in store.log("a")]
        check(other.restore(other.plan(turns[-1].id, IDENTITY, LAYOUT), IDENTITY, LAYOUT), tokens)
        assert other.session(name).marks == {"m": turns[3].id}
    assert other.verify().problems == ()
    other.export("a", tmp_path / "three")
    assert (tmp_path / "three").read_bytes() == (tmp_path / "one").read_bytes()
    with pytest.raises(SessionExists):
        other.import_(tmp_path / "one")
    with pytest.raises(IdentityMismatch):
        other.plan(turns[-1].id, dataclasses.replace(IDENTITY, weights="sha256:x"), LAYOUT)
    assert other.tokens(turns[-1].id).tolist() == tokens


@pytest.mark.parametrize("links", [True, False])
def test_a_file_that_appears_while_an_export_is_written_stays(store, tmp_path, monkeypatch, links):
    grow(store, "a", [5])
    target = tmp_path / "f"
    write_all = portable._write_all

    def meanwhile(*args):
        done = write_all(*args)
        target.write_bytes(b"precious")
        return done

    def without_links(*args, **options):
        raise OSError(errno.EPERM, "no links here")

    with monkeypatch.context() as patch:
        if not links:
            patch.setattr(os, "link", without_links)
        patch.setattr(portable, "_write_all", meanwhile)
        with pytest.raises(BadName, match="exists"):
            store.export("a", target)
        patch.setattr(portable, "_write_all", write_all)
        assert target.read_bytes() == b"precious"
        assert not list(tmp_path.glob(".tmp-*"))
        target.unlink()
        store.export("a", target)
    first = Store.open(tmp_path / "other", config=CONFIG).import_(target)
    again = store.import_(target, "copy")
    assert (first.known, again.written, again.known) == (0, 0, first.written)


def test_an_export_never_replaces_a_file(store, tmp_path):
    grow(store, "a", [3])
    (tmp_path / "f").write_text("mine")
    with pytest.raises(BadName, match="exists"):
        store.export("a", tmp_path / "f")
    assert (tmp_path / "f").read_text() == "mine"


@pytest.mark.parametrize(("content", "found"), [(b"", "is empty"), (b"# A title\n" * 9, "begins with '# A title")])
def test_what_never_was_an_export_is_no_damage(store, tmp_path, content, found):
    """It is the wrong file, and its first bytes are told."""
    (tmp_path / "f").write_bytes(content)
    with pytest.raises(BadName, match=rf"no exported session: it {found}.*a file made by `k3 export`"):
        store.import_(tmp_path / "f")


@pytest.mark.parametrize("what", ["flip", "cut", "longer", "no head"])
def test_a_damaged_export_is_refused_and_leaves_nothing(store, tmp_path, what):
    grow(store, "a", [700, 50])
    store.export("a", tmp_path / "f")
    data = (tmp_path / "f").read_bytes()
    variants = []
    if what == "flip":
        for at in range(0, len(data), 997):
            variants.append(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
    elif what == "cut":
        variants = [data[:at] for at in (1, 7, 15, *range(2999, len(data), 2999))]
    elif what == "longer":
        variants = [data + b"\0"]
    else:
        variants = [b"K3EXP\r\n\x1a" + b"\xff" * 100, data.replace(b"\r\n", b"\n", 1)]
    other = Store.open(tmp_path / "other", config=CONFIG)
    for number, variant in enumerate(variants):
        file = tmp_path / f"bad{number}"
        file.write_bytes(variant)
        with pytest.raises(Damaged) as refused:
            other.import_(file, "a")
        assert "k3 repair" not in str(refused.value), "no store is damaged"
        assert other.sessions() == []
    left = [path for path, _ in files(other) if path.startswith(("objects", "refs", "locks"))]
    assert left == ["locks/refs", "locks/store"], "no lock file tells the next writer of a crash, either"


def test_an_export_of_a_damaged_session_leaves_no_file(store, tmp_path):
    _, turns = grow(store, "a", [700])
    key = store.catalog.turn(turns[0].id).pages[0].blob.id
    path = tmp_path / "store/objects" / key[:2] / key[2:]
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(Damaged):
        store.export("a", tmp_path / "f")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["home", "store"] or not (tmp_path / "f").exists()
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".tmp")]


def test_a_file_that_names_other_tokens_for_a_boundary_is_refused(store, tmp_path):
    """Refs drive the prefix search: one that lies about a turn must not get in."""
    grow(store, "a", [700])
    ref = store.catalog.ref("a")
    lie = tuple(entry._replace(prefix="0" * 64) for entry in ref.keep)
    store.save_ref(dataclasses.replace(ref, keep=lie))
    store.export("a", tmp_path / "f")
    other = Store.open(tmp_path / "other", config=CONFIG)
    with pytest.raises(Damaged, match="misstates"):
        other.import_(tmp_path / "f")
    assert other.sessions() == []
