"""How a message that was cut is ended in good form, wherever in it the cut fell."""

from __future__ import annotations

from collections.abc import Set

from k3cli.chat.tags import Channel, HalfTag, Tags
from k3cli.chat.tokenizer import Tokenizer


def closing_ids(tokenizer: Tokenizer, channel: Channel | None, seen: Set[Channel], tag: HalfTag | None) -> list[int]:
    """Ids that end a message. channel: the one that is open. seen: those that were, it among them.

    tag: one that was being written. It is finished where it is plain which it was to be.
    """
    tags = Tags(tokenizer)
    ids: list[int] = []
    name = _likely(tag, channel, seen) if tag is not None else None
    if tag is not None and name is not None:
        ids += [*tokenizer.encode_text(name[len(tag.body) :]), tokenizer.special("<|sep|>")]
        channel = name if tag.opening else ("done" if name == "message" else None)  # type: ignore[assignment]
        seen = seen | {channel} if channel is not None else seen
    if channel == "think":
        ids += tags.close("think")
        channel = None
    if channel is None and not seen & {"response", "tools"}:
        ids += tags.open("response")
        channel = "response"
    if channel in ("response", "tools"):
        ids += tags.close(channel)
    if channel != "done":
        ids += tags.close("message")
    return [*ids, tokenizer.special("<|end_of_msg|>")]


def _likely(tag: HalfTag, channel: Channel | None, seen: Set[Channel]) -> str | None:
    """The tag that was being written, where that is plain. Other half tags are left: the next marker ends them."""
    if channel == "done":
        return None
    if not tag.opening:
        name: str | None = channel or "message"
    elif channel in ("think", None) and not seen & {"response", "tools"}:
        name = "response"
    elif channel != "tools" and "tools" not in seen:
        name = "tools"
    else:
        name = None
    return name if name is not None and name.encode().startswith(tag.body) else None
