"""Which drafter a model gets: `--spec`, what `auto` means, and why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from k3cli.engine.drafting.drafter import Drafter
from k3cli.engine.drafting.suffix import SuffixDrafter
from k3cli.errors import UsageError

KINDS = "auto, off, suffix or dspark[:DIR]"


@dataclass(frozen=True)
class Choice:
    """kind: "off", "suffix" or "dspark". folder: of a DSpark checkpoint, "" for the model's own. reason: why."""

    kind: str
    folder: str
    reason: str


OFF = Choice("off", "", "nothing was asked for")


def choose(spec: str, reason: str = "") -> Choice:
    """What a `spec` setting stands for; reason: where it came from. UsageError when it is unknown or not available."""
    kind, _, folder = spec.partition(":")
    if kind == "auto" and not folder:
        return Choice("suffix", "", "auto: it needs no weights, and costs next to nothing where text does not repeat")
    if kind in ("off", "suffix") and not folder:
        return Choice(kind, "", reason or "asked for")
    if kind == "dspark":
        raise UsageError(f"spec is {spec}: DSpark drafts can't be loaded yet", "auto, off or suffix")
    raise UsageError(f"spec is {spec!r}", KINDS)


def drafter_maker(choice: Choice, sources: Sequence[Sequence[int]] = ()) -> Callable[[], Drafter] | None:
    """Makes the drafter of a new timeline; None without speculation. sources: ids of texts to draft from."""
    return (lambda: SuffixDrafter(sources)) if choice.kind == "suffix" else None
