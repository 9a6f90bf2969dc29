"""What a drafter is: something that guesses the next tokens. A wrong guess costs time, never a token.

The target model checks every guess: a draft is accepted when it equals the token that the target itself draws at that
position. So a drafter may guess from anything, and needs no care beyond being quick.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from k3cli.engine.sampling import Sampling


@dataclass(frozen=True)
class Draft:
    """A guess of what follows the context.

    ids: the tokens, next one first. confidence: for each, how likely it is to be accepted if those before it are
    (0 to 1); None when the drafter can't tell, and the acceptance measured at each place is used instead.
    asked: that part of the drafter was asked which takes time, and has to win it. instead: tokens that were expected of
    another draft at hand, made without that part.
    """

    ids: Sequence[int] = ()
    confidence: Sequence[float] | None = None
    asked: bool = True
    instead: float = 0.0


NOTHING = Draft()


class Drafter(Protocol):
    """Guesses for one timeline. Whatever it raises turns it off for the rest of that timeline; the turn goes on. Of two
    in one (`both.py`), that half.

    name: as shown to people. needs_hidden: whether `observe` wants hidden rows of the target (see there).
    One that learns what it could not learn again after a resume may also have `keep(position)`, named tensors that
    hold what it knows of the tokens before there and do not change any more, and `recall(kept, position)`, which takes
    such a mapping back, as arrays. One with a part that costs next to nothing may have it as `cheap`: it alone is asked
    while asking is not worth it.
    """

    @property
    def name(self) -> str: ...

    @property
    def needs_hidden(self) -> bool: ...

    def begin(self, context: Sequence[int], sampling: Sampling) -> None:
        """A run of decoding starts behind `context`, every token of the timeline.

        The context may be anything: longer than last time, or with another tail (an undo, a fork). sampling: how the
        target draws; a drafter that draws with the same noise agrees with it more often.
        """

    def propose(self, context: Sequence[int], position: int, k: int) -> Draft:
        """At most k >= 1 tokens after `context`, whose last token, at index `position`, is the newest one drawn.

        Within one run the context only grows. `context` belongs to the caller: it is not kept and not changed.
        """

    def observe(self, accepted: Sequence[int], position: int, hidden: Any) -> None:
        """Tokens that were evaluated and stay, oldest first: of a prompt, or the rows of a window that were kept.

        position: of the first. hidden: with `needs_hidden`, what the model tapped for exactly these rows; else None.
        """

    def fork(self) -> Drafter:
        """A drafter for a copy of the timeline; nothing that changes is shared. Called often: it must be cheap."""
