"""Which drafter a model gets: `--spec`, what `auto` means, and why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from k3cli.config import path_of
from k3cli.engine.drafting.drafter import Drafter
from k3cli.engine.drafting.suffix import SuffixDrafter
from k3cli.errors import UsageError
from k3cli.model_files import lies_there

if TYPE_CHECKING:
    from k3cli.model.dspark.network import DraftModel

KINDS = "auto, off, suffix, dspark[:DIR] or both[:DIR]"


@dataclass(frozen=True)
class Choice:
    """kind: "off", "suffix", "dspark" or "both". reason: why.

    folder: of a DSpark checkpoint, "" for the model's own.
    """

    kind: str
    folder: str
    reason: str

    @property
    def model_based(self) -> bool:
        """Whether a draft model has to be loaded."""
        return self.kind in ("dspark", "both")


OWN_DRAFT = "dspark"
"""Folder inside a model's folder where its own draft lies."""

OFF = Choice("off", "", "nothing was asked for")


def choose(spec: str, reason: str = "", model: Path | None = None) -> Choice:
    """What a `spec` setting stands for. UsageError when it is unknown.

    reason: where it came from. model: the target's folder, in which `auto` looks for a draft; None: it finds none.
    """
    kind, _, folder = spec.partition(":")
    if kind == "auto" and not folder:
        if model is not None and lies_there(model / OWN_DRAFT):
            return Choice("both", "", f"auto: long matches, and the model's own draft ({OWN_DRAFT}/) where text is new")
        return Choice("suffix", "", "auto: the model has no draft of its own; matches in the text need no weights")
    if kind in ("off", "suffix") and not folder:
        return Choice(kind, "", reason or "asked for")
    if kind in ("dspark", "both") and folder == folder.strip() and not spec.endswith(":"):
        return Choice(kind, folder, reason or "asked for")
    raise UsageError(f"spec is {spec!r}", KINDS)


def without_draft(problem: Exception) -> Choice:
    """What `auto` stands for when the model's own draft can't be loaded."""
    return Choice("suffix", "", f"auto: the model's own draft can't be used ({problem})")


def drafter_maker(
    choice: Choice, sources: Sequence[Sequence[int]] = (), draft: DraftModel | None = None
) -> Callable[[], Drafter] | None:
    """Makes the drafter of a new timeline; None without speculation.

    sources: ids of texts to draft from. draft: the loaded model of a "dspark" or "both" choice.
    """
    if choice.model_based:
        from k3cli.engine.drafting.both import BothDrafter
        from k3cli.engine.drafting.dspark import DSparkDrafter

        assert draft is not None
        if choice.kind == "both":
            return lambda: BothDrafter(SuffixDrafter(sources), DSparkDrafter(draft))
        return lambda: DSparkDrafter(draft)
    return (lambda: SuffixDrafter(sources)) if choice.kind == "suffix" else None


def draft_folder(choice: Choice, model: Path) -> Path:
    """The checkpoint of a "dspark" or "both" choice: what it names, or the model's own.

    UsageError when there is none. What is there may be damaged.
    """
    folder = path_of(choice.folder) if choice.folder else model / OWN_DRAFT
    if not lies_there(folder / "config.json" if choice.folder else folder):
        found = f"no draft in {folder}" if choice.folder else f"{model.name} has no draft of its own ({OWN_DRAFT}/)"
        raise UsageError(
            f"spec is {choice.kind}: {found}", f"{choice.kind}:DIR with a DSpark checkpoint, auto, off or suffix"
        )
    return folder
