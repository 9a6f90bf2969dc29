"""A history of ids back to messages, for people to read. The ids stay the truth: nothing here is rendered again."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from k3cli.chat.events import Malformed
from k3cli.chat.k2_parser import K2Parser
from k3cli.chat.parser import StreamParser
from k3cli.chat.tags import parse_tag
from k3cli.chat.tokenizer import Tokenizer
from k3cli.chat.xtml_parser import XtmlParser


@dataclass(frozen=True)
class TranscriptEntry:
    """One message of a history.

    kind: "message"; for what the format itself puts in as system text "tool-declare", "thinking-effort",
    "tool-choice" or "response-format"; "stray" for ids outside any message. message: the shape of chat.messages
    (tool declarations carry `tools`; ids of tool calls are made up, in K3 they are not recorded).
    start, stop: its ids are `ids[start:stop]`. complete: its end was there. problems: where the format was left.
    """

    kind: str
    message: dict[str, Any]
    start: int
    stop: int
    complete: bool
    problems: tuple[str, ...] = ()


def read_xtml(tokenizer: Tokenizer, ids: Sequence[int]) -> list[TranscriptEntry]:
    """The messages of a K3 history, the unfinished last one included."""
    opener, sep = tokenizer.special("<|open|>"), tokenizer.special("<|sep|>")
    closing = [tokenizer.special("<|close|>"), *tokenizer.encode_text("message"), sep]
    mint = _counter()
    entries = []
    for start, stop, complete in _spans(ids, tokenizer.special("<|end_of_msg|>")):
        span = list(ids[start : stop - 1] if complete else ids[start:stop])
        head = span.index(sep) if sep in span else len(span)
        tag = parse_tag(_decode(tokenizer, span[1:head])) if span[:1] == [opener] else None
        if tag is None or tag[0] != "message" or "role" not in tag[1] or head == len(span):
            entries.append(_stray(tokenizer, ids, start, stop, complete))
            continue
        attributes, body = tag[1], span[head + 1 :]
        role = attributes.pop("role")
        if role == "assistant":
            parser = XtmlParser(tokenizer, None, mint)
            message, problems = _assistant(parser, ids[start + head + 1 : stop], complete)
            entries.append(TranscriptEntry("message", message | attributes, start, stop, complete, problems))
            continue
        closed = body[-len(closing) :] == closing
        text = _decode(tokenizer, body[: -len(closing)] if closed else body)
        kind = attributes.pop("type", "message") if role == "system" else "message"
        problems = () if closed or not complete else ("unclosed-message: no closing tag",)
        attributes.pop("index", None)
        shape: dict[str, Any] = {"role": role, **attributes, "content": text}
        if kind == "tool-declare" and (tools := _declared(text)) is not None:
            shape = {"role": role, "tools": tools}
        entries.append(TranscriptEntry(kind, shape, start, stop, complete, problems))
    return entries


def read_k2(tokenizer: Tokenizer, ids: Sequence[int]) -> list[TranscriptEntry]:
    """The messages of a K2-style history, the unfinished last one included."""
    roles = {tokenizer.special(f"<|im_{role}|>"): role for role in ("system", "user", "assistant")}
    middle = tokenizer.special("<|im_middle|>")
    mint = _counter()
    entries = []
    for start, stop, complete in _spans(ids, tokenizer.special("<|im_end|>")):
        span = list(ids[start : stop - 1] if complete else ids[start:stop])
        head = span.index(middle) if middle in span else len(span)
        if not span or span[0] not in roles or head == len(span):
            entries.append(_stray(tokenizer, ids, start, stop, complete))
            continue
        role, label = roles[span[0]], _decode(tokenizer, span[1:head])
        if role == "assistant":
            parser = K2Parser(tokenizer, mint, recorded=True)
            message, problems = _assistant(parser, ids[start + head + 1 : stop], complete)
            entries.append(TranscriptEntry("message", message, start, stop, complete, problems))
            continue
        text = _decode(tokenizer, span[head + 1 :])
        shape: dict[str, Any] = {"role": role, "content": text}
        if role == "system" and label == "tool":
            title, newline, rest = text.partition("\n")
            shape = {"role": "tool", "content": text}
            if newline and title.startswith("## Return of "):
                shape = {"role": "tool", "tool_call_id": title.removeprefix("## Return of "), "content": rest}
        entries.append(TranscriptEntry("message", shape, start, stop, complete))
    return entries


def _spans(ids: Sequence[int], end: int) -> list[tuple[int, int, bool]]:
    """(start, stop, complete) of each stretch that ends with `end`, and of what follows the last one."""
    spans = []
    start = 0
    for stop, token in enumerate(ids, start=1):
        if token == end:
            spans.append((start, stop, True))
            start = stop
    if start < len(ids):
        spans.append((start, len(ids), False))
    return spans


def _assistant(parser: StreamParser, ids: Sequence[int], complete: bool) -> tuple[dict[str, Any], tuple[str, ...]]:
    events = [event for token in ids for event in parser.feed(token)]
    if not complete:
        events += parser.finish("open")
    problems = tuple(f"{event.reason}: {event.detail}" for event in events if isinstance(event, Malformed))
    return parser.message(), problems


def _stray(tokenizer: Tokenizer, ids: Sequence[int], start: int, stop: int, complete: bool) -> TranscriptEntry:
    text = _decode(tokenizer, ids[start:stop])
    return TranscriptEntry(
        "stray", {"role": "system", "content": text}, start, stop, complete, ("ids outside any message",)
    )


def _decode(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Text of ids, markers by name: for people, so an id that is out of the vocabulary is shown and not refused."""
    known = (
        tokenizer.token_bytes(token) if 0 <= token < tokenizer.n_vocab else f"<|unknown {token}|>".encode()
        for token in ids
    )
    return b"".join(known).decode("utf-8", "replace")


def _declared(body: str) -> list[dict[str, Any]] | None:
    """The tools of a declaration, whose JSON stands alone on the line before the last."""
    lines = body.split("\n")
    if len(lines) < 3 or lines[-3] != "```json":
        return None
    try:
        tools = json.loads(lines[-2])
    except json.JSONDecodeError:
        return None
    return tools if isinstance(tools, list) else None


def _counter() -> Callable[[], str]:
    count = itertools.count(1)
    return lambda: f"call_{next(count)}"
