"""k3-nano over several ranks on a CPU against one process: logits, and a recalled fact, token by token."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from k3cli.chat.renderer import renderer_for
from k3cli.chat.tokenizer import Tokenizer
from k3cli.config import NANO

ROUNDING = 0.01
"""Between one process and several, on logits with a standard deviation of about 5."""
LONG = pytest.mark.skipif(os.environ.get("K3_LONG") != "1", reason="slow: K3_LONG=1")


def conversation(tokenizer: Tokenizer) -> torch.Tensor:
    renderer = renderer_for("kimi_k3", tokenizer)
    context = renderer.new_context(True)
    turns = [
        {"role": "user", "content": "Remember that the deploy key is K7-4411-QX."},
        {"role": "assistant", "content": "Noted."},
        {"role": "user", "content": "What is the deploy key?"},
    ]
    return torch.tensor([*renderer.render_messages(turns, context), *renderer.generation_prompt(True)])


def answer(net: Any, state: Any, logits: torch.Tensor, stop: int) -> tuple[list[int], torch.Tensor]:
    ids, rows = [int(logits.argmax())], [logits]
    while ids[-1] != stop and len(ids) < 80:
        found, log = net.verify(torch.tensor(ids[-1:]), state)
        net.commit(state, log, 1)
        rows.append(found[0])
        ids.append(int(found[0].argmax()))
    return ids, torch.stack(rows)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=LONG)])
def test_nano_says_over_ranks_what_it_says_alone(load_both, size: int):
    tokenizer = Tokenizer.from_dir(NANO)
    prompt, stop = conversation(tokenizer), tokenizer.special("<|end_of_msg|>")
    found = load_both(NANO, size)
    try:
        assert found.many.weights_digest == found.one.weights_digest
        seen = []
        for net in (found.one.model, found.many.model):
            state = net.new_state()
            read = net.prefill(prompt, state, logits="all")
            ids, rows = answer(net, state, read[-1], stop)
            seen.append((ids, torch.cat((read, rows))))
    finally:
        found.peers.close()
    (alone, one), (together, many) = seen
    assert alone == together
    assert alone[-1] == stop
    assert "The deploy key is K7-4411-QX." in tokenizer.decode_text(alone)
    assert (one - many).abs().max() < ROUNDING
