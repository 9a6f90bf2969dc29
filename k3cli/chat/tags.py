"""K3's tags: control ids around a name and its attributes, written and read."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from k3cli.chat.tokenizer import Tokenizer

_TAG = re.compile(r'\s*([^\s"=]+)((?:\s+[^\s"=]+="[^"]*")*)\s*')
_ATTRIBUTE = re.compile(r'\s+([^\s"=]+)="([^"]*)"')

Attributes = Iterable[tuple[str, str]]
Channel = Literal["think", "response", "tools", "done"]
"""What of a message is open, "done" behind its closing tag."""


class Tags:
    """Control ids and the tags made of them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._text = tokenizer.encode_text
        self._open = tokenizer.special("<|open|>")
        self._close = tokenizer.special("<|close|>")
        self._sep = tokenizer.special("<|sep|>")
        self._end = tokenizer.special("<|end_of_msg|>")

    def open(self, tag: str, attributes: Attributes = ()) -> list[int]:
        ids = [self._open, *self._text(tag)]
        for name, value in attributes:
            # Four pieces, never joined: `="_` would be one token, `="` and `_id` are two.
            for piece in (f" {name}", '="', value.replace("&", "&amp;").replace('"', "&quot;"), '"'):
                ids += self._text(piece)
        return [*ids, self._sep]

    def close(self, tag: str) -> list[int]:
        return [self._close, *self._text(tag), self._sep]

    def message(self, attributes: Attributes, body: Iterable[int]) -> list[int]:
        return [*self.open("message", attributes), *body, *self.close("message"), self._end]


def parse_tag(text: str) -> tuple[str, dict[str, str]] | None:
    """Name and attributes (unescaped) of a tag's text; None when it is no tag."""
    tag = _TAG.fullmatch(text)
    if tag is None:
        return None
    return tag[1], {
        key: value.replace("&quot;", '"').replace("&amp;", "&") for key, value in _ATTRIBUTE.findall(tag[2])
    }


@dataclass
class HalfTag:
    """A tag whose `<|sep|>` has not come yet."""

    opening: bool
    body: bytearray

    @property
    def text(self) -> str:
        return self.body.decode("utf-8", "replace")

    def __str__(self) -> str:
        return f"{'opening' if self.opening else 'closing'} tag {self.text!r}"
