"""Measures a k3-nano checkpoint through the product's own model (`k3cli`), greedy, on conversations of fresh seeds.

`evaluate.py --data DIR [--model DIR] [--distances 1000,4000,16000] [--device cpu]` prints one JSON object a line:
parity with the training model, perplexity on held-out documents, tool calls, recall by distance.
"""

from __future__ import annotations

import argparse
import json
import math
import pickle
import random
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import subject
import torch
import torch.nn.functional as F
from chatfmt import ANSWER as REPLY
from chatfmt import VALUE, Writer, unmark
from export import restore
from generate import Library, begin, recall_case, training_row
from model import NanoConfig, NanoModel
from vocab import Vocab

from k3cli.model.network import K3Model
from k3cli.model.state import State
from k3cli.model.weights import load_model

ROOT = Path(__file__).parents[2]
CHUNK = 2048
LIMIT = 300  # tokens of one answer
ANSWER = re.compile(
    r"(?:(.*?)<\|close\|>think<\|sep\|><\|open\|>response<\|sep\|>)?(.*?)<\|close\|>response<\|sep\|>(.*)<\|close\|>message<\|sep\|><\|end_of_msg\|>",
    re.DOTALL,
)
CALL = re.compile(r'<\|open\|>call tool="([^"]*)" index="\d+"<\|sep\|>(.*?)<\|close\|>call<\|sep\|>', re.DOTALL)
ARGUMENT = re.compile(
    r'<\|open\|>argument key="([^"]*)" type="(\w+)"<\|sep\|>(.*?)<\|close\|>argument<\|sep\|>', re.DOTALL
)


class Product:
    """Greedy answers from a `K3Model`."""

    def __init__(self, model: K3Model, vocab: Vocab) -> None:
        self.model, self.vocab = model, vocab
        self.stop = vocab.special("<|end_of_msg|>")
        self.answers = self.stopped = self.well_formed = 0
        self.decoded, self.decode_s, self.prefilled, self.prefill_s = 0, 0.0, 0, 0.0

    def read(self, ids: list[int], state: State) -> int:
        """Evaluates `ids` and returns the best next id."""
        start, logits = time.perf_counter(), None
        for at in range(0, len(ids), CHUNK):
            logits = self.model.prefill(torch.tensor(ids[at : at + CHUNK]), state)
        self.prefilled += len(ids)
        self.prefill_s += time.perf_counter() - start
        assert logits is not None
        return int(logits.argmax(-1).flatten()[-1])

    def answer(self, prompt: list[int], state: State) -> str:
        """The raw completion, control tokens by name; `state` moves on."""
        out = [self.read(prompt, state)]
        start = time.perf_counter()
        while out[-1] != self.stop and len(out) < LIMIT:
            logits, log = self.model.verify(torch.tensor(out[-1:]), state)
            self.model.commit(state, log, 1)
            out.append(int(logits[0].argmax()))
        self.decoded += len(out)
        self.decode_s += time.perf_counter() - start
        text = self.vocab.decode(out)
        self.answers += 1
        self.stopped += out[-1] == self.stop
        self.well_formed += ANSWER.fullmatch(text) is not None
        return text


def response_of(text: str) -> str:
    """The response channel of a completion, empty when malformed."""
    found = ANSWER.fullmatch(text)
    return found[2] if found else ""


def calls_of(text: str) -> list[tuple[str, dict[str, Any]]]:
    calls = []
    for name, body in CALL.findall(text):
        arguments: dict[str, Any] = {}
        for key, kind, value in ARGUMENT.findall(body):
            try:
                arguments[key] = value if kind == "string" else json.loads(value)
            except ValueError:
                arguments[key] = None
        calls.append((name, arguments))
    return calls


def question(vocab: Vocab, thinking: bool, text: str) -> list[int]:
    writer = Writer(vocab, thinking)
    writer.message("user", text)
    writer.generation_prompt()
    return writer.ids


