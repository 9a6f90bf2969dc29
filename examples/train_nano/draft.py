"""Trains k3-nano's DSpark draft: `draft.py --data DIR --model DIR --out DIR --seconds N`. DIR of --data: prepare.py.

The target is the shipped checkpoint, run by `k3cli`; its residual streams behind the tapped layers are kept for a pool
of conversations, and blocks of the draft are trained at random places inside answers. The loss of row i counts 0.85^i.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import pickle
import random
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from generate import training_row
from safetensors.torch import save_file
from torch import Tensor, nn
from vocab import Vocab

from k3cli.model.dspark.config import DraftConfig
from k3cli.model.dspark.rope import rotate, table
from k3cli.model.dspark.weights import layer_names, load_draft, shared_names
from k3cli.model.network import K3Model
from k3cli.model.weights import load_model

ANSWER_CLASSES = (3, 4)
DECAY = 0.85
CONFIG = {
    "architectures": ["DSparkDraftModel"],
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "block_size": 7,
    "markov_rank": 64,
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    "rope_theta": 10000.0,
    "max_position_embeddings": 131072,
}
TAPS = (2, 5, 8)


class Trained(nn.Module):
    """The draft in training form: many blocks at once, each behind its own part of one conversation."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        cfg, D = config, config.hidden
        self.config = config

        def matrix(rows: int, columns: int, scale: float = 1.0) -> nn.Parameter:
            return nn.Parameter(torch.randn(rows, columns) * scale * columns**-0.5)

        def ones(n: int) -> nn.Parameter:
            return nn.Parameter(torch.ones(n))

        small = (2 * cfg.layers) ** -0.5
        keys = cfg.kv_heads * cfg.v_dim
        self.layers = nn.ModuleList(
            nn.ParameterDict(
                {
                    "input_norm": ones(D),
                    "post_norm": ones(D),
                    "q_proj": matrix(cfg.heads * cfg.v_dim, D),
                    "k_proj": matrix(keys, D),
                    "v_proj": matrix(keys, D),
                    "q_norm": ones(cfg.v_dim),
                    "k_norm": ones(cfg.v_dim),
                    "o_proj": matrix(D, cfg.heads * cfg.v_dim, small),
                    "gate_proj": matrix(cfg.intermediate, D),
                    "up_proj": matrix(cfg.intermediate, D),
                    "down_proj": matrix(D, cfg.intermediate, small),
                }
            )
            for _ in range(cfg.layers)
        )
        self.context_proj, self.context_norm = matrix(D, len(cfg.taps) * D), ones(D)
        self.final_norm = ones(D)
        self.markov_w1 = nn.Parameter(torch.randn(cfg.vocab, cfg.markov_rank) * 0.02)
        self.markov_w2 = nn.Parameter(torch.zeros(cfg.vocab, cfg.markov_rank))
        self.confidence = nn.Parameter(torch.zeros(1, D + cfg.markov_rank))
        self.confidence_bias = nn.Parameter(torch.zeros(1))

    def forward(self, taps: Tensor, ids: Tensor, anchors: Tensor, embed: Tensor) -> Tensor:
        """taps [T, taps D] and ids [T] of a conversation, anchors [A] positions -> hidden rows [A, block, D]."""
        cfg, A, T = self.config, anchors.numel(), ids.numel()
        rope = table(cfg.rope, ids.device)
        block = cfg.block
        features = norm(F.linear(taps, self.context_proj), self.context_norm, cfg.eps)
        tokens = torch.full((A, block), cfg.mask_id, device=ids.device)
        tokens[:, 0] = ids[anchors]
        x = embed[tokens].view(A * block, -1)
        positions = (anchors[:, None] + torch.arange(block, device=ids.device)).flatten()
        context_positions = torch.arange(T, device=ids.device)
        # A block sees the conversation before its anchor, and itself.
        before = context_positions < anchors.repeat_interleave(block)[:, None]
        own = torch.arange(A, device=ids.device).repeat_interleave(block)
        mask = torch.cat((before, own[:, None] == own), 1)
        for layer in self.layers:
            normed = norm(x, layer["input_norm"], cfg.eps)
            q = split(F.linear(normed, layer["q_proj"]), cfg.heads)
            q = rotate(norm(q, layer["q_norm"], cfg.eps), positions[:, None], rope)
            sides = ((features, context_positions), (normed, positions))
            keys = [rotate(self._keys(layer, side), at[:, None], rope) for side, at in sides]
            values = [split(F.linear(side, layer["v_proj"]), cfg.kv_heads) for side, _ in sides]
            k, v = (torch.cat(part).repeat_interleave(cfg.heads // cfg.kv_heads, 1) for part in (keys, values))
            heads_first = (part.transpose(0, 1) for part in (q, k, v))
            out = F.scaled_dot_product_attention(*heads_first, attn_mask=mask, scale=cfg.scale)
            x = x + F.linear(out.transpose(0, 1).reshape(A * block, -1), layer["o_proj"])
            normed = norm(x, layer["post_norm"], cfg.eps)
            gated = F.silu(F.linear(normed, layer["gate_proj"])) * F.linear(normed, layer["up_proj"])
            x = x + F.linear(gated, layer["down_proj"])
        return norm(x, self.final_norm, cfg.eps).view(A, block, -1)

    def _keys(self, layer: Any, x: Tensor) -> Tensor:
        return norm(split(F.linear(x, layer["k_proj"]), self.config.kv_heads), layer["k_norm"], self.config.eps)

    def heads(self, hidden: Tensor, previous: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
        """(logits [A, block, V], confidence logits [A, block]); previous: the true token before each row's guess."""
        memory = F.embedding(previous, self.markov_w1)
        logits = F.linear(hidden, head) + F.linear(memory, self.markov_w2)
        seen = torch.cat((hidden.detach(), memory.detach()), -1)
        return logits.float(), F.linear(seen, self.confidence, self.confidence_bias).squeeze(-1).float()


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight.to(x.dtype), eps)


def split(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1))


def feed(requests: Any, results: Any, data: Path, length: int) -> None:
    vocab = Vocab.from_file(data / "tiktoken.model")
    library = pickle.loads((data / "corpus.pkl").read_bytes())["train"]
    while (number := requests.get()) is not None:
        results.put(training_row(f"train/draft/{number}", length, vocab, library))


def conversation(target: K3Model, ids: Tensor) -> Tensor:
    """Residual streams of every token behind the tapped layers, [T, taps D]."""
    taps: list[Tensor] = []
    state = target.new_state()
    for piece in ids.split(2048):
        target.prefill(piece, state, logits="none", taps=taps)
    return torch.cat(taps)


def export(model: Trained, raw: dict[str, Any], out: Path) -> None:
    """config.json and bf16 weights under the public names."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(raw, indent=1) + "\n")
    names = layer_names(model.config)
    tensors = {f"layers.{i}.{names[field]}": p for i, layer in enumerate(model.layers) for field, p in layer.items()}
    tensors |= {name: getattr(model, field) for field, name in shared_names(model.config).items()}
    plain = {name: tensor.detach().to("cpu", torch.bfloat16).contiguous() for name, tensor in tensors.items()}
    save_file(plain, out / "model.safetensors", metadata={"format": "pt"})


def accepted(right: Tensor) -> Tensor:
    """[A, block] guesses that are right -> tokens a step commits on average, the target's own one included."""
    return 1 + right.float().cumprod(1).sum(1).mean()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True, help="the target's checkpoint")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=150, help="of training, loading apart")
    parser.add_argument("--steps", type=int, default=10**9)
    parser.add_argument("--length", type=int, default=2048, help="tokens of a conversation")
    parser.add_argument("--pool", type=int, default=4000, help="conversations kept for training")
    parser.add_argument("--anchors", type=int, default=64, help="blocks of a conversation and step")
    parser.add_argument("--batch", type=int, default=8, help="conversations of a step")
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument("--processes", type=int, default=4)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    loaded = load_model(options.model, device=device, dtype=torch.float32)
    target, size = loaded.model, loaded.config
    target.tap_layers = TAPS
    raw = CONFIG | {"hidden_size": size.hidden, "vocab_size": size.vocab, "num_target_layers": len(size.layers)}
    raw["dflash_config"] = {"mask_token_id": size.vocab - 2, "target_layer_ids": list(TAPS)}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "config.json").write_text(json.dumps(raw))
    config = DraftConfig.from_dir(options.out)
    config.check_target(size)
    model = Trained(config).to(device)
    embed, head = target.weights.embed, target.weights.head
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(groups, lr=options.lr, betas=(0.9, 0.95))

    context = mp.get_context("spawn")
    requests, results = context.Queue(), context.Queue()
    arguments = (requests, results, options.data, options.length)
    workers = [context.Process(target=feed, args=arguments, daemon=True) for _ in range(options.processes)]
    for worker in workers:
        worker.start()
    for number in range(options.pool):
        requests.put(number)

    dice = random.Random(0)
    pool: list[tuple[Tensor, Tensor, Tensor]] = []
    weights = DECAY ** torch.arange(config.block, device=device)
    began, step = time.monotonic(), 0
    while (part := (time.monotonic() - began) / options.seconds) < 1 and step < options.steps:
        fresh = options.batch if not pool else 1
        while fresh and len(pool) < options.pool:
            ids, classes = results.get()
            tokens = torch.from_numpy(ids.astype("int64")).to(device)
            inside = torch.isin(torch.from_numpy(classes).to(device), torch.tensor(ANSWER_CLASSES, device=device))
            # An anchor stands before a token of an answer, with a whole block of tokens behind it.
            places = torch.nonzero(inside[1 : len(ids) - config.block + 1]).flatten()
            if places.numel():
                pool.append((tokens, conversation(target, tokens).to(dtype), places))
            fresh -= 1
        rate = options.lr * min(1.0, (step + 1) / 50, max(0.03, 1.5 * (1 - part)))
        for group in optimiser.param_groups:
            group["lr"] = rate
        optimiser.zero_grad(set_to_none=True)
        told = []
        for tokens, taps, places in dice.choices(pool, k=options.batch):
            anchors = places[torch.randint(len(places), (options.anchors,), device=device)]
            with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
                hidden = model(taps, tokens, anchors, embed.to(dtype))
                following = anchors[:, None] + torch.arange(1, config.block + 1, device=device)
                wanted, previous = tokens[following], tokens[following - 1]
                logits, sure = model.heads(hidden, previous, head.to(dtype))
            right = logits.argmax(-1) == wanted
            each = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="none").view(wanted.shape)
            doubt = F.binary_cross_entropy_with_logits(sure, right.float())
            ((each * weights).sum() / weights.sum() / len(anchors) + 0.2 * doubt).div(options.batch).backward()
            told.append(accepted(right))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        step += 1
        if step % 50 == 0 or step == options.steps:
            row = {"step": step, "s": round(time.monotonic() - began), "pool": len(pool)}
            print(json.dumps(row | {"per_step": round(float(torch.stack(told).mean()), 3)}), flush=True)
    for worker in workers:
        worker.terminate()
    export(model, raw, options.out)
    load_draft(options.out, size, embed, head)
    print(json.dumps({"parameters": sum(p.numel() for p in model.parameters()), "steps": step, "pool": len(pool)}))


if __name__ == "__main__":
    main()
