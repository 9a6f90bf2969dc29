"""Printing what a conversation says, and running one turn so that every way out leaves it saved."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from k3cli.commands.names import short_id
from k3cli.commands.output import Printer, human_bytes
from k3cli.commands.signals import Cancel, cancel_on_signals
from k3cli.engine import events as ev
from k3cli.errors import Exit, K3Error
from k3cli.words import counted

if TYPE_CHECKING:
    from k3cli.engine.conversation import Conversation
    from k3cli.engine.sampling import Sampling

PATIENCE = 0.3
"""Seconds that a save may take before a line says that it is waited for."""


def show(event: ev.Event, printer: Printer) -> None:
    """One event: as NDJSON, or for people (answer on stdout, the rest on stderr)."""
    if not isinstance(event, ev.Progress) or printer.progress_due(event.done >= event.total):
        printer.raw_event(event.to_json())
    if isinstance(event, ev.Notice):
        printer.notice(event.message)
    elif isinstance(event, ev.Progress):
        printer.progress(event.stage, event.done, event.total, f"{event.done:,} of {event.total:,} {event.unit}")
    elif printer.json:
        return
    elif isinstance(event, ev.Text):
        printer.answer(event.text)
    elif isinstance(event, ev.Thinking):
        printer.thinking(event.text)
    elif isinstance(event, ev.ToolCall):
        printer.notice(f"tool call {event.id}: {event.name} {event.arguments}")
    elif isinstance(event, ev.Malformed):
        printer.notice(f"the model left the chat format: {event.reason} ({event.detail})")
    elif isinstance(event, ev.SessionOpened):
        printer.notice(_opened(event))
    elif isinstance(event, ev.Stopped) and event.reason in ("length", "cancelled"):
        why = {"length": "the answer reached its length limit", "cancelled": "the answer was stopped"}
        printer.notice(f"{why[event.reason]} after {counted(event.generated, 'token')}")
    elif isinstance(event, ev.Speculation) and event.drafter != "off" and event.steps:
        printer.end()
        printer.notice(_speculation(event))
    elif isinstance(event, (ev.Saved, ev.NotSaved)):
        printer.end()
        printer.notice(_saved(event, printer.goes_on))


def run_turn(
    conversation: Conversation,
    messages: Sequence[Mapping[str, Any]],
    printer: Printer,
    sampling: Sampling,
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    tool_choice: str | None = None,
    response_format: Mapping[str, Any] | None = None,
    wait: bool = True,
) -> Exit:
    """One turn, printed as it comes. Ctrl-C, SIGTERM and a closed stdout stop the answer; the turn is saved.

    wait: until it is durable or refused; else the save goes on when the answer has ended, and `settle` tells the rest.
    Returns the exit code: OK, or the code of what stopped the answer.
    """
    with cancel_on_signals() as cancel:
        events = conversation.turn(
            messages,
            sampling,
            tools=tools,
            tool_choice=tool_choice,
            response_format=response_format,
            cancel=cancel.is_set,
            wait=wait,
        )
        code = drain(events, printer, cancel)
    printer.end()
    return code


def drain(events: Iterable[ev.Event], printer: Printer, cancel: Cancel) -> Exit:
    """Print every event; when stdout fails under us, ask for the end and go on to the save without printing.

    Raises the K3Error of a stdout that failed otherwise than by being closed, after the last event.
    """
    failure: K3Error | None = None
    for event in events:
        if failure is not None or cancel.code == Exit.BROKEN_PIPE:
            continue
        try:
            show(event, printer)
        except BrokenPipeError:
            cancel(Exit.BROKEN_PIPE)
            printer.abandon()
        except K3Error as problem:
            failure = problem
            cancel(Exit.FAILED)
            printer.abandon()
    if failure is not None:
        raise failure
    return cancel.code


def settle(conversation: Conversation, printer: Printer) -> None:
    """Wait until every turn is durable or refused, and print which; a line says so when that takes a while.

    A signal cuts the wait short, by the exception that it raises where this is called.
    """
    for event in conversation.settle(PATIENCE):
        show(event, printer)
    if conversation.saving:
        printer.notice("waiting until the last turn is on disk (Ctrl-C does not wait)")
        for event in conversation.settle():
            show(event, printer)


def refuse_unsaved(conversation: Conversation) -> None:
    """Raise when turns that are in memory only would end with this process: a script must not take that for success."""
    if lost := conversation.queued:
        raise K3Error(
            f"{counted(lost, 'turn')} of session {conversation.name} could not be saved and ended with this process",
            do="why is said above; what was saved before is whole",
        )


def finish(code: Exit) -> None:
    """End the command with the code of a stopped answer; OK returns."""
    if code != Exit.OK:
        import typer

        raise typer.Exit(int(code))


def _opened(event: ev.SessionOpened) -> str:
    if event.how == "created":
        shared = f", {counted(event.reused, 'token')} of its head reused from the store" if event.reused else ""
        return f"new session {event.name}{shared}"
    if event.how == "ephemeral":
        what = f"a fork of {event.source} that leaves nothing on disk"
    elif event.how == "forked":
        what = f"new session {event.name}, forked from {event.source}"
    else:
        what = f"resumed session {event.name}"
    at = f" at turn {short_id(event.turn)}" if event.turn else ""
    return (
        f"{what}{at}: {counted(event.tokens, 'token')}, reused {event.reused:,}, replayed {event.replayed:,}, "
        f"pending {event.pending:,}"
    )


def _speculation(event: ev.Speculation) -> str:
    seconds = ", ".join(f"{name} {value:.2f} s" for name, value in event.seconds.items())
    head = f"drafts {event.drafter}: {event.tokens_per_step:.2f} tokens a step, {counted(event.steps, 'step')}"
    if not event.acceptance:
        return f"{head}, nothing to draft; {seconds}"
    shares = " ".join(f"{100 * share:.0f}" for share in event.acceptance)
    largest = max(number for number, count in enumerate(event.rows, 1) if count)
    rows = f"of up to {counted(largest, 'token')} (at most {event.window})"
    return f"{head} {rows}, accepted by place {shares} %; {seconds}"


def _saved(event: ev.Saved | ev.NotSaved, goes_on: bool) -> str:
    """goes_on: a prompt follows, so that there may be another save. Why there was none is told by a Notice before."""
    counts = (
        f"reused {event.reused:,}, replayed {event.replayed:,}, prefilled {event.prefilled:,}, "
        f"generated {event.generated:,}"
    )
    if isinstance(event, ev.Saved):
        written = f"{human_bytes(event.bytes_written)} written in {event.seconds:.2f} s"
        return f"saved {event.session} turn {short_id(event.turn)}: {counts}; {written}"
    if event.reason == "ephemeral":
        return f"not saved (ephemeral): {counts}"
    waiting = f"{counted(event.queued, 'turn')} in memory only{', for the next save' if goes_on else ''}"
    return f"NOT saved: {counts}; {waiting}"
