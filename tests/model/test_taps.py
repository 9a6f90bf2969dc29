"""Residual streams handed out behind tapped layers: what they are, and the same whichever way a token is evaluated."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from k3cli.model.network import K3Model
from k3cli.model.weights import load_model

IDS = torch.randint(0, 97, (21,), generator=torch.Generator().manual_seed(4))


@pytest.fixture(params=["k3", "linear"])
def tapped(request: pytest.FixtureRequest, checkpoints) -> K3Model:
    model = load_model(checkpoints[request.param]).model
    block = model.config.attn_res_block or 1
    model.tap_layers = tuple(range(block - 1, len(model.config.layers), block))
    return model


def norm(x: Tensor, weight: Tensor | float, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def test_logits_follow_from_taps(tapped: K3Model):
    """With a tap behind every block of layers, they are the snapshots that the last mix reads, and the prefix."""
    taps: list[Tensor] = []
    logits = tapped.prefill(IDS, tapped.new_state(), logits="all", taps=taps)
    (rows,) = taps
    weights, eps = tapped.weights, tapped.config.norm_eps
    streams = list(rows.double().split(tapped.config.hidden, -1))
    assert len(streams) == len(tapped.tap_layers)
    if tapped.config.attn_res_block is None:
        mixed = streams[-1]
    else:
        assert weights.mix is not None
        sources = torch.stack([weights.embed[IDS].double(), *streams])
        scores = norm(sources, 1.0, eps) @ weights.mix.query.double()
        mixed = (scores.softmax(0).unsqueeze(-1) * sources).sum(0)
    expected = norm(mixed, weights.norm.double(), eps) @ weights.head.double().T
    assert logits is not None
    assert torch.allclose(logits.double(), expected, atol=1e-3)


def test_rows_of_a_window_are_those_of_plain_steps(tapped: K3Model):
    """Windows of every length, wrapped around the end of the slots, too."""
    whole: list[Tensor] = []
    tapped.prefill(IDS, tapped.new_state(), taps=whole)
    plain, windows, state = [], [], tapped.new_state()
    for i in range(len(IDS)):
        _, log = tapped.verify(IDS[i : i + 1], state)
        tapped.commit(state, log, 1)
        assert log.taps is not None
        plain.append(log.taps)
    state, at = tapped.new_state(), 0
    for n in (3, 8, 1, 5, 4):
        _, log = tapped.verify(IDS[at : at + n], state)
        tapped.commit(state, log, n)
        assert log.taps is not None
        windows.append(log.taps)
        at += n
    assert torch.equal(torch.cat(windows), torch.cat(plain))
    assert torch.allclose(torch.cat(plain), whole[0], atol=1e-3)


def test_without_tapped_layers_nothing_is_handed_out(loaded):
    model, taps = loaded["k3"].model, []
    model.prefill(IDS, model.new_state(), taps=taps)
    _, log = model.verify(IDS[:2], model.new_state())
    assert not taps
    assert log.taps is None
