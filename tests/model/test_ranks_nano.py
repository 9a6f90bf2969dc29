"""k3-nano over several ranks on a CPU against one process: logits, answers token by token, states handed over."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from k3cli.chat.renderer import renderer_for
from k3cli.chat.tokenizer import Tokenizer
from k3cli.config import NANO

ROUNDING = 1e-3
"""Between one process and several, on logits with a standard deviation of about 6."""


class Chat:
    """One conversation as ids, a piece for each turn, the ones before it evaluated."""

    def __init__(self) -> None:
        self.tokenizer = Tokenizer.from_dir(NANO)
        self.renderer = renderer_for("kimi_k3", self.tokenizer)
        self.context = self.renderer.new_context(True)
        self.stop = self.tokenizer.special("<|end_of_msg|>")

    def user(self, text: str) -> torch.Tensor:
        message = self.renderer.render_messages([{"role": "user", "content": text}], self.context)
        return torch.tensor([*message, *self.renderer.generation_prompt(True)])


def answer(net: Any, state: Any, prompt: torch.Tensor, stop: int) -> tuple[list[int], torch.Tensor]:
    """Greedy (ids, logits behind the prompt and behind every id); the stop id is evaluated too."""
    rows = [net.prefill(prompt, state, logits="all")]
    ids = [int(rows[0][-1].argmax())]
    while len(ids) < 90:
        found, log = net.verify(torch.tensor(ids[-1:]), state)
        net.commit(state, log, 1)
        rows.append(found)
        if ids[-1] == stop:
            break
        ids.append(int(found[0].argmax()))
    return ids, torch.cat(rows)


def stored(state: Any) -> SimpleNamespace:
    """What the store would give back of a state."""
    fields, position = state.checkpoint(), state.position
    pages = {name: state.page_rows(name, 0, position) for name in ("kv_latent", "k_pe")}

    def page_rows(name: str, start: int, stop: int) -> Any:
        return pages[name][:, start:stop]

    return SimpleNamespace(position=position, checkpoint=lambda: fields, page_rows=page_rows)


@pytest.mark.parametrize("size", [2, 4])
def test_nano_over_ranks_and_alone(load_both, size: int):
    chat = Chat()
    told, asked = chat.user("Remember that the deploy key is K7-4411-QX."), chat.user("What is the deploy key?")
    found = load_both(NANO, size)
    one, many = found.one.model, found.many.model
    try:
        assert found.many.weights_digest == found.one.weights_digest
        first, other = one.new_state(), many.new_state()
        noted, logits = answer(one, first, told, chat.stop)
        again, logits_many = answer(many, other, told, chat.stop)
        assert again == noted
        assert (logits - logits_many).abs().max() < ROUNDING
        back, there = one.new_state(), many.new_state()
        back.load(stored(other))
        there.load(stored(first))
        right, logits = answer(one, first, asked, chat.stop)
        for net, state in ((one, back), (many, there)):  # each goes on where the other stopped
            ids, rows = answer(net, state, asked, chat.stop)
            assert ids == right
            assert (logits - rows).abs().max() < ROUNDING
    finally:
        found.peers.close()
    assert right[-1] == chat.stop
    assert "The deploy key is K7-4411-QX." in chat.tokenizer.decode_text(right)
