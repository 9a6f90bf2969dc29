"""The power goes at every call and inside every write: what was acknowledged is there, the rest is whole or absent."""

from __future__ import annotations

import os
import pickle
import random

import numpy as np
import pytest
from k3_sessions import Store
from k3_sessions.blobs import path_of
from k3_sessions.catalog import file_id
from k3_sessions.upkeep import files, object_id

from tests.sessions.sim_fs import Crash, SimFS
from tests.sessions.toy import CONFIG, IDENTITY, LAYOUT, Toy, check, draft, grow, ids

LONG = bool(os.environ.get("K3_LONG"))
ROUNDS = 12 if LONG else 2


@pytest.fixture(scope="module")
def base():
    """A store with session `a` of three turns and its fork `b`, as pickled files; everything in it is durable."""
    fs = SimFS()
    store = Store.open("memory", fs=fs, config=CONFIG)
    tokens, turns = grow(store, "a", [500, 30, 600])
    store.fork("a", "b", at=turns[1].id)
    grow(store, "gone", [700], seed=8)
    store.drop_ref("gone")  # as after a crash between forgetting a session and freeing it
    store.close()
    return pickle.dumps(fs.root), tokens, turns


NEW = ids(40, 5)
HINT = np.arange(900, dtype="<u4")


def commit(store: Store, tokens: list[int]) -> None:
    plan = store.plan(store.session("a").head, IDENTITY, LAYOUT)
    done = tokens + NEW
    with store.writer("a", create=False, identity=IDENTITY, layout=LAYOUT) as writer:
        writer.commit(draft(NEW, len(done) - 1, restored=plan), Toy(done, len(done) - 1, beside={"h": HINT}))


def create(store: Store, tokens: list[int]) -> None:
    grow(store, "c", [30], seed=3)


def go_back(store: Store, tokens: list[int]) -> None:
    first = store.log("a")[0]
    done = tokens[:500] + NEW
    with store.writer("a", create=False, identity=IDENTITY, layout=LAYOUT) as writer:
        writer.set_head(first.id)
        restored = store.plan(first.id, IDENTITY, LAYOUT)
        writer.commit(draft(NEW, len(done) - 1, restored=restored), Toy(done, len(done) - 1))


OPERATIONS = {
    "commit": commit,
    "go back": go_back,
    "create": create,
    "fork": lambda store, tokens: store.fork("a", "c"),
    "rename": lambda store, tokens: store.rename("b", "c"),
    "remove": lambda store, tokens: store.remove("b"),
    "remove the parent": lambda store, tokens: store.remove("a"),
    "mark": lambda store, tokens: store.mark("a", store.session("a").head, "m"),
    "gc": lambda store, tokens: store.gc(),
}


def crash_at(base, operation, number: int, rng: random.Random) -> tuple[SimFS, bool]:
    """The disk after a crash at changing call `number` of the operation; False when it had ended before."""
    fs = SimFS(root=pickle.loads(base[0]))
    store = Store.open("memory", fs=fs, config=CONFIG)
    start = len(fs.calls)

    def fault(name: str, path: str, at: int) -> int | None:
        if at - start < number:
            return None
        if name == "write" and rng.random() < 0.7:
            return rng.randrange(2000)
        raise Crash

    fs.fault = fault
    try:
        operation(store, base[1])
    except Crash:
        return fs.after_crash(rng), True
    finally:
        store.close()
    return fs.after_crash(rng), False


def check_store(fs: SimFS, base, name: str, finished: bool) -> None:
    _, tokens, turns = base
    store = Store.open("memory", fs=fs, config=CONFIG)
    sessions = {session.name: session for session in store.sessions()}
    assert not [s.error for s in sessions.values() if s.error]
    assert store.verify().problems == ()
    # Of the sessions that were there only the one being taken away or renamed may be missing.
    gone = {"remove": "b", "remove the parent": "a", "rename": "b"}.get(name)
    assert set(sessions) >= {"a", "b"} - {gone}
    assert set(sessions) <= {"a", "b", "c"}
    if gone == "b" and name == "rename":
        assert set(sessions) & {"b", "c"}
    if finished:
        assert gone not in sessions
    for session in sessions.values():
        log = store.log(session.name)
        if session.name == "a":
            moved = name == "go back" and log[1].tokens == tuple(NEW)
            assert [t.id for t in log[: 1 if moved else 3]] == [t.id for t in turns[: 1 if moved else 3]]
            assert moved or not (name == "go back" and finished)
            assert len(log) == (2 if moved else 3) or (name == "commit" and log[3].tokens == tuple(NEW))
            assert len(log) == 4 or not (name == "commit" and finished)
        # The head of every session comes back bit for bit, without replay.
        plan = store.plan(session.head, IDENTITY, LAYOUT)
        assert plan.boundary == log[-1].position
        said = store.tokens(session.head).tolist()
        check(store.restore(plan, IDENTITY, LAYOUT), said)
        if said == tokens + NEW:
            assert np.array_equal(store.hints(plan, IDENTITY, LAYOUT)["h"], HINT)
        if session.name != "c":
            assert said in (tokens, tokens[:530], tokens + NEW, tokens[:500] + NEW)
    # Life goes on, and what the crash left lying about is collected.
    if "a" in sessions and len(store.log("a")) == 3:
        commit(store, tokens)
    store.gc()
    wanted = {key for ref in store.catalog.refs()[0] for key in store.catalog.need(ref).all()}
    assert {object_id(path) for path, _ in files(store) if path.startswith("objects/")} == wanted
    assert not [path for path, _ in files(store) if ".tmp-" in path]
    assert store.verify().problems == ()
    store.close()


