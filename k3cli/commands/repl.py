"""The prompt of a terminal: history, several lines, commands; Ctrl-C stops an answer, never the program."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from k3cli.commands.failures import as_k3_error
from k3cli.commands.inputs import bind_tool_results, parse_tool_results
from k3cli.commands.names import short_id
from k3cli.commands.output import Printer
from k3cli.commands.signals import (
    EndRun,
    exit_on_signals,
    ignore_signals,
    leave_prompt_on_signals,
    prompt_signals,
)
from k3cli.commands.turns import refuse_unsaved, run_turn, settle, show
from k3cli.errors import Exit, K3Error, UsageError
from k3cli.words import counted, in_words

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession

    from k3cli.engine.conversation import Conversation
    from k3cli.engine.sampling import Sampling

HELP = {
    "/help": "this list",
    "/fork [NAME]": "go on in a fork; the session stays as it is",
    "/undo": "take back the last turn",
    "/result TEXT": "answer the open tool call (with several open: JSON, as for --tool-result)",
    "/info": "the session: tokens, turn, model",
    "/save": "save again after a failed save",
    "/quit": "leave (Ctrl-D too), once the last turn is on disk",
}
KEYS = "Enter sends; Alt-Enter or a final \\ begins a new line; // sends a line that starts with /"
LOOK_SECONDS = 0.05
_COMMAND = re.compile(r"/([a-z]*)(?:\s+(.*))?\s*", re.DOTALL)


class Repl:
    """One conversation at a terminal. `/fork` replaces the conversation."""

    def __init__(
        self, conversation: Conversation, printer: Printer, sampling: Sampling, fresh_name: Callable[[], str]
    ) -> None:
        """fresh_name: makes a session name that is free, for a `/fork` without one."""
        self.conversation = conversation
        self.fresh_name = fresh_name
        self.printer = printer
        self.sampling = sampling
        self.leaving = self.hurried = False
        self._warned = False
        self._commands: dict[str, Callable[[str], None]] = {
            "help": self._help,
            "fork": self._fork,
            "undo": self._undo,
            "info": self._info,
            "save": self._save,
            "quit": self._quit,
        }

    def handle(self, text: str) -> Exit:
        """One line of input. Failures are printed; the code is not OK only when the program should end."""
        try:
            match = _COMMAND.fullmatch(text)
            if match and match[1] == "result":
                return self._turn(self._results(match[2] or ""))
            if match:
                return self._command(match[1], (match[2] or "").strip())
            return self._turn([{"role": "user", "content": text[1:] if text.startswith("//") else text}])
        except Exception as problem:
            known = as_k3_error(problem)
            if known is None:
                raise
            self.printer.end()
            self.printer.notice(f"error: {known}")
            return Exit.OK

    def _turn(self, messages: list[dict[str, Any]]) -> Exit:
        self._warned = False
        code = run_turn(self.conversation, messages, self.printer, self.sampling, wait=False)
        calls = self.conversation.open_calls()
        if calls and code == Exit.OK:
            names = ", ".join(f"{call['name']} (id {call['id']})" for call in calls)
            self.printer.notice(f"waiting for the result of {names}: /result TEXT")
        return Exit.OK if code == Exit.INTERRUPTED else code

    def _results(self, text: str) -> list[dict[str, Any]]:
        if not text.strip():
            raise UsageError("/result without text", "/result TEXT")
        return bind_tool_results(parse_tool_results(text, "/result"), self.conversation.open_calls())

    def _command(self, name: str, argument: str) -> Exit:
        if name not in self._commands:
            raise UsageError(f"/{name} is not a command", ", ".join(word.split()[0] for word in HELP))
        if argument and name != "fork":
            raise UsageError(f"/{name} {argument}", f"/{name} alone")
        if name != "quit":
            self._warned = False
        self._commands[name](argument)
        return Exit.OK

    def _help(self, _argument: str) -> None:
        for word, meaning in HELP.items():
            self.printer.notice(f"{word}: {meaning}")
        self.printer.notice(KEYS)

    def _fork(self, argument: str) -> None:
        settle(self.conversation, self.printer)
        old = self.conversation
        new = old.fork(argument or self.fresh_name())
        self.conversation = new
        old.close()
        self.printer.notice(f"now in {new.name}; {old.name} stays as it was")

    def _undo(self, _argument: str) -> None:
        settle(self.conversation, self.printer)
        turn = self.conversation.undo(emit=lambda event: show(event, self.printer))
        where = f"turn {short_id(turn)}" if turn else "the beginning"
        self.printer.notice(f"took back the last turn; the next one goes on from {where}")

    def _info(self, _argument: str) -> None:
        for key, value in self.conversation.info().items():
            self.printer.notice(f"{key.replace('_', ' ')}: {in_words(value)}")

    def _save(self, _argument: str) -> None:
        settle(self.conversation, self.printer)
        if not self.conversation.queued:
            self.printer.notice("nothing to save: every turn is on disk")
        for event in self.conversation.save():
            show(event, self.printer)

    def _quit(self, _argument: str) -> None:
        try:
            settle(self.conversation, self.printer)
        except KeyboardInterrupt:
            self.printer.notice("left while the last turn was being saved: the session has it whole, or not at all")
            self.leaving = self.hurried = True
            return
        if self.conversation.queued and not self._warned:
            self._warned = True
            self.printer.notice(
                f"{counted(self.conversation.queued, 'turn')} in memory only: /save tries again, /quit again gives up"
            )
            return
        self.leaving = True

    def tell(self) -> None:
        """Print how saves ended that nobody waited for."""
        for event in self.conversation.settle(0):
            show(event, self.printer)

    async def tell_when_saved(self) -> None:
        """While the user reads or types: print above the prompt, once the turn is durable or refused."""
        from prompt_toolkit.application import get_app, run_in_terminal

        while self.conversation.saving:
            await asyncio.sleep(LOOK_SECONDS)
        try:
            await run_in_terminal(self.tell)
        except Exception as problem:  # ends the prompt, too, instead of being printed by the event loop
            if not get_app().is_done:
                get_app().exit(exception=problem)


def repl(
    conversation: Conversation, printer: Printer, sampling: Sampling, history: Path, fresh_name: Callable[[], str]
) -> Exit:
    """Ask, answer, until the user leaves. Returns the exit code; raises K3Error when turns are lost by leaving."""
    printer.goes_on = True
    asking = _prompt_session(history)
    chat = Repl(conversation, printer, sampling, fresh_name)
    printer.notice("/help lists the commands; Ctrl-D leaves")
    code = Exit.OK
    try:
        with prompt_signals():
            while not chat.leaving and code == Exit.OK:
                try:
                    code = _step(chat, asking)
                except KeyboardInterrupt:
                    continue
    except Exception:
        _leave(chat, printer)
        raise
    except BaseException:
        _leave(chat, printer)
        refuse_unsaved(chat.conversation)
        ignore_signals()
        raise
    _leave(chat, printer)
    refuse_unsaved(chat.conversation)
    return code


def _leave(chat: Repl, printer: Printer) -> None:
    """Close the conversation once every turn is on disk or refused; a signal cuts the wait."""
    exit_on_signals()  # again, where one signal is why we leave: the wait must have a way out
    wait = True
    try:
        if chat.hurried:
            raise EndRun(Exit.INTERRUPTED)
        settle(chat.conversation, printer)
    except (EndRun, KeyboardInterrupt):
        wait = False
        raise
    finally:
        chat.conversation.close(wait=wait)


def _step(chat: Repl, asking: PromptSession[str]) -> Exit:
    """Ask once, answer once. Meanwhile a line says when the turn before is durable."""
    saving = chat.conversation.saving
    chat.tell()
    begun = False

    def watch() -> None:
        nonlocal begun
        begun = True
        if saving:
            asking.app.create_background_task(chat.tell_when_saved())

    def end_prompt() -> bool:
        loop = asking.app.loop
        if loop is None:  # not yet, or no more
            return begun
        loop.call_soon_threadsafe(end)
        return True

    def end() -> None:
        if asking.app.future is not None and not asking.app.future.done():
            asking.app.exit(exception=EOFError)

    try:
        with leave_prompt_on_signals(end_prompt):
            text = asking.prompt("k3> ", pre_run=watch)
    except EOFError:
        text = "/quit"
    return chat.handle(text.rstrip()) if text.strip() else Exit.OK


def _prompt_session(history: Path) -> PromptSession[str]:
    """A multi-line prompt whose history only its owner can read."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.application import create_app_session
    from prompt_toolkit.history import FileHistory
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
    from prompt_toolkit.output.plain_text import PlainTextOutput
    from prompt_toolkit.utils import is_dumb_terminal

    class History(FileHistory):
        def load_history_strings(self) -> Iterable[str]:
            try:
                return [*super().load_history_strings()]
            except OSError:  # read in a thread behind the prompt, when the file may be gone
                return []

        def store_string(self, string: str) -> None:
            with suppress(OSError):  # a full disk costs the line in the history, not the prompt
                super().store_string(string)

    keys = KeyBindings()

    # What was typed ahead, during an answer, ends its lines with Ctrl-J instead of Enter.
    @keys.add("c-j")
    @keys.add("enter")
    def _send(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.text.endswith("\\"):
            buffer.delete_before_cursor(1)
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _newline(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    try:
        history.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(history, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600))
    except OSError as problem:
        raise K3Error(f"{history}: {problem.strerror}", "a file k3 may write", "check K3_HOME") from None
    # A dumb terminal is asked without moving its cursor, but the output made for any other shows and blinks it first.
    with create_app_session(output=PlainTextOutput(sys.stdout)) if is_dumb_terminal() else nullcontext():
        return PromptSession(history=History(str(history)), multiline=True, key_bindings=keys)
