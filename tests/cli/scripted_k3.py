"""`k3` with a model that answers by rule, to run in a process of its own or inside a test.

The rules look at the last message: "slow N" gives N words, a moment apart; "call NAME" calls a tool; "think TEXT"
thinks first; "long" never stops; a tool result is quoted; anything else comes back as "You said: ...". The next id is a
function of the ids before it alone, kept in the state itself, so that resume, fork and replay are put to the test.
"""

from __future__ import annotations

import base64
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from k3_sessions.types import FieldSpec, StateLayout
from torch import Tensor

from k3cli.chat.renderer import Renderer, renderer_of
from k3cli.chat.tokenizer import Tokenizer
from k3cli.engine.engine import Engine
from k3cli.engine.transcript import transcript

WEIGHTS = "sha256:" + "5c" * 32
VOCAB = 512  # 256 bytes and 256 specials
LAYOUT = StateLayout(
    (
        FieldSpec("recurrent", "checkpoint", (0,), (2,), "float32"),
        FieldSpec("kv_latent", "page", (1,), (1,), "float32"),
    )
)


class ScriptedState:
    def __init__(self) -> None:
        self.ids: list[int] = []

    @property
    def position(self) -> int:
        return len(self.ids)

    def fork(self) -> ScriptedState:
        child = ScriptedState()
        child.ids = list(self.ids)
        return child

    def reserve(self, n: int) -> None:
        """Lists have room."""

    def checkpoint(self) -> dict[str, Any]:
        return {"recurrent": np.array([[len(self.ids), sum(self.ids)]], dtype=np.float32)}

    def page_rows(self, field: str, start: int, stop: int) -> Any:
        return np.array(self.ids[start:stop], dtype=np.float32).reshape(1, -1, 1)

    def load(self, restored: Any) -> None:
        state = restored.checkpoint()["recurrent"][0].tolist()
        rows = restored.page_rows("kv_latent", 0, restored.position)
        self.ids = [int(value) for value in rows.reshape(-1)]
        assert state == [len(self.ids), sum(self.ids)]


class ScriptedModel:
    window = 4
    prefill_chunk = 512

    def __init__(self, renderer: Renderer) -> None:
        self.renderer = renderer
        self.starts = {thinking: renderer.generation_prompt(thinking) for thinking in (True, False)}
        self.replies: dict[tuple[int, ...], list[int]] = {}

    def state_layout(self) -> StateLayout:
        return LAYOUT

    def new_state(self) -> ScriptedState:
        return ScriptedState()

    def prefill(self, ids: Tensor, state: ScriptedState, *, logits: str = "last") -> Tensor | None:
        rows = []
        for token in ids.tolist():
            state.ids.append(token)
            if logits == "all":
                rows.append(self._logits(state.ids))
        if logits == "none":
            return None
        return torch.stack(rows) if logits == "all" else self._logits(state.ids)

    def verify(self, ids: Tensor, state: ScriptedState) -> tuple[Tensor, list[int]]:
        child = state.fork()
        rows = []
        for token in ids.tolist():
            child.ids.append(token)
            rows.append(self._logits(child.ids))
        return torch.stack(rows), ids.tolist()

    def commit(self, state: ScriptedState, log: list[int], n: int) -> None:
        state.ids += log[:n]

    def _logits(self, ids: list[int]) -> Tensor:
        logits = torch.zeros(VOCAB)
        logits[self._next(ids)] = 100.0
        return logits

    def _next(self, ids: list[int]) -> int:
        """What follows `ids`: the reply to the newest prompt, as far as it is not yet said."""
        at, thinking = max((last_index(ids, start), thinking) for thinking, start in self.starts.items())
        if at < 0:
            return 0
        cut = at + len(self.starts[thinking])
        key = tuple(ids[:cut])
        if key not in self.replies:
            self.replies[key] = self._reply(list(key), thinking)
        reply, said = self.replies[key], len(ids) - cut
        text = self._asked(list(key))
        if text.startswith("slow ") and said % 8 == 7:
            time.sleep(0.02)
        if text == "long":
            return reply[20 + said % 10]
        return reply[said] if said < len(reply) else 0

    def _asked(self, prompt: list[int]) -> str:
        entries = [e for e in transcript(self.renderer, prompt) if e.get("role") in ("user", "tool")]
        return str(entries[-1].get("content", "")) if entries else ""

    def _reply(self, prompt: list[int], thinking: bool) -> list[int]:
        entries = [e for e in transcript(self.renderer, prompt) if e.get("role") in ("user", "tool")]
        text = str(entries[-1].get("content", ""))
        message: dict[str, Any] = {"role": "assistant", "content": f"You said: {text}"}
        word, _, rest = text.partition(" ")
        if entries[-1]["role"] == "tool":
            message["content"] = f"The tool said: {text}"
        elif word == "slow":
            message["content"] = " ".join(f"word{number}" for number in range(int(rest)))
        elif word == "think":
            message |= {"reasoning_content": f"pondering {rest}", "content": rest}
        elif word == "call":
            calls = [
                {"id": f"c{n}", "type": "function", "function": {"name": name, "arguments": {"x": str(n)}}}
                for n, name in enumerate(rest.split(), 1)
            ]
            message |= {"content": "", "tool_calls": calls}
        elif word == "escape":
            message["content"] = "red \x1b[31m and \r back"
        context = self.renderer.new_context(thinking)
        whole = self.renderer.render_message(message, context)
        return whole[len(self.starts[thinking]) :]


def last_index(ids: Sequence[int], part: Sequence[int]) -> int:
    """Where `part` last begins in `ids`, -1 if nowhere."""
    for at in range(len(ids) - len(part), -1, -1):
        if list(ids[at : at + len(part)]) == list(part):
            return at
    return -1


def make_vocab(folder: Path) -> Path:
    """A model folder with a tokenizer only: one rank per byte, K3's specials on top."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = (base64.b64encode(bytes([byte])) + b" %d\n" % byte for byte in range(256))
    (folder / "tiktoken.model").write_bytes(b"".join(lines))
    return folder


def load(model_ref: str, *, weights: str = WEIGHTS, limit: int = 8192, **_options: Any) -> Engine:
    """What `Engine.load` is replaced by. A model called "other" has other weights."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = Tokenizer.from_dir(make_vocab(Path(folder)))
    renderer = renderer_of(tokenizer)
    other = Path(model_ref).name == "other"
    return Engine(
        ScriptedModel(renderer),
        tokenizer,
        renderer,
        weights_digest="sha256:" + "00" * 32 if other else weights,
        name=model_ref if model_ref.startswith("owner/") else "scripted",
        context_limit=limit,
    )


def slow_disk(seconds: float) -> None:
    """Every sync of a file of the store takes this much longer from here on."""
    from k3_sessions.fs import RealFS

    sync = RealFS.sync

    def slowly(self: RealFS, handle: Any) -> None:
        time.sleep(seconds)
        sync(self, handle)

    RealFS.sync = slowly  # type: ignore[method-assign]


if __name__ == "__main__":
    from k3cli.commands import runtime

    slow_disk(float(os.environ.get("SLOW_DISK", "0")))

    Engine.load = staticmethod(load)  # type: ignore[method-assign,assignment]
    runtime.recommended_sampling = lambda _ref: {}
    from k3cli.main import main

    sys.exit(main())
