"""A disk that takes its time: the prompt comes at once, a line says when the turn is durable, leaving waits for it."""

from __future__ import annotations

import os
import signal
import time

import pytest

SLOW = {"SLOW_DISK": "0.4"}  # a commit syncs three times in a row: objects, turn, ref
SAVED = r"saved a turn"


def turns(k3) -> int:
    done = k3("log", "a", "--json")
    return done.one("done")["turns"] if done.code == 0 else 0


def answered(chat, text) -> None:
    """From the prompt over an answer to the next prompt, with the turn still on its way to the disk."""
    chat.expect("k3>")
    chat.send(f"{text}\r")
    chat.expect(f"You said: {text}")
    chat.expect("k3>")


def test_the_prompt_comes_before_the_turn_is_durable_and_a_line_says_when(terminal, k3) -> None:
    chat = terminal("chat", "-s", "a", env=SLOW)
    chat.expect("k3>")
    chat.send("hello\r")
    seen = chat.expect("You said: hello")
    seen += chat.expect("k3>")
    assert "saved a turn" not in seen
    assert turns(k3) == 0
    chat.send("half a li")
    after = chat.expect(SAVED)
    assert turns(k3) == 1
    assert "half a li" in after + chat.expect("k3>.*half a li"), "what was typed is still there"
    # the next turn goes on while this one is saved, and leaving waits for both
    chat.send("ne\r")
    chat.expect("You said: half a line")
    answered(chat, "third")
    chat.send("/quit\r")
    chat.expect("waiting until the last turn is on disk")
    chat.expect(SAVED)
    assert chat.close() == 0
    assert turns(k3) == 3
    assert k3("replay", "a").code == 0


def test_a_signal_at_the_prompt_waits_for_the_save(terminal, k3) -> None:
    chat = terminal("chat", "-s", "a", env=SLOW)
    answered(chat, "hello")
    os.kill(chat.pid, signal.SIGTERM)
    chat.expect(SAVED)
    assert chat.close() == 143
    assert turns(k3) == 1


def test_ctrl_c_while_quit_waits_for_a_save_leaves_without_it(terminal, k3) -> None:
    k3("chat", "-s", "a", "-p", "one")
    chat = terminal("resume", "a", env={"SLOW_DISK": "4"})
    answered(chat, "hello")
    chat.send("/quit\r")
    chat.expect("waiting until the last turn is on disk")
    begun = time.monotonic()
    chat.send("\x03")
    assert chat.close() == 130
    assert time.monotonic() - begun < 8, "the three syncs of the save alone take 12 s"
    # The turn in flight is whole or absent, and the session goes on.
    assert turns(k3) in (1, 2)
    assert k3("verify").code == 0
    assert k3("resume", "a", "-p", "two").out == "You said: two\n"
    assert k3("replay", "a").code == 0


def test_ctrl_c_while_save_waits_comes_back_to_the_prompt(terminal, k3) -> None:
    chat = terminal("chat", "-s", "a", env={"SLOW_DISK": "1.5"})
    answered(chat, "hello")
    chat.send("/save\r")
    chat.expect("waiting until the last turn is on disk")
    chat.send("\x03")
    chat.expect("k3>")
    assert turns(k3) == 0
    chat.expect(SAVED)
    chat.send("/quit\r")
    assert chat.close() == 0
    assert turns(k3) == 1


def test_a_second_signal_does_not_wait(terminal, k3) -> None:
    k3("chat", "-s", "a", "-p", "one")
    chat = terminal("resume", "a", env={"SLOW_DISK": "4"})
    answered(chat, "hello")
    begun = time.monotonic()
    os.kill(chat.pid, signal.SIGTERM)
    chat.expect("waiting until the last turn is on disk")
    os.kill(chat.pid, signal.SIGTERM)
    assert chat.close() == 143
    assert time.monotonic() - begun < 11, "the three syncs of the save alone take 12 s"
    assert turns(k3) == 1
    assert k3("resume", "a", "-p", "two").out == "You said: two\n"
    assert k3("verify").code == 0


@pytest.mark.parametrize("after", [0.0, 1.0])
def test_sigkill_between_answer_and_save_loses_that_turn_only(terminal, k3, after) -> None:
    k3("chat", "-s", "a", "-p", "one")
    chat = terminal("resume", "a", env={"SLOW_DISK": "0.7"})
    answered(chat, "two")
    time.sleep(after)
    os.kill(chat.pid, signal.SIGKILL)
    assert chat.close() == -signal.SIGKILL
    assert turns(k3) == 1
    done = k3("resume", "a", "-p", "three", "--json")
    assert (done.one("session")["replayed"], done.one("session")["pending"]) == (0, 1)
    assert turns(k3) == 2
    assert k3("verify").code == 0
    assert k3("replay", "a").code == 0


def test_a_refused_save_is_told_at_the_prompt_and_leaving_says_what_is_lost(terminal, k3) -> None:
    chat = terminal("chat", "-s", "a", env={"K3_QUOTA": "2000"})
    chat.expect("k3>")
    for queued in ("1 turn", "2 turns"):
        chat.send("hello\r")
        chat.expect(f"(?s)this turn could not be saved.*{queued} in memory only, for the next save")
        chat.expect("k3>")
    chat.send("/quit\r")
    chat.expect("2 turns in memory only: /save tries again, /quit again gives up")
    chat.expect("k3>")
    chat.send("/quit\r")
    chat.expect("2 turns of session a could not be saved")
    assert chat.close() == 1
    assert turns(k3) == 0


def test_a_history_that_cannot_be_written_does_not_stop_the_prompt(terminal, private_home) -> None:
    chat = terminal("chat", "-s", "a")
    chat.expect("k3>")
    (history,) = private_home.rglob("history")
    history.unlink()
    history.mkdir()
    chat.send("hello\r")
    seen = chat.expect("You said: hello") + chat.expect("k3>")
    assert "Exception" not in seen
    assert "ENTER" not in seen
    chat.send("/quit\r")
    assert chat.close() == 0


def test_one_shot_waits_and_says_saved_before_done(spawn, k3) -> None:
    process = spawn("chat", "-s", "a", "-p", "hello", "--json", env=SLOW)
    at = {}
    for line in process.stdout:
        at[line.split('"type":"', 1)[1].split('"')[0]] = time.monotonic()
    assert process.wait(timeout=60) == 0
    assert list(at)[-2:] == ["saved", "done"]
    assert at["saved"] - at["stopped"] > 0.8, "it is said when it is true"
    assert turns(k3) == 1
