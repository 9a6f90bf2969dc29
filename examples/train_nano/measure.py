"""Quick measurements with the training model: recall with the true answer fed (equal to greedy decoding when each of
its tokens is the best guess) and loss on held-out documents."""

from __future__ import annotations

import math
import random

import torch
import torch.nn.functional as F
from chatfmt import ANSWER, VALUE, Writer
from generate import Library, recall_case
from model import NanoModel
from vocab import Vocab


def padded(ids: list[int], device: torch.device) -> torch.Tensor:
    """[1, T] with T a multiple of 64; what is added at the end can not change what is before it."""
    return torch.tensor([ids + [0] * (-len(ids) % 64)], device=device)


@torch.no_grad()
def recall_table(
    model: NanoModel, vocab: Vocab, library: Library, distance: int, cases: int, device: torch.device
) -> dict[str, float]:
    """Shares of questions whose value, and whose whole answer, greedy decoding gives exactly; 8 questions a case."""
    exact_value = exact_answer = asked = 0
    for number in range(cases):
        case = recall_case(f"eval/{distance}/{number}", distance, vocab, library)
        ids, classes, spans = list(case.ids), [0] * len(case.ids), []
        for _, _, question, kinds in case.questions:
            spans.append((len(ids), len(ids) + len(question)))
            ids += question
            classes += kinds
        hidden = model.hidden(padded(ids, device))
        start = len(case.ids)
        best = F.linear(hidden[start - 1 : len(ids) - 1], model.lm_head.weight.to(hidden.dtype)).argmax(-1).tolist()
        for first, last in spans:
            right = [(classes[i], best[i - start] == ids[i]) for i in range(first, last)]
            exact_value += all(ok for kind, ok in right if kind == VALUE)
            exact_answer += all(ok for kind, ok in right if kind in (ANSWER, VALUE))
            asked += 1
    return {"asked": asked, "value": round(exact_value / asked, 4), "answer": round(exact_answer / asked, 4)}


@torch.no_grad()
def held_out_loss(model: NanoModel, vocab: Vocab, library: Library, device: torch.device) -> dict[str, float]:
    """Perplexity per token, and bits per byte, of held-out text pasted by a user, by kind of document."""
    rng = random.Random("eval/documents")
    sums: dict[str, list[float]] = {"docs": [0.0, 0, 0], "code": [0.0, 0, 0]}
    while min(s[1] for s in sums.values()) < 40_000:
        _, kind, ids, _ = library.excerpt(rng, 1500)
        writer = Writer(vocab, True)
        writer.message("user", ["Look at this text:\n\n"])
        head = writer.ids[:-4]  # without the closing tag
        hidden = model.hidden(padded(head + ids, device))
        logits = F.linear(
            hidden[len(head) - 1 : len(head) + len(ids) - 1], model.lm_head.weight.to(hidden.dtype)
        ).float()
        sums[kind][0] += F.cross_entropy(logits, torch.tensor(ids, device=device), reduction="sum").item()
        sums[kind][1] += len(ids)
        sums[kind][2] += sum(vocab.lengths[i] for i in ids)
    out = {}
    for kind, (loss, tokens, size) in sums.items():
        out[f"{kind}_perplexity"] = round(math.exp(loss / tokens), 3)
        out[f"{kind}_bits_per_byte"] = round(loss / math.log(2) / size, 4)
    return out