@pytest.mark.parametrize("name", OPERATIONS)
def test_power_off_at_every_call(base, name):
    rng = random.Random(name)
    operation = OPERATIONS[name]
    crashed = 0
    for number in range(100000):
        running = False
        for _ in range(ROUNDS):
            fs, running = crash_at(base, operation, number, rng)
            check_store(fs, base, name, finished=not running)
        if not running:
            break
        crashed += 1
    assert crashed >= 2


@pytest.fixture(scope="module")
def ill():
    """A store in which `a` has lost its last turn, `b` a checkpoint, and the refs of `c` and `d` are garbled."""
    fs = SimFS()
    store = Store.open("memory", fs=fs, config=CONFIG)
    logs = {}
    for seed, name in enumerate("abcd"):
        _, turns = grow(store, name, [30, 20, 10], seed=seed)
        logs[name] = [turn.id for turn in turns]
    checkpoint = store.catalog.turn(logs["b"][2]).checkpoint[0].id
    refs = {name: f"refs/{file_id(name)}" for name in "cd"}
    store.close()
    for path, change in (
        (path_of(logs["a"][2]), lambda data: b"x" + data[1:]),
        (path_of(checkpoint), lambda data: data[:-1]),
        (refs["c"], lambda data: data.replace(b'"pinned":false', b'"pinned":fa1se')),
        (refs["d"], lambda data: data[:50]),
        ("FORMAT", lambda data: data[:-3]),
    ):
        folder, _, name = path.rpartition("/")
        file = fs._folder(folder).entries[name]
        file.data = bytearray(change(bytes(file.data)))
        file.synced = bytes(file.data)
    return pickle.dumps(fs.root), logs


def test_power_off_during_a_repair(ill):
    """Wherever it stops, nothing that a whole repair saves is lost, `gc` in between included."""
    rng = random.Random("repair")
    logs = ill[1]
    for number in range(1000):
        for _ in range(ROUNDS):
            fs = SimFS(root=pickle.loads(ill[0]))
            store = Store.open("memory", fs=fs, config=CONFIG, mend=True)
            start = len(fs.calls)

            def fault(name: str, path: str, at: int, limit: int = start + number) -> None:
                if at >= limit:
                    raise Crash

            fs.fault = fault
            try:
                store.repair()
                finished = True
            except Crash:
                finished = False
            finally:
                store.close()
            store = Store.open("memory", fs=fs.after_crash(rng), config=CONFIG, mend=True)
            store.gc()
            store.repair()
            assert store.verify().problems == ()
            found = {session.name: [turn.id for turn in store.log(session.name)] for session in store.sessions()}
            assert found.pop(f"recovered-{logs['d'][2][:10]}") == logs["d"]
            assert found == {"a": logs["a"][:2], "b": logs["b"], "c": logs["c"]}
            store.close()
        if finished:
            return
    pytest.fail("the repair never ended")


def test_power_off_while_the_first_store_is_made():
    rng = random.Random(1)
    for number in range(100):
        for _ in range(ROUNDS * 20):
            fs = SimFS()

            def fault(name: str, path: str, at: int, limit: int = number) -> None:
                if at >= limit:
                    raise Crash

            fs.fault = fault
            try:
                Store.open("memory", fs=fs, config=CONFIG)
                finished = True
            except Crash:
                finished = False
            store = Store.open("memory", fs=fs.after_crash(rng), config=CONFIG)
            tokens, turns = grow(store, "a", [5])
            check(store.restore(store.plan(turns[0].id, IDENTITY, LAYOUT), IDENTITY, LAYOUT), tokens)
            store.close()
        if finished:
            return
    pytest.fail("opening a store never ended")


def test_the_simulator_bites(base, monkeypatch):
    """Without the syncs the same battery must fail: otherwise it proves nothing."""
    monkeypatch.setattr(SimFS, "sync", lambda self, handle: self._change("sync", handle[0]) and None)
    with pytest.raises(AssertionError):
        test_power_off_at_every_call(base, "commit")


def test_the_simulator_bites_without_directory_syncs(base, monkeypatch):
    monkeypatch.setattr(SimFS, "sync_dir", lambda self, path: self._change("sync_dir", path) and None)
    with pytest.raises(AssertionError):
        test_power_off_at_every_call(base, "commit")
