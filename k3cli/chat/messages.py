"""Messages as people and programs write them: the shapes, and the checks that refuse anything else by name."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from k3cli.errors import UsageError

EFFORTS = ("low", "high", "max")
TOOL_CHOICES = ("auto", "none", "required")
RESPONSE_FORMATS = ("text", "json_object", "json_schema")
MAX_TOOL_NAME = 256
"""Longest tool name, characters; what Moonshot's verifier demands."""


_KEYS: Mapping[str, tuple[str, ...]] = {
    "system": ("role", "content", "name", "tools"),
    "user": ("role", "content", "name"),
    "assistant": ("role", "content", "name", "reasoning_content", "reasoning", "tool_calls"),
    "tool": ("role", "content", "tool", "name", "tool_call_id", "id"),
}
"""What a message of each role may hold. Content is text or a list of text parts."""
_REQUEST_KEYS = ("messages", "tools", "thinking", "effort", "tool_choice", "response_format")
_MEDIA = ("image", "image_url", "video", "video_url", "input_audio", "audio_url", "file")


@dataclass(frozen=True)
class ChatRequest:
    """A checked prompt: what `k3 debug tokens --chat` reads. `thinking` and `effort` have their defaults filled in."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    thinking: bool = True
    effort: str | None = None
    tool_choice: str | None = None
    response_format: Mapping[str, Any] | None = None


def check_request(data: Any, *, thinking: bool, effort: str | None) -> ChatRequest:
    """Check an object {messages, tools?, thinking?, effort?, tool_choice?, response_format?}.

    thinking, effort: defaults for absent keys; `"effort": null` leaves the effort declaration out. Raises UsageError
    naming the place for everything that is not as described here.
    """
    request = _object(data, "the chat object", _REQUEST_KEYS)
    if not isinstance(request.get("messages"), list):
        raise UsageError(f"messages is {_kind(request.get('messages'))}", "a list of messages")
    wants = request.get("thinking", thinking)
    if not isinstance(wants, bool):
        raise UsageError(f"thinking is {_kind(wants)}", "true or false")
    return ChatRequest(
        messages=check_messages(request["messages"]),
        tools=check_tools(request.get("tools") or [], "tools"),
        thinking=wants,
        effort=check_effort(request.get("effort", effort if wants else None)),
        tool_choice=check_tool_choice(request.get("tool_choice")),
        response_format=check_response_format(request.get("response_format")),
    )


def check_messages(messages: Iterable[Any]) -> list[Mapping[str, Any]]:
    """Check every message; returns them as a list."""
    return [check_message(message, f"messages[{number}]") for number, message in enumerate(messages)]


def check_message(message: Any, where: str) -> Mapping[str, Any]:
    """Check one message: role, keys of that role, types. Keys whose value is null count as absent."""
    if not isinstance(message, Mapping):
        raise UsageError(f"{where} is {_kind(message)}", "an object with role and content")
    role = message.get("role")
    if not isinstance(role, str) or role not in _KEYS:
        hint = 'say "system" instead' if role == "developer" else None
        raise UsageError(f"{where} has role {role!r}", f"one of {', '.join(_KEYS)}", hint)
    _object({k: v for k, v in message.items() if v is not None}, where, _KEYS[role])
    for key in ("name", "tool", "tool_call_id", "id", "reasoning_content", "reasoning"):
        if message.get(key) is not None and not isinstance(message[key], str):
            raise UsageError(f"{where}.{key} is {_kind(message[key])}", "a string")
    parts = content_parts(message.get("content"), where)
    if message.get("tools") is not None:
        check_tools(message["tools"], f"{where}.tools")
        if message["tools"] and any(parts):
            raise UsageError(f"{where} has both tools and content", "two system messages, the tools first")
    if message.get("tool_calls") is not None:
        _check_calls(message["tool_calls"], f"{where}.tool_calls")
    return message


def content_parts(content: Any, where: str) -> list[str]:
    """The texts of a message body, in order; null has none. UsageError for media, which this text model cannot read."""
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise UsageError(f"{where}.content is {_kind(content)}", "a string or a list of text parts")
    texts = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind in _MEDIA:
            raise UsageError(f"{where}.content[{number}] is of type {kind!r}", "text: images are not supported")
        if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
            raise UsageError(f"{where}.content[{number}] has no text", 'a part {"type": "text", "text": ...}')
        texts.append(part["text"])
    return texts


def check_tools(tools: Any, where: str) -> list[Mapping[str, Any]]:
    """Check a catalogue of OpenAI-style declarations: functions, each name given once."""
    if not isinstance(tools, list | tuple):
        raise UsageError(f"{where} is {_kind(tools)}", "a list of tool declarations")
    seen: set[str] = set()
    for number, tool in enumerate(tools):
        place = f"{where}[{number}]"
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or tool.get("type") != "function":
            raise UsageError(f"{place} is no function", '{"type": "function", "function": {"name": ..., ...}}')
        name = check_tool_name(function.get("name"), place)
        if name in seen:
            raise UsageError(f"{place} declares {name!r} again", "one declaration for each name")
        seen.add(name)
        if not isinstance(function.get("parameters", {}), Mapping):
            raise UsageError(f"{place}.function.parameters is {_kind(function['parameters'])}", "a JSON schema object")
    return list(tools)


def tool_names(tools: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """Names of checked declarations."""
    return tuple(tool["function"]["name"] for tool in tools)


def check_tool_name(name: Any, where: str) -> str:
    if not isinstance(name, str) or not 0 < len(name) <= MAX_TOOL_NAME:
        shown = f"a name of {len(name)} characters" if isinstance(name, str) else f"the name {_kind(name)}"
        raise UsageError(f"{where} has {shown}", f"a name of 1 to {MAX_TOOL_NAME} characters")
    return name


def check_effort(effort: Any) -> str | None:
    if effort is not None and effort not in EFFORTS:
        raise UsageError(f"effort is {effort!r}", f"one of {', '.join(EFFORTS)}")
    return effort


def check_tool_choice(choice: Any) -> str | None:
    if choice is not None and choice not in TOOL_CHOICES:
        raise UsageError(
            f"tool_choice is {choice!r}", f"one of {', '.join(TOOL_CHOICES)}; a call of one named tool cannot be forced"
        )
    return choice


def check_response_format(form: Any) -> Mapping[str, Any] | None:
    if form is None:
        return None
    form = _object(form, "response_format", ("type", "json_schema"))
    if form.get("type") not in RESPONSE_FORMATS:
        raise UsageError(f"response_format.type is {form.get('type')!r}", f"one of {', '.join(RESPONSE_FORMATS)}")
    if form["type"] == "json_schema" and not isinstance(form.get("json_schema"), Mapping):
        raise UsageError(
            f"response_format.json_schema is {_kind(form.get('json_schema'))}", "an object with the schema"
        )
    if form["type"] != "json_schema" and form.get("json_schema") is not None:
        raise UsageError(f"response_format of type {form['type']!r} has a json_schema", 'type "json_schema"')
    return form


def canonical_json(value: Any, where: str) -> str:
    """JSON with all keys sorted by code point, no spaces, non-ASCII as it is. UsageError when there is no JSON form."""
    return _dump(value, where, sort_keys=True, separators=(",", ":"))


def plain_json(value: Any, where: str) -> str:
    """JSON with `, ` and `: `, keys in their order, non-ASCII as it is. UsageError when there is no JSON form."""
    return _dump(value, where, sort_keys=False, separators=(", ", ": "))


def _dump(value: Any, where: str, *, sort_keys: bool, separators: tuple[str, str]) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, sort_keys=sort_keys, separators=separators, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as problem:
        raise UsageError(f"{where} has no JSON form ({problem})", "plain JSON values") from None


def _check_calls(calls: Any, where: str) -> None:
    if not isinstance(calls, list | tuple):
        raise UsageError(f"{where} is {_kind(calls)}", "a list of tool calls")
    for number, call in enumerate(calls):
        place = f"{where}[{number}]"
        _object(call, place, ("id", "type", "index", "function"))
        if call.get("id") is not None and not isinstance(call["id"], str):
            raise UsageError(f"{place}.id is {_kind(call['id'])}", "a string")
        if call.get("type", "function") != "function":
            raise UsageError(f"{place}.type is {call['type']!r}", '"function"')
        function = _object(call.get("function"), f"{place}.function", ("name", "arguments"))
        check_tool_name(function.get("name"), f"{place}.function")
        if not isinstance(function.get("arguments"), str | Mapping | None):
            raise UsageError(f"{place}.function.arguments is {_kind(function['arguments'])}", "JSON text or an object")


def _object(value: Any, where: str, keys: Sequence[str]) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise UsageError(f"{where} is {_kind(value)}", f"an object with {', '.join(keys)}")
    unknown = sorted(str(key) for key in value if key not in keys)
    if unknown:
        raise UsageError(f"{where} has unknown key {', '.join(map(repr, unknown))}", f"only {', '.join(keys)}")
    return value


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "missing or null"}
    return names.get(type(value), f"a {type(value).__name__}")
