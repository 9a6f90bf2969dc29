"""Repair where turns, refs or versions are the trouble, and refusals that leave nothing behind."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from k3_sessions import (
    BadName,
    Damaged,
    SessionExists,
    SessionMissing,
    Store,
    StoreBusy,
    StoreConfig,
)
from k3_sessions.blobs import path_of
from k3_sessions.records import copied_root

from tests.sessions.toy import CONFIG, IDENTITY, LAYOUT, check, grow


@pytest.fixture
def made(tmp_path):
    """A store with session `a` of 24 short turns: thinning has left gaps between the boundaries it keeps."""
    root = tmp_path / "s"
    store = Store.open(root, config=CONFIG)
    tokens, turns = grow(store, "a", [7] * 24)
    kept = {entry.turn for entry in store.catalog.ref("a").keep}
    return root, tokens, [turn.id for turn in turns], kept


def ids_of(store: Store, name: str) -> list[str]:
    return [turn.id for turn in store.log(name)]


def content(root: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in root.rglob("*") if path.is_file() and "locks" not in path.parts}


def resumes(store: Store, name: str, tokens: list[int]) -> None:
    """Every turn of the session can be restored, with the tokens that belong to it."""
    for turn in store.log(name):
        plan = store.plan(turn.id, IDENTITY, LAYOUT)
        assert not plan.damaged
        state = store.restore(plan, IDENTITY, LAYOUT)
        if plan.turn is not None:
            check(state, tokens)


@pytest.mark.parametrize(("number", "how"), [(23, "missing"), (15, "missing"), (15, "cut"), (11, "swapped")])
def test_a_lost_turn_costs_what_follows_it_and_nothing_before(made, number, how):
    root, tokens, turns, _ = made
    path = root / path_of(turns[number])
    if how == "missing":
        path.unlink()
    else:
        path.write_bytes(b"x" if how == "cut" else (root / path_of(turns[number - 1])).read_bytes())
    store = Store.open(root, config=CONFIG)
    assert path_of(turns[number]) in [problem.path for problem in store.verify().problems]
    foretold, done = store.repair(dry_run=True), store.repair()
    assert (foretold.sessions, foretold.recovered) == (done.sessions, done.recovered)
    (session,) = done.sessions
    assert session.lost_turns == tuple(reversed(turns[number:]))
    # Whole turns between the one the session fell back to and the lost one are not forgotten: they get a name again.
    best = store.log(done.recovered[0] if done.recovered else "a")
    assert [turn.id for turn in best] == turns[:number]
    for name in ("a", *done.recovered):
        resumes(store, name, tokens)
    again = store.repair()
    assert (again.sessions, again.recovered, again.lost, again.quarantined) == ((), (), (), ())
    store.gc()
    assert store.verify().problems == ()
    assert [turn.id for turn in store.log(done.recovered[0] if done.recovered else "a")] == turns[:number]
    grow(store, "a", [5], create=False, seed=3)


def test_a_session_without_its_first_turn_is_lost_until_the_user_removes_it(made):
    root, _, turns, _ = made
    store = Store.open(root, config=CONFIG)
    grow(store, "b", [9], seed=2)
    (root / path_of(turns[0])).unlink()
    store = Store.open(root, config=CONFIG)
    assert store.repair().lost == ("a",)
    assert (root / path_of(turns[5])).exists()
    assert "is missing" in store.gc().blocked
    with pytest.raises(Damaged):
        store.log("a")
    assert store.remove("a").notices
    assert not store.gc().blocked
    assert not (root / path_of(turns[5])).exists()
    assert [session.name for session in store.sessions()] == ["b"]


def test_falling_back_prefers_the_longest_branch_to_an_older_mark(made):
    root, _, turns, kept = made
    store = Store.open(root, config=CONFIG)
    store.mark("a", turns[1], "early")
    (root / path_of(turns[23])).unlink()
    store = Store.open(root, config=CONFIG)
    store.repair()
    assert turns[22] in kept
    assert store.session("a").head == turns[22]
    assert store.session("a").marks == {"early": turns[1]}


def test_repair_leaves_alone_what_a_newer_version_wrote(made, monkeypatch):
    """Going back to an older release must not cost a session: neither its ref nor its objects are set aside."""
    root, _, _, _ = made
    with monkeypatch.context() as newer:
        newer.setattr("k3_sessions.objects.MAJOR", 2)
        newer.setattr("k3_sessions.records.MAJOR", 2)
        future = Store.open(root.parent / "future", config=CONFIG)
        grow(future, "new", [600, 7], seed=9)
        ref = next((root.parent / "future/refs").iterdir())
    for path in (root.parent / "future/objects").rglob("*"):
        if path.is_file():
            (root / "objects" / path.parent.name).mkdir(exist_ok=True)
            path.rename(root / "objects" / path.parent.name / path.name)
    ref.rename(root / "refs" / ref.name)
    store = Store.open(root, config=CONFIG)
    before = sorted(
        (path, path.read_bytes()) for path in root.rglob("*") if path.is_file() and "locks" not in path.parts
    )
    report = store.repair()
    assert (report.quarantined, report.sessions, report.lost, report.recovered) == ((), (), (), ())
    ((_, why),) = report.untouched
    assert "2.0" in why
    assert store.gc().blocked
    after = sorted(
        (path, path.read_bytes()) for path in root.rglob("*") if path.is_file() and "locks" not in path.parts
    )
    assert after == before
    assert [bool(session.error) for session in store.sessions()] == [False, True]


def test_a_link_or_folder_among_the_refs_is_set_aside(made, tmp_path):
    root, _, turns, _ = made
    ref = next((root / "refs").iterdir())
    (tmp_path / "elsewhere").write_bytes(ref.read_bytes())
    ref.unlink()
    ref.symlink_to(tmp_path / "elsewhere")
    (root / "refs/folder").mkdir()
    store = Store.open(root, config=CONFIG)
    report = store.repair()
    assert set(report.quarantined) == {f"refs/{ref.name}", "refs/folder"}
    assert (tmp_path / "elsewhere").exists()
    (name,) = report.recovered
    assert ids_of(store, name) == turns
    assert store.verify().problems == ()


def test_wrong_names_leave_no_lock_files(tmp_path):
    store = Store.open(tmp_path / "s", config=CONFIG)
    grow(store, "a", [5])
    before = sorted(path.name for path in (tmp_path / "s/locks").iterdir())
    for attempt in (
        lambda: store.rename("absent", "new"),
        lambda: store.remove("absent"),
        lambda: store.fork("absent", "new"),
        lambda: store.writer("absent", create=False, identity=IDENTITY, layout=LAYOUT),
    ):
        with pytest.raises(SessionMissing):
            attempt()
    with pytest.raises(SessionExists):
        store.writer("a", create=True, identity=IDENTITY, layout=LAYOUT)
    store.writer("never-committed", create=True, identity=IDENTITY, layout=LAYOUT).close()
    assert sorted(path.name for path in (tmp_path / "s/locks").iterdir()) == before
    store.rename("a", "b")
    store.remove("b")
    assert sorted(path.name for path in (tmp_path / "s/locks").iterdir()) == ["refs", "store"]


@pytest.mark.parametrize("folder", ["locks", "quarantine", "refs", "objects"])
def test_a_store_copied_without_one_of_its_folders(made, folder):
    root, tokens, _, _ = made
    shutil.rmtree(root / folder)
    if folder in ("refs", "objects"):  # going on would look like an empty store, and `gc` would make it one
        with pytest.raises(Damaged, match=f"has no folder {folder}"):
            Store.open(root, config=CONFIG)
        assert not (root / folder).exists()
        return
    store = Store.open(root, config=CONFIG)
    resumes(store, "a", tokens)
    grow(store, "a", [5], create=False, seed=3)
    assert store.verify().problems == ()


def test_collecting_waits_for_a_ref_that_is_being_written(tmp_path):
    """Else the unfinished file of another process's `mark` would be taken for one a crash left."""
    store = Store.open(tmp_path / "s", config=CONFIG)
    grow(store, "a", [5])
    other = Store.open(tmp_path / "s", config=StoreConfig(free_floor_bytes=0, lock_wait_seconds=0.05))
    (tmp_path / "s/refs/.tmp-half").touch()
    with store.changing_refs():
        with pytest.raises(StoreBusy):
            other.gc()
        with other.writer("a", create=False, identity=IDENTITY, layout=LAYOUT):
            pass
        assert (tmp_path / "s/refs/.tmp-half").exists()
    assert other.gc().removed == ("refs/.tmp-half",)


