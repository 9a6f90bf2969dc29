"""What people read: counts that agree with their nouns, records without marks of Python, reasons told once."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import typer

from k3cli.commands.replay import difference
from k3cli.engine import events as ev
from k3cli.errors import Exit
from k3cli.main import app
from k3cli.words import counted, in_words, listed

PYTHON = re.compile(r"\bNone\b|\bTrue\b|\bFalse\b|[\[{]['\d\]}]")


@pytest.fixture
def store_files(private_home) -> Path:
    return private_home / "k3" / "sessions"


def damage(path: Path, old: bytes, new: bytes) -> None:
    data = path.read_bytes()
    assert old in data
    path.chmod(0o600)
    path.write_bytes(data.replace(old, new))


def test_counts_and_values() -> None:
    assert [counted(n, "turn") for n in (0, 1, 2, 1200)] == ["0 turns", "1 turn", "2 turns", "1,200 turns"]
    assert counted(2, "entry", "entries") == "2 entries"
    assert (listed("session", ["a"]), listed("session", ["a", "b"])) == ("session a", "sessions a, b")
    record = {"top_k": 0, "seed": None, "steps": [["prefill", 85], ["decode", 41]], "on": True, "off": [], "x": 0.25}
    told = "top_k 0, seed none, steps prefill 85, decode 41, on yes, off none, x 0.25"
    assert in_words(record) == told


def test_no_count_of_one_has_a_plural(k3, tmp_path) -> None:
    k3("chat", "-s", "a", "-p", "hi")
    runs = [("replay", "a"), ("verify",), ("show", "a"), ("gc",), ("replay", "a", "--score")]
    said = "".join(done.out + done.err for done in (k3(*args) for args in runs))
    assert "1 turn," in said
    assert "1 session, " in said
    assert not re.findall(r"\b1 (?:[a-z]+ )?(?:turns|sessions|objects|checkpoints|tokens|files|leftovers)\b", said)


def test_a_turn_is_shown_without_marks_of_python(k3, tmp_path) -> None:
    tools = tmp_path / "tools.json"
    function = {"name": "late", "description": "Comes late.", "parameters": {}}
    tools.write_text(json.dumps([{"type": "function", "function": function}]))
    k3("chat", "-s", "a", "-p", "hi")
    k3("chat", "-s", "a", "--add-tools", str(tools), "-p", "more")
    shown = k3("show", "a", "--at", "2").out
    assert "counts: generated " in shown
    assert "sampling: max_tokens none, min_p 0, seed " in shown
    assert re.search(r"schedule: (prefill \d+, )+decode \d+", shown)
    assert "ids that close the answer: none" in shown
    for text in (shown, k3("show", "a").out):
        assert not PYTHON.search(text), text
    # a declaration of tools says which, from the record as from the ids
    for text in (shown, k3("replay", "a", "--show").out):
        assert "--- tool-declare\n(tool) late: Comes late.\n" in text


def test_info_is_told_without_marks_of_python(terminal) -> None:
    chat = terminal("chat", "-s", "a")
    chat.expect("k3>")
    chat.send("/info\r")
    seen = chat.expect("(?s)seed: .*k3>")
    assert re.search(r"saving: no\b", seen)
    assert re.search(r"tools: none\b", seen)
    assert not PYTHON.search(re.sub(r"\x1b\[[^a-zA-Z]*[a-zA-Z]", "", seen)), seen
    chat.send("\x04")
    assert chat.close() == 0


def test_settings_are_told_without_marks_of_python(tmp_path) -> None:
    from k3cli.commands.doctor_checks import settings_rows
    from k3cli.config import load_settings

    env = {"K3_HOME": str(tmp_path), "K3_THINKING": "0", "K3_QUOTA": "1G", "K3_SEED": "1234567"}
    rows = {row.name: row.value for row in settings_rows(load_settings(env=env))}
    assert rows == {"thinking": "no", "quota": "1.0 GB", "seed": "1234567"}


def test_what_a_machine_did_not_record_is_none(k3, monkeypatch) -> None:
    """Turns of an older version may say less of where they ran."""
    from k3cli.engine.engine import Engine

    plain = Engine.runtime
    k3("chat", "-s", "a", "-p", "hi")
    monkeypatch.setattr(Engine, "runtime", lambda engine: plain(engine) | {"clocks": 2})
    assert "last extended with clocks none; now clocks 2" in k3("resume", "a", "-p", "more").err


def test_a_difference_of_the_state_is_a_sentence() -> None:
    event = ev.Difference("id", 1, 126, None, None, None, "recurrent", 1, 1.91e-6)
    assert difference(event) == "at position 126: state field recurrent of layer 1, by up to 1.91e-06"


def test_log_tells_rates_where_the_turn_has_them(k3) -> None:
    k3("chat", "-s", "a", "-p", "hi")
    k3("replay", "a", "--into", "b")
    head, row = k3("log", "a", "--stats").out.splitlines()
    assert head.split()[2:9] == ["TOKENS", "REUSED", "REPLAYED", "PREFILLED", "T/S", "GENERATED", "T/S"]
    turn = k3("log", "a", "--json").one("turn")["meta"]
    cells = row.split()
    assert cells[7] == f"{turn['counts']['prefilled'] / turn['seconds']['prefill']:,.0f}"
    assert cells[9] == f"{turn['counts']['generated'] / turn['seconds']['decode']:,.0f}"
    assert k3("log", "b", "--stats").out.splitlines()[1].split()[7] == "-"


def test_a_turn_that_can_not_be_saved_is_explained_once(k3, monkeypatch) -> None:
    monkeypatch.setenv("K3_QUOTA", "1000")
    done = k3("chat", "-s", "a", "-p", "hi")
    assert done.code == Exit.FAILED
    assert done.err.count("would pass the quota") == 1
    assert "next save" not in done.err  # this process ends
    assert "1 turn in memory only" in done.err
    assert "why is said above" in done.err


def test_an_import_without_room_names_the_session(k3, tmp_path, monkeypatch) -> None:
    k3("chat", "-s", "a", "-p", "hi")
    k3("export", "a", str(tmp_path / "f"))
    monkeypatch.setenv("K3_HOME", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("K3_QUOTA", "1000")
    done = k3("import", str(tmp_path / "f"))
    assert done.code == Exit.NO_FIT
    assert "session a needs" in done.err
    assert "this turn" not in done.err


def test_an_import_of_something_else_is_usage(k3, tmp_path) -> None:
    (tmp_path / "f").write_text("# A title\n")
    done = k3("import", str(tmp_path / "f"))
    assert done.code == Exit.USAGE
    assert "begins with '# A title" in done.err


def test_verify_names_a_file_once_and_does_not_advise_itself(k3, store_files) -> None:
    k3("chat", "-s", "a", "-p", "hi")
    ref = next((store_files / "refs").iterdir())
    damage(ref, b'"name":"a"', b'"name":"x"')
    done = k3("verify")
    assert done.code == Exit.DAMAGED
    assert done.out.count(ref.name) == 1
    assert "k3 verify" not in done.out + done.err
    assert "needed by a session whose name can't be read" in done.out
    assert "1 damaged file in " in done.err


def test_a_store_that_can_not_be_opened_is_not_sent_to_verify(k3, store_files) -> None:
    k3("chat", "-s", "a", "-p", "hi")
    damage(store_files / "FORMAT", b'"k3"', b'"kk"')
    for args in (("ls",), ("verify",)):
        done = k3(*args)
        assert done.code == Exit.DAMAGED
        assert "FORMAT" in done.err
        assert "run `k3 repair`" in done.err
        assert "k3 verify" not in done.err
    assert k3("repair").code == 0
    assert k3("ls").code == 0


@pytest.mark.parametrize("forks", [(), ("b", "c")])
def test_repair_says_where_the_turns_are(k3, store_files, forks) -> None:
    k3("chat", "-s", "a", "-p", "hi")
    (ref,) = (store_files / "refs").iterdir()
    for name in forks:
        k3("fork", "a", name)
    damage(ref, b'"name":"a"', b'"name":"x"')
    done = k3("repair")
    made = re.findall(r"session (recovered-\w+): recovered", done.out)
    where = f"sessions {', '.join(forks)}" if forks else f"session {made[0]}"
    assert bool(made) is not bool(forks)
    assert f"its turns are in {where}\n" in done.out
    assert "recovered-ID" not in done.out


def test_repair_of_a_file_that_tells_nothing(k3, store_files) -> None:
    k3("chat", "-s", "a", "-p", "hi")
    (ref,) = (store_files / "refs").iterdir()
    k3("fork", "a", "b")
    ref.chmod(0o600)
    ref.write_bytes(b"?")
    done = k3("repair", "--json")
    assert done.one("lost")["held_by"] == []
    assert done.one("done")["recovered"] == 0


def test_a_checkpoint_that_was_damaged_is_not_called_thinned(k3, store_files) -> None:
    k3("chat", "-s", "a", "-p", "hi")
    objects = [path for path in (store_files / "objects").rglob("*") if path.is_file()]
    (checkpoint,) = [path for path in objects if path.read_bytes()[10:12] == b"\x04\x00"]
    os.unlink(checkpoint)
    assert k3("repair").code == 0
    for args in (("resume", "a", "-p", "more"), ("resume", "a", "-p", "and more", "--at", "1")):
        done = k3(*args)
        assert done.code == 0
        assert "was damaged, and `k3 repair` gave it up" in done.err
        assert "thinned" not in done.err
    assert "thinned" not in k3("show", "a", "--at", "1").out


def test_whose_first_turn_is_under_way_has_nothing_to_fork(k3, private_home) -> None:
    from k3cli.commands.runtime import open_store
    from k3cli.config import load_settings

    with open_store(load_settings()).reserving("slow"):
        done = k3("chat", "-s", "slow", "-p", "me too")
        assert done.code == Exit.SESSION
        assert "wait for it" in done.err
        assert "k3 fork" not in done.err
    k3("chat", "-s", "slow", "-p", "one")
    with open_store(load_settings()).reserving("slow"):
        assert "k3 fork slow" in k3("chat", "-s", "slow", "-p", "me too").err


@pytest.mark.parametrize(
    ("name", "value", "valid"),
    [("K3_KERNELS", "foo", "reference"), ("K3_DEBUG", "yes", "1"), ("K3_CACHE", __file__, "")],
)
def test_an_unknown_value_in_the_environment_is_usage(k3, monkeypatch, name, value, valid) -> None:
    monkeypatch.setenv(name, value)
    done = k3("ls")
    assert done.code == Exit.USAGE
    assert done.err.count("\n") == 1
    assert f"{name} is {value!r}" in done.err
    assert valid in done.err


def every_help(command: typer.core.TyperGroup, words: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    below = getattr(command, "commands", {})
    return [words, *(found for name, part in below.items() for found in every_help(part, (*words, name)))]


@pytest.mark.parametrize("words", every_help(typer.main.get_command(app)), ids=" ".join)
def test_help_cuts_nothing_and_shows_no_type_of_python(k3, monkeypatch, words) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERMINAL_WIDTH", "80")
    shown = k3(*words, "--help").out
    assert shown.startswith("Usage: k3")
    assert not re.search(r"(?<!\[ARGS\])(?<!\})(?<!\])(?<!-2 )\.\.\.$", shown, re.MULTILINE)
    assert not re.search(r"<(str|int|list|path|float)", shown)
    assert "[[" not in shown


def test_an_option_without_its_value_is_told_as_everything_else(k3) -> None:
    told = {("chat", "-p"): "-p without a value; expected -p TEXT", ("ls", "--json=1"): "--json with a value; expected"}
    for args, found in told.items():
        done = k3(*args)
        assert done.code == Exit.USAGE
        assert f"k3: error: {found}" in done.err


def test_help_of_bench_has_its_docstring(k3) -> None:
    assert "Exit 1 when a row failed." in " ".join(k3("bench", "--help").out.split())