def recall_fed(product: Product, library: Library, distance: int, questions: int) -> dict[str, Any]:
    """As `recall`, with the true answer fed: an answer counts when each of its tokens is the best guess, which is when
    greedy decoding would give it. Needs prefill only, so that long distances are quick enough on a CPU."""
    asked = exact = same = number = 0
    seen = []
    while asked < questions:
        case = recall_case(f"eval/product/{distance}/{number}", distance, product.vocab, library)
        number += 1
        context = product.model.new_state()
        product.read(case.ids, context)
        for (_, _, ids, classes), away in zip(case.questions, case.distances, strict=True):
            logits = product.model.prefill(torch.tensor(ids), context.fork(), logits="all")
            assert logits is not None
            best = logits.argmax(-1).tolist()
            right = [(kind, guess == true) for kind, guess, true in zip(classes[1:], best, ids[1:], strict=False)]
            asked += 1
            exact += all(ok for kind, ok in right if kind == VALUE)
            same += all(ok for kind, ok in right if kind >= REPLY)
            seen.append(away)
    return recalled("recall, answer fed", distance, seen, exact, same)


def recall(product: Product, library: Library, distance: int, questions: int) -> dict[str, Any]:
    """Exact: the response holds the value, not inside a longer word. `same`: the whole answer is the expected one."""
    asked = exact = same = 0
    seen = []
    missed: list[tuple[str, str, str]] = []
    number = 0
    while asked < questions:
        case = recall_case(f"eval/product/{distance}/{number}", distance, product.vocab, library)
        number += 1
        context = product.model.new_state()
        product.read(case.ids, context)
        for (text, value, ids, _), away in zip(case.questions, case.distances, strict=True):
            prompt = question(product.vocab, case.thinking, unmark(text))
            got = product.answer(prompt, context.fork())
            response = response_of(got)
            ok = re.search(rf"(?<!\w){re.escape(value)}(?!\w)", response) is not None
            asked, exact = asked + 1, exact + ok
            same += got == product.vocab.decode(ids[len(prompt) :])
            seen.append(away)
            if not ok:
                missed.append((unmark(text), value, response))
    return recalled("recall", distance, seen, exact, same) | {"missed": missed}


def recalled(what: str, distance: int, seen: Sequence[int], exact: int, same: int) -> dict[str, Any]:
    """The row of a recall. seen: the true distance of each question asked."""
    return {
        "what": what,
        "distance": distance,
        "from": min(seen),
        "to": max(seen),
        "asked": len(seen),
        "exact": round(exact / len(seen), 4),
        "same": round(same / len(seen), 4),
    }


def tools(product: Product, library: Library, count: int) -> dict[str, Any]:
    """Right name and arguments where a tool fits; no call where none does."""
    right_name = right = false_calls = answered = results = 0
    for number in range(count):
        rng = random.Random(f"eval/product/tools/{number}")
        talk = begin(rng, product.vocab, library, 2048, with_tools=True)
        tool = rng.choice(talk.tools)
        request, arguments, result, answer = tool.make(rng)
        state = product.model.new_state()
        product.read(talk.out.ids, state)
        other = state.fork()
        calls = calls_of(product.answer(question(product.vocab, talk.out.thinking, unmark(request)), state))
        right_name += [name for name, _ in calls] == [tool.name]
        right += calls == [(tool.name, arguments)]
        if calls == [(tool.name, arguments)]:
            # The completion ended with the stop id unevaluated; the result follows it.
            writer = Writer(product.vocab, talk.out.thinking)
            writer.raw([product.stop], 0)
            writer.message("tool", result, tool=tool.name, index="1")
            writer.generation_prompt()
            answered += 1
            results += response_of(product.answer(writer.ids, state)) == unmark(answer)
        plain, _ = subject.ask(rng, rng.choice([*subject.QA, *subject.CHAT]))
        false_calls += bool(calls_of(product.answer(question(product.vocab, talk.out.thinking, plain), other)))
    return {
        "what": "tools",
        "asked": count,
        "name": round(right_name / count, 4),
        "name_and_arguments": round(right / count, 4),
        "answer_from_result": round(results / max(answered, 1), 4),
        "calls_without_need": round(false_calls / count, 4),
    }


