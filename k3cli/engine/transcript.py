"""A history for people: messages read back from the token ids, never from recorded text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from k3cli.chat.renderer import Renderer


def transcript(renderer: Renderer, ids: Sequence[int]) -> list[dict[str, Any]]:
    """Messages of a history, in order: `kind`, the message's own keys, `start`, `stop`, `complete`, `problems`.

    See chat.transcript.TranscriptEntry for their meaning.
    """
    return [
        {
            "kind": entry.kind,
            **entry.message,
            "start": entry.start,
            "stop": entry.stop,
            "complete": entry.complete,
            "problems": list(entry.problems),
        }
        for entry in renderer.parse_transcript(ids)
    ]


def load_renderer(model_ref: str | Path) -> Renderer:
    """Chat format of a model without its weights (and without torch), to read a stored session. Raises ModelError."""
    from k3cli.chat.renderer import renderer_of
    from k3cli.chat.tokenizer import Tokenizer
    from k3cli.model.hub import resolve_model

    return renderer_of(Tokenizer.from_dir(resolve_model(model_ref)))
