"""Nothing wrong is ever loaded: identity, damage, foreign files, versions."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import random
import shutil
from pathlib import Path

import numpy as np
import orjson
import pytest
from k3_sessions import Store
from k3_sessions.blobs import Batch, path_of
from k3_sessions.errors import BadName, Damaged, FormatUnsupported, IdentityMismatch, NetworkFilesystem, StoreError
from k3_sessions.fs import RealFS
from k3_sessions.objects import MAJOR, PREFIX, Kind, pack, unpack
from k3_sessions.records import seal

from tests.sessions.toy import CONFIG, IDENTITY, LAYOUT, Toy, check, draft, grow, identity_for


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("made") / "store"
    store = Store.open(root, config=CONFIG)
    tokens, turns = grow(store, "a", [600, 100, 300])
    return root, tokens, turns


@pytest.fixture
def copy(made, tmp_path):
    shutil.copytree(made[0], tmp_path / "store")
    return Store.open(tmp_path / "store", config=CONFIG), Path(tmp_path / "store"), made[1], made[2]


def restore(store, turn):
    return store.restore(store.plan(turn.id, IDENTITY, LAYOUT), IDENTITY, LAYOUT)


OTHER = {
    "weights": "sha256:weightt",
    "tokenizer": "sha256:other",
    "chat_format": "xtml-2",
    "layout": "sha256:other",
    "compute": "float32",
}


@pytest.mark.parametrize("field", OTHER)
def test_each_identity_field_refuses_by_name(copy, field):
    store, _, _, turns = copy
    other = dataclasses.replace(IDENTITY, **{field: OTHER[field]})
    plan = store.plan(turns[-1].id, IDENTITY, LAYOUT)
    attempts = [lambda: store.plan(turns[-1].id, other, LAYOUT), lambda: store.restore(plan, other, LAYOUT)]
    if field != "layout":
        attempts.append(lambda: store.writer("a", create=False, identity=other, layout=LAYOUT))
    for attempt in attempts:
        with pytest.raises(IdentityMismatch, match=f"{field} {OTHER[field]}") as caught:
            attempt()
        assert caught.value.fields == (field,)
    # The refusal leaves the session free and whole.
    check(restore(store, turns[-1]), copy[2])
    with store.writer("a", create=False, identity=IDENTITY, layout=LAYOUT):
        pass


@pytest.mark.parametrize("change", ["dtype", "shape", "layers", "name", "version", "missing", "more"])
def test_another_layout_is_refused(copy, change):
    store, _, _, turns = copy
    first = LAYOUT.fields[0]
    changed = {
        "dtype": dataclasses.replace(first, dtype="bfloat16"),
        "shape": dataclasses.replace(first, shape=(3, 2, 5)),
        "layers": dataclasses.replace(first, layers=(0, 1, 2)),
        "name": dataclasses.replace(first, name="other"),
    }
    fields = (changed.get(change, first), *LAYOUT.fields[1:])
    if change == "missing":
        fields = LAYOUT.fields[1:]
    elif change == "more":
        fields = (*LAYOUT.fields, dataclasses.replace(first, name="extra"))
    layout = dataclasses.replace(LAYOUT, fields=fields, version=2 if change == "version" else 1)
    with pytest.raises(IdentityMismatch, match="layout"):
        store.plan(turns[-1].id, identity_for(layout), layout)
    with pytest.raises(IdentityMismatch, match="layout"):
        store.plan(turns[-1].id, IDENTITY, layout)


def every_file(root: Path) -> list[Path]:
    return sorted(p for p in root.rglob("*") if p.is_file() and p.parent.name != "locks")


def checkpoints(root: Path, turn):
    return Store.open(root, config=CONFIG).catalog.turn(turn.id).checkpoint


def outcome(root: Path, turns, tokens) -> str:
    """What a fresh process makes of the store: the newest turn bit for bit, an older boundary, or a refusal."""
    try:
        store = Store.open(root, config=CONFIG)
        head = store.session("a").head
        for _ in range(4):
            plan = store.plan(head, IDENTITY, LAYOUT)
            try:
                state = store.restore(plan, IDENTITY, LAYOUT)
            except Damaged:
                continue  # plan again, around the object that failed
            break
        else:
            return "never settles"
        assert list(plan.replay) == tokens[plan.boundary : plan.target]
        if plan.turn is not None:
            check(state, tokens)
        return "newest" if plan.boundary == turns[-1].position else "older"
    except (StoreError, FormatUnsupported):
        return "refused"


@pytest.mark.parametrize("damage", ["flip", "cut", "zero", "longer", "empty", "gone"])
def test_damage_to_any_file_is_refused_or_gone_around(made, tmp_path, damage):
    root, tokens, turns = made
    rng = random.Random(damage)
    seen = set()
    for number, path in enumerate(every_file(root)):
        again = tmp_path / str(number)
        shutil.copytree(root, again)
        target = again / path.relative_to(root)
        data = bytearray(target.read_bytes())
        if damage == "flip":
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        elif damage == "cut":
            del data[rng.randrange(len(data)) :]
        elif damage == "zero":
            at = rng.randrange(len(data))
            data[at : at + 64] = bytes(len(data[at : at + 64]))
        elif damage == "longer":
            data += b"\0"
        target.write_bytes(b"" if damage == "empty" else data)
        if damage == "gone":
            target.unlink()
        found = outcome(again, turns, tokens)
        # Only the checkpoints of older turns are not needed for the newest position.
        older = path in [root / path_of(blob.id) for t in turns[:2] for blob in checkpoints(root, t)]
        assert found == "newest" if older else found in ("refused", "older"), path
        seen.add(found)
        report = None
        try:
            store = Store.open(again, config=CONFIG)
            report = store.verify()
        except (StoreError, FormatUnsupported):
            continue
        # A whole ref that is gone is a session that is gone: nothing else tells of it.
        assert report.problems or (damage == "gone" and path.parent.name == "refs"), path
    assert seen == {"refused", "older", "newest"}


def test_every_bit_of_a_small_turn_object_and_ref(copy):
    _store, root, tokens, turns = copy
    for path in (root / path_of(turns[1].id), next((root / "refs").iterdir())):
        data = path.read_bytes()
        for at in range(0, len(data) * 8, 13):
            bad = bytearray(data)
            bad[at // 8] ^= 1 << (at % 8)
            path.write_bytes(bad)
            assert outcome(root, turns, tokens) == "refused", (path, at)
        path.write_bytes(data)
    assert outcome(root, turns, tokens) == "newest"


def test_swapped_objects_of_equal_size_are_refused(copy):
    store, root, tokens, turns = copy
    *older, one = (store.catalog.turn(t.id).checkpoint[0] for t in turns)
    two = next(blob for blob in older if blob.size == one.size)
    first, second = root / path_of(one.id), root / path_of(two.id)
    swap = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(swap)
    assert outcome(root, turns, tokens) in ("older", "refused")
    assert len(store.verify().problems) == 2


def test_a_turn_pointing_at_another_turns_checkpoint_is_refused(copy):
    """Even with every hash right: the checkpoint says which tokens it describes."""
    store, _, _tokens, turns = copy
    one, two = (store.catalog.turn(t.id) for t in turns[1:])
    forged = dataclasses.replace(two, checkpoint=one.checkpoint)
    blob, _ = store.blobs.put(forged.pack(1), Batch())
    ref = store.catalog.ref("a")
    keep = tuple(k._replace(turn=blob.id) if k.turn == two.id else k for k in ref.keep)
    store.save_ref(dataclasses.replace(ref, head=blob.id, keep=keep))
    with pytest.raises(Damaged, match="position"):
        store.restore(store.plan(blob.id, IDENTITY, LAYOUT), IDENTITY, LAYOUT)


def test_after_damage_the_nearest_good_boundary_is_offered_with_its_cost(copy):
    store, root, tokens, turns = copy
    bad = store.catalog.turn(turns[-1].id).checkpoint[0].id
    data = bytearray((root / path_of(bad)).read_bytes())
    data[-1] ^= 1
    (root / path_of(bad)).write_bytes(data)
    plan = store.plan(turns[-1].id, IDENTITY, LAYOUT)
    with pytest.raises(Damaged, match="does not match its hash") as caught:
        store.restore(plan, IDENTITY, LAYOUT)
    assert caught.value.object == path_of(bad)
    plan = store.plan(turns[-1].id, IDENTITY, LAYOUT)
    assert (plan.boundary, len(plan.replay)) == (turns[1].position, turns[2].position - turns[1].position)
    assert bad[:10] in plan.reason
    assert plan.damaged == f"{path_of(bad)} does not match its hash"
    assert not store.plan(turns[1].id, IDENTITY, LAYOUT).damaged
    # As soon as nobody keeps that checkpoint, going around it is no news of damage any more.
    store.repair()
    plan = store.plan(turns[-1].id, IDENTITY, LAYOUT)
    assert (plan.boundary, plan.damaged) == (turns[1].position, "")
    check(store.restore(plan, IDENTITY, LAYOUT), tokens)


def test_repair_sets_aside_falls_back_and_deletes_nothing(copy):
    store, root, tokens, turns = copy
    page = store.catalog.turn(turns[1].id).pages[0].blob.id
    (root / path_of(page)).write_bytes(b"short")
    foretold = store.repair(dry_run=True)
    done = store.repair()
    assert dataclasses.replace(foretold, dry_run=False) == done
    assert done.quarantined == (path_of(page),)
    assert [p.read_bytes() for p in (root / "quarantine").iterdir()] == [b"short"]
    (session,) = done.sessions
    assert session.head_before == session.head_after == turns[-1].id
    assert session.boundary == turns[0].position
    assert session.lost_checkpoints == (turns[1].position, turns[2].position)
    assert store.verify().problems == ()
    plan = store.plan(turns[-1].id, IDENTITY, LAYOUT)
    check(store.restore(plan, IDENTITY, LAYOUT), tokens)
    with store.writer("a", create=False, identity=IDENTITY, layout=LAYOUT) as writer:
        more = [*tokens, 5]
        report = writer.commit(draft([5], len(more), restored=plan), Toy(more, len(more)))
    check(restore(store, report.turn), more)


def test_repair_of_a_lost_turn_goes_back_to_the_newest_readable_one(copy):
    _store, root, tokens, turns = copy
    (root / path_of(turns[2].id)).write_bytes(b"x")
    fresh = Store.open(root, config=CONFIG)
    (session,) = fresh.repair().sessions
    assert (session.head_before, session.head_after) == (turns[2].id, turns[1].id)
    check(restore(fresh, turns[1]), tokens)
    assert [t.id for t in fresh.log("a")] == [t.id for t in turns[:2]]


@pytest.mark.parametrize("cut", [40, None])
def test_repair_rebuilds_a_session_whose_ref_is_unreadable(copy, cut):
    """Under its own name if the file still tells it: the name of the file proves that. Else under that of its head."""
    store, root, tokens, turns = copy
    ref = next((root / "refs").iterdir())
    data = ref.read_bytes()
    ref.write_bytes(data[:cut] if cut else data.replace(b'"pinned":false', b'"pinned":fa1se'))
    foretold, done = store.repair(dry_run=True), store.repair()
    assert dataclasses.replace(foretold, dry_run=False) == done
    assert [s.error for s in store.sessions()] == [""]
    (name,) = done.recovered
    assert name == ("a" if cut is None else f"recovered-{turns[-1].id[:10]}")
    assert len(done.lost) == (cut is not None)
    assert store.session(name).head == turns[-1].id
    check(restore(store, turns[-1]), tokens)
    store.gc()
    for turn in turns:
        check(restore(store, turn), tokens)


@pytest.mark.parametrize("how", ["flip", "cut", "empty", "missing"])
def test_repair_writes_a_damaged_format_file_again(copy, how):
    _, root, tokens, turns = copy
    file = root / "FORMAT"
    good = file.read_bytes()
    bad = {"flip": good.replace(b"store", b"stare"), "cut": good[:-9], "empty": b"", "missing": b""}[how]
    file.write_bytes(bad)
    if how == "missing":
        file.unlink()
    with pytest.raises((Damaged, FormatUnsupported), match="k3 repair"):
        Store.open(root, config=CONFIG)
    foretold = Store.open(root, config=CONFIG, mend=True).repair(dry_run=True)
    assert not file.exists() if how == "missing" else file.read_bytes() == bad
    done = Store.open(root, config=CONFIG, mend=True).repair()
    assert dataclasses.replace(foretold, dry_run=False) == done
    assert (done.written, done.quarantined) == (("FORMAT",), () if how == "missing" else ("FORMAT",))
    assert file.read_bytes() == good
    fresh = Store.open(root, config=CONFIG)
    check(restore(fresh, turns[-1]), tokens)
    assert fresh.repair().written == ()


def test_a_format_file_of_another_major_is_not_mended(copy):
    _, root, _, _ = copy
    (root / "FORMAT").write_bytes(b'{"k3":"store","version":"2.0"}\n')
    with pytest.raises(FormatUnsupported, match=r"2\.0"):
        Store.open(root, config=CONFIG, mend=True)


def test_one_broken_session_hides_no_other(copy):
    store, root, _, _ = copy
    grow(store, "b", [3], seed=5)
    (root / "refs" / hashlib.sha256(b"a").hexdigest()[:32]).write_bytes(b"{}\n")
    assert sorted((s.name, bool(s.error)) for s in store.sessions())[1] == ("b", False)
    with pytest.raises(Damaged):
        store.session("a")
    with pytest.raises(Damaged):
        store.writer("a", create=True, identity=IDENTITY, layout=LAYOUT)


def test_a_ref_under_another_sessions_name_is_refused(copy):
    store, root, _, _ = copy
    grow(store, "b", [3], seed=5)
    names = {n: root / "refs" / hashlib.sha256(n.encode()).hexdigest()[:32] for n in "ab"}
    names["b"].write_bytes(names["a"].read_bytes())
    with pytest.raises(Damaged, match="ref of session a"):
        store.session("b")


def test_links_are_not_followed(copy, tmp_path):
    store, root, _, turns = copy
    key = store.catalog.turn(turns[-1].id).checkpoint[0].id
    path = root / path_of(key)
    path.rename(tmp_path / "outside")
    path.symlink_to(tmp_path / "outside")
    assert "regular file" in store.plan(turns[-1].id, IDENTITY, LAYOUT).reason
    shutil.rmtree(root / "refs")
    (tmp_path / "elsewhere").mkdir()
    (root / "refs").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreError):
        store.fork("a", "b")
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_modes_are_private_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        store = Store.open(tmp_path / "s", config=CONFIG)
        grow(store, "a", [600])
        store.export("a", tmp_path / "file")
    finally:
        os.umask(before)
    for path in [tmp_path / "s", *(tmp_path / "s").rglob("*"), tmp_path / "file"]:
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path


def test_paths_cannot_leave_the_store(tmp_path):
    fs = RealFS(tmp_path / "s")
    for path in ["../x", "a/../../x", "", "refs/..", "./x/y"]:
        with pytest.raises(OSError):
            fs.create(path)


# Versions


def test_an_object_of_another_major_is_refused_and_a_newer_minor_is_read():
    data = bytearray(b"".join(pack(Kind.ROOT, {"a": 1}, (), 1)))
    data[9] += 1
    assert unpack(data, Kind.ROOT, "x").meta == {"a": 1}
    data[8] += 1
    with pytest.raises(FormatUnsupported, match=f"{MAJOR + 1}.1"):
        unpack(data, Kind.ROOT, "x")


def test_unknown_optional_sections_are_skipped_and_others_refused():
    arrays = [(name, "uint32", np.arange(3, dtype="<u4")) for name in ("tokens", "x")]
    data = b"".join(pack(Kind.TURN, {}, arrays, 1))
    with pytest.raises(FormatUnsupported, match="section x"):
        unpack(data, Kind.TURN, "file", known=("tokens",))
    size = PREFIX.unpack_from(data)[4]
    header = orjson.loads(data[16 : 16 + size])
    header["sections"][1]["optional"] = True
    text = orjson.dumps(header)
    changed = PREFIX.pack(*PREFIX.unpack_from(data)[:4], len(text)) + text + data[16 + size :]
    assert list(unpack(changed, Kind.TURN, "file", known=("tokens",)).sections) == ["tokens"]


def test_a_store_of_another_major_and_a_folder_of_other_things_are_refused(tmp_path):
    Store.open(tmp_path / "s", config=CONFIG)
    (tmp_path / "s/FORMAT").write_bytes(seal({"k3": "store"}).replace(b'"1.0"', b'"2.0"'))
    with pytest.raises(FormatUnsupported, match=r"2\.0"):
        Store.open(tmp_path / "s", config=CONFIG)
    (tmp_path / "t").mkdir()
    (tmp_path / "t/thesis.doc").write_text("x")
    with pytest.raises(BadName, match="thesis"):
        Store.open(tmp_path / "t", config=CONFIG)
    assert [p.name for p in (tmp_path / "t").iterdir()] == ["thesis.doc"]


def test_keys_of_a_newer_minor_survive_a_rewrite(copy):
    store, _root, _, turns = copy
    ref = dataclasses.replace(store.catalog.ref("a"), unknown={"colour": "blue"})
    store.save_ref(ref)
    store.mark("a", turns[0].id, "m")
    assert store.catalog.ref("a").unknown == {"colour": "blue"}


def test_network_file_systems_are_refused_unless_forced(tmp_path, monkeypatch):
    assert RealFS(tmp_path / "s").type_name() not in ("", "nfs")
    monkeypatch.setattr(RealFS, "type_name", lambda self: "nfs4")
    with pytest.raises(NetworkFilesystem, match="nfs4"):
        Store.open(tmp_path / "s", config=CONFIG)
    Store.open(tmp_path / "s", config=dataclasses.replace(CONFIG, force_network_fs=True))
