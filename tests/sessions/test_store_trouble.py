"""Full disk, read-only disk, I/O errors, and several processes at once."""

from __future__ import annotations

import dataclasses
import errno
import multiprocessing
import os
import random
import resource
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest
from k3_sessions import Store
from k3_sessions.disk import Space
from k3_sessions.errors import IOFailure, SessionLocked, StoreFull, StoreReadOnly

from tests.sessions.sim_fs import SimFS, failing
from tests.sessions.toy import CONFIG, IDENTITY, LAYOUT, Toy, check, draft, grow, ids

LONG = bool(os.environ.get("K3_LONG"))

CODES = {errno.ENOSPC: StoreFull, errno.EROFS: StoreReadOnly, errno.EIO: IOFailure, errno.EDQUOT: StoreFull}


@pytest.mark.parametrize("code", CODES, ids=errno.errorcode.get)
@pytest.mark.parametrize("call", ["create", "write", "sync", "replace", "sync_dir"])
def test_a_disk_in_trouble_loses_nothing(code, call):
    """The turn stays in memory; the next commit stores both, and the last good state is whole all along."""
    fs = SimFS()
    store = Store.open("memory", fs=fs, config=CONFIG)
    tokens, turns = grow(store, "a", [600])
    plan = store.plan(turns[0].id, IDENTITY, LAYOUT)
    with store.writer("a", create=False, identity=IDENTITY, layout=LAYOUT) as writer:
        fs.fault = failing(code, (call,))
        first, second = ids(50, 1), ids(50, 2)
        with pytest.raises(CODES[code]):
            writer.commit(draft(first, 649, restored=plan), Toy(tokens + first, 649))
        assert writer.unsaved == 1
        assert writer.head.id == turns[0].id
        check(store.restore(plan, IDENTITY, LAYOUT), tokens)
        with pytest.raises(CODES[code]):
            writer.flush(Toy(tokens + first, 649))
        fs.fault = lambda name, path, number: None
        done = tokens + first + second
        report = writer.commit(draft(second, 699), Toy(done, 699))
        assert (report.stored, writer.unsaved) == (2, 0)
    store = Store.open("memory", fs=fs, config=CONFIG)
    assert [t.tokens for t in store.log("a")] == [tuple(tokens), tuple(first), tuple(second)]
    check(store.restore(store.plan(report.turn.id, IDENTITY, LAYOUT), IDENTITY, LAYOUT), done)
    middle = store.plan(store.log("a")[1].id, IDENTITY, LAYOUT)
    assert (middle.boundary, len(middle.replay)) == (599, 50)
    store.gc()
    assert store.verify().problems == ()


@pytest.mark.parametrize("where", ["copy", "thread", "rows"])
def test_exhausted_memory_loses_nothing(tmp_path, monkeypatch, where):
    """It counts as trouble like a full disk: one error that a conversation survives, and the next commit holds both."""
    store = Store.open(tmp_path / "s", config=CONFIG)
    tokens, turns = grow(store, "a", [600])
    first, second = ids(50, 1), ids(50, 2)
    done = tokens + first + second

    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread") if where == "thread" else MemoryError

    with store.writer("a", create=False, identity=IDENTITY, layout=LAYOUT) as writer, monkeypatch.context() as short:
        plan = store.plan(turns[0].id, IDENTITY, LAYOUT)
        if where == "thread":
            short.setattr(store.pool(), "submit", refuse)
        else:
            short.setattr(Toy, {"copy": "checkpoint", "rows": "page_rows"}[where], refuse)
        for attempt in (
            lambda: writer.commit(draft(first, 649, restored=plan), Toy(tokens + first, 649)),
            lambda: writer.flush(Toy(tokens + first, 649)),
        ):
            with pytest.raises(IOFailure, match="memory ran out"):
                attempt()
            assert writer.unsaved == 1
        short.undo()
        assert writer.commit(draft(second, 699), Toy(done, 699)).stored == 2
    assert [turn.tokens for turn in store.log("a")] == [tuple(tokens), tuple(first), tuple(second)]
    head = store.session("a").head
    check(store.restore(store.plan(head, IDENTITY, LAYOUT), IDENTITY, LAYOUT), done)
    assert store.verify().problems == ()


