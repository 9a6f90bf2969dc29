"""Which drafter a model gets: `--spec`, what `auto` means, and why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from k3cli.engine.drafting.drafter import Drafter
from k3cli.engine.drafting.suffix import SuffixDrafter
from k3cli.errors import UsageError

if TYPE_CHECKING:
    from k3cli.model.dspark.network import DraftModel

KINDS = "auto, off, suffix or dspark[:DIR]"


@dataclass(frozen=True)
class Choice:
    """kind: "off", "suffix" or "dspark". folder: of a DSpark checkpoint, "" for the model's own. reason: why."""

    kind: str
    folder: str
    reason: str


OWN_DRAFT = "dspark"
"""Folder inside a model's folder where its own draft lies."""

OFF = Choice("off", "", "nothing was asked for")


def choose(spec: str, reason: str = "") -> Choice:
    """What a `spec` setting stands for; reason: where it came from. UsageError when it is unknown or not available."""
    kind, _, folder = spec.partition(":")
    if kind == "auto" and not folder:
        return Choice("suffix", "", "auto: it needs no weights, and costs next to nothing where text does not repeat")
    if kind in ("off", "suffix") and not folder:
        return Choice(kind, "", reason or "asked for")
    if kind == "dspark" and folder == folder.strip() and not spec.endswith(":"):
        return Choice("dspark", folder, reason or "asked for")
    raise UsageError(f"spec is {spec!r}", KINDS)


def drafter_maker(
    choice: Choice, sources: Sequence[Sequence[int]] = (), draft: DraftModel | None = None
) -> Callable[[], Drafter] | None:
    """Makes the drafter of a new timeline; None without speculation.

    sources: ids of texts to draft from. draft: the loaded model of a "dspark" choice.
    """
    if choice.kind == "dspark":
        from k3cli.engine.drafting.dspark import DSparkDrafter

        assert draft is not None
        return lambda: DSparkDrafter(draft)
    return (lambda: SuffixDrafter(sources)) if choice.kind == "suffix" else None


def draft_folder(choice: Choice, model: Path) -> Path:
    """The checkpoint of a "dspark" choice: the folder it names, or that inside the model's. UsageError without."""
    folder = Path(choice.folder).expanduser() if choice.folder else model / OWN_DRAFT
    if not (folder / "config.json").is_file():
        found = f"no draft in {folder}" if choice.folder else f"{model.name} has no draft of its own ({OWN_DRAFT}/)"
        raise UsageError(f"spec is dspark: {found}", "dspark:DIR with a DSpark checkpoint, auto, off or suffix")
    return folder
