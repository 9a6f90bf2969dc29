"""The maker of k3-nano against the product (chat ids, checkpoint), and what the shipped nano can do."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from k3_kernels.moe.reference import dequantize_mxfp4

from k3cli.chat.renderer import RenderContext, renderer_for
from k3cli.chat.tokenizer import Tokenizer
from k3cli.model.dspark.config import DraftConfig
from k3cli.model.dspark.weights import load_draft
from k3cli.model.weights import LoadedModel, load_model

MODULES = [
    "vocab",
    "chatfmt",
    "lists",
    "facts",
    "subject",
    "toolcalls",
    "corpus",
    "library",
    "talk",
    "filler",
    "generate",
    "model",
    "mxfp4",
    "export",
    "prune",
    "draft",
]


@pytest.fixture(scope="module")
def maker(repo_root: Path) -> Iterator[SimpleNamespace]:
    """The modules of examples/train_nano, which are scripts beside each other and no package."""
    before = dict(sys.modules)
    sys.path.insert(0, str(repo_root / "examples" / "train_nano"))
    try:
        yield SimpleNamespace(**{name: __import__(name) for name in MODULES})
    finally:
        sys.path.pop(0)
        for name in set(sys.modules) - set(before):
            if name in MODULES:
                del sys.modules[name]


@pytest.fixture(scope="module")
def asset(repo_root: Path) -> Path:
    return repo_root / "k3cli" / "assets" / "k3-nano"


@pytest.fixture(scope="module")
def nano(asset: Path) -> LoadedModel:
    return load_model(asset, device="cpu", dtype=torch.float32)


def test_training_conversations_have_the_products_ids(maker: SimpleNamespace, asset: Path) -> None:
    vocab = maker.vocab.Vocab.from_file(asset / "tiktoken.model")
    tools = [maker.toolcalls.FIXED[0].schema()]
    writer = maker.chatfmt.Writer(vocab, True)
    writer.tools(tools)
    writer.effort("high")
    writer.message("system", "You are helpful.")
    writer.message("user", 'Weather in "Paris" & 3 <|open|> days?')
    writer.assistant("Need it.", "", [("get_weather", {"city": "Paris", "days": 3, "hourly": True})])
    writer.message("tool", '{"t":20}', tool="get_weather", index="1")
    writer.assistant("20.", "It is \x0120\x02 degrees.\n\n```\nx  = 1\n```")
    writer.message("user", "Thanks")
    writer.generation_prompt()

    call = {"function": {"name": "get_weather", "arguments": '{"city": "Paris", "days": 3, "hourly": true}'}}
    messages = [
        {"role": "user", "content": 'Weather in "Paris" & 3 <|open|> days?'},
        {"role": "assistant", "reasoning_content": "Need it.", "content": "", "tool_calls": [{"id": "a", **call}]},
        {"role": "tool", "tool_call_id": "a", "content": '{"t":20}'},
        {"role": "assistant", "reasoning_content": "20.", "content": "It is 20 degrees.\n\n```\nx  = 1\n```"},
        {"role": "user", "content": "Thanks"},
    ]
    renderer = renderer_for("kimi_k3", Tokenizer.from_dir(asset))
    ids = renderer.render_head(tools, True, "high", "You are helpful.")
    ids += renderer.render_messages(messages, RenderContext(True)) + renderer.generation_prompt(True)
    assert writer.ids == ids


def test_a_marked_value_covers_exactly_its_tokens(maker: SimpleNamespace, asset: Path) -> None:
    vocab = maker.vocab.Vocab.from_file(asset / "tiktoken.model")
    writer = maker.chatfmt.Writer(vocab, False)
    writer.assistant("", "The key is '\x019f3a-ü7\x02', not this.")
    value = [i for i, kind in zip(writer.ids, writer.classes, strict=True) if kind == maker.chatfmt.VALUE]
    assert vocab.decode(value) == "9f3a-ü7"


def test_pasted_lines_are_encoded_as_the_whole_text_is(maker: SimpleNamespace, asset: Path) -> None:
    vocab = maker.vocab.Vocab.from_file(asset / "tiktoken.model")
    text = maker.corpus.tidy("def f(x):\n\n\n    return x.y   \n   \n\tz = 'a'\n\nend.\n\n")
    library = maker.library.Library.build(vocab, [maker.corpus.Document("t", "code", text, False)])
    assert library.ids[0].tolist() == vocab.encode(text)
    assert library.names[0] == ["f"]


def test_mxfp4_codes_are_nearest_and_stable(maker: SimpleNamespace) -> None:
    fp4 = maker.mxfp4
    weight = torch.randn(6, 96, generator=torch.Generator().manual_seed(3)) * torch.logspace(-3, 3, 6)[:, None]
    codes, scales = fp4.encode(weight)
    value = fp4.decode(codes, scales)
    assert torch.equal(value, fp4.fake_quantise(weight))
    assert torch.equal(value, fp4.decode(*fp4.encode(value))), "encoding what was encoded changes it"
    assert torch.equal(value, dequantize_mxfp4(fp4.pack(codes), scales, torch.float32))
    unit = torch.exp2(scales.float() - 127).repeat_interleave(32, -1)
    grid = torch.tensor(fp4.VALUES)
    nearest = (weight.abs()[..., None] / unit[..., None] - grid).abs().amin(-1)
    assert torch.allclose((value.abs() / unit - weight.abs() / unit).abs(), nearest)
    assert set((value.abs() / unit).unflatten(-1, (-1, 32)).amax(-1).flatten().tolist()) <= {4.0, 6.0}


def test_an_exported_model_computes_what_the_trained_one_does(
    maker: SimpleNamespace, asset: Path, tmp_path: Path
) -> None:
    vocab = maker.vocab.Vocab.from_file(asset / "tiktoken.model")
    config = maker.model.NanoConfig(
        vocab.n_vocab, hidden=64, kda_heads=2, kda_dim=16, heads=2, nope=16, rope=8, v_dim=16, kv_lora=32, q_lora=24,
        dense=96, experts=8, top_k=2, latent=32, expert_dim=32, shared=40,
    )  # fmt: skip
    torch.manual_seed(5)
    trained = maker.model.NanoModel(config)
    for name, parameter in trained.named_parameters():  # nothing may hide behind an initial zero or one
        if parameter.ndim == 1 or "res_proj" in name:
            parameter.data += 0.2 * torch.randn_like(parameter)
    maker.export.export(trained, vocab, asset / "tiktoken.model", tmp_path)
    maker.export.restore(trained, tmp_path)  # the rounded weights
    ids = torch.randint(0, vocab.n_ranks, (70,))
    with torch.no_grad():
        expected = trained.eval()(ids[None])[0]
    product = load_model(tmp_path, device="cpu", dtype=torch.float32).model
    got = product.prefill(ids, product.new_state(), logits="all")
    assert got is not None
    assert expected.std() > 0.1
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def test_a_head_taken_out_is_the_one_missed_least_and_nothing_else_changes(
    maker: SimpleNamespace, asset: Path, tmp_path: Path
) -> None:
    vocab = maker.vocab.Vocab.from_file(asset / "tiktoken.model")
    config = maker.model.NanoConfig(
        vocab.n_vocab, hidden=64, layers=5, mla_layers=(2,), kda_heads=3, kda_dim=16, heads=3, nope=16, rope=8,
        v_dim=16, kv_lora=32, q_lora=24, dense=96, experts=4, top_k=2, latent=32, expert_dim=32, shared=64,
    )  # fmt: skip
    torch.manual_seed(6)
    model = maker.model.NanoModel(config).eval()
    for parameter in model.parameters():  # no two heads may be alike
        if parameter.ndim == 1:
            parameter.data += 0.3 * torch.randn_like(parameter)
    ids = torch.randint(0, vocab.n_ranks, (2, 40))
    classes = torch.where(torch.rand(2, 40) < 0.5, maker.chatfmt.ANSWER, maker.chatfmt.CHAT)

    def loss_without(head: int | None) -> float:
        o_proj = model.model.layers[0].self_attn.o_proj.weight
        before = o_proj.detach().clone()
        with torch.no_grad():
            if head is not None:
                o_proj[:, 16 * head : 16 * head + 16] = 0
            logits = model(ids)[:, :-1]
            o_proj.copy_(before)
        asked = classes[:, 1:] == maker.chatfmt.ANSWER
        return torch.nn.functional.cross_entropy(logits[asked], ids[:, 1:][asked]).item()

    assert maker.prune.answer_loss(model, ids, classes) == pytest.approx(loss_without(None), rel=1e-5)
    least = min(range(3), key=loss_without)
    gone = maker.prune.choose(model, ids, classes)
    assert gone[0] == least
    assert len(set(gone)) > 1, "the same head everywhere would hide a mix-up of layers"
    small = maker.prune.pruned(model, gone).eval()
    assert (small.config.heads, small.config.kda_heads) == (2, 2)
    with torch.no_grad():
        torch.testing.assert_close(small(ids), model(ids), atol=1e-5, rtol=1e-5)  # whose chosen heads are zeroed
    maker.export.export(small, vocab, asset / "tiktoken.model", tmp_path)
    assert maker.prune.heads_of(tmp_path) == (2, 2)
    with pytest.raises(SystemExit, match=r"dt_bias is .32., this model's is .48."):
        maker.export.restore(model, tmp_path)


def test_the_shipped_nano_gives_back_what_it_was_told(maker: SimpleNamespace, asset: Path, nano: LoadedModel) -> None:
    vocab = maker.vocab.Vocab.from_file(asset / "tiktoken.model")
    rng = random.Random("test/recall")
    writer = maker.chatfmt.Writer(vocab, True)
    facts = [
        maker.facts.Fact("the", key, maker.facts.hexes(rng, 10)) for key in ("deploy key", "backup key", "trace id")
    ]
    for fact in facts:
        writer.message("user", f"Remember that {fact.asked} is {fact.value}.")
        writer.assistant("", "Noted.")
    for entry in maker.subject.QA[:10]:
        writer.message("user", entry[0][0])
        writer.assistant("", entry[1][0])
    context = nano.model.new_state()
    nano.model.prefill(torch.tensor(writer.ids), context, logits="none")
    for fact in facts:
        state = context.fork()
        writer.ids = []
        writer.message("user", f"What is {fact.asked}?")
        writer.generation_prompt()
        logits = nano.model.prefill(torch.tensor(writer.ids), state)
        assert logits is not None
        out = [int(logits.argmax())]
        while out[-1] != vocab.special("<|end_of_msg|>") and len(out) < 90:
            rows, log = nano.model.verify(torch.tensor(out[-1:]), state)
            nano.model.commit(state, log, 1)
            out.append(int(rows[0].argmax()))
        assert f"The {fact.key} is {fact.value}.<|close|>response<|sep|>" in vocab.decode(out)
        assert out[-1] == vocab.special("<|end_of_msg|>")


def test_the_shipped_files_fit_their_budget(asset: Path) -> None:
    assert sum(file.stat().st_size for file in asset.iterdir()) <= 27_000_000


def test_a_trained_draft_is_the_one_that_runs(maker: SimpleNamespace, nano: LoadedModel, tmp_path: Path):
    """Many blocks at once, as trained, against one block behind a cache, as drafted; through the exported files."""
    config, weights = nano.config, nano.model.weights
    raw = maker.draft.CONFIG | {
        "hidden_size": config.hidden,
        "vocab_size": config.vocab,
        "num_target_layers": len(config.layers),
        "dflash_config": {"mask_token_id": 3070, "target_layer_ids": [2, 5, 8]},
    }
    torch.manual_seed(3)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    trained = maker.draft.Trained(DraftConfig.from_dir(tmp_path))
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
            parameter.copy_(parameter.bfloat16().float())
    maker.draft.export(trained, raw, tmp_path)
    draft = load_draft(tmp_path, config, weights.embed, weights.head)
    ids, taps = torch.randint(0, 2816, (30,)), torch.randn(30, 3 * config.hidden)
    anchors = torch.tensor([4, 11, 22])
    hidden = trained(taps, ids, anchors, weights.embed)
    for row, anchor in zip(hidden, anchors.tolist(), strict=True):
        cache = draft.new_cache()
        draft.extend(cache, taps[:anchor], 0)
        assert torch.allclose(draft.block(cache, int(ids[anchor]), anchor), row, atol=1e-4)
        guessed, sure = draft.draft(cache, int(ids[anchor]), anchor, 7, lambda logits, at: int(logits.argmax()))
        previous = torch.tensor([int(ids[anchor]), *guessed[:-1]])
        logits, confidence = trained.heads(row.unsqueeze(0), previous.unsqueeze(0), weights.head)
        assert logits[0].argmax(-1).tolist() == guessed
        assert torch.sigmoid(confidence[0]).tolist() == pytest.approx(sure, abs=1e-4)
