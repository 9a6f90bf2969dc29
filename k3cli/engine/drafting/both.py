"""Two drafters in one: a match in the text where it is likely to go on, the draft model's guess elsewhere.

A long match is right more often than any model and costs nothing; where text is new, only the model knows anything.
One that fails is no reason to do without the other: `without` says who goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
    """cheap: asked first, and alone while the policy rests. model: asked where `cheap` is not sure.

    Each raises what its halves do, when both have done what they can.
    """

    name = "suffix+dspark"

    def __init__(self, cheap: Drafter, model: Drafter) -> None:
        self.cheap, self.model = cheap, model
        self.needs_hidden = model.needs_hidden
        self._at_work: set[str] = set()

    def begin(self, context: Sequence[int], sampling: Sampling) -> None:
        self._each(lambda half, _: half.begin(context, sampling))

    def propose(self, context: Sequence[int], position: int, k: int) -> Draft:
        """Of two drafts the one of which more tokens are expected to be accepted."""
        self._at_work = {"cheap"}
        match = self.cheap.propose(context, position, k)
        if match.confidence and match.confidence[0] >= SURE:
            return match
        promised = expected(match)
        self._at_work = {"model"}
        guess = self.model.propose(context, position, k)
        if promised > expected(guess):
            self._at_work = {"cheap"}
            return replace(match, asked=True, instead=promised)
        return replace(guess, instead=promised)

    def observe(self, accepted: Sequence[int], position: int, hidden: Any) -> None:
        self._each(lambda half, name: half.observe(accepted, position, hidden if name == "model" else None))

    def fork(self) -> BothDrafter:
        forks: dict[str, Drafter] = {}
        self._each(lambda half, name: forks.update({name: half.fork()}))
        return BothDrafter(**forks)

    def keep(self, position: int) -> Mapping[str, Any]:
        """What the model keeps."""
        self._at_work = {"model"}
        keep = getattr(self.model, "keep", None)
        return {} if keep is None else dict(keep(position))

    def recall(self, kept: Mapping[str, Any], position: int) -> None:
        """For the model; what is cheap is made again."""
        self._at_work = {"model"}
        if hasattr(self.model, "recall"):
            self.model.recall(kept, position)

    def without(self, failed: Drafter | None = None) -> tuple[Drafter, Drafter] | None:
        """(the half that is lost, the one that goes on) when one has failed; None when neither can go on.

        failed: that half; None: whoever has raised the newest error, or made the newest draft.
        """
        lost = self._at_work if failed is None else {"cheap" if failed is self.cheap else "model"}
        if len(lost) != 1:
            return None
        return (self.cheap, self.model) if "cheap" in lost else (self.model, self.cheap)

    @property
    def context_rows(self) -> int:
        """Tokens of the context the model has seen."""
        return int(getattr(self.model, "context_rows", 0))

    def hit_rates(self) -> dict[str, float]:
        """Those of the matches, where they are measured."""
        rates = getattr(self.cheap, "hit_rates", None)
        return {} if rates is None else dict(rates())

    def _each(self, call: Callable[[Drafter, str], None]) -> None:
        """Calls both halves, the second one whatever the first does."""
        failed: dict[str, Exception] = {}
        for name, half in (("cheap", self.cheap), ("model", self.model)):
            try:
                call(half, name)
            except Exception as error:
                failed[name] = error
        self._at_work = set(failed)
        if failed:
            raise next(iter(failed.values()))
