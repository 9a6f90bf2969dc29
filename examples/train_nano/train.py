"""Trains k3-nano: `train.py --data DIR --seconds N --out DIR`. DIR of --data comes from prepare.py.

The schedule runs on the clock: lengths, learning rate and the MXFP4-aware finish follow elapsed/N. A fixed number of
tokens makes a step, in rows of 1k to 64k. Every run ends with the exported checkpoint, the recall table and, beside
the checkpoint, the unquantised experts, so that `--resume` can go on from what was brought back.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing as mp
import pickle
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import model as net
import numpy as np
import torch
import torch.nn.functional as F
from export import export, restore
from generate import Library, training_row
from measure import held_out_loss, recall_table
from model import MoE, NanoConfig, NanoModel
from muon import split
from mxfp4 import fake_quantise
from torch import Tensor
from vocab import Vocab

CLASS_WEIGHTS = (0.0, 0.15, 0.1, 1.0, 2.0)  # pad, chat, document, answer, value
LENGTHS = [  # from this part of the run on: share of steps by row length
    (0.00, {1024: 0.25, 4096: 0.75}),
    (0.55, {1024: 0.12, 4096: 0.43, 16384: 0.45}),
    (0.85, {1024: 0.10, 4096: 0.27, 16384: 0.33, 32768: 0.18, 65536: 0.12}),
]
QUANTISE_FROM = 0.70
BIAS_RATE = 1e-3


def lengths_at(part: float, tokens: int) -> dict[int, float]:
    shares = next(shares for start, shares in reversed(LENGTHS) if part >= start)
    return {n: share for n, share in shares.items() if n <= tokens} or {tokens: 1.0}


def learning_rate(part: float, step: int, peak: float) -> float:
    """Warm-up over 150 steps, constant to 40 %, then linear to 2 % of the peak."""
    return peak * min(1.0, (step + 1) / 150, max(0.02, 1 - 0.98 * (part - 0.4) / 0.6))


def work(requests: Any, results: Any, data: Path, tokens: int, seed: str) -> None:
    """A data process: takes (step, length), gives ids and classes of one step."""
    vocab = Vocab.from_file(data / "tiktoken.model")
    library = pickle.loads((data / "corpus.pkl").read_bytes())["train"]
    while (request := requests.get()) is not None:
        step, length = request
        rows = [training_row(f"train/{seed}/{step}/{i}", length, vocab, library) for i in range(tokens // length)]
        results.put((np.stack([r[0] for r in rows]), np.stack([r[1] for r in rows])))


class Feed:
    """Batches from data processes, a fixed number of steps ahead."""

    def __init__(self, data: Path, tokens: int, seed: str, processes: int) -> None:
        context = mp.get_context("fork")
        self.requests, self.results = context.Queue(), context.Queue()
        arguments = (self.requests, self.results, data, tokens, seed)
        self.processes = [context.Process(target=work, args=arguments, daemon=True) for _ in range(processes)]
        for process in self.processes:
            process.start()
        self.tokens, self.rng, self.asked = tokens, random.Random(seed), 0

    def ask(self, part: float) -> None:
        shares = lengths_at(part, self.tokens)
        self.requests.put((self.asked, self.rng.choices(list(shares), list(shares.values()))[0]))
        self.asked += 1

    def batches(self, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            ids, classes = self.results.get()
            yield (
                torch.from_numpy(ids.astype(np.int32)).to(device, non_blocking=True).long(),
                torch.from_numpy(classes).to(device, non_blocking=True).long(),
            )

    def close(self) -> None:
        for process in self.processes:
            process.terminate()


def loss_parts(hidden: Tensor, head: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(mean weighted loss, loss of each token, whether the best guess is right)."""
    logits = F.linear(hidden, head.to(hidden.dtype)).float()
    each = F.cross_entropy(logits, targets, reduction="none")
    return (each * weights).sum() / weights.sum(), each.detach(), logits.detach().argmax(-1) == targets


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=1000, help="for start-up, compilation and training together")
    parser.add_argument("--steps", type=int, default=10**9, help="stop after so many steps")
    parser.add_argument("--tokens", type=int, default=65536, help="per step")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--seed", default="1")
    parser.add_argument("--small", action="store_true", help="a toy model, for a try on a CPU")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--resume", type=Path, help="a folder that --out brought back")
    parser.add_argument("--start-at", type=float, default=0.0, help="part of the schedule already done (with --resume)")
    parser.add_argument("--evaluate", default="1000,4000,16000", help="distances of the recall table at the end")
    options = parser.parse_args()

    begin = time.time()
    options.out.mkdir(parents=True, exist_ok=True)
    feed = Feed(options.data, options.tokens, options.seed, options.processes)  # forks before CUDA starts
    vocab = Vocab.from_file(options.data / "tiktoken.model")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = True
    config = NanoConfig(vocab.n_vocab)
    if options.small:
        config = NanoConfig(
            vocab.n_vocab,
            hidden=64,
            kda_heads=2,
            kda_dim=16,
            heads=2,
            nope=16,
            rope=16,
            v_dim=16,
            kv_lora=32,
            q_lora=32,
            dense=96,
            experts=8,
            top_k=2,
            latent=32,
            expert_dim=32,
            shared=32,
        )
    model = NanoModel(config, torch.bfloat16 if device.type == "cuda" else torch.float32).to(device)
    if options.resume:
        restore(model, options.resume)
    muon, adam = split(model)
    plain = dict(net.POINTWISE)
    loss_of, quantise = loss_parts, fake_quantise
    if not options.no_compile:
        torch._dynamo.config.cache_size_limit = 64
        net.pin_kernels()
        for name, function in plain.items():
            net.POINTWISE[name] = torch.compile(function, dynamic=False)
        loss_of = torch.compile(loss_parts, dynamic=False)
        quantise = torch.compile(fake_quantise, dynamic=False)
    moes = [m for m in model.modules() if isinstance(m, MoE)]
    class_weights = torch.tensor(CLASS_WEIGHTS, device=device)
    sums = torch.zeros(3, len(CLASS_WEIGHTS), device=device)  # count, loss, right, by class
    log = (options.out / "log.jsonl").open("a")
    for _ in range(4 * options.processes):
        feed.ask(options.start_at)
    model.train()
    print(
        f"start-up {time.time() - begin:.1f} s, {sum(p.numel() for p in model.parameters()):,} parameters", flush=True
    )
    ids = torch.zeros(options.tokens // 1024, 1024, dtype=torch.long, device=device)
    for warm in (quantise, None):  # builds every kernel, outside the clock
        for moe in moes:
            moe.quantise = warm
        ones = torch.ones(options.tokens, device=device)
        loss_of(model.hidden(ids), model.lm_head.weight, ids.flatten(), ones)[0].backward()
        if device.type == "cuda":
            torch.cuda.synchronize()
        print(f"kernels built after {time.time() - begin:.1f} s", flush=True)
    model.zero_grad(set_to_none=True)
    for moe in moes:
        moe.gate.load.zero_()
    started, marked, quantising = time.time(), time.time(), False
    saved = options.start_at
    step, budget = 0, options.seconds - (time.time() - begin)
    for ids, classes in feed.batches(device):
        elapsed = time.time() - started
        part = options.start_at + (1 - options.start_at) * elapsed / budget
        if part >= 1 or step >= options.steps:
            break
        feed.ask(part)
        if part >= QUANTISE_FROM and not quantising:
            quantising = True
            for moe in moes:
                moe.quantise = quantise
        targets = F.pad(ids[:, 1:], (0, 1)).flatten()
        kinds = F.pad(classes[:, 1:], (0, 1)).flatten()
        loss, each, right = loss_of(model.hidden(ids), model.lm_head.weight, targets, class_weights[kinds])
        loss.backward()
        lr = learning_rate(part, step, options.lr)
        adam.param_groups[0]["lr"] = lr
        torch.nn.utils.clip_grad_norm_(adam.param_groups[0]["params"], 1.0)
        muon.step(lr)
        adam.step()
        model.zero_grad(set_to_none=True)
        with torch.no_grad():
            rate = BIAS_RATE if part < 0.8 else 0.0
            for moe in moes:
                load = moe.gate.load
                moe.gate.e_score_correction_bias += rate * torch.sign(load.mean() - load)
                moe.gate.load = torch.zeros_like(load)
            sums.index_add_(1, kinds, torch.stack((torch.ones_like(each), each, right.float())))
        step += 1
        if part >= saved + 0.2:  # something to go on from, should the machine be taken away
            saved = part
            (options.out / "interim").mkdir(exist_ok=True)
            export(model, vocab, options.data / "tiktoken.model", options.out / "interim", experts_too=True)
        if step % 50 == 0 or step <= 3:
            count, total, hits = sums.tolist()
            now = time.time()
            line = {
                "step": step,
                "part": round(part, 4),
                "s": round(now - started, 1),
                "lr": round(lr, 6),
                "len": ids.shape[1],
                "loss": [round(t / max(n, 1), 4) for t, n in zip(total[1:], count[1:], strict=True)],
                "right": [round(h / max(n, 1), 4) for h, n in zip(hits[1:], count[1:], strict=True)],
                "tok/s": round(sum(count) / (now - marked)),
                "uneven": round(float((load.max() / load.mean()).item()), 2),
            }
            sums.zero_()
            marked = now
            log.write(json.dumps(line) + "\n")
            log.flush()
            if step % 200 == 0 or step <= 3 or device.type == "cpu":
                print(json.dumps(line), flush=True)
            if not math.isfinite(total[3]):
                raise SystemExit(f"step {step}: the loss is not finite")
    trained = time.time() - started
    feed.close()
    net.POINTWISE.update(plain)
    for moe in moes:
        moe.quantise = fake_quantise
    model.eval()
    export(model, vocab, options.data / "tiktoken.model", options.out, experts_too=True)
    memory = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    result: dict[str, Any] = {
        "steps": step,
        "tokens": step * options.tokens,
        "train_s": round(trained, 1),
        "GiB": round(memory, 1),
    }
    library: Library = pickle.loads((options.data / "corpus.pkl").read_bytes())["held_out"]
    print(json.dumps(result), flush=True)
    result["held_out"] = held_out_loss(model, vocab, library, device)
    for distance in map(int, options.evaluate.split(",") if options.evaluate else []):
        result[f"recall_{distance}"] = recall_table(
            model, vocab, library, distance, 13 if distance < 40000 else 4, device
        )
        print(distance, result[f"recall_{distance}"], flush=True)
    result["all_s"] = round(time.time() - begin, 1)
    print(json.dumps(result), flush=True)
    (options.out / "result.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
