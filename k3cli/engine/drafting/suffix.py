"""A drafter without weights: agents repeat themselves, so what followed the same words before may follow again.

It keeps a pointer into everything said so far: the place where the newest longest match goes on. While drawn tokens
follow the pointer, the match grows. When one does not, the tokens are looked up again; and because edits change a
word and then go on as before, the neighbourhood of the lost place is searched, too.

How often the pointer is right is measured by the length of its match, at every token, whether a draft was verified or
not: that costs nothing, since the tokens come by anyway. So text that doesn't repeat soon stops being drafted, and
text that begins to repeat is noticed without a single wasted row.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from k3cli.engine.drafting.drafter import NOTHING, Draft
from k3cli.engine.drafting.ngrams import BREAK, NgramIndex

if TYPE_CHECKING:
    from k3cli.engine.sampling import Sampling

ORDERS = (8, 3)
"""Match lengths that are looked up, the longer one first."""
TRIES = 16
"""Places looked at for one length."""
LONGEST = 32
"""Matches are not measured beyond this many tokens."""
NEAR = 12
"""After a difference: how many tokens on both sides of it are searched for where the text goes on."""

_EDGES = (0, 1, 2, 3, 4, 5, 6, 8, 12, 20)
"""Match lengths at which a new class begins. Below 3, the match is with the neighbourhood of a lost place; 0 stands for
"the token after the one that was replaced"."""
_PRIOR = (0.3, 0.35, 0.45, 0.4, 0.5, 0.55, 0.6, 0.7, 0.8, 0.9)
_PRIOR_WEIGHT = 3.0
_FADE = 0.98
_CLASS = [sum(edge <= length for edge in _EDGES) - 1 for length in range(LONGEST + 1)]


class HitRates:
    """How often the next token was the expected one, by the length of the match; recent tokens count more."""

    def __init__(self) -> None:
        self._seen = [_PRIOR_WEIGHT] * len(_EDGES)
        self._hits = [p * _PRIOR_WEIGHT for p in _PRIOR]

    def note(self, length: int, hit: bool) -> None:
        c = _CLASS[min(length, LONGEST)]
        self._seen[c] = self._seen[c] * _FADE + 1
        self._hits[c] = self._hits[c] * _FADE + hit

    def rate(self, length: int) -> float:
        c = _CLASS[min(length, LONGEST)]
        return self._hits[c] / self._seen[c]

    def table(self) -> dict[str, float]:
        """Rates by match length, for people."""
        names = [str(a) if b == a + 1 else f"{a}-{b - 1}" for a, b in pairwise(_EDGES)] + [f"{_EDGES[-1]}+"]
        return {name: round(h / s, 3) for name, h, s in zip(names, self._hits, self._seen, strict=True)}


class SuffixDrafter:
    """Drafts from the tokens of a timeline and, behind them, other texts. See drafter.Drafter for the calls.

    The index takes 20 to 28 bytes a token (ngrams) and is built from the context when a run of decoding begins: under a
    second for a million tokens. A fork starts without one.
    """

    name = "suffix"
    needs_hidden = False

    def __init__(self, sources: Sequence[Sequence[int]] = (), rates: HitRates | None = None) -> None:
        """sources: ids of other texts to draft from, the most important last."""
        self._sources = sources
        self._rates = rates or HitRates()
        self._index: NgramIndex | None = None
        self._known = 0  # tokens of the context that are in the index ...
        self._since = 0  # ... of which those from here on lie in one piece at its end
        self._at = -1  # place in the index that holds the expected token, -1: none
        self._length = 0
        self._lost = -1
        self._age = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the index."""
        return 0 if self._index is None else self._index.nbytes

    def begin(self, context: Sequence[int], sampling: Sampling) -> None:
        index = self._index
        if index is None:
            index = self._index = NgramIndex(ORDERS)
            for ids in self._sources:
                index.extend(ids)
                index.append(BREAK)
            self._known = self._since = 0
        same = self._agreement(context, index)
        if same < self._known:
            # Another tail. The old one stays as a text to draft from; a few tokens before the new one join it.
            index.append(BREAK)
            self._known = self._since = max(0, same - LONGEST)
            self._at = self._lost = -1
        if len(context) > self._known:
            index.extend(context[self._known :])
            self._known = len(context)
            self._lost = -1
            self._look_up(index)

    def propose(self, context: Sequence[int], position: int, k: int) -> Draft:
        index = self._index
        assert index is not None, "begin comes first"
        for token in context[self._known :]:
            self._follow(index, token)
        self._known = len(context)
        at = self._at
        if at < 0:
            return NOTHING
        ids, end = index.ids, len(index)
        found: list[int] = []
        for i in range(at, at + k):
            # A match that reaches the end of the text goes on with its own draft: a period repeats.
            token = ids[i] if i < end else found[i - end]
            if token == BREAK:
                break
            found.append(token)
        return Draft(found, [self._rates.rate(self._length + i) for i in range(len(found))])

    def observe(self, accepted: Sequence[int], hidden: Any) -> None:
        """Nothing: every token comes with the next context."""

    def fork(self) -> SuffixDrafter:
        return SuffixDrafter(self._sources, self._rates)

    def hit_rates(self) -> dict[str, float]:
        """See HitRates.table."""
        return self._rates.table()

    def _agreement(self, context: Sequence[int], index: NgramIndex) -> int:
        """How many of the known tokens the context still begins with; those before `_since` are taken on trust."""
        known, since = self._known, self._since
        upto = min(known, len(context))
        base = len(index) - known
        ids = index.ids
        # Almost always all are the same, which lists tell fastest.
        if list(ids[base + since : base + upto]) == list(context[since:upto]):
            return upto
        return next((i for i in range(since, upto) if ids[base + i] != context[i]), upto)

    def _follow(self, index: NgramIndex, token: int) -> None:
        """One more token of the context."""
        hit = False
        at = self._at
        if at >= 0:
            hit = index.ids[at] == token
            self._rates.note(self._length, hit)
            if not hit and (self._lost < 0 or self._length >= ORDERS[-1]):
                self._lost, self._age = at, -1
        index.append(token)
        self._age += 1
        if hit:
            self._at = at + 1
            self._length = min(self._length + 1, LONGEST)
            if self._length >= 2 * ORDERS[0]:
                self._lost = -1
                return
        else:
            self._at = -1
        self._look_up(index)

    def _look_up(self, index: NgramIndex) -> None:
        """The longest match among the newest places, if it beats the one at hand; else the neighbourhood."""
        ids, end = index.ids, len(index)
        best, place = self._length if self._at >= 0 else 0, -1
        for n in ORDERS:
            for found in index.places(n, TRIES):
                length, most = n, min(found, LONGEST)
                while length < most and ids[found - 1 - length] == ids[end - 1 - length]:
                    length += 1
                if length > best:
                    best, place = length, found
            if place >= 0:
                self._at, self._length = place, best
                return
        if self._at < 0 and self._lost >= 0:
            self._look_near(index)

    def _look_near(self, index: NgramIndex) -> None:
        lost, ids = self._lost, index.ids
        if self._age > NEAR:
            self._lost = -1
            return
        token, end = ids[-1], len(ids) - 1
        for place in range(lost, min(lost + NEAR, end)):
            if ids[place] == token:
                self._at, self._length = place + 1, 1
                return
        if self._age == 0 and lost + 1 < end:
            self._at, self._length = lost + 1, 0