def perplexity(product: Product, library: Library, tokens: int) -> dict[str, Any]:
    """Of held-out documents pasted by a user at the start of a conversation, excerpts of about 1,500 tokens."""
    rng = random.Random("eval/documents")
    sums = {"docs": [0.0, 0.0, 0.0], "code": [0.0, 0.0, 0.0]}
    while min(s[1] for s in sums.values()) < tokens:
        _, kind, ids, _ = library.excerpt(rng, 1500)
        writer = Writer(product.vocab, True)
        writer.open_tag("message", 1, role="user")
        writer.text("Look at this text:\n\n", 1)
        state, head = product.model.new_state(), len(writer.ids)
        logits = product.model.prefill(torch.tensor(writer.ids + ids), state, logits="all")
        assert logits is not None
        loss = F.cross_entropy(logits[head - 1 : -1].float().cpu(), torch.tensor(ids), reduction="sum").item()
        for i, value in enumerate((loss, len(ids), sum(product.vocab.lengths[t] for t in ids))):
            sums[kind][i] += value
    line: dict[str, Any] = {"what": "perplexity"}
    for kind, (loss, count, size) in sums.items():
        line |= {
            f"{kind}_tokens": int(count),
            kind: round(math.exp(loss / count), 2),
            f"{kind}_bits_per_byte": round(loss / math.log(2) / size, 3),
        }
    return line


def parity(product: Product, folder: Path, library: Library) -> dict[str, Any]:
    """Largest logit difference between the product's model and the training model, both fp32, on one fresh row."""
    ids, _ = training_row("eval/parity", 600, product.vocab, library)
    row = torch.tensor(ids.astype("int64"))
    trained = NanoModel(NanoConfig(product.vocab.n_vocab))
    restore(trained, folder)
    with torch.no_grad():
        expected = trained.eval()(row[None])[0]
    got = product.model.prefill(row, product.model.new_state(), logits="all")
    assert got is not None
    difference = (got.cpu() - expected).abs().max().item()
    return {"what": "parity", "max_logit_difference": difference, "logit_std": round(expected.std().item(), 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="what prepare.py wrote")
    parser.add_argument("--model", type=Path, default=ROOT / "k3cli" / "assets" / "k3-nano")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--distances", default="1000,4000,16000")
    parser.add_argument("--questions", type=int, default=104)
    parser.add_argument("--fed", action="store_true", help="recall by feeding the true answer: quick on a CPU")
    parser.add_argument("--only", choices=("parity", "perplexity", "tools", "recall"))
    options = parser.parse_args()
    vocab = Vocab.from_file(options.model / "tiktoken.model")
    library: Library = pickle.loads((options.data / "corpus.pkl").read_bytes())["held_out"]
    product = Product(load_model(options.model, device=options.device, dtype=torch.float32).model, vocab)
    jobs = {
        "parity": lambda: [parity(product, options.model, library)],
        "perplexity": lambda: [perplexity(product, library, 20_000)],
        "tools": lambda: [tools(product, library, options.questions)],
        "recall": lambda: (
            (recall_fed if options.fed else recall)(product, library, int(d), options.questions)
            for d in options.distances.split(",")
        ),
    }
    for name, job in jobs.items():
        if options.only in (None, name):
            for line in job():
                print(json.dumps(line), flush=True)
    if product.answers:
        print(
            json.dumps(
                {
                    "what": "answers",
                    "count": product.answers,
                    "stopped": round(product.stopped / product.answers, 4),
                    "well_formed": round(product.well_formed / product.answers, 4),
                    "prefill_tok_s": round(product.prefilled / product.prefill_s),
                    "decode_tok_s": round(product.decoded / product.decode_s, 1),
                }
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()
