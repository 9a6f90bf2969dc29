"""Every way a run can end: one line on stderr, the documented exit code, and `error` as the last event."""

from __future__ import annotations

import json
import re

import k3_sessions.errors as store_errors
import pytest

import k3cli.commands.runtime as runtime
from k3cli import errors
from k3cli.commands.failures import as_k3_error
from k3cli.commands.signals import EndRun
from k3cli.errors import Exit

OURS = [
    (errors.K3Error, 1),
    (errors.UsageError, 2),
    (errors.ModelError, 3),
    (errors.FitError, 4),
    (errors.ContextError, 5),
    (errors.SessionError, 6),
    (errors.ReplayDiffers, 7),
    (errors.DamagedError, 8),
    (errors.BusyError, 75),
]
STORE = [
    (store_errors.BadName("x"), 2),
    (store_errors.SessionExists("x"), 6),
    (store_errors.SessionMissing("x"), 6),
    (store_errors.SessionLocked("x"), 6),
    (store_errors.SessionChanged("x"), 75),
    (store_errors.StoreBusy("x"), 75),
    (store_errors.IdentityMismatch("x", "y", "z", fields=("weights",)), 3),
    (store_errors.Damaged("x", object="o"), 8),
    (store_errors.FormatUnsupported("x"), 8),
    (store_errors.StoreFull("x"), 4),
    (store_errors.StoreReadOnly("x"), 1),
    (store_errors.IOFailure("x"), 1),
    (store_errors.NetworkFilesystem("x"), 2),
    (store_errors.BadDraft("x"), 1),
]


@pytest.fixture
def failing(k3, monkeypatch):
    """`k3 ls` of a store whose opening raises what is given."""

    def run(problem: BaseException, *options: str):
        def fail(_settings):
            raise problem

        monkeypatch.setattr(runtime, "open_store", fail)
        return k3("ls", *options)

    return run


@pytest.mark.parametrize(("kind", "code"), OURS)
def test_our_errors(failing, kind, code) -> None:
    done = failing(kind("two\nlines", "one line", "do this"), "--json")
    assert done.code == code
    assert done.err == "k3: error: two lines; expected one line; do this\n"
    last = done.events[-1]
    assert (last["type"], last["exit_code"], last["expected"], last["do"]) == ("error", code, "one line", "do this")


@pytest.mark.parametrize(("problem", "code"), STORE)
def test_store_errors(failing, problem, code) -> None:
    done = failing(problem)
    assert done.code == code
    assert done.out == ""
    assert done.err.startswith("k3: error: x")


def test_every_store_error_was_thought_of() -> None:
    kinds = {v for v in vars(store_errors).values() if isinstance(v, type) and issubclass(v, store_errors.StoreError)}
    assert kinds - {type(problem) for problem, _ in STORE} == {store_errors.StoreError}


def test_signals_and_interrupts(failing) -> None:
    assert failing(KeyboardInterrupt()).code == 130
    done = failing(EndRun(Exit.TERMINATED), "--json")
    assert done.code == 143
    assert done.events[-1]["type"] == "error"


def test_an_unexpected_failure_keeps_its_traceback(failing, k3, monkeypatch) -> None:
    done = failing(ZeroDivisionError("oops"))
    assert done.code == 1
    assert len(done.err.splitlines()) == 1
    match = re.search(r"ZeroDivisionError: oops; the traceback is in (\S+)", done.err)
    assert match
    with open(match[1]) as file:
        assert "raise problem" in file.read()
    monkeypatch.setenv("K3_DEBUG", "1")
    assert "raise problem" in failing(ZeroDivisionError("oops")).err


