"""Sizes of weights and state against the published arithmetic of K3, and against what is allocated."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import k3_kernels.kda
import k3_kernels.mla
import pytest
import torch

from k3cli.config import K3_SHAPE, NANO
from k3cli.errors import UsageError
from k3cli.model import blocks
from k3cli.model.blocks import dense_bytes
from k3cli.model.config import ModelConfig
from k3cli.model.fit import needs
from k3cli.model.machine import GPUS, parse_gpus, read_rate
from k3cli.model.sizing import state_size, weigh, workspace
from k3cli.model.weights import load_model
from tests.model.sizes import allocated

K3 = ModelConfig.from_dir(K3_SHAPE)
BF16 = torch.bfloat16
# Bytes of the public checkpoint, by component; A_log is stored with 32 zeros behind 96 values in each of 69 layers.
PUBLISHED = {
    "routed experts": 1_446_456_066_048,
    "KDA attention": 61_258_257_408 - 69 * 32 * 4,
    "MLA attention": 11_145_412_608,
    "shared experts": 24_310_185_984,
    "expert latents": 9_454_620_672,
    "router": 1_182_074_880,
    "dense MLP": 1_453_326_336,
    "norms and mixing": 5_361_664 + 2_680_832,
    "embedding": 2_348_810_240,
    "head": 2_348_810_240,
}


def test_weights_of_k3_are_those_of_its_checkpoint():
    assert {entry.name: entry.disk for entry in weigh(K3, BF16)} == PUBLISHED


def test_state_of_k3_is_the_published_arithmetic():
    """Decimal GB. An all-attention stack of the same depth would need 13.71 and 107.14."""
    state = state_size(K3, BF16, BF16)
    gigabytes = {tokens: round((tokens * state.row + state.recurrent) / 1e9, 2) for tokens in (128_000, 1_000_000)}
    assert gigabytes == {128_000: 3.76, 1_000_000: 27.87}
    assert round(50 * state.recurrent / 1e9, 2) == 10.85
    assert round((1_000_000 * state.row + 51 * state.recurrent) / 1e9, 2) == 38.72
    assert state_size(K3, BF16).recurrent == 434_110_464
    assert state.conv == 15_261_696
    attention_only = state_size(dataclasses.replace(K3, layers=("mla",) * 93), BF16)
    assert round(attention_only.session(128_000) / 1e9, 2) == 13.71
    assert round(attention_only.session(1_000_000) / 1e9, 2) == 107.14


def test_a_rank_holds_its_heads_and_all_latents():
    whole, rank = state_size(K3, BF16), state_size(K3, BF16, world=8)
    assert (rank.recurrent * 8, rank.conv * 8, rank.row) == (whole.recurrent, whole.conv, whole.row)


@pytest.mark.parametrize("kind", ["kda", "mla"])
def test_a_chunk_takes_what_its_kernels_do(kind: str):
    """The operation's own bytes, its inputs and outputs at K3's widths, and the residual streams, little more."""
    layers = dataclasses.replace(K3, layers=(kind,) * 8, moe_layers=(False,) * 8, moe=None, intermediate=1000)
    T, item = 8192, 2
    if kind == "kda":
        scratch = k3_kernels.kda.prefill_scratch(T, 96, 128, 128, BF16)
        inputs = T * (9 * 96 * 128 + 2 * 128 + 96) * item
    else:
        scratch = k3_kernels.mla.prefill_scratch(T, 10**6, 96, 128, 64, 512, 128, BF16)
        inputs = T * (1536 + 96 * 192 + 2 * 576 + 2 * 96 * 128) * item
    streams = T * (1 + 4) * 7168 * item
    found = workspace(layers, BF16, T)
    assert scratch + inputs + streams < found < 1.05 * (scratch + inputs + streams)
    if kind == "mla":
        assert workspace(layers, BF16, T, context=T) < found - 9 * 10**8
    assert workspace(layers, BF16, T, world=8) < found - 0.8 * (scratch + inputs)


def test_loaded_bytes_are_those_allocated(monkeypatch: pytest.MonkeyPatch):
    """Every tensor the loaded nano model owns, absorbed copies included; and experts kept dequantised on a CPU."""
    config = ModelConfig.from_dir(NANO)
    planned = sum(entry.loaded for entry in weigh(config, torch.float32))
    dense = dense_bytes(config, torch.float32, config.moe.experts)
    assert dense == 8 * 32 * 3 * 160 * 128 * 4
    assert allocated(load_model(NANO).model.weights) == pytest.approx(planned + dense, rel=0.005)
    before = needs(config, torch.float32, "cpu", 1)[0].weights
    monkeypatch.setattr(blocks, "DENSE", dense - 1)
    assert allocated(load_model(NANO).model.weights) == pytest.approx(planned, rel=0.005)
    assert before - needs(config, torch.float32, "cpu", 1)[0].weights == dense


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts_kept_dequantised_change_no_bit(dtype: str, monkeypatch: pytest.MonkeyPatch):
    found = []
    for limit in (blocks.DENSE, 0):
        monkeypatch.setattr(blocks, "DENSE", limit)
        model = load_model(NANO, dtype=dtype).model
        mlp = model.weights.layers[1].mlp
        assert (mlp.ready is mlp.experts) == (limit == 0)
        state, ids = model.new_state(), torch.arange(300, 380)
        found.append((model.prefill(ids[:72], state), model.verify(ids[72:], state)[0]))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_state_bytes_are_those_of_a_state():
    model = load_model(NANO).model
    size = state_size(ModelConfig.from_dir(NANO), torch.float32)
    fields = {field.name: field for field in model.state_layout().fields}
    held = model.new_state().checkpoint()
    assert held["recurrent"].nbytes == size.recurrent
    assert sum(held[name].nbytes for name in ("conv_q", "conv_k", "conv_v")) == size.conv
    layers = len(fields["kv_latent"].layers)
    assert 4 * layers * (fields["kv_latent"].shape[0] + fields["k_pe"].shape[0]) == size.row


@pytest.mark.parametrize(
    ("text", "expected"),
    [("8xB300", ("B300", 8)), ("h200", ("H200", 1)), ("2 x 96GB", ("96GB", 2)), ("4*H100", ("H100", 4))],
)
def test_gpus_in_words(text: str, expected: tuple[str, int]):
    name, count, memory = parse_gpus(text)
    assert (name, count) == expected
    assert memory == (GPUS[name] * 10**6 if name in GPUS else 96 * 10**9)


@pytest.mark.parametrize("text", ["8xX300", "two", "0xB300", "3x", "96", "8xB300,2xH200", ""])
def test_gpus_nobody_knows_are_refused_with_the_kinds(text: str):
    with pytest.raises(UsageError, match="--gpus"):
        parse_gpus(text)


def test_read_rate_needs_a_file_worth_reading(tmp_path: Path):
    (tmp_path / "small").write_bytes(b"x" * 1000)
    assert read_rate(tmp_path / "small") is None
    assert read_rate(tmp_path / "absent") is None
