"""Signals while a terminal is asked: they end the prompt from inside, whatever its event loop is doing."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from prompt_toolkit import PromptSession
from prompt_toolkit.application import Application, create_app_session
from prompt_toolkit.input import PipeInput, create_pipe_input
from prompt_toolkit.output import DummyOutput

from k3cli.commands import repl
from k3cli.commands.signals import EndRun, exit_on_signals
from k3cli.errors import Exit


class Chat:
    """What `_step` uses of a Repl; the task behind its prompt sends this process a signal, in the event loop."""

    saving = True

    def __init__(self, number: signal.Signals) -> None:
        self.number = number
        self.conversation = self
        self.handled: list[str] = []

    def tell(self) -> None:
        pass

    async def tell_when_saved(self) -> None:
        os.kill(os.getpid(), self.number)

    def handle(self, text: str) -> Exit:
        self.handled.append(text)
        return Exit.OK


@pytest.fixture
def keyboard(monkeypatch: pytest.MonkeyPatch) -> Iterator[PipeInput]:
    """What is typed into the prompt. An error that the event loop would print, waiting for a key, fails the test."""
    shown: list[object] = []
    monkeypatch.setattr(Application, "_handle_exception", lambda _app, _loop, context: shown.append(context))
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    with create_pipe_input() as typed, create_app_session(input=typed, output=DummyOutput()):
        yield typed
    for number, handler in before.items():
        signal.signal(number, handler)
    assert shown == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_inside_the_event_loop_ends_the_prompt_and_the_run(keyboard, number) -> None:
    exit_on_signals()
    chat = Chat(number)
    with pytest.raises(EndRun) as stop:
        repl._step(chat, PromptSession())  # type: ignore[arg-type]
    assert stop.value.exit == Exit.TERMINATED
    assert chat.handled == []


def test_a_prompt_without_a_signal_leaves_the_handlers_as_they_were(keyboard) -> None:
    exit_on_signals()
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)]
    chat = Chat(signal.SIGTERM)
    chat.saving = False
    keyboard.send_text("hello\r")
    assert repl._step(chat, PromptSession()) == Exit.OK  # type: ignore[arg-type]
    keyboard.send_text("\x04")
    repl._step(chat, PromptSession())  # type: ignore[arg-type]
    assert chat.handled == ["hello", "/quit"]
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)] == before