def test_memory_and_files() -> None:
    for refused in (
        MemoryError(),
        OSError(12, "Cannot allocate memory"),
        ImportError("libtorch_cpu.so: failed to map segment from shared object"),
        RuntimeError("can't start new thread"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: can't allocate memory: 9 bytes"),
    ):
        assert type(as_k3_error(refused)) is errors.FitError, refused
    assert as_k3_error(ImportError("no module named x")) is None
    assert as_k3_error(RuntimeError("shapes differ")) is None
    named = as_k3_error(PermissionError(13, "Permission denied", "/some/file"))
    assert str(named) == "/some/file: Permission denied"
    assert as_k3_error(KeyError("x")) is None


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("chat", "--bogus"), ("no such option --bogus", "--session", "--temperature", "k3 chat --help")),
        (("bogus",), ("no such command 'bogus'", "chat", "replay")),
        (("bogus", "chat"), ("no such command 'bogus'; expected one of chat", "see k3 --help")),
        (("debug", "logitz", "tokens"), ("no such command 'logitz'; expected one of logits", "see k3 debug --help")),
        (("bench", "--rounds", "compare"), ("--rounds is 'compare'", "see k3 bench --help")),
        (("bench", "compare", "--json=1"), ("--json alone; see k3 bench compare --help",)),
        (("ls", "", "(s)"), ("unexpected argument (s); expected",)),
        (("resume",), ("missing argument NAME", "expected k3 resume NAME", "k3 resume --help")),
        (("rm",), ("missing argument NAME", "expected k3 rm NAME...")),
        (("ls", "x"), ("unexpected argument x", "expected k3 ls without one")),
        (("chat", "--json=1"), ("--json with a value", "expected --json alone")),
        (("debug",), ("missing command", "one of logits, tokens")),
        (("debug", "logits"), ("missing option --model", "expected --model DIR")),
        (("bench", "--slice", "x"), ("--slice is 'x'", "expected a whole number")),
        (("bench", "--temperature", "x"), ("--temperature is 'x'", "expected a number")),
        (("plan", "--sessions", "0"), ("--sessions is '0'", "expected a whole number, at least 1")),
        (("chat", "--seed", "x"), ("--seed is 'x'", "a whole number")),
        (("fork", "a", "b", "c"), ("unexpected argument c", "expected k3 fork NAME [NEW]")),
        (("debug", "bogus"), ("no such command 'bogus'", "logits", "tokens")),
        (("replay", "a", "--show", "--score"), ("--show and --score",)),
        (("replay", "a", "--score", "--from", "1"), ("--from with --score", "k3 fork a --at")),
        (("replay", "a", "--into", "b", "--from", "1", "--to", ""), ("--from and --to with --into",)),
        (("replay", "a", "--effort", "low"), ("--effort without --into",)),
        (("replay", "a", "--system", "", "--no-thinking"), ("--system and --no-thinking without --into",)),
        (("replay", "a", "--show", "--dtype", "float32", "--gpus", "2"), ("--dtype and --gpus with --show",)),
        (("fork", "a", "--seed", "1"), ("--seed without a prompt", "-p TEXT")),
        (("fork", "a", "--model", "m", "--hide-thinking"), ("--model and --hide-thinking without a prompt",)),
        (("fork", "a", "--draft-from", "x", "--require-cached"), ("--require-cached and --draft-from without",)),
        (("mark", "a", "b", "--remove", "--at", "1"), ("--remove with --at",)),
    ],
)
def test_usage_errors_name_what_is_valid(k3, args, words) -> None:
    done = k3(*args)
    assert done.code == Exit.USAGE
    assert done.out == ""
    assert len(done.err.splitlines()) == 1
    assert all(word in done.err for word in words), done.err
    as_event = k3(*args, "--json")
    assert as_event.code == Exit.USAGE
    assert json.loads(as_event.out.splitlines()[-1])["type"] == "error"


def test_what_is_set_elsewhere_is_no_option_of_a_fork(k3, monkeypatch) -> None:
    k3("chat", "-s", "a", "-p", "hello")
    monkeypatch.setenv("K3_SEED", "7")
    monkeypatch.setenv("K3_SPEC", "off")
    done = k3("fork", "a", "b")
    assert (done.code, done.out) == (0, "b\n"), done.err


@pytest.mark.parametrize("option", ["--into", "--from", "--to"])
def test_an_empty_word_is_a_word(k3, option) -> None:
    k3("chat", "-s", "a", "-p", "hello")
    done = k3("replay", "a", option, "")
    assert done.code in (Exit.USAGE, Exit.SESSION)
    assert done.out == ""
    assert "''" in done.err


def test_unknown_settings_stop_every_command(k3, monkeypatch, private_home) -> None:
    monkeypatch.setenv("K3_TEMPRATURE", "1")
    done = k3("ls")
    assert done.code == Exit.USAGE
    assert "K3_TEMPRATURE" in done.err
    monkeypatch.delenv("K3_TEMPRATURE")
    (private_home / "k3").mkdir(parents=True)
    (private_home / "k3" / "config.toml").write_text("colour = true")
    done = k3("chat", "-p", "x")
    assert done.code == Exit.USAGE
    assert "'colour'" in done.err


def test_help_without_a_command_is_a_usage_error(k3) -> None:
    done = k3()
    assert done.code == Exit.USAGE
    assert done.out == ""
    assert "Commands:" in done.err
    shown = k3("--help")
    assert (shown.code, shown.err) == (0, "")
    assert all(word in shown.out for word in ("chat", "replay", "130/141/143"))
    assert k3("--version").out.startswith("k3 ")


def test_a_home_that_cannot_be_made(k3, monkeypatch, tmp_path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("K3_HOME", str(tmp_path / "file"))
    done = k3("ls")
    assert done.code in (1, 2)
    assert len(done.err.splitlines()) == 1
    assert str(tmp_path / "file") in done.err