def test_messages_name_what_was_asked_for(tmp_path):
    store = Store.open(tmp_path / "s", config=CONFIG)
    _, (turn,) = grow(store, "a", [5])
    with pytest.raises(BadName, match=r"^mark 'a b'; expected at most"):
        store.mark("a", turn.id, "a b")
    with pytest.raises(BadName, match=r"has no mark 'x'; it has none"):
        store.unmark("a", "x")
    store.mark("a", turn.id, "good")
    with pytest.raises(BadName, match=r"has no mark 'x'; expected one of good"):
        store.unmark("a", "x")
    with pytest.raises(BadName, match="is a folder"):
        store.import_(tmp_path)
    with pytest.raises(BadName, match="absent does not exist"):
        store.import_(tmp_path / "absent")
    with pytest.raises(BadName, match=r"folder .*absent does not exist"):
        store.export("a", tmp_path / "absent/file")
    store.export("a", tmp_path / "file")
    with pytest.raises(SessionExists, match="--name"):
        store.import_(tmp_path / "file")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    assert store.import_(tmp_path / "link", "b").name == "b"


PERMISSIONS = """
import os, sys
from pathlib import Path
from k3_sessions import Store, StoreReadOnly
from k3_sessions.blobs import path_of
from tests.sessions.toy import CONFIG, IDENTITY, LAYOUT, check, grow

# Used once before, so that everything is imported: the interpreter's own files may be out of reach for that user.
_, (first,) = grow(Store.open(sys.argv[1] + "/warm", config=CONFIG), "w", [600])
warm = Store.open(sys.argv[1] + "/warm", config=CONFIG)
check(warm.restore(warm.plan(first.id, IDENTITY, LAYOUT), IDENTITY, LAYOUT), warm.tokens(first.id).tolist())
if os.geteuid() == 0:
    os.setegid(65534)
    os.seteuid(65534)
root = Path(sys.argv[1]) / "s"
store = Store.open(root, config=CONFIG)
tokens, turns = grow(store, "a", [600, 20])
grow(store, "b", [30], seed=2)

def refused(text, attempt):
    try:
        attempt()
    except StoreReadOnly as error:
        assert text in str(error) and "Permission denied" in str(error), error
    else:
        raise AssertionError(f"{text}: not refused")

def fresh():
    return Store.open(root, config=CONFIG)

# An object that may not be read: a restore refuses, verify tells, repair and gc leave everything alone.
blob = root / path_of(store.catalog.turn(turns[-1].id).checkpoint[0].id)
blob.chmod(0)
plan = store.plan(turns[-1].id, IDENTITY, LAYOUT)
refused("reading the session store", lambda: store.restore(plan, IDENTITY, LAYOUT))
(problem,) = fresh().verify().problems
assert "Permission denied" in problem.what and problem.sessions == ("a",), problem
report = fresh().repair()
assert [name for name, _ in report.untouched] == ["a"] and not report.quarantined and not report.sessions, report
assert fresh().gc().removed == ()
blob.chmod(0o600)

# A ref that may not be read hides no other session, and nothing is collected meanwhile.
ref = next(path for path in (root / "refs").iterdir() if b'"name":"b"' in path.read_bytes())
ref.chmod(0)
assert [bool(s.error) for s in fresh().sessions()] == [False, True]
report = fresh().repair()
assert not report.quarantined and not report.recovered and len(report.untouched) == 1, report
assert fresh().gc().blocked
ref.chmod(0o600)

# A turn that may not be read.
turn = root / path_of(turns[0].id)
turn.chmod(0)
refused("reading the session store", lambda: fresh().log("a"))
assert not fresh().repair().quarantined
turn.chmod(0o600)

# Folders that may not be written: the writer is refused, readers go on.
for folder in ("objects", "refs", "."):
    (root / folder).chmod(0o500)
blob.parent.chmod(0o500)
try:
    grow(fresh(), "a", [5], create=False)
except StoreReadOnly as error:
    assert "Permission denied" in str(error)
else:
    raise AssertionError("written")
check(fresh().restore(fresh().plan(turns[-1].id, IDENTITY, LAYOUT), IDENTITY, LAYOUT), tokens)
for folder in (".", "refs", "objects"):
    (root / folder).chmod(0o700)
blob.parent.chmod(0o700)

# A root that may not be entered.
root.chmod(0)
refused("opening the session store", fresh)
root.chmod(0o700)
grow(fresh(), "a", [5], create=False)
assert fresh().verify().problems == ()
print("fine")
"""