def test_a_clock_that_runs_backwards_loses_nothing(tmp_path, monkeypatch):
    """Times are for people and for the order of eviction; nothing else may depend on them."""
    stamps = iter(f"20{60 - n:02}-01-01T00:00:00.000Z" for n in range(50))
    for module in ("writer", "committing", "branches", "room", "portable", "locks", "repairing"):
        monkeypatch.setattr(f"k3_sessions.{module}.now", lambda: next(stamps))
    store = Store.open(tmp_path / "s", config=CONFIG)
    tokens, turns = grow(store, "a", [600, 30, 30])
    store.fork("a", "b", at=turns[1].id)
    for path in (tmp_path / "s").rglob("*"):
        os.utime(path, (0, 0))
    tokens, more = grow(store, "a", [30], create=False)
    store.export("a", tmp_path / "file")
    store.import_(tmp_path / "file", "c")
    for name in ("a", "c"):
        assert [turn.id for turn in store.log(name)] == [turn.id for turn in (*turns, *more)]
    check(store.restore(store.plan(more[-1].id, IDENTITY, LAYOUT), IDENTITY, LAYOUT), tokens)
    assert store.gc().removed == ()
    assert store.verify().problems == ()
    quota = store.usage().allocated + 66000  # room for the next commit's overhead, not for its rows
    small = Store.open(tmp_path / "s", config=dataclasses.replace(CONFIG, quota_bytes=quota))
    grow(small, "d", [200], seed=5)
    assert [bool(session.evicted) for session in store.sessions()].count(True) >= 1
    assert store.usage().allocated <= quota
    assert store.verify().problems == ()


def test_one_failing_call_at_each_place_of_a_commit():
    """Whichever single call fails, trying again with `flush` stores the turn exactly once."""
    number, failed = 0, True
    while failed:
        fs = SimFS()
        store = Store.open("memory", fs=fs, config=CONFIG)
        tokens, _ = grow(store, "a", [600])
        with store.writer("a", create=False, identity=IDENTITY, layout=LAYOUT) as writer:
            base = len(fs.calls)

            def fault(name: str, path: str, at: int, limit: int = number, start: int = base) -> None:
                if at - start == limit:
                    raise OSError(errno.EIO, "I/O error", path)

            fs.fault = fault
            done = tokens + ids(50, 1)
            try:
                writer.commit(draft(done[600:], 649), Toy(done, 649))
                failed = base + number < len(fs.calls)
            except IOFailure:
                writer.flush(Toy(done, 649))
            assert writer.unsaved == 0
        store = Store.open("memory", fs=fs, config=CONFIG)
        assert [len(t.tokens) for t in store.log("a")] == [600, 50]
        check(store.restore(store.plan(store.session("a").head, IDENTITY, LAYOUT), IDENTITY, LAYOUT), done)
        number += 1
    assert number > 20


def test_a_disk_that_fills_up_in_the_middle_recovers_when_space_is_freed():
    fs = SimFS(capacity=100_000)
    fs.space = lambda: Space(1 << 40, 1 << 40)  # the room is taken by somebody else while the commit runs
    store = Store.open("memory", fs=fs, config=CONFIG)
    tokens, turns = grow(store, "a", [100])
    grow(store, "big", [400], seed=1)
    with store.writer("a", create=False, identity=IDENTITY, layout=LAYOUT) as writer:
        done = tokens + ids(600, 3)
        with pytest.raises(StoreFull):
            writer.commit(draft(done[100:], 700), Toy(done, 700))
        check(store.restore(store.plan(turns[0].id, IDENTITY, LAYOUT), IDENTITY, LAYOUT), tokens)
        fs.capacity = 1 << 30
        store.remove("big")
        report = writer.flush(Toy(done, 700))
    check(store.restore(store.plan(report.turn.id, IDENTITY, LAYOUT), IDENTITY, LAYOUT), done)


