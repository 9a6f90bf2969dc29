"""What was said, for people.

The token ids are the truth, so a transcript is read back from them where the session's tokenizer is at hand; else from
the text each turn recorded, which the reader is told.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from k3cli.commands.names import short_id
from k3cli.commands.output import Printer
from k3cli.errors import K3Error

if TYPE_CHECKING:
    from k3_sessions.store import Store
    from k3_sessions.types import Turn

    from k3cli.config import Settings


def recorded_messages(meta: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The messages of one turn as its record tells them: the tools it declared, what was given, then the answer."""
    given, answer = meta.get("given", {}), meta.get("answer")
    declared = [{"kind": "tool-declare", "role": "system", "tools": given["tools"]}] if given.get("tools") else []
    return [*declared, *given.get("messages", []), *([answer] if answer else [])]


def prompt_line(meta: Mapping[str, Any]) -> str:
    """The first line of what the turn was asked, to know it again in a list."""
    if meta.get("kind") == "prompt":
        return "(a first prompt, kept because other sessions begin with the same tokens)"
    for message in reversed(meta.get("given", {}).get("messages", [])):
        text = content_text(message.get("content"))
        if text.strip():
            prefix = "" if message.get("role") == "user" else f"{message.get('role')}: "
            return prefix + text.strip().splitlines()[0]
    return ""


def content_text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return "" if content is None else str(content)


def print_messages(messages: Sequence[Mapping[str, Any]], printer: Printer) -> None:
    """Messages as text, each under its role."""
    for message in messages:
        kind = message.get("kind", "message")
        who = message.get("role", "?") if kind == "message" else kind
        printer.line(f"--- {who}" + (f" ({message['name']})" if message.get("name") else ""))
        for tool in message.get("tools") or ():
            function = tool.get("function", tool)
            about = content_text(function.get("description"))
            printer.line(f"(tool) {function.get('name')}" + (f": {about}" if about else ""))
        if message.get("reasoning_content"):
            printer.line(f"(thinking) {message['reasoning_content']}")
        text = content_text(message.get("content"))
        if text:
            printer.line(text)
        for call in message.get("tool_calls") or ():
            function = call.get("function", {})
            printer.line(f"(tool call) {function.get('name')} {function.get('arguments')}")
        for problem in message.get("problems") or ():
            printer.line(f"(outside the format) {problem}")
        if message.get("complete") is False:
            printer.line("(cut)")


def print_transcript(store: Store, settings: Settings, name: str, printer: Printer, first: int, last: int) -> None:
    """The turns `first`..`last` (numbers from 1, both included) of a session. Evaluates nothing."""
    turns = store.log(name)
    said = _from_ids(store, settings, name, printer, turns)
    for number, turn in enumerate(turns, 1):
        if first <= number <= last:
            messages = recorded_messages(turn.meta) if said is None else said[number - 1]
            printer.event("transcript", number=number, id=turn.id, messages=messages, stop=turn.meta.get("stop"))
            printer.line(f"=== turn {number} {short_id(turn.id)}")
            print_messages(messages, printer)
    printer.done(name=name, source="record" if said is None else "ids")


def _from_ids(
    store: Store, settings: Settings, name: str, printer: Printer, turns: Sequence[Turn]
) -> list[list[dict[str, Any]]] | None:
    """Messages of each turn, read back from the ids; None when the session's tokenizer is not at hand."""
    from k3cli.engine.transcript import load_renderer, transcript

    session = store.session(name)
    assert session.identity is not None
    try:
        renderer = load_renderer(settings.model_ref)
        other = renderer.tokenizer.digest != session.identity.tokenizer
        why = f"the tokenizer of {settings.model_ref} is not the session's" if other else ""
    except K3Error as problem:
        why = str(problem)
    if why:
        printer.notice(f"showing the recorded text, not the token ids ({why})")
        return None
    found: list[list[dict[str, Any]]] = [[] for _ in turns]
    for entry in transcript(renderer, store.tokens(turns[-1].id).tolist() if turns else []):
        # An answer that was cut is closed by the turn after it: what counts is where a message begins.
        owner = next(index for index, turn in enumerate(turns) if entry["start"] < turn.total)
        found[owner].append(entry)
    return found
