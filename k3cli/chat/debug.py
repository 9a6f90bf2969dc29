"""What `k3 debug tokens` does: text, or a chat object, to the ids that the engine would see."""

from __future__ import annotations

import json
from pathlib import Path

from k3cli.chat.renderer import renderer_of
from k3cli.chat.tokenizer import Tokenizer
from k3cli.errors import UsageError


def debug_tokens(tokenizer_dir: str | Path, *, text: str | None = None, chat: str | Path | None = None) -> list[int]:
    """Ids of `text` (no markers, nothing added), or of the whole prompt that the file `chat` describes.

    chat: a JSON object as `messages.check_request` describes; thinking defaults to what the family does, effort to
    max when thinking. Raises UsageError for a bad file, ModelError for a bad tokenizer folder.
    """
    if (text is None) == (chat is None):
        raise UsageError("both text and --chat" if chat is not None else "neither text nor --chat", "one of them")
    tokenizer = Tokenizer.from_dir(tokenizer_dir)
    if chat is None:
        return tokenizer.encode_text(text or "")
    return renderer_of(tokenizer).render(read_chat(chat))


def read_chat(path: str | Path) -> dict[str, object]:
    """The object in a `--chat` file. Raises UsageError when it cannot be read or is no JSON object."""
    try:
        data = json.loads(Path(path).read_bytes())
    except OSError as problem:
        raise UsageError(f"--chat {path}: {problem.strerror}", "a readable file") from None
    except (ValueError, RecursionError) as problem:
        raise UsageError(f"--chat {path} is no JSON ({problem})", "a JSON object with messages") from None
    if not isinstance(data, dict):
        raise UsageError(f"--chat {path} holds a {type(data).__name__}", "a JSON object with messages")
    return data