@contextmanager
def no_byte_more():
    """Every write of this process to a file fails, as on a full disk; files can be made, emptied and removed."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_session_can_be_removed_from_a_full_disk(tmp_path):
    """Removing is the way out of a full disk, so it must not need room; what does need some leaves nothing locked."""
    store = Store.open(tmp_path, config=CONFIG)
    tokens, turns = grow(store, "a", [600])
    grow(store, "b", [100])
    with no_byte_more():
        with pytest.raises(StoreFull, match="ulimit -f"):
            store.fork("a", "c")
        writer = store.writer("a", create=False, identity=IDENTITY, layout=LAYOUT)
        with writer, pytest.raises(StoreFull):
            writer.commit(draft(ids(50, 1), 649), Toy(tokens + ids(50, 1), 649))
        assert store.remove("b").bytes > 0
    assert not store.exists("b")
    assert store.fork("a", "c").head == turns[0].id
    assert store.verify().problems == ()


def test_a_real_read_only_folder_still_reads(tmp_path):
    store = Store.open(tmp_path / "s", config=CONFIG)
    tokens, turns = grow(store, "a", [30])
    for path in [tmp_path / "s", *(tmp_path / "s").rglob("*")]:
        path.chmod(0o500 if path.is_dir() else 0o400)
    try:
        again = Store.open(tmp_path / "s", config=CONFIG)
        check(again.restore(again.plan(turns[0].id, IDENTITY, LAYOUT), IDENTITY, LAYOUT), tokens)
        assert again.verify().problems == ()
        if os.geteuid() != 0:
            with pytest.raises(StoreReadOnly):
                again.fork("a", "b")
    finally:
        for path in [tmp_path / "s", *(tmp_path / "s").rglob("*")]:
            path.chmod(0o700 if path.is_dir() else 0o600)


def test_reads_write_nothing(tmp_path):
    store = Store.open(tmp_path / "s", config=CONFIG)
    _, turns = grow(store, "a", [600])
    SimFS()

    def snapshot():
        return {
            p: (p.stat().st_mtime_ns, p.stat().st_size) for p in (tmp_path / "s").rglob("*") if "locks" not in str(p)
        }

    (tmp_path / "s/objects/.tmp-left").write_bytes(b"x")
    before = snapshot()
    again = Store.open(tmp_path / "s", config=CONFIG)
    again.sessions()
    again.log("a")
    again.restore(again.plan(turns[0].id, IDENTITY, LAYOUT), IDENTITY, LAYOUT)
    again.find_prefix(IDENTITY, LAYOUT, again.tokens(turns[0].id))
    again.verify()
    again.usage()
    again.gc(dry_run=True)
    assert snapshot() == before


# Processes

CHILD = """
import sys, os, random
sys.path[:0] = [{root!r}, {sessions!r}]
from k3_sessions import Store
from tests.sessions.toy import *
store = Store.open({store!r}, config=CONFIG)
"""


def child(tmp_path, repo_root, code: str) -> subprocess.Popen:
    text = CHILD.format(root=str(repo_root), sessions=str(repo_root / "sessions"), store=str(tmp_path / "s")) + code
    return subprocess.Popen([sys.executable, "-c", text], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


HOLD = """
writer = store.writer('a', create=False, identity=IDENTITY, layout=LAYOUT)
print('held', flush=True)
sys.stdin.read()
"""


def test_the_second_writer_learns_who_the_first_is_and_its_death_frees_the_session(tmp_path, repo_root):
    store = Store.open(tmp_path / "s", config=CONFIG)
    tokens, turns = grow(store, "a", [30])
    holder = child(tmp_path, repo_root, HOLD)
    try:
        assert holder.stdout.readline() == "held\n"
        began = time.monotonic()
        with pytest.raises(SessionLocked, match=f"process {holder.pid} on .*fork") as caught:
            store.writer("a", create=False, identity=IDENTITY, layout=LAYOUT)
        assert time.monotonic() - began < 1.0
        assert caught.value.pid == holder.pid
        # Readers and forks need no lock.
        check(store.restore(store.plan(turns[0].id, IDENTITY, LAYOUT), IDENTITY, LAYOUT), tokens)
        store.fork("a", "b")
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        holder.stdout.close()
        holder.stdin.close()
    with store.writer("a", create=False, identity=IDENTITY, layout=LAYOUT) as writer:
        assert writer.head.id == turns[0].id


def test_a_reserved_session_is_its_next_writers_and_nobody_elses(tmp_path):
    """For who needs long to get ready. What was not taken over is given back, also when getting ready fails."""
    store, other = (Store.open(tmp_path / "s", config=CONFIG) for _ in range(2))
    _, turns = grow(store, "a", [30])
    locks = sorted(path.name for path in (tmp_path / "s" / "locks").iterdir())
    with store.reserving("a", "new", "b"):
        for name in ("a", "new"):
            with pytest.raises(SessionLocked, match=f"session {name} is being written by process"):
                other.writer(name, create=name == "new", identity=IDENTITY, layout=LAYOUT)
        writer = store.writer("a", create=False, identity=IDENTITY, layout=LAYOUT)
        store.fork("a", "b")  # who makes a session has not begun to write it
        with pytest.raises(SessionLocked):
            other.writer("b", create=False, identity=IDENTITY, layout=LAYOUT)
        store.writer("b", create=False, identity=IDENTITY, layout=LAYOUT).close()
        other.writer("b", create=False, identity=IDENTITY, layout=LAYOUT).close()
        with pytest.raises(SessionLocked):
            store.writer("a", create=False, identity=IDENTITY, layout=LAYOUT)
    with pytest.raises(SessionLocked):
        other.writer("a", create=False, identity=IDENTITY, layout=LAYOUT)
    writer.close()
    other.writer("a", create=False, identity=IDENTITY, layout=LAYOUT).close()
    store.remove("b")
    with pytest.raises(RuntimeError, match="no model"), store.reserving("a", "new"):
        raise RuntimeError("no model")
    assert sorted(path.name for path in (tmp_path / "s" / "locks").iterdir()) == locks
    with other.writer("a", create=False, identity=IDENTITY, layout=LAYOUT) as again:
        assert again.head.id == turns[0].id


def test_a_reservation_that_is_given_back_still_tells_of_a_writer_that_died(tmp_path, repo_root):
    store = Store.open(tmp_path / "s", config=CONFIG)
    grow(store, "a", [30])
    holder = child(tmp_path, repo_root, HOLD)
    assert holder.stdout.readline() == "held\n"
    holder.kill()
    holder.communicate()
    with store.reserving("a"):
        pass
    later = Store.open(tmp_path / "s", config=CONFIG)
    later.unlock_session("a", later.lock_session("a"), clean=True)
    assert later.crashed


def test_a_reservation_that_is_given_back_tells_of_what_was_left_unfinished(tmp_path, monkeypatch):
    store = Store.open(tmp_path / "s", config=CONFIG)
    grow(store, "a", [30])
    monkeypatch.setattr(store, "save_ref", lambda ref: 1 / 0)
    with pytest.raises(ZeroDivisionError), store.reserving("b"):
        store.fork("a", "b")
    later = Store.open(tmp_path / "s", config=CONFIG)
    later.unlock_session("b", later.lock_session("b"), clean=True)
    assert later.crashed


GROW = """
number = int(sys.argv[1]) if len(sys.argv) > 1 else 0
while True:
    head = store.session('a').head
    plan = store.plan(head, IDENTITY, LAYOUT)
    tokens = store.tokens(head).tolist()
    check(store.restore(plan, IDENTITY, LAYOUT), tokens)
    with store.writer('a', create=False, identity=IDENTITY, layout=LAYOUT) as writer:
        for _ in range(50):
            tokens += ids(random.randrange(1, 90), len(tokens))
            start = store.turn(writer.head.id).total
            report = writer.commit(draft(tokens[start:], len(tokens) - 1, restored=plan), Toy(tokens, len(tokens) - 1))
            plan = None
            print(report.turn.id, flush=True)
