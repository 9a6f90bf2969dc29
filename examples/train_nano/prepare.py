"""Makes the tokenizer and the encoded corpus: `prepare.py --out DIR` writes tiktoken.model and corpus.pkl."""

from __future__ import annotations

import argparse
import pickle
import random
from pathlib import Path

import subject
from chatfmt import EFFORT_TEXT, TOOLS_TEXT, unmark
from corpus import load_documents
from facts import ACK_ONE, ASK_ONE, STATE_ONE, fill, new_fact
from generate import Library
from toolcalls import draw_tools
from vocab import Vocab, count_pieces, save_ranks, train_bpe

TAGS = [
    "message",
    "think",
    "response",
    "tools",
    "call",
    "argument",
    "json",
    " role",
    " type",
    " tool",
    " index",
    " key",
    '="',
    "user",
    "assistant",
    "system",
    "tool",
    "string",
    "number",
    "boolean",
    "tool-declare",
    "thinking-effort",
    TOOLS_TEXT,
    EFFORT_TEXT.format("low"),
    EFFORT_TEXT.format("high"),
    EFFORT_TEXT.format("max"),
]


def chat_texts(n: int) -> list[str]:
    """Samples of what is said in conversations, with plain words for values."""
    rng = random.Random("vocabulary")
    texts = []
    for _ in range(n):
        fact = new_fact(rng)
        fact.value = "value"
        texts += [fill(rng, rng.choice(pool), fact) for pool in (STATE_ONE, ASK_ONE, ACK_ONE, ["{B} is {m}."])]
        for pool in (subject.QA, subject.CHAT):
            texts += subject.ask(rng, rng.choice(pool))
        texts += subject.unknown(rng)
        for tool in draw_tools(rng):
            texts += [tool.make(rng)[0], str(tool.schema()).replace("'", '"')]
    return [unmark(text) for text in texts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2816, help="tokens without the 256 specials")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--corpus-only", action="store_true", help="keep DIR/tiktoken.model, encode the corpus again")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    documents = load_documents()
    file = options.out / "tiktoken.model"
    if not options.corpus_only:
        weighted = [(d.text, 4 if d.kind == "docs" else 1) for d in documents if not d.held_out]
        weighted += [(text, 20) for text in chat_texts(4000)] + [(tag, 100_000) for tag in TAGS]
        save_ranks(train_bpe(count_pieces(weighted), options.ranks), file)
    vocab = Vocab.from_file(file)
    parts = {held: Library.build(vocab, [d for d in documents if d.held_out == held]) for held in (False, True)}
    with (options.out / "corpus.pkl").open("wb") as out:
        pickle.dump({"train": parts[False], "held_out": parts[True]}, out)
    n = {held: sum(map(len, library.ids)) for held, library in parts.items()}
    print(f"{vocab.n_ranks} ranks, training documents {n[False]:,} tokens, held out {n[True]:,} tokens")


if __name__ == "__main__":
    main()
