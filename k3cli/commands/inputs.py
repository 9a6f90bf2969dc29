"""What a person hands over: prompts, system text, tool catalogues, tool results. Checked before any model is loaded."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from k3cli.chat.messages import check_response_format, check_tools
from k3cli.commands.combinations import refuse_unused
from k3cli.config import path_of
from k3cli.errors import UsageError
from k3cli.words import counted

ONE_SHOT = "-p TEXT, a pipe, - or --tool-result"


def read_text(path: str, what: str) -> str:
    """The text of a file, or of stdin for "-". Raises UsageError naming `what` when it cannot be had."""
    if not path:
        raise UsageError(f"{what} names no file", "a readable file, or - for stdin")
    try:
        raw = sys.stdin.buffer.read() if path == "-" else path_of(path).read_bytes()
    except OSError as problem:
        raise UsageError(f"{what} {path}: {problem.strerror}", "a readable file, or - for stdin") from None
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as problem:
        where = what if path == "-" and what == "stdin" else f"{what} {path}"
        raise UsageError(f"{where} has byte {raw[problem.start]:#04x} at {problem.start}", "UTF-8 text") from None


@dataclass(frozen=True)
class Request:
    """What one run is asked to do. Neither prompt nor results: a terminal asks for prompts."""

    prompt: str | None = None
    results: list[dict[str, Any]] | None = None
    add_tools: list[dict[str, Any]] = field(default_factory=list)
    tool_choice: str | None = None
    response_format: dict[str, Any] | None = None

    @property
    def one_shot(self) -> bool:
        return self.prompt is not None or self.results is not None


def read_request(
    prompt: str | None,
    dash: str | None,
    *,
    tool_result: str | None = None,
    add_tools: str | None = None,
    tool_choice: str | None = None,
    response_format: str | None = None,
    head: Mapping[str, str | None] | None = None,
    json: bool = False,
) -> Request:
    """Read and check everything the user handed over for this run.

    `-p TEXT` alone never touches stdin. `-` reads stdin (`-p -` too); with `-p TEXT -` stdin follows the text after an
    empty line. With neither, and no tool result, a stdin that is not a terminal is the prompt. A run that is left
    without a prompt needs a terminal on both sides, and takes nothing that is for one turn. Raises UsageError.
    head: other options that name files, by option: only one of all may be stdin, which can be read once.
    """
    if dash not in (None, "-"):
        raise UsageError(f"unexpected argument {dash!r}", "- (read stdin) or nothing", "give the prompt with -p TEXT")
    if prompt == "-":
        prompt, dash = None, "-"
    piped_prompt = dash == "-" or (prompt is None and tool_result is None and not sys.stdin.isatty())
    files = {"--tool-result": tool_result, "--add-tools": add_tools, "--response-format": response_format}
    refuse_shared_stdin({"the prompt": "-" if piped_prompt else None, **files, **(head or {})})
    if tool_choice not in (None, "auto", "none", "required"):
        raise UsageError(f"--tool-choice is {tool_choice!r}", "auto, none or required")
    text = None if prompt is None else _not_empty(prompt, "the text of -p")
    if piped_prompt:
        piped = read_text("-", "stdin").rstrip("\n")
        text = _not_empty(piped, "stdin") if text is None else (text + "\n\n" + piped if piped else text)
    request = Request(
        prompt=text,
        results=read_tool_results(tool_result),
        add_tools=read_tools(add_tools, "--add-tools") or [],
        tool_choice=None if tool_choice == "auto" else tool_choice,
        response_format=read_response_format(response_format),
    )
    if not request.one_shot and (json or not sys.stdout.isatty()):
        where = "--json" if json else "a stdout that is not a terminal"
        raise UsageError(f"no prompt was given with {where}", ONE_SHOT)
    if not request.one_shot:
        one_turn = {"--add-tools": add_tools, "--tool-choice": request.tool_choice}
        refuse_unused({**one_turn, "--response-format": response_format}, "without a prompt", f"{ONE_SHOT}, one turn")
    return request


def refuse_shared_stdin(paths: Mapping[str, str | None]) -> None:
    """Refuse a second reader of stdin, which would find it empty. paths: by what they are for."""
    readers = [what for what, path in paths.items() if path == "-"]
    if len(readers) > 1:
        raise UsageError(f"both {readers[0]} and {readers[1]} are read from stdin", "only one of them")


def read_system(path: str | None) -> str | None:
    return None if path is None else _not_empty(read_text(path, "--system").strip("\n"), f"--system {path}")


def read_tools(path: str | None, option: str = "--tools") -> list[dict[str, Any]] | None:
    """A tool catalogue: a JSON list of OpenAI-style declarations, or an object with such a list under "tools"."""
    if path is None:
        return None
    data = _json(read_text(path, option), f"{option} {path}")
    if isinstance(data, dict) and set(data) == {"tools"}:
        data = data["tools"]
    if not isinstance(data, list):
        raise UsageError(f"{option} {path} holds {_kind(data)}", "a JSON list of tool declarations")
    check_tools(data, f"{option} {path}: tools")
    return data


def read_response_format(path: str | None) -> dict[str, Any] | None:
    """An OpenAI-style response format: a JSON object with `type`."""
    if path is None:
        return None
    data = _json(read_text(path, "--response-format"), f"--response-format {path}")
    if not isinstance(data, dict):
        raise UsageError(f"--response-format {path} holds {_kind(data)}", "a JSON object")
    check_response_format(data)
    return data


def read_tool_results(path: str | None) -> list[dict[str, Any]] | None:
    """Tool results from a file or stdin; see `parse_tool_results`."""
    return None if path is None else parse_tool_results(read_text(path, "--tool-result"), f"--tool-result {path}")


def parse_tool_results(text: str, what: str) -> list[dict[str, Any]]:
    """JSON `{"id"?, "name"?, "content"}` or a list of those; any other text is the content of the one open call."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return [{"content": text}]
    items = data if isinstance(data, list) else [data]
    if not items or not all(isinstance(item, dict) and "content" in item for item in items):
        return [{"content": text}]
    for item in items:
        unknown = sorted(set(item) - {"id", "name", "content"})
        if unknown:
            raise UsageError(f"{what} has key {unknown[0]!r}", "id, name and content")
        if not isinstance(item["content"], str):
            item["content"] = json.dumps(item["content"], ensure_ascii=False)
        for key in ("id", "name"):
            if not isinstance(item.get(key, ""), str):
                raise UsageError(f"{what}: {key} is {_kind(item[key])}", "a string")
    return items


