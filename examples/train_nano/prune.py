"""Takes one attention head out of every layer of a trained nano: `prune.py --data DIR --model DIR --out DIR`.

Layer by layer the head goes whose loss is missed least, measured on generated conversations with the heads already
chosen gone. The result is a checkpoint that `train.py --resume` goes on from. Nothing is fitted to make up for what is
lost: training does that.
"""

from __future__ import annotations

import argparse
import json
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from chatfmt import ANSWER, VALUE
from export import export, restore
from generate import training_row
from model import KDA, MLA, NanoConfig, NanoModel
from torch import Tensor
from vocab import Vocab

BY_HEAD = {  # parameters of a KDA or MLA layer with rows by head; o_proj has columns by head
    KDA: ("q_proj", "k_proj", "v_proj", "g_proj", "f_b_proj", "b_proj", "q_conv1d", "k_conv1d", "v_conv1d"),
    MLA: ("q_b_proj", "kv_b_proj", "g_proj"),
}
VECTORS = ("A_log", "dt_bias")  # of a KDA layer, by head


def heads_of(folder: Path) -> tuple[int, int]:
    """(KDA heads, MLA heads) of an exported folder."""
    text = json.loads((folder / "config.json").read_text())["text_config"]
    return text["linear_attn_config"]["num_heads"], text["num_attention_heads"]


def attention(model: NanoModel) -> list[KDA | MLA]:
    return [layer.self_attn for layer in model.model.layers]  # type: ignore[misc]


def head_columns(layer: KDA | MLA, head: int) -> slice:
    """Columns of o_proj that take the head's output."""
    width = layer.shape[1] if isinstance(layer, KDA) else layer.c.v_dim
    return slice(head * width, (head + 1) * width)


@torch.no_grad()
def answer_loss(model: NanoModel, ids: Tensor, classes: Tensor) -> float:
    """Mean loss of the answers' tokens, those of values counted twice. ids, classes [B, T]."""
    weights = F.pad(classes[:, 1:], (0, 1)).flatten()
    weights = (weights == ANSWER).float() + 2.0 * (weights == VALUE).float()
    targets = F.pad(ids[:, 1:], (0, 1)).flatten()
    each = F.cross_entropy(F.linear(model.hidden(ids), model.lm_head.weight).float(), targets, reduction="none")
    return float((each * weights).sum() / weights.sum())


@torch.no_grad()
def choose(model: NanoModel, ids: Tensor, classes: Tensor) -> list[int]:
    """The head each layer misses least. The chosen heads' columns of o_proj are zero afterwards."""
    chosen = []
    for index, layer in enumerate(attention(model)):
        weight, losses = layer.o_proj.weight, []
        heads = layer.shape[0] if isinstance(layer, KDA) else layer.c.heads
        for head in range(heads):
            kept = weight[:, head_columns(layer, head)].clone()
            weight[:, head_columns(layer, head)] = 0.0
            losses.append(answer_loss(model, ids, classes))
            weight[:, head_columns(layer, head)] = kept
        best = min(range(heads), key=losses.__getitem__)
        weight[:, head_columns(layer, best)] = 0.0
        chosen.append(best)
        print(json.dumps({"layer": index, "gone": best, "loss": [round(loss, 4) for loss in losses]}), flush=True)
    return chosen


def without(value: Tensor, head: int, heads: int, dim: int = 0) -> Tensor:
    """`value` without the head's share of dimension `dim`."""
    parts = list(value.chunk(heads, dim))
    del parts[head]
    return torch.cat(parts, dim)


@torch.no_grad()
def pruned(model: NanoModel, gone: list[int]) -> NanoModel:
    """A model of one head less in every layer: layer i has lost head `gone[i]`."""
    c = model.config
    small = NanoModel(replace(c, heads=c.heads - 1, kda_heads=c.kda_heads - 1), model.dtype)
    state = model.state_dict()
    for index, (layer, head) in enumerate(zip(attention(model), gone, strict=True)):
        heads = layer.shape[0] if isinstance(layer, KDA) else layer.c.heads
        base = f"model.layers.{index}.self_attn."
        names = [f"{name}.weight" for name in BY_HEAD[type(layer)]] + (list(VECTORS) if isinstance(layer, KDA) else [])
        for name in names:
            state[base + name] = without(state[base + name], head, heads)
        state[base + "o_proj.weight"] = without(state[base + "o_proj.weight"], head, heads, 1)
    small.load_state_dict(state)
    return small


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True, help="an exported folder; its experts-* are used if there")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gone", help="the heads, by layer, as measured before: 0,3,1,...")
    parser.add_argument("--rows", type=int, default=2, help="conversations to measure on")
    parser.add_argument("--length", type=int, default=768, help="tokens of each")
    options = parser.parse_args()
    vocab = Vocab.from_file(options.data / "tiktoken.model")
    kda_heads, heads = heads_of(options.model)
    model = NanoModel(NanoConfig(vocab.n_vocab, heads=heads, kda_heads=kda_heads))
    restore(model, options.model)
    model.eval()
    library = pickle.loads((options.data / "corpus.pkl").read_bytes())["train"]
    rows = [training_row(f"train/prune/{i}", options.length, vocab, library) for i in range(options.rows)]
    ids, classes = (torch.from_numpy(np.stack(part).astype(np.int64)) for part in zip(*rows, strict=True))
    if options.gone is None:
        print(json.dumps({"loss before": round(answer_loss(model, ids, classes), 4)}), flush=True)
        gone = choose(model, ids, classes)
        print("--gone " + ",".join(map(str, gone)))
    else:
        gone = [int(head) for head in options.gone.split(",")]
    small = pruned(model, gone).eval()
    if options.gone is None:
        print(json.dumps({"loss after": round(answer_loss(small, ids, classes), 4)}), flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    export(small, vocab, options.data / "tiktoken.model", options.out, experts_too=True)


if __name__ == "__main__":
    main()
