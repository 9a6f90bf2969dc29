"""Streaming parser of K3's channels and tool calls, on ids.

What the model is known to leave out is accepted: the closing tag of a channel before the next one opens, the response
channel before `tools`. Anything else out of place is reported as `Malformed` and what can be read is kept.
Source: chat-format notes, section 2.8.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from k3cli.chat.arguments import is_json, quote
from k3cli.chat.parser import OpenCall, StreamParser
from k3cli.chat.tags import Channel, HalfTag, parse_tag
from k3cli.chat.tokenizer import Tokenizer
from k3cli.chat.xtml_closing import closing_ids

_ORDER: tuple[Channel, ...] = ("think", "response", "tools")


@dataclass
class Argument:
    """The argument, or the `json` block (key None), that is open."""

    key: str | None
    type: str
    literal: list[str]


class XtmlParser(StreamParser):
    """See `StreamParser`. Begins inside the channel that the generation prompt opened.

    channel None begins right after the opening tag of a message: that is how a history is read back, and
    then the text of `json` blocks is kept even when it is no JSON object, since a client may have sent it so.
    """

    def __init__(
        self, tokenizer: Tokenizer, channel: Literal["think", "response"] | None, mint: Callable[[], str] | None = None
    ) -> None:
        super().__init__(tokenizer, mint, recorded=channel is None)
        self._open = tokenizer.special("<|open|>")
        self._close = tokenizer.special("<|close|>")
        self._sep = tokenizer.special("<|sep|>")
        self._eom = tokenizer.special("<|end_of_msg|>")
        self._channel: Channel | None = None
        self._seen: set[Channel] = set()
        self._tag: HalfTag | None = None
        self._call: OpenCall | None = None
        self._argument: Argument | None = None
        self._block_read = False
        self._skip: str | None = None
        self._gap = ""
        self._at_end = False
        if channel is not None:
            self._enter(channel)

    # -- ids ------------------------------------------------------------------------------------------------------

    def _take(self, token: int) -> None:
        if self._tokenizer.is_text(token):
            data = self._tokenizer.token_bytes(token)
            if self._tag is not None:
                self._tag.body += data
            else:
                self._body(self._decoder.push(data))
            return
        if token == self._sep and self._tag is not None:
            tag, self._tag = self._tag, None
            self._on_tag(tag)
            return
        self._flush()
        if token in (self._open, self._close):
            self._tag = HalfTag(token == self._open, bytearray())
        elif token == self._eom:
            self._finish_message()
        else:
            self._stop_or_stray(token)

    def _flush(self) -> None:
        """Before a marker: give out what is held back, and report what has no place."""
        if self._tag is not None:
            self._malformed("unfinished-tag", str(self._tag))
            self._tag = None
        self._body(self._decoder.flush())
        if self._gap.strip():
            self._malformed("stray-text", self._gap)
        self._gap = ""

    def _cut(self) -> None:
        tag = self._tag
        self._body(self._decoder.flush())
        if self._call is not None:
            self._drop_call(self._call)
        elif tag is not None and self._channel == "tools":
            self._malformed("unfinished-tag", str(tag))
        if self._gap.strip():
            self._malformed("stray-text", self._gap)
            self._gap = ""

    def _finish_message(self) -> None:
        self._at_end = True
        channel = self._channel
        self._leave()
        if channel != "done":
            self._malformed("unclosed-message", f"the message ended without its closing tag (channel: {channel})")
        self._end("stop")

    def _enter(self, channel: Channel) -> None:
        self._channel = channel
        self._seen.add(channel)
        if channel == "think":
            self._say(channel, "")

    def _leave(self) -> None:
        """Out of whatever channel is open; a call still open in it never becomes one."""
        if self._call is not None:
            self._drop_call(self._call)
        self._channel = self._call = self._argument = None

    # -- text -----------------------------------------------------------------------------------------------------

    def _body(self, text: str) -> None:
        if not text or self._skip is not None:
            return
        if self._call is None and self._channel in ("think", "response"):
            self._say(self._channel, text)
        elif self._call is not None and self._argument is not None:
            self._write(self._call, self._argument, text)
        else:
            self._gap += text
            if self._channel is None and "response" not in self._seen and self._gap.strip():
                # An answer without its opening tag is still an answer.
                self._malformed("missing-tag", "text before the response channel was opened")
                text, self._gap = self._gap, ""
                self._enter("response")
                self._say("response", text)

    def _write(self, call: OpenCall, argument: Argument, text: str) -> None:
        if argument.type == "string" and argument.key is not None:
            self._grow_call(call, quote(text))
        else:
            argument.literal.append(text)
            self._grow_call(call, text)

    # -- tags -----------------------------------------------------------------------------------------------------

    def _on_tag(self, tag: HalfTag) -> None:
        parsed = parse_tag(tag.text)
        if parsed is None or (parsed[1] and not tag.opening):
            self._malformed("bad-tag", str(tag))
            if self._call is not None:
                self._fail("a tag inside it cannot be read")
            return
        name, attributes = parsed
        if self._skip is not None:
            known = name in (*_ORDER, "message", "call")
            if not known and (tag.opening or name != self._skip):
                return
            if name == self._skip:
                self._skip = None
                return
            self._skip = None
        if tag.opening:
            self._on_open(name, attributes)
        else:
            self._on_close(name)

    def _on_open(self, name: str, attributes: dict[str, str]) -> None:
        if self._channel == "done" or name == "message":
            self._malformed("unexpected-tag", f"opening tag {name!r} after the end of the message")
            self._leave()
            self._channel = "done"
            self._skip = name
        elif name in ("think", "response", "tools"):
            self._open_channel(name)  # type: ignore[arg-type]
        elif name == "call":
            self._open_call(attributes)
        elif name in ("argument", "json"):
            self._open_argument(name, attributes)
        else:
            self._malformed("unknown-tag", f"opening tag {name!r}")
            if self._call is not None:
                self._fail(f"unknown tag {name!r} inside it")
            self._skip = name

    def _open_channel(self, name: Literal["think", "response", "tools"]) -> None:
        late = any(_ORDER.index(seen) >= _ORDER.index(name) for seen in self._seen if seen != "done")
        if late:
            self._malformed("unexpected-tag", f"opening tag {name!r} again or out of order")
        self._leave()
        self._enter(name)

    def _open_call(self, attributes: dict[str, str]) -> None:
        if self._call is not None:
            self._drop_call(self._call)
            self._call = self._argument = None
        if self._channel != "tools":
            self._malformed("missing-tag", "a call outside the tools channel")
            self._enter("tools")
        name = attributes.get("tool", "")
        self._block_read = False
        self._call = self._begin_call(name, None, None if name else "no tool name")

    def _open_argument(self, kind: str, attributes: dict[str, str]) -> None:
        call = self._call
        if call is None:
            self._malformed("unexpected-tag", f"opening tag {kind!r} outside a call")
            self._skip = kind
            return
        if self._argument is not None:
            self._fail(f"{kind!r} opens inside another argument")
            return
        first = not call.parts
        if kind == "json":
            if not first or self._block_read:
                self._fail("a json block beside arguments")
            self._argument = Argument(None, "object", [])
            return
        key = attributes.get("key")
        if key is None:
            self._fail("an argument without a key")
        if self._block_read:
            self._fail("an argument beside a json block")
        self._argument = Argument(key or "", attributes.get("type", ""), [])
        self._grow_call(call, f'{"{" if first else ", "}"{quote(key or "")}": ')
        if self._argument.type == "string":
            self._grow_call(call, '"')

    def _on_close(self, name: str) -> None:
        if name == "message" and self._channel != "done":
            self._leave()
            self._channel = "done"
        elif name in _ORDER and name == self._channel:
            self._leave()
        elif name in ("argument", "json") and self._call is not None:
            self._close_argument(name, self._call)
        elif name == "call" and self._call is not None:
            self._close_call(self._call)
        else:
            self._malformed("unexpected-tag", f"closing tag {name!r}")

    def _close_argument(self, kind: str, call: OpenCall) -> None:
        argument, self._argument = self._argument, None
        if argument is None or (argument.key is None) != (kind == "json"):
            self._fail(f"closing tag {kind!r} without its opening")
        elif argument.key is None:
            self._block_read = True
        elif argument.type == "string":
            self._grow_call(call, '"')
        elif not is_json("".join(argument.literal)):
            self._fail(f"argument {argument.key!r} of type {argument.type!r} is no JSON value")

    def _close_call(self, call: OpenCall) -> None:
        if self._argument is not None:
            self._fail("an argument in it was not closed")
        elif not self._block_read:
            self._grow_call(call, "}" if call.parts else "{}")
        self._end_call(call, any_arguments=self._recorded)
        self._call = self._argument = None

    def _fail(self, problem: str) -> None:
        if self._call is not None and self._call.problem is None:
            self._call.problem = problem

    def close_ids(self) -> list[int]:
        if self._at_end:
            return []
        # Half a tag inside what is skipped means nothing: the next marker ends it.
        return closing_ids(self._tokenizer, self._channel, self._seen, self._tag if self._skip is None else None)