def bind_tool_results(results: list[dict[str, Any]], calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tool messages for the open `calls` (`id`, `name`), one for each, in the order of the calls.

    A result is matched by id, else by name among calls still unanswered, else it belongs to the only one left.
    Raises UsageError when a result has no call or a call no result: the model waits for all of them.
    """
    if not calls:
        raise UsageError(
            "a tool result was given but no tool call is open", "a session whose last turn ended in a tool call"
        )
    waiting = [(call["id"], call["name"]) for call in calls]
    shown = ", ".join(f"{name} (id {call_id})" for call_id, name in waiting)
    answers: dict[str, dict[str, Any]] = {}
    for result in results:
        fits = [
            (call_id, name)
            for call_id, name in waiting
            if call_id not in answers and result.get("id", call_id) == call_id and result.get("name", name) == name
        ]
        if not fits:
            raise UsageError(f"no open call fits the tool result {_label(result)}", f"one of {shown}")
        if len(fits) > 1 and "id" not in result and "name" not in result and len(results) != len(calls):
            raise UsageError("a tool result names no call and several are open", f"an id or a name, of {shown}")
        call_id, name = fits[0]
        answers[call_id] = {"role": "tool", "tool_call_id": call_id, "name": name, "content": result["content"]}
    missing = [f"{name} (id {call_id})" for call_id, name in waiting if call_id not in answers]
    if missing:
        raise UsageError(
            f"{len(answers)} of {counted(len(calls), 'tool result')} given", "one each; missing " + ", ".join(missing)
        )
    return [answers[call_id] for call_id, _ in waiting]


def _label(result: dict[str, Any]) -> str:
    return " ".join(f"{key} {result[key]!r}" for key in ("id", "name") if key in result) or "without id and name"


def _not_empty(text: str, what: str) -> str:
    """The text, when there is some and UTF-8 can hold it: the command line may carry any bytes."""
    try:
        text.encode()
    except UnicodeEncodeError as problem:
        raise UsageError(f"{what} has a byte that is no UTF-8 at character {problem.start}", "UTF-8 text") from None
    if not text.strip():
        raise UsageError(f"{what} is empty", "some text", "give a prompt with -p TEXT, a pipe, or -")
    return text


def _json(text: str, what: str) -> Any:
    try:
        data = json.loads(text)
        # What JSON text may spell but neither UTF-8 nor JSON can hold: lone surrogates, NaN.
        json.dumps(data, ensure_ascii=False, allow_nan=False).encode()
        return data
    except json.JSONDecodeError as problem:
        raise UsageError(f"{what} is not JSON (line {problem.lineno}: {problem.msg})", "a JSON file") from None
    # Or more than Python reads: a number of thousands of digits, nesting a thousand deep.
    except (ValueError, RecursionError) as problem:
        raise UsageError(f"{what} cannot be read ({problem})", "a JSON file of plain values") from None


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
