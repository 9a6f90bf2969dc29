"""K3's XTML chat format as token ids, with a loss class beside every id. Self-contained on purpose.

Each piece of text between two control ids is encoded on its own, as the format asks. A value that must later be
recalled exactly is wrapped in MARK_OPEN .. MARK_CLOSE by the template that writes it; the marks are removed here and
the tokens between them get the class VALUE.
"""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
from vocab import Vocab

PAD, CHAT, DOC, ANSWER, VALUE = range(5)  # loss classes
MARK_OPEN, MARK_CLOSE = "\x01", "\x02"
MARKS = re.compile(f"{MARK_OPEN}(.*?){MARK_CLOSE}", re.DOTALL)

EFFORT_TEXT = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the response channel), "
    "supported values include `low`, `medium`, `high`, and `max`.\n"
    "Now the system is invoked with `thinking_effort={}`."
)
TOOLS_TEXT = "# Tools\nHere are the available tools, described in JSONSchema.\n\n```json\n{}\n```"


def unmark(text: str) -> str:
    return text.replace(MARK_OPEN, "").replace(MARK_CLOSE, "")


def argument_type(value: Any) -> str:
    if value is None:
        return "null"
    kinds = ((bool, "boolean"), (str, "string"), ((int, float), "number"), (dict, "object"), (list, "array"))
    return next(name for kind, name in kinds if isinstance(value, kind))


class Writer:
    """Grows one conversation: `ids` and `classes`, two lists of equal length."""

    def __init__(self, vocab: Vocab, thinking: bool) -> None:
        self.vocab = vocab
        self.thinking = thinking
        self.ids: list[int] = []
        self.classes: list[int] = []
        self._open, self._close = vocab.special("<|open|>"), vocab.special("<|close|>")
        self._sep, self._end = vocab.special("<|sep|>"), vocab.special("<|end_of_msg|>")

    def __len__(self) -> int:
        return len(self.ids)

    def raw(self, ids: list[int], cls: int) -> None:
        self.ids += ids
        self.classes += [cls] * len(ids)

    def text(self, text: str, cls: int) -> None:
        if MARK_OPEN not in text:
            self.raw(self.vocab.encode(text), cls)
            return
        spans, plain, last = [], "", 0
        for match in MARKS.finditer(text):
            plain += text[last : match.start()]
            start = len(plain.encode())
            plain += match[1]
            spans.append((start, len(plain.encode())))
            last = match.end()
        plain += text[last:]
        ids = self.vocab.encode(plain)
        ends = np.cumsum([self.vocab.lengths[i] for i in ids])
        classes = np.full(len(ids), cls)
        if cls == ANSWER:
            for start, stop in spans:
                classes[(ends > start) & (np.concatenate(([0], ends[:-1])) < stop)] = VALUE
        self.ids += ids
        self.classes += classes.tolist()

    def open_tag(self, tag: str, cls: int, **attributes: str) -> None:
        self.raw([self._open], cls)
        self.text(tag, cls)
        for name, value in attributes.items():
            escaped = value.replace("&", "&amp;").replace('"', "&quot;")
            for part in (f" {name}", '="', escaped, '"'):
                self.text(part, cls)
        self.raw([self._sep], cls)

    def close_tag(self, tag: str, cls: int) -> None:
        self.raw([self._close], cls)
        self.text(tag, cls)
        self.raw([self._sep], cls)

    def end(self, cls: int) -> None:
        self.close_tag("message", cls)
        self.raw([self._end], cls)

    def message(self, role: str, content: str | list[str | list[int]], **attributes: str) -> None:
        """A message that is not the assistant's. Pre-encoded parts (lists of ids) count as document text."""
        self.open_tag("message", CHAT, role=role, **attributes)
        for part in [content] if isinstance(content, str) else content:
            if isinstance(part, str):
                self.text(part, CHAT)
            else:
                self.raw(part, DOC)
        self.end(CHAT)

    def tools(self, tools: list[dict[str, Any]]) -> None:
        body = json.dumps(tools, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        self.message("system", TOOLS_TEXT.format(body), type="tool-declare")

    def effort(self, level: str) -> None:
        self.message("system", EFFORT_TEXT.format(level), type="thinking-effort")

    def generation_prompt(self) -> None:
        self.open_tag("message", CHAT, role="assistant")
        self.open_tag("think" if self.thinking else "response", CHAT)

    def assistant(self, think: str, response: str, calls: list[tuple[str, dict[str, Any]]] | None = None) -> None:
        self.generation_prompt()
        if self.thinking:
            self.text(think, ANSWER)
            self.close_tag("think", ANSWER)
            self.open_tag("response", ANSWER)
        self.text(response, ANSWER)
        self.close_tag("response", ANSWER)
        if calls:
            self.open_tag("tools", ANSWER)
            for index, (name, arguments) in enumerate(calls, 1):
                self.open_tag("call", ANSWER, tool=name, index=str(index))
                for key, value in arguments.items():
                    self.open_tag("argument", ANSWER, key=key, type=argument_type(value))
                    self.text(value if isinstance(value, str) else json.dumps(value), ANSWER)
                    self.close_tag("argument", ANSWER)
                self.close_tag("call", ANSWER)
            self.close_tag("tools", ANSWER)
        self.end(ANSWER)
