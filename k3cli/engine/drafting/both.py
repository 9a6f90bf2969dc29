"""Two drafters in one: a match in the text where it is likely to go on, the draft model's guess elsewhere.

A long match is right more often than any model and costs nothing; where text is new, only the model knows anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from k3cli.engine.drafting.drafter import Draft, Drafter

if TYPE_CHECKING:
    from k3cli.engine.sampling import Sampling

SURE = 0.8
"""A match that is as likely to go on as this is taken without asking the model."""


def expected(draft: Draft) -> float:
    """Tokens that are accepted on average; for a draft that can't tell, one."""
    if draft.confidence is None:
        return 1.0 if draft.ids else 0.0
    tokens, whole = 0.0, 1.0
    for chance in draft.confidence:
        whole *= chance
        tokens += whole
    return tokens


class BothDrafter:
    """cheap: asked first, and alone while the policy rests. model: asked where `cheap` is not sure."""

    name = "suffix+dspark"

    def __init__(self, cheap: Drafter, model: Drafter) -> None:
        self.cheap, self.model = cheap, model
        self.needs_hidden = model.needs_hidden

    def begin(self, context: Sequence[int], sampling: Sampling) -> None:
        self.cheap.begin(context, sampling)
        self.model.begin(context, sampling)

    def propose(self, context: Sequence[int], position: int, k: int) -> Draft:
        """Of two drafts the one of which more tokens are expected to be accepted."""
        match = self.cheap.propose(context, position, k)
        if match.confidence and match.confidence[0] >= SURE:
            return replace(match, asked=False)
        guess = self.model.propose(context, position, k)
        promised = expected(match)
        return replace(match if promised > expected(guess) else guess, instead=promised)

    def observe(self, accepted: Sequence[int], position: int, hidden: Any) -> None:
        self.cheap.observe(accepted, position, None)
        self.model.observe(accepted, position, hidden)

    def fork(self) -> BothDrafter:
        return BothDrafter(self.cheap.fork(), self.model.fork())

    def keep(self, position: int) -> Mapping[str, Any]:
        """What the model keeps."""
        keep = getattr(self.model, "keep", None)
        return {} if keep is None else dict(keep(position))

    def recall(self, kept: Mapping[str, Any], position: int) -> None:
        """For the model; what is cheap is made again."""
        if hasattr(self.model, "recall"):
            self.model.recall(kept, position)

    @property
    def context_rows(self) -> int:
        """Tokens of the context the model has seen."""
        return int(getattr(self.model, "context_rows", 0))

    def hit_rates(self) -> dict[str, float]:
        """Those of the matches, where they are measured."""
        rates = getattr(self.cheap, "hit_rates", None)
        return {} if rates is None else dict(rates())