def test_missing_permissions_refuse_and_prove_nothing_bad():
    """In a process of its own, as an ordinary user even where the tests run as root."""
    with tempfile.TemporaryDirectory() as folder:
        if os.geteuid() == 0:
            os.chown(folder, 65534, 65534)
        done = subprocess.run(
            [sys.executable, "-c", PERMISSIONS, folder],
            env={"PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
        )
    assert (done.returncode, done.stdout) == (0, "fine\n"), done.stderr


@pytest.mark.parametrize("how", ["missing", "flipped", "other"])
def test_the_root_of_a_tree_comes_back_from_its_first_turn(made, how):
    root, tokens, turns, _ = made
    store = Store.open(root, config=CONFIG)
    store.fork("a", "b", at=turns[15])
    fixed = store.session("a").fixed
    key = store.catalog.ref("a").root
    path = root / path_of(key)
    good = path.read_bytes()
    if how == "missing":
        path.unlink()
    else:
        path.write_bytes(bytes([good[0] ^ 1]) + good[1:] if how == "flipped" else good[::-1])
    store = Store.open(root, config=CONFIG)
    assert [bool(session.error) for session in store.sessions()] == [True, True]
    before = content(root)
    foretold = store.repair(dry_run=True)
    assert content(root) == before
    report = store.repair()
    assert (report.written, report.sessions, report.lost, report.recovered) == ((path_of(key),), (), (), ())
    assert (foretold.written, foretold.quarantined) == (report.written, report.quarantined)
    assert report.quarantined == (() if how == "missing" else (path_of(key),))
    assert path.read_bytes() == good
    assert len(list((root / "quarantine").iterdir())) == (how != "missing")
    fresh = Store.open(root, config=CONFIG)
    assert fresh.session("a").fixed == fixed
    assert ids_of(fresh, "a") == turns
    resumes(fresh, "a", tokens)
    resumes(fresh, "b", tokens)
    assert fresh.verify().problems == ()
    assert fresh.repair().written == ()


def test_a_root_without_a_copy_loses_its_tree_and_no_other(tmp_path, repo_root):
    """Sessions of 1.0 and 1.1 hold no copy: what is lost is said, and what another session needs stays."""
    store = Store.open(tmp_path / "s", config=CONFIG)
    store.import_(repo_root / "tests/sessions/golden/session-1.0.k3s")
    tokens, turns = grow(store, "other", [9, 9])
    (tmp_path / "s" / path_of(store.catalog.ref("golden").root)).unlink()
    store = Store.open(tmp_path / "s", config=CONFIG)
    report = store.repair()
    assert (report.lost, report.written) == (("golden",), ())
    assert ids_of(store, "other") == [turn.id for turn in turns]
    resumes(store, "other", tokens)
    store.remove("golden")
    assert store.verify().problems == ()


def test_a_copy_that_is_not_the_root_is_not_believed(made):
    root, _, turns, _ = made
    store = Store.open(root, config=CONFIG)
    first = store.catalog.turn(turns[0])
    assert copied_root(first) == store.catalog.root(first.root)
    for wrong in ({}, {"identity": {}}, {**first.root_copy, "fixed": {"system": "another"}}):
        assert copied_root(replace(first, root_copy=wrong)) is None


def test_a_session_rebuilt_from_its_ref_names_no_damaged_boundary(made):
    """Two faults at once: the ref is damaged, and so is a checkpoint that the ref named. One repair mends both."""
    root, tokens, turns, kept = made
    store = Store.open(root, config=CONFIG)
    newest = store.catalog.turn(turns[-1]).checkpoint[0]
    path = root / path_of(newest.id)
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    (ref,) = (root / "refs").iterdir()
    ref.write_bytes(ref.read_bytes().replace(b'"pinned":false', b'"pinned":fals3'))
    store = Store.open(root, config=CONFIG)
    report = store.repair()
    assert report.recovered == ("a",)
    assert path_of(newest.id) in report.quarantined
    fresh = Store.open(root, config=CONFIG)
    assert fresh.verify().problems == ()
    assert ids_of(fresh, "a") == turns
    assert {entry.turn for entry in fresh.catalog.ref("a").keep} == kept - {turns[-1]}
    resumes(fresh, "a", tokens)


def test_a_repair_that_dies_forgets_no_branch(made, monkeypatch):
    """Turns after a lost one come back as a session of their own, also where the first repair died half-way."""
    root, _, turns, _ = made
    (root / path_of(turns[15])).unlink()
    store = Store.open(root, config=CONFIG)
    with monkeypatch.context() as patch:
        saved = []

        def dying(self, ref):
            if saved:
                raise KeyboardInterrupt
            saved.append(ref.name)
            save(self, ref)

        save = Store.save_ref
        patch.setattr(Store, "save_ref", dying)
        with pytest.raises(KeyboardInterrupt):
            store.repair()
    store = Store.open(root, config=CONFIG)
    store.repair()
    store.gc()
    found = {turn.id for session in store.sessions() for turn in store.log(session.name)}
    assert found >= {*turns[:15]}
    assert Store.open(root, config=CONFIG).verify().problems == ()
