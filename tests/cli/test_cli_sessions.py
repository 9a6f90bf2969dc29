"""Looking at sessions and changing them: ls, show, log, mark, rename, rm, du, gc, and the transcript."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from k3_sessions.errors import SessionLocked
from k3_sessions.store import Store

from k3cli.config import load_settings
from k3cli.engine.engine import Engine
from k3cli.errors import Exit, ModelError


@pytest.fixture
def forked(k3):
    """Session a with three turns, b forked at turn 1 with one of its own, c forked at the end."""
    for text in ("one", "two\nand more", "three"):
        k3("chat", "-s", "a", "-p", text)
    k3("fork", "a", "b", "--at", "1", "-p", "other")
    k3("fork", "a", "c")
    return k3


def turns(k3, name: str, *options: str):
    return [event for event in k3("log", name, "--json", *options).events if event["type"] == "turn"]


def test_no_sessions(k3) -> None:
    done = k3("ls")
    assert (done.code, done.out) == (0, "")
    assert "k3 chat starts one" in done.err
    assert k3("ls", "--json").events == [{"v": 1, "type": "done", "sessions": 0}]


@pytest.mark.parametrize("closed", ["objects", "refs", "locks", ""])
def test_doctor_says_where_turns_cannot_be_saved(k3, private_home, monkeypatch, closed) -> None:
    """A store on a disk that is mounted read-only is readable and looks well: only this row tells."""

    def row():
        return [e for e in k3("doctor", "--json").events if e["type"] == "check" and e["name"] == "writable"]

    assert row() == []
    if closed:
        k3("chat", "-s", "a", "-p", "one")
        assert row() == []
        folder = private_home / "k3" / "sessions" / closed
    else:  # the store would be made below a folder that takes nothing
        private_home.mkdir(exist_ok=True)
        folder = private_home
    monkeypatch.setattr(os, "access", lambda path, _mode: str(path) != str(folder))
    (found,) = row()
    assert (found["value"], found["ok"]) == ("no", False)
    assert str(folder) in found["reason"]
    assert k3("doctor").code == 1


def test_ls_shows_forks_below_their_origin_and_bytes_apart(forked) -> None:
    lines = forked("ls").out.splitlines()
    assert lines[0].split()[:5] == ["NAME", "TURNS", "TOKENS", "MLA", "KDA"]
    assert [line[:3].rstrip() for line in lines[1:]] == ["a", "  b", "  c"]
    found = {e["name"]: e for e in forked("ls", "--json").events if e["type"] == "session_info"}
    assert [found[name]["turns"] for name in "abc"] == [3, 2, 3]
    assert found["a"]["mla_bytes"] > 0
    assert found["a"]["kda_bytes"] > 0
    assert found["b"]["origin"] == {"session": "a", "turn": turns(forked, "a")[0]["id"]}


def test_a_broken_session_hides_no_other(forked, private_home) -> None:
    refs = private_home / "k3" / "sessions" / "refs"
    broken = next(file for file in refs.iterdir() if b'"name":"b"' in file.read_bytes())
    broken.write_bytes(b"{" + broken.read_bytes()[1:-20])
    done = forked("ls")
    assert done.code == 0
    assert "damaged" in done.out
    assert "cannot be read" in done.err
    assert {line.split()[0] for line in done.out.splitlines()} >= {"a", "c"}
    assert [bool(e["error"]) for e in forked("ls", "--json").events if e["type"] == "session_info"].count(True) == 1
    assert forked("resume", "a", "-p", "four").code == 0
    doctor = forked("doctor", "--json", "--model", "nowhere")
    assert any(e["type"] == "check" and e["section"] == "store" and not e["ok"] for e in doctor.events)


def test_log_lists_turns_marks_and_where_forks_leave(forked) -> None:
    forked("mark", "a", "good", "--at", "2")
    found = turns(forked, "a")
    assert [e["number"] for e in found] == [1, 2, 3]
    assert [e["forks"] for e in found] == [["b"], [], ["c"]]
    assert [e["marks"] for e in found] == [[], ["good"], []]
    assert found[2]["sessions"] == ["a"]
    assert found[1]["parent"] == found[0]["id"]
    assert found[1]["start"] == found[0]["total"]
    text = forked("log", "a").out
    assert "[good]" in text
    assert "(fork: b)" in text
    assert "two" in text
    assert "and more" not in text


def test_log_tree_shows_every_branch_once(forked) -> None:
    found = turns(forked, "a", "--tree")
    assert len(found) == 4
    assert len({e["id"] for e in found}) == 4
    assert sorted(name for e in found for name in e["sessions"]) == ["a", "b", "c"]
    branch = next(e for e in found if e["sessions"] == ["b"])
    assert (branch["number"], branch["parent"]) == (2, found[0]["id"])


def test_log_stats(forked) -> None:
    lines = forked("log", "a", "--stats").out.splitlines()
    assert lines[0].split()[2:8] == ["TOKENS", "REUSED", "REPLAYED", "PREFILLED", "T/S", "GENERATED"]
    assert len(lines) == 4


def test_show_a_session_and_a_turn(forked) -> None:
    text = forked("show", "a").out
    assert "newest turn: 3" in text
    assert "identity weights: sha256:" in text
    shown = forked("show", "a", "--at", "2").out
    assert "two\nand more" in shown
    assert "You said: two" in shown
    event = forked("show", "a", "--at", "-1", "--json").one("turn")
    assert len(event["ids"]) == event["tokens"]
    assert forked("show", "nobody").code == Exit.SESSION


def test_mark_and_unmark(forked) -> None:
    assert forked("mark", "a", "good").code == 0
    assert forked("show", "a", "--json").one("session_info")["marks"] == {"good": turns(forked, "a")[2]["id"]}
    assert forked("fork", "a", "d", "--at", "good").code == 0
    assert "was at turn" not in forked("mark", "a", "good").err
    assert f"was at turn {turns(forked, 'a')[2]['id'][:10]}" in forked("mark", "a", "good", "--at", "1").err
    assert forked("mark", "a", "good", "--remove").code == 0
    assert forked("show", "a", "--json").one("session_info")["marks"] == {}
    assert forked("mark", "a", "12").code == Exit.USAGE
    assert forked("mark", "a", "good", "--remove").code == Exit.USAGE


def test_rename(forked) -> None:
    assert forked("rename", "a", "z").code == 0
    assert forked("resume", "z", "-p", "more").code == 0
    assert forked("show", "a").code == Exit.SESSION
    assert forked("rename", "z", "b").code == Exit.SESSION
    assert forked("rename", "z", "../up").code == Exit.USAGE
    # b and c were forked from a: they stay in the list although their origin has another name now
    assert len(forked("ls").out.splitlines()) == 4


def test_rm_frees_what_nobody_needs_and_keeps_forks_whole(forked) -> None:
    before = forked("du", "--json").one("done")["allocated"]
    done = forked("rm", "a", "--json")
    assert done.code == 0
    assert done.one("removed")["bytes"] >= 0
    assert forked("rm", "c").code == 0
    assert forked("du", "--json").one("done")["allocated"] < before
    assert forked("resume", "b", "-p", "still there").code == 0
    assert forked("rm", "a").code == Exit.SESSION
    # all names are checked first: nothing is removed when one of them is wrong
    assert forked("rm", "b", "nobody").code == Exit.SESSION
    assert forked("show", "b").code == 0


def test_du_tells_own_and_shared_apart(forked) -> None:
    usage = {e["name"]: e for e in forked("du", "--json").events if e["type"] == "usage"}
    assert usage["c"]["mla_own"] == 0
    assert usage["c"]["mla_shared"] > 0
    assert usage["b"]["kda_own"] > 0
    (tree,) = [e for e in forked("du", "--json").events if e["type"] == "tree"]
    assert sorted(tree["sessions"]) == ["a", "b", "c"]
    assert tree["mla"] < sum(e["mla_own"] + e["mla_shared"] for e in usage.values())
    assert "CHECKPOINTS" in forked("du").out


def test_gc_dry_run_tells_what_gc_removes(forked, private_home) -> None:
    left = private_home / "k3" / "sessions" / "objects" / "ab"
    left.mkdir(exist_ok=True)
    (left / ("0" * 62)).write_bytes(b"nobody needs this")
    dry = forked("gc", "--dry-run", "--json")
    assert (left / ("0" * 62)).exists()
    real = forked("gc", "--json")
    assert not (left / ("0" * 62)).exists()
    assert dry.one("garbage")["path"] == f"objects/ab/{'0' * 62}"
    assert dry.events[:-1] == real.events[:-1]
    assert forked("gc").out == ""


def break_one_object(home, events) -> None:
    """Flip a bit in the largest object that holds state of the newest turn."""
    files = [path for path in (home / "k3" / "sessions" / "objects").rglob("*") if path.is_file()]
    newest = max(files, key=lambda path: path.stat().st_mtime_ns)
    data = bytearray(newest.read_bytes())
    data[-1] ^= 1
    newest.chmod(0o600)
    newest.write_bytes(data)


def test_verify_finds_damage_and_repair_sets_it_aside(forked, private_home) -> None:
    done = forked("verify")
    assert (done.code, done.out) == (0, "")
    assert "all is well: 3 sessions" in done.err
    break_one_object(private_home, forked("log", "b", "--json").events)
    done = forked("verify", "--json")
    assert done.code == Exit.DAMAGED
    (problem,) = [e for e in done.events if e["type"] == "problem"]
    assert problem["path"].startswith("objects/")
    assert problem["sessions"]
    assert done.events[-1]["exit_code"] == 8
    told = forked("repair", "--dry-run")
    assert told.code == 0
    assert f"quarantine {problem['path']}" in told.out
    assert forked("verify").code == Exit.DAMAGED
    assert forked("repair", "--json").one("quarantined")["path"] == problem["path"]
    assert forked("verify").code == 0
    assert "nothing to repair" in forked("repair").err
    for name in ("a", "b", "c"):
        assert forked("resume", name, "-p", "on we go").code == 0
    assert forked("verify", "nobody").code == Exit.SESSION


def test_a_floor_that_was_asked_for_is_kept_however_small_the_disk(forked, monkeypatch) -> None:
    monkeypatch.setenv("K3_FREE_FLOOR", "900T")
    done = forked("resume", "a", "-p", "four")
    assert done.code == 1
    assert "NOT saved" in done.err
    assert len(turns(forked, "a")) == 3


def test_export_and_import(forked, tmp_path, monkeypatch) -> None:
    file = tmp_path / "a.k3"
    done = forked("export", "a", str(file), "--json")
    assert done.code == 0
    assert done.one("exported")["bytes"] == file.stat().st_size
    assert file.stat().st_mode & 0o077 == 0
    assert forked("export", "a", str(file)).code == Exit.USAGE
    assert forked("export", "nobody", str(tmp_path / "x")).code == Exit.SESSION
    assert forked("import", str(file)).code == Exit.SESSION
    same = forked("import", str(file), "--name", "again")
    assert (same.code, same.out) == (0, "again\n")
    monkeypatch.setenv("K3_HOME", str(tmp_path / "elsewhere"))
    assert forked("import", str(file)).out == "a\n"
    resumed = forked("resume", "a", "-p", "four", "--json")
    assert resumed.code == 0
    assert resumed.one("session")["replayed"] == 0
    assert forked("import", str(tmp_path / "absent")).code == Exit.USAGE
    file.chmod(0o600)
    file.write_bytes(file.read_bytes()[:-40])
    cut = forked("import", str(file), "--name", "cut")
    assert cut.code == Exit.DAMAGED
    assert "cut" not in forked("ls").out


def test_the_transcript_runs_nothing(forked) -> None:
    done = forked("replay", "a", "--show", "--from", "2", "--to", "2", "--model", "nowhere")
    assert done.code == 0
    assert "two\nand more" in done.out
    assert "You said: two" in done.out
    assert "three" not in done.out
    assert "recorded text" in done.err
    events = forked("replay", "a", "--show", "--json", "--model", "nowhere").events
    assert [e["number"] for e in events if e["type"] == "transcript"] == [1, 2, 3]


def test_the_transcript_comes_from_the_ids_where_it_can(forked, scripted, tmp_path) -> None:
    model = scripted.make_vocab(tmp_path / "model")
    forked("chat", "-s", "cut", "-p", "slow 40", "--max-tokens", "30")
    forked("resume", "cut", "-p", "after")
    done = forked("replay", "cut", "--show", "--json", "--model", str(model))
    assert done.one("done")["source"] == "ids"
    first, second = (e for e in done.events if e["type"] == "transcript")
    assert [m["role"] for m in first["messages"] if m["kind"] == "message"] == ["user", "assistant"]
    assert [m["content"] for m in second["messages"]] == ["after", "You said: after"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(k3, shell) -> None:
    done = k3("completion", shell)
    assert done.code == 0
    assert "_K3_COMPLETE" in done.out
    other = k3("completion", "tcsh")
    assert (other.code, other.out) == (Exit.USAGE, "")
    assert "no completion script for 'tcsh'; expected bash, zsh or fish" in other.err


def test_session_names_complete_without_torch(forked, process_env) -> None:
    program = (
        "import sys; sys.argv = ['k3']\nfrom k3cli.main import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'triton', 'tiktoken'} & set(sys.modules)\nsys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    env = {**process_env, "_K3_COMPLETE": "complete_bash", "COMP_WORDS": "k3 resume ", "COMP_CWORD": "2"}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == ["a", "b", "c"]


def test_what_the_store_holds_is_private(forked, private_home) -> None:
    for path in (private_home / "k3").rglob("*"):
        assert path.stat().st_mode & 0o077 == 0, path
    assert os.stat(private_home / "k3").st_mode & 0o077 == 0


def test_looking_at_sessions_loads_no_torch(forked, process_env) -> None:
    program = (
        "import sys\nfrom k3cli.main import main\n"
        "for line in ('ls', 'log a --tree', 'show a', 'show a --at 1', 'fork a e', 'rm e', 'mark a m'):\n"
        "    sys.argv = ['k3', *line.split()]\n    code = main()\n    assert code == 0, (line, code)\n"
        "heavy = {'torch', 'triton', 'tiktoken'} & set(sys.modules)\nsys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], env=process_env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (("chat", "-s", "a", "-p", "more"), "a"),
        (("chat", "-s", "d", "-p", "more"), "d"),
        (("resume", "a", "-p", "more"), "a"),
        (("fork", "a", "d", "-p", "more"), "d"),
        (("replay", "a", "--into", "d"), "d"),
    ],
)
def test_a_session_that_is_being_written_is_told_before_the_model_is_loaded(k3, monkeypatch, words, name) -> None:
    """Nothing is held when the load itself fails."""
    k3("chat", "-s", "a", "-p", "one")
    loads: list[str] = []

    def refuse(ref: str, **_: object) -> None:
        loads.append(ref)
        with pytest.raises(SessionLocked):  # nobody else begins while it loads
            store().lock_session(name)
        raise ModelError("no such model")

    def store() -> Store:
        return Store.open(load_settings().store_root)

    monkeypatch.setattr(Engine, "load", staticmethod(refuse))
    holder = store()
    lock = holder.lock_session(name)
    done = k3(*words)
    assert done.code == 6
    assert f"error: session {name} is being written by process {os.getpid()} on " in done.err
    assert loads == []
    holder.unlock_session(name, lock, clean=True)
    assert k3(*words).code == 3
    assert len(loads) == 1
    free = store()
    free.unlock_session(name, free.lock_session(name), clean=True)
    assert not free.crashed


@pytest.mark.parametrize("words", [("chat", "-s", "d", "-p", "more"), ("fork", "a", "d", "-p", "more")])
def test_a_session_that_somebody_was_quicker_to_make_is_told_before_the_model_is_loaded(k3, monkeypatch, words) -> None:
    k3("chat", "-s", "a", "-p", "one")
    taking = Store.lock_session

    def slow(self: Store, name: str) -> object:
        monkeypatch.setattr(Store, "lock_session", taking)
        Store.open(load_settings().store_root).fork("a", name)
        return taking(self, name)

    monkeypatch.setattr(Store, "lock_session", slow)
    monkeypatch.setattr(Engine, "load", staticmethod(lambda *_, **__: pytest.fail("loaded")))
    done = k3(*words)
    assert (done.code, "error: session d exists" in done.err) == (6, True)
