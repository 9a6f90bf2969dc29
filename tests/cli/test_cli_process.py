"""What only a real process shows: signals, closed pipes, stdin that is no terminal, and the prompt of a terminal."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from k3cli.errors import Exit


def read_until(process: subprocess.Popen[str], kind: str) -> dict:
    """Read events from stdout up to the first of a type."""
    assert process.stdout is not None
    for line in process.stdout:
        event = json.loads(line)
        if event["type"] == kind:
            return event
    raise AssertionError(f"no {kind} event; {process.stderr.read() if process.stderr else ''}")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 143)])
def test_a_signal_stops_the_answer_and_the_turn_is_saved(spawn, k3, number, code) -> None:
    before = signal.signal(number, signal.SIG_DFL)  # under nohup a child would inherit that SIGHUP is ignored
    process = spawn("chat", "-s", "a", "-p", "slow 400", "--json", stdin=subprocess.DEVNULL)
    signal.signal(number, before)
    read_until(process, "text")
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    events = [json.loads(line) for line in out.splitlines()]
    assert events[-1]["type"] == "done"
    assert (events[-1]["reason"], events[-1]["saved"]) == ("cancelled", True)
    assert "Traceback" not in err
    done = k3("resume", "a", "-p", "still there")
    assert (done.code, done.out) == (0, "You said: still there\n")


@pytest.mark.parametrize(
    ("module", "number"),
    [
        ("typer.models", signal.SIGINT),
        ("typer.models", signal.SIGTERM),
        ("typer.models", signal.SIGHUP),
        ("torch.types", signal.SIGINT),
    ],
)
def test_a_signal_while_the_program_starts_is_one_line(process_env, module, number) -> None:
    """Before the handlers of `main` are there, and after."""
    before = signal.signal(number, signal.SIG_DFL)  # see above
    process = subprocess.Popen(
        [sys.executable, "-X", "importtime", "-m", "k3cli", "chat", "-p", "hello", "--json"],
        env=process_env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    signal.signal(number, before)
    for line in process.stderr:
        if line.rstrip().endswith(f" {module}"):
            break
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    word, code = ("interrupted", 130) if number == signal.SIGINT else ("terminated", 143)
    assert process.returncode == code, err
    said = [line for line in err.splitlines() if not line.startswith("import time:")]
    assert said == [f"k3: error: {word}"]
    if module == "torch.types":
        assert [json.loads(line)["type"] for line in out.splitlines()] == ["error"]


def test_no_exception_goes_through_a_module_that_is_being_loaded(process_env, tmp_path) -> None:
    (tmp_path / "native.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    program = (
        "from k3cli.commands.signals import exit_on_signals\nexit_on_signals()\n"
        "try:\n    import native\nexcept BaseException:\n    print('an exception in the loader')\n"
    )
    env = {**process_env, "PYTHONPATH": f"{tmp_path}{os.pathsep}{process_env['PYTHONPATH']}"}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (130, "")


@pytest.mark.parametrize("debug", ["0", "1"])
def test_what_the_threads_of_torch_have_to_say_is_for_debugging(process_env, debug) -> None:
    """When a rank is lost, they may write lines of theirs beside the one of ours, or may not."""
    program = (
        "import sys\nfrom k3cli.main import main\nsys.argv = ['k3', 'ls']\nmain()\n"
        "from datetime import timedelta\nimport torch.distributed as dist\n"
        "try:\n    dist.TCPStore('127.0.0.1', 1, is_master=False, timeout=timedelta(seconds=1))\n"
        "except RuntimeError:\n    pass\n"
    )
    env = {name: value for name, value in process_env.items() if name != "TORCH_CPP_LOG_LEVEL"} | {"K3_DEBUG": debug}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=120)
    others = [line for line in done.stderr.splitlines() if not line.startswith("k3: ")]
    assert (done.returncode, bool(others)) == (0, debug == "1"), done.stderr


def test_a_second_signal_leaves_at_once_and_the_session_is_whole(spawn, k3) -> None:
    k3("chat", "-s", "a", "-p", "one")
    process = spawn("resume", "a", "-p", "slow 400", "--json", stdin=subprocess.DEVNULL)
    read_until(process, "text")
    for _ in range(20):
        process.send_signal(signal.SIGINT)
        time.sleep(0.002)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    done = k3("resume", "a", "-p", "two")
    assert done.out == "You said: two\n"


def test_sigkill_in_an_answer_leaves_the_last_saved_turn(spawn, k3) -> None:
    k3("chat", "-s", "a", "-p", "one")
    process = spawn("resume", "a", "-p", "slow 400", "--json", stdin=subprocess.DEVNULL)
    read_until(process, "text")
    process.kill()
    process.communicate()
    done = k3("resume", "a", "-p", "two", "--json")
    assert done.code == 0
    assert done.one("session")["replayed"] == 0
    assert k3("log", "a", "--json").one("done")["turns"] == 2


@pytest.mark.parametrize("json_mode", [False, True])
def test_a_closed_pipe_is_141_and_the_turn_is_saved(spawn, k3, json_mode) -> None:
    options = ("--json",) if json_mode else ()
    process = spawn("chat", "-s", "a", "-p", "slow 400", *options, stdin=subprocess.DEVNULL)
    process.stdout.read(10)
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait(timeout=60) == Exit.BROKEN_PIPE, err
    assert "Traceback" not in err
    assert "Exception ignored" not in err
    turn = k3("show", "a", "--at", "-1", "--json").one("turn")
    assert turn["meta"]["stop"] == "cancelled"
    assert k3("resume", "a", "-p", "next").out == "You said: next\n"


def test_a_closed_pipe_without_a_turn(k3, spawn) -> None:
    for name in ("a", "b"):
        k3("chat", "-s", name, "-p", "one")
    read_end, write_end = os.pipe()
    os.close(read_end)
    process = spawn("ls", stdout=write_end)
    os.close(write_end)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (Exit.BROKEN_PIPE, "")


def test_a_terminal_that_goes_away_stops_the_answer_and_the_turn_is_saved(terminal, k3) -> None:
    chat = terminal("chat", "-s", "a", "-p", "slow 400")
    chat.expect("word1")
    assert chat.hang_up() in (Exit.TERMINATED, Exit.BROKEN_PIPE)
    assert k3("show", "a", "--at", "-1", "--json").one("turn")["meta"]["stop"] == "cancelled"


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)])
def test_streams_that_were_closed_before_the_start(spawn, k3, closed) -> None:
    def close() -> None:
        for number in closed:
            os.close(number)

    process = spawn("chat", "-s", "a", "-p", "one", preexec_fn=close)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert out == ("" if 1 in closed else "You said: one\n")
    assert "Traceback" not in err
    assert k3("resume", "a", "-p", "two").code == 0
    assert k3("verify").code == 0


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_a_stdout_that_is_full_fails_and_the_turn_is_saved(spawn, k3) -> None:
    with open("/dev/full", "w") as full:
        process = spawn("chat", "-s", "a", "-p", "slow 400", stdout=full)
        _, err = process.communicate(timeout=60)
    assert process.returncode == Exit.FAILED
    assert err.splitlines()[-1].startswith("k3: error: stdout: No space left")
    assert k3("show", "a", "--at", "-1", "--json").one("turn")["meta"]["stop"] == "cancelled"


def test_a_stderr_nobody_reads_does_not_stop_the_answer(spawn) -> None:
    process = spawn("chat", "-s", "a", "-p", "think well", stdin=subprocess.DEVNULL)
    process.stderr.close()
    assert process.stdout.read() == "well\n"
    assert process.wait(timeout=60) == 0


def test_a_pipe_is_one_shot_and_writes_no_escapes(spawn) -> None:
    process = spawn("chat", "-s", "a")
    out, err = process.communicate("think piped", timeout=60)
    assert (process.returncode, out) == (0, "piped\n")
    assert "\x1b" not in out + err
    assert "\r" not in out + err
    empty = spawn("chat", "-s", "a", stdin=subprocess.DEVNULL)
    out, err = empty.communicate(timeout=60)
    assert (empty.returncode, out) == (Exit.USAGE, "")
    assert "stdin is empty" in err


def test_a_second_writer_learns_who_holds_the_session(spawn, k3) -> None:
    process = spawn("chat", "-s", "a", "-p", "slow 400", "--json", stdin=subprocess.DEVNULL)
    read_until(process, "text")
    begun = time.monotonic()
    done = k3("chat", "-s", "a", "-p", "me too")
    assert done.code == Exit.SESSION
    assert str(process.pid) in done.err
    assert time.monotonic() - begun < 30
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)


def test_the_prompt_of_a_terminal(terminal, k3, private_home) -> None:
    chat = terminal("chat", "-s", "a")
    chat.expect("Ctrl-D leaves")
    chat.expect("k3>")
    chat.send("hello\r")
    assert "You said: hello" in chat.expect("saved a turn")
    chat.expect("k3>")
    # Ctrl-C stops the answer, not the program
    chat.send("slow 4000\r")
    chat.expect("word3")
    chat.send("\x03")
    chat.expect("the answer was stopped")
    chat.expect("saved a turn")
    chat.send("/info\r")
    assert "tokens:" in chat.expect("queued: 0")
    chat.send("/nonsense\r")
    assert "/quit" in chat.expect("is not a command.*")
    # two lines in one message
    chat.send("first\\\rsecond\r")
    assert "You said: first" in chat.expect("saved a turn")
    chat.send("/undo\r")
    chat.expect("took back the last turn")
    chat.send("/fork side\r")
    chat.expect("now in side; a stays as it was")
    chat.send("on the side\r")
    chat.expect("saved side turn")
    chat.send("/save\r")
    chat.expect("nothing to save")
    chat.send("/help\r")
    chat.expect("/result TEXT")
    chat.expect("k3>")
    # Ctrl-C at an empty prompt does nothing, Ctrl-D leaves
    chat.send("\x03")
    chat.expect("k3>")
    chat.send("\x04")
    assert chat.close() == 0
    assert k3("log", "a", "--json").one("done")["turns"] == 3
    assert k3("log", "side", "--json").one("done")["turns"] == 3
    history = private_home / "k3" / "history"
    assert "on the side" in history.read_text()
    assert history.stat().st_mode & 0o077 == 0


def test_a_dumb_terminal_gets_no_escapes(terminal) -> None:
    chat = terminal("chat", "-s", "a", env={"TERM": "dumb"})
    seen = chat.expect("k3> ")
    chat.send("hello\r")
    seen += chat.expect("You said: hello")
    chat.send("/quit\r")
    seen += chat.expect("saved a turn")
    assert "\x1b" not in seen
    assert chat.close() == 0


def test_a_tool_call_at_a_terminal(terminal, k3, tmp_path) -> None:
    tools = tmp_path / "tools.json"
    tools.write_text('[{"type": "function", "function": {"name": "read", "description": "", "parameters": {}}}]')
    chat = terminal("chat", "-s", "a", "--tools", str(tools))
    chat.expect("k3>")
    chat.send("call read\r")
    chat.expect("waiting for the result of read")
    chat.expect("saved a turn")
    chat.send("/result 42\r")
    assert "The tool said: 42" in chat.expect("saved a turn")
    chat.send("/result 43\r")
    chat.expect("no tool call is open")
    chat.send("//slash\r")
    assert "You said: /slash" in chat.expect("saved a turn")
    chat.send("/quit\r")
    assert chat.close() == 0


def test_sigterm_at_the_prompt_ends_with_143(terminal) -> None:
    chat = terminal("chat", "-s", "a")
    chat.expect("k3>")
    os.kill(chat.pid, signal.SIGTERM)
    assert chat.close() == 143
