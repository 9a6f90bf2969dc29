"""The encoded documents that users paste."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

import numpy as np
from corpus import Document
from vocab import Vocab

LINE = re.compile(r"[^\n]*\n+")


@dataclass
class Library:
    """Documents cut into lines and encoded. `cuts[i]` are the token counts before each line of document i."""

    titles: list[str]
    kinds: list[str]
    ids: list[np.ndarray]  # uint16, one array a document
    cuts: list[np.ndarray]  # int32, starts of lines, with the end
    names: list[list[str]]  # names defined in a code document, in order, by line start
    where: list[np.ndarray]

    @classmethod
    def build(cls, vocab: Vocab, documents: list[Document]) -> Library:
        library = cls([], [], [], [], [], [])
        for document in documents:
            ids: list[int] = []
            cuts, names, where = [0], [], []
            for line in LINE.findall(document.text):  # encoding line by line gives the same ids as encoding the whole
                found = re.match(r"\s*(?:def|class) (\w+)", line)
                if found and document.kind == "code":
                    names.append(found[1])
                    where.append(len(ids))
                ids += vocab.encode(line)
                cuts.append(len(ids))
            library.titles.append(document.title)
            library.kinds.append(document.kind)
            library.ids.append(np.array(ids, np.uint16))
            library.cuts.append(np.array(cuts, np.int32))
            library.names.append(names)
            library.where.append(np.array(where, np.int32))
        return library

    def excerpt(self, rng: random.Random, size: int) -> tuple[str, str, list[int], list[str]]:
        """(title, kind, ids, names defined): whole lines of one document, about `size` tokens or what there is."""
        which = rng.choices(range(len(self.ids)), self._weights())[0]
        cuts = self.cuts[which]
        first = int(cuts[rng.randrange(len(cuts) - 1)]) if len(self.ids[which]) > size else 0
        first = min(first, max(0, int(cuts[-1]) - size))
        first = int(cuts[np.searchsorted(cuts, first, side="right") - 1])
        last = int(cuts[min(np.searchsorted(cuts, first + size), len(cuts) - 1)])
        last = min(last, first + 2 * size + 64)
        inside = [name for name, at in zip(self.names[which], self.where[which], strict=True) if first <= at < last]
        return self.titles[which], self.kinds[which], self.ids[which][first:last].tolist(), inside

    def _weights(self) -> list[float]:
        if not hasattr(self, "_cached"):
            self._cached = [
                len(i) ** 0.75 * (2.0 if k == "docs" else 0.5) for i, k in zip(self.ids, self.kinds, strict=True)
            ]
        return self._cached
