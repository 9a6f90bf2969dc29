"""The tokenizer of k3-nano: train a byte-level BPE with K3's split pattern, save it as `tiktoken.model`, load it back.

The file has one token a line, `base64(bytes) rank`; the 256 single bytes come first, then the merges in the order they
were learned. 256 special ids follow the ranks at the same offsets as in K3 (`[BOS]` +0, `<|end_of_msg|>` +2, ...).
"""

from __future__ import annotations

import base64
import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

import regex
import tiktoken

UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{CONTRACTION}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)

# Offsets of the named specials above the rank count; every other special id is reserved.
SPECIALS = {
    "[BOS]": 0,
    "[EOS]": 1,
    "<|end_of_msg|>": 2,
    "<|open|>": 3,
    "<|close|>": 4,
    "<|sep|>": 5,
    "[start_header_id]": 6,
    "[end_header_id]": 7,
    "[EOT]": 9,
    "<|media_begin|>": 18,
    "<|media_content|>": 19,
    "<|media_end|>": 20,
    "<|media_pad|>": 21,
    "<osagent_mode>": 65,
    "[UNK]": 254,
    "[PAD]": 255,
}
N_SPECIALS = 256


class Vocab:
    """Text to ids and back, without specials in text; named special ids beside it."""

    def __init__(self, ranks: dict[bytes, int]) -> None:
        self.n_ranks = len(ranks)
        self.n_vocab = self.n_ranks + N_SPECIALS
        self._encoding = tiktoken.Encoding(
            name="k3-nano", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={}, explicit_n_vocab=self.n_ranks
        )
        self.bytes_of = [token for token, _ in sorted(ranks.items(), key=lambda item: item[1])]
        self.lengths = [len(token) for token in self.bytes_of]
        self._cache: dict[str, list[int]] = {}

    @classmethod
    def from_file(cls, path: Path) -> Vocab:
        ranks = {}
        for line in path.read_bytes().splitlines():
            token, rank = line.split()
            ranks[base64.b64decode(token)] = int(rank)
        return cls(ranks)

    def special(self, name: str) -> int:
        return self.n_ranks + SPECIALS[name]

    def encode(self, text: str) -> list[int]:
        """Ids of `text`; short strings are remembered, since templates repeat. Do not change the list."""
        if len(text) > 64:
            return self._encoding.encode_ordinary(text)
        ids = self._cache.get(text)
        if ids is None:
            ids = self._encoding.encode_ordinary(text)
            if len(self._cache) < 200_000:
                self._cache[text] = ids
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`; special ids appear by name (for reading only)."""
        names = {self.n_ranks + offset: name.encode() for name, offset in SPECIALS.items()}
        parts = [self.bytes_of[i] if i < self.n_ranks else names.get(i, b"<?>") for i in ids]
        return b"".join(parts).decode("utf-8", errors="replace")


def count_pieces(texts: Iterable[tuple[str, int]]) -> Counter[bytes]:
    """Pieces of the split pattern with their weighted counts. Digit pieces are left out: every digit stays one token,
    which makes numbers and hex strings easy to copy."""
    split = regex.compile(PATTERN, regex.V1)
    counts: Counter[bytes] = Counter()
    for text, weight in texts:
        for piece in split.findall(text):
            if not piece[0].isnumeric():
                counts[piece.encode()] += weight
    return counts


def train_bpe(counts: Counter[bytes], n_ranks: int) -> dict[bytes, int]:
    """Greedy BPE: repeatedly merge the most frequent adjacent pair. Ties break on the pair's bytes, so that the result
    depends on the counts alone."""
    tokens: list[bytes] = [bytes([b]) for b in range(256)]
    words = [list(word) for word in counts]
    weights = list(counts.values())
    totals: Counter[tuple[int, int]] = Counter()
    where: defaultdict[tuple[int, int], set[int]] = defaultdict(set)
    for index, word in enumerate(words):
        for pair in pairwise(word):
            totals[pair] += weights[index]
            where[pair].add(index)
    heap = [(-total, tokens[a], tokens[b], (a, b)) for (a, b), total in totals.items()]
    heapq.heapify(heap)
    while len(tokens) < n_ranks and heap:
        negative, _, _, pair = heapq.heappop(heap)
        if totals[pair] != -negative or not totals[pair]:
            continue
        new = len(tokens)
        tokens.append(tokens[pair[0]] + tokens[pair[1]])
        changed: set[tuple[int, int]] = set()
        for index in where.pop(pair):
            word, weight = words[index], weights[index]
            for old in pairwise(word):
                totals[old] -= weight
                changed.add(old)
            merged: list[int] = []
            i = 0
            while i < len(word):
                if i + 1 < len(word) and (word[i], word[i + 1]) == pair:
                    merged.append(new)
                    i += 2
                else:
                    merged.append(word[i])
                    i += 1
            words[index] = merged
            for fresh in pairwise(merged):
                totals[fresh] += weight
                where[fresh].add(index)
                changed.add(fresh)
        for a, b in changed:
            if totals[a, b] > 0:
                heapq.heappush(heap, (-totals[a, b], tokens[a], tokens[b], (a, b)))
    return {token: rank for rank, token in enumerate(tokens)}


def save_ranks(ranks: dict[bytes, int], path: Path) -> None:
    lines = [base64.b64encode(token).decode() + f" {rank}" for token, rank in sorted(ranks.items(), key=lambda i: i[1])]
    path.write_text("\n".join(lines) + "\n")
