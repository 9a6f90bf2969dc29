"""A drafter without weights: agents repeat themselves, so what followed the same words before may follow again.

It keeps a pointer into everything said so far: the place where the newest longest match goes on. While drawn tokens
follow the pointer, the match grows. When one does not, the tokens are looked up again; and because edits change a
word and then go on as before, the neighbourhood of the lost place is searched, too. What was put there instead is
remembered for the rest of the answer: who renames a variable once does it again at the next place.

How often the pointer is right is measured by the length of its match, at every token, whether a draft was verified or
not: that costs nothing, since the tokens come by anyway. So text that doesn't repeat soon stops being drafted, and
text that begins to repeat is noticed without a single wasted row.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from k3cli.engine.drafting.drafter import Draft
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

FOLLOWED = 16
"""Tokens that are followed one by one, those of the longest window; more come only behind a sleep (policy.PEEK)."""
CHANGE = 8
"""Most tokens of what an edit takes away, and of what it puts there."""

_EDGES = (0, 1, 2, 3, 4, 5, 6, 8, 12, 20)
"""Match lengths at which a new class begins. Below 3, the match is with the neighbourhood of a lost place; 0 stands for
"the token after the one that was replaced"."""
_PRIOR = (0.3, 0.35, 0.45, 0.4, 0.5, 0.55, 0.6, 0.7, 0.8, 0.9)
_EDIT_PRIOR = 0.6
_PRIOR_WEIGHT = 3.0
_FADE = 0.98
_CLASS = [sum(edge <= length for edge in _EDGES) - 1 for length in range(LONGEST + 1)]


_EDIT = len(_EDGES)
"""The class of "what was put here last time": the first token of a replacement."""


class HitRates:
    """How often the next token was the expected one, by the length of the match; recent tokens count more."""

    def __init__(self) -> None:
        self._seen = [_PRIOR_WEIGHT] * (_EDIT + 1)
        self._hits = [p * _PRIOR_WEIGHT for p in (*_PRIOR, _EDIT_PRIOR)]

    def note(self, kind: int, hit: bool) -> None:
        """kind: see `kind_of`."""
        self._seen[kind] = self._seen[kind] * _FADE + 1
        self._hits[kind] = self._hits[kind] * _FADE + hit

    def rate(self, kind: int) -> float:
        return self._hits[kind] / self._seen[kind]

    def table(self) -> dict[str, float]:
        """Rates by match length, for people."""
        names = [str(a) if b == a + 1 else f"{a}-{b - 1}" for a, b in pairwise(_EDGES)] + [f"{_EDGES[-1]}+", "edit"]
        return {name: round(self.rate(kind), 3) for kind, name in enumerate(names)}


def kind_of(length: int) -> int:
    """The class of a match of so many tokens."""
    return _CLASS[min(length, LONGEST)]


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
        self._edit: tuple[int, ...] = ()  # what is still to come of a replacement, before `_at` goes on
        self._under = -1  # where the replaced tokens begin, while none of the replacement has come
        self._lost = -1
        self._age = 0
        self._edits: dict[int, tuple[array[int], tuple[int, ...]]] = {}  # first token -> tokens, replacement

    @property
    def cheap(self) -> SuffixDrafter:
        """What is asked while the policy rests: itself."""
        return self

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
            self._point(index, -1, 0)
        self._edits.clear()
        if len(context) > self._known:
            self._catch_up(index, context)

    def propose(self, context: Sequence[int], position: int, k: int) -> Draft:
        index = self._index
        assert index is not None, "begin comes first"
        if len(context) - self._known > FOLLOWED:
            self._catch_up(index, context)
        for token in context[self._known :]:
            self._follow(index, token)
        self._known = len(context)
        at, edit, under, length, end = self._at, self._edit, self._under, self._length, len(index)
        ids, found, confidence = index.ids, list[int](), list[float]()
        while at >= 0 and len(found) < k:
            if edit:
                token, edit = edit[0], edit[1:]
            else:
                # A match that reaches the end of the text goes on with its own draft: a period repeats.
                token = ids[at] if at < end else found[at - end]
                at += 1
            if token == BREAK:
                break
            found.append(token)
            confidence.append(self._rates.rate(_EDIT if under >= 0 else kind_of(length)))
            length += 1
            under = -1
            if not edit and (change := self._change_at(index, at)) is not None:
                under, at, edit = at, at + change[0], change[1]
            if at - end >= len(found):
                break
        return Draft(found, confidence, asked=False)

    def observe(self, accepted: Sequence[int], position: int, hidden: Any) -> None:
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

    def _catch_up(self, index: NgramIndex, context: Sequence[int]) -> None:
        """Takes in what is new all at once, which is quick and measures nothing, and looks for a match behind it."""
        index.extend(context[self._known :])
        self._known = len(context)
        self._lost = -1
        self._point(index, -1, 0)
        self._look_up(index)

    def _follow(self, index: NgramIndex, token: int) -> None:
        """One more token of the context."""
        hit, ids = False, index.ids
        if 0 <= self._at < len(index) or self._edit:
            expected = self._edit[0] if self._edit else ids[self._at]
            hit = expected == token
            self._rates.note(_EDIT if self._under >= 0 else kind_of(self._length), hit)
            if not hit and self._under >= 0 and token == ids[self._under]:
                # Not replaced here: the text itself goes on.
                del self._edits[token]
                self._at, self._edit, hit = self._under, (), True
            if not hit and (self._lost < 0 or self._length >= ORDERS[-1]):
                self._lost, self._age = (self._under if self._under >= 0 else self._at), -1
        index.append(token)
        self._age += 1
        if not hit:
            self._point(index, -1, 0)
            self._look_up(index)
            return
        if self._edit:
            self._edit, self._under, self._length = self._edit[1:], -1, self._length + 1
            if not self._edit:
                self._point(index, self._at, self._length)
            return
        self._point(index, self._at + 1, self._length + 1)
        if self._length == 2 and self._lost >= 0 and not self._edit:
            self._learn(index)
        if self._length < 2 * ORDERS[0]:
            self._look_up(index)
        else:
            self._lost = -1

    def _point(self, index: NgramIndex, at: int, length: int) -> None:
        """Expect what stands at `at`, or what was put there the last time; -1: expect nothing."""
        self._at, self._length, self._edit, self._under = at, min(length, LONGEST), (), -1
        if at >= 0 and (change := self._change_at(index, at)) is not None:
            self._under, self._at, self._edit = at, at + change[0], change[1]

    def _change_at(self, index: NgramIndex, at: int) -> tuple[int, tuple[int, ...]] | None:
        """How many tokens at a place were replaced elsewhere in this answer, and by what."""
        ids = index.ids
        if not self._edits or at >= len(ids) or (known := self._edits.get(ids[at])) is None:
            return None
        gone, put = known
        return (len(gone), put) if ids[at : at + len(gone)] == gone else None

    def _learn(self, index: NgramIndex) -> None:
        """Two tokens after a difference were as expected: what lies between is an edit."""
        ids, end = index.ids, len(index)
        gone, put = ids[self._lost : self._at - 2], ids[end - self._age - 1 : end - 2]
        if 1 <= len(gone) <= CHANGE and 1 <= len(put) <= CHANGE:
            self._edits[gone[0]] = (gone, tuple(put))

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
                self._point(index, place, best)
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
                self._point(index, place + 1, 1)
                return
        if self._age == 0 and lost + 1 < end:
            self._point(index, lost + 1, 0)