"""


def test_kill_at_any_moment_of_real_commits(tmp_path, repo_root):
    """Real processes, real SIGKILL: every turn whose commit returned is there, bit for bit."""
    store = Store.open(tmp_path / "s", config=CONFIG)
    _, turns = grow(store, "a", [30])
    acknowledged = {turns[0].id}
    rng = random.Random(4)
    for _ in range(300 if LONG else 6):
        process = child(tmp_path, repo_root, GROW)
        acknowledged.add(process.stdout.readline().strip())
        time.sleep(rng.random() * 0.05)
        process.send_signal(signal.SIGKILL)
        rest, _ = process.communicate()
        acknowledged.update(line for line in rest.splitlines() if len(line) == 64)
        again = Store.open(tmp_path / "s", config=CONFIG)
        # Whoever writes next collects what the dead writer left.
        again.writer("a", create=False, identity=IDENTITY, layout=LAYOUT).close()
        assert again.gc(dry_run=True).removed == ()
        log = again.log("a")
        assert acknowledged <= {t.id for t in log} | {""}
        plan = again.plan(log[-1].id, IDENTITY, LAYOUT)
        assert plan.replay == ()
        check(again.restore(plan, IDENTITY, LAYOUT), again.tokens(log[-1].id).tolist())
    store.gc()
    assert store.verify().problems == ()


def hammer(root: str, seed: int, seconds: float) -> None:
    rng = random.Random(seed)
    store = Store.open(root, config=dataclasses.replace(CONFIG, threads=1))
    until = time.monotonic() + seconds
    tokens = grow(store, f"own{seed}", [100], seed=seed)[0]
    while time.monotonic() < until:
        what = rng.random()
        name = f"own{seed}"
        if what < 0.6:
            tokens, _ = grow(store, name, [rng.randrange(1, 200)], create=False, seed=seed)
            assert store.tokens(store.session(name).head).tolist() == tokens
        elif what < 0.8:
            fork = f"fork{seed}"
            if store.exists(fork):
                store.remove(fork)
            store.fork(name, fork)
            grow(store, fork, [rng.randrange(1, 100)], create=False, seed=seed + 1000)
        elif what < 0.9:
            store.gc()
        else:
            check(store.restore(store.plan(store.session(name).head, IDENTITY, LAYOUT), IDENTITY, LAYOUT), tokens)


def test_eight_processes_hammering_one_store_with_kills_lose_and_mix_nothing(tmp_path):
    context = multiprocessing.get_context("spawn")
    root = str(tmp_path / "s")
    Store.open(root, config=CONFIG)
    seconds = 30.0 if LONG else 4.0
    workers = [context.Process(target=hammer, args=(root, seed, seconds)) for seed in range(8)]
    for worker in workers:
        worker.start()
    time.sleep(seconds * 0.7)
    for worker in workers[:3]:
        os.kill(worker.pid, signal.SIGKILL)
    for worker in workers:
        worker.join(timeout=120)
    assert [w.exitcode for w in workers[3:]] == [0] * 5
    store = Store.open(root, config=CONFIG)
    sessions = store.sessions()
    assert len(sessions) >= 5
    assert [s.error for s in sessions if s.error] == []
    for session in sessions:
        tokens = store.tokens(session.head).tolist()
        plan = store.plan(session.head, IDENTITY, LAYOUT)
        assert plan.replay == ()
        check(store.restore(plan, IDENTITY, LAYOUT), tokens)
    store.gc()
    assert store.verify().problems == ()
