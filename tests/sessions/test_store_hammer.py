"""Eight processes doing everything to one store while they are killed at random: K3_LONG=1 runs it."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from k3_sessions import (
    SessionChanged,
    SessionExists,
    SessionLocked,
    SessionMissing,
    Store,
    StoreBusy,
    StoreConfig,
)

from tests.sessions.toy import IDENTITY, LAYOUT, Toy, check, draft, ids

CONFIG = StoreConfig(free_floor_bytes=0, threads=1, lock_wait_seconds=20)
WEIGHTS = {"commit": 6} | dict.fromkeys(
    ("fork", "mark", "gc", "repair", "export", "import", "rename", "rm", "verify", "restore", "pin"), 1
)


def commit(store: Store, name: str, rng: random.Random) -> str:
    """One more turn of the session; returns its id once it is acknowledged."""
    create = not store.exists(name)
    with store.writer(name, create=create, identity=IDENTITY, layout=LAYOUT) as writer:
        head = writer.head
        tokens = [] if head is None else store.tokens(head.id).tolist()
        plan = None if head is None else store.plan(head.id, IDENTITY, LAYOUT)
        assert plan is None or not plan.damaged
        new = ids(rng.choice([3, 40, 600]), rng.randrange(10**6))
        tokens += new
        return writer.commit(draft(new, len(tokens) - 1, restored=plan), Toy(tokens, len(tokens) - 1)).turn.id


def restore(store: Store, name: str) -> None:
    head = store.session(name).head
    plan = store.plan(head, IDENTITY, LAYOUT)
    state = store.restore(plan, IDENTITY, LAYOUT)
    if plan.turn is not None:
        check(state, store.tokens(head).tolist())


def once(store: Store, operation: str, number: int, folder: Path, rng: random.Random) -> None:
    mine, file = f"w{number}", folder / f"export-{number}"

    def some(kinds: str) -> str:
        return f"{rng.choice(kinds)}{number}-{rng.randrange(3)}"

    if operation == "commit":
        turn = commit(store, mine, rng)
        with open(folder / f"acknowledged-{number}", "a") as log:
            log.write(json.dumps(turn) + "\n")
    elif operation == "repair":
        report = store.repair()
        found = (report.quarantined, report.sessions, report.recovered, report.lost, report.untouched, report.written)
        assert not any(found), report
    elif operation == "verify":
        assert store.verify().problems == ()
    elif operation == "export":
        file.unlink(missing_ok=True)
        store.export(mine, file)
    elif operation == "import" and file.exists():
        store.import_(file, some("i"))
    elif operation == "restore":
        restore(store, mine)
    else:
        simple = {
            "fork": lambda: store.fork(mine, some("f")),
            "mark": lambda: store.mark(mine, store.session(mine).head, some("m")),
            "gc": store.gc,
            "rename": lambda: store.rename(some("f"), some("r")),
            "rm": lambda: store.remove(some("fir")),
            "pin": lambda: store.pin(mine),
        }
        simple.get(operation, lambda: None)()


def work(root: str, number: int, seed: int) -> None:
    """What a child process does until it is killed. Anything but a refusal ends it, and the test."""
    rng = random.Random(seed)
    store = Store.open(root, config=CONFIG)
    names, weights = list(WEIGHTS), list(WEIGHTS.values())
    while True:
        try:
            once(store, rng.choices(names, weights)[0], number, Path(root).parent, rng)
        except (SessionMissing, SessionExists, SessionLocked, StoreBusy, SessionChanged):
            continue


@pytest.mark.skipif(not os.environ.get("K3_LONG"), reason="K3_LONG=1 runs it: 40 seconds")
@pytest.mark.timeout(200)
def test_eight_processes_do_everything_while_they_are_killed(tmp_path):
    root = tmp_path / "s"
    Store.open(root, config=CONFIG).close()
    rng = random.Random(5)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    code = "import sys; from tests.sessions.test_store_hammer import work; work(sys.argv[1], *map(int, sys.argv[2:]))"

    def start(number: int) -> subprocess.Popen[bytes]:
        seed = rng.randrange(10**9)
        command = [sys.executable, "-c", code, str(root), str(number), str(seed)]
        with open(tmp_path / f"errors-{number}", "a") as errors:
            return subprocess.Popen(command, env=environment, stderr=errors)

    workers = [start(number) for number in range(8)]
    until = time.monotonic() + 40
    try:
        while time.monotonic() < until:
            time.sleep(rng.uniform(0.05, 0.5))
            number = rng.randrange(8)
            ended = [
                f"{n}: {(tmp_path / f'errors-{n}').read_text()}" for n in range(8) if workers[n].poll() is not None
            ]
            assert not ended
            workers[number].send_signal(signal.SIGKILL)
            workers[number].wait()
            workers[number] = start(number)
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    store = Store.open(root, config=CONFIG)
    for file in tmp_path.glob("acknowledged-*"):
        # A kill may have cut the last line of the log itself.
        said = [json.loads(line) for line in file.read_text().splitlines() if line.endswith('"')]
        assert said
        assert set(said) <= {turn.id for turn in store.log(f"w{file.name[-1]}")}
    for session in store.sessions():
        assert not session.error
        restore(store, session.name)
    assert store.verify().problems == ()
    foretold, done = store.gc(dry_run=True), store.gc()
    assert (foretold.removed, foretold.bytes) == (done.removed, done.bytes)
    assert store.gc().removed == ()
