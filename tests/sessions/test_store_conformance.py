"""The same small suite against every file system: real, in memory, losing what is not synced, and nearly full."""

from __future__ import annotations

import random

import pytest
from k3_sessions import Store
from k3_sessions.fs import RealFS

from tests.sessions.sim_fs import SimFS
from tests.sessions.toy import CONFIG, IDENTITY, LAYOUT, check, grow

KINDS = ["real", "memory", "crashing", "full"]


@pytest.fixture(params=KINDS)
def fs(request, tmp_path):
    if request.param == "real":
        return RealFS(tmp_path / "store")
    return SimFS(capacity=3 << 20 if request.param == "full" else 1 << 40)


@pytest.fixture
def again(request, fs):
    """What another process sees afterwards; on the crashing one, after a loss of power."""

    def reopen():
        if "crashing" in request.node.name:
            return Store.open("x", fs=fs.after_crash(random.Random(3)), config=CONFIG)
        return Store.open("x", fs=fs, config=CONFIG)

    return reopen


def opened(fs):
    with fs.reader("d/x"):
        pass


def test_primitives(fs):
    assert fs.make_dir("d")
    assert not fs.make_dir("d")
    handle = fs.create("d/.tmp-1")
    with pytest.raises(FileExistsError):
        fs.create("d/.tmp-1")
    for part in (b"ab", b"", b"cd"):
        fs.write(handle, part)
    fs.sync(handle)
    fs.close(handle)
    fs.replace("d/.tmp-1", "d/x")
    fs.sync_dir("d")
    fs.sync_dir("")
    assert fs.names("d") == ["x"]
    assert [(name, info.size, info.kind) for name, info in fs.entries("d")] == [("x", 4, "file")]
    assert bytes(fs.read("d/x")) == b"abcd"
    assert bytes(fs.read("d/x", 1, 2)) == b"bc"
    assert bytes(fs.read("d/x", 3, 9)) == b"d"
    with fs.reader("d/x") as read:
        seen, piece = b"", memoryview(bytearray(3))
        while count := read(piece):
            seen += bytes(piece[:count])
        assert (seen, read(piece)) == (b"abcd", 0)
    assert fs.info("d").kind == "dir"
    assert fs.info("d/y") is None
    assert fs.info("none/y") is None
    fs.remove("d/x")
    for missing in (lambda: fs.read("d/x"), lambda: fs.remove("d/x"), lambda: fs.names("none"), lambda: opened(fs)):
        with pytest.raises(FileNotFoundError):
            missing()
    assert 0 < fs.space().free <= fs.space().total


def test_locks(fs):
    fs.make_dir("locks")
    one = fs.lock("locks/a", shared=False, wait=0.0, note=b"me")
    assert bytes(fs.read("locks/a")) == b"me"
    assert fs.lock("locks/a", shared=False, wait=0.0) is None
    assert fs.lock("locks/a", shared=True, wait=0.0) is None
    fs.unlock(one)
    readers = [fs.lock("locks/a", shared=True, wait=0.0) for _ in range(3)]
    assert None not in readers
    assert fs.lock("locks/a", shared=False, wait=0.0) is None
    for reader in readers:
        fs.unlock(reader)
    last = fs.lock("locks/a", shared=False, wait=0.0)
    assert last is not None
    fs.unlock(last)


def test_sessions_live_fork_and_go(fs, again):
    store = Store.open("x", fs=fs, config=CONFIG)
    tokens, turns = grow(store, "a", [0, 1, 511, 600])
    store.fork("a", "b", at=turns[2].id)
    grow(store, "b", [20], create=False, seed=2)
    store.rename("b", "c")
    store.mark("a", turns[1].id, "m")
    after = again()
    assert [s.name for s in after.sessions()] == ["a", "c"]
    check(after.restore(after.plan(turns[3].id, IDENTITY, LAYOUT), IDENTITY, LAYOUT), tokens)
    assert after.verify().problems == ()
    after.remove("a")
    head = after.session("c").head
    check(after.restore(after.plan(head, IDENTITY, LAYOUT), IDENTITY, LAYOUT), after.tokens(head).tolist())
    after.remove("c")
    assert after.gc(dry_run=True).removed == ()
    assert after.usage().sessions == ()
