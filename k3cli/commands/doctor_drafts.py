"""What `k3 doctor` tells of drafts: where they come from, whether a draft model can be used, what decides the rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from k3cli.commands.doctor_checks import Check
from k3cli.config import Settings
from k3cli.errors import Exit, K3Error, UsageError
from k3cli.words import counted

if TYPE_CHECKING:
    from pathlib import Path

    from k3cli.engine.drafting.choose import Choice
    from k3cli.model.config import ModelConfig


def drafting(settings: Settings, window: int, folder: Path, config: ModelConfig) -> Iterator[Check]:
    """How decoding drafts, and from what the number of rows is decided.

    window: rows of a step of the model, which lies in `folder`.
    """
    from k3cli.engine.drafting.choose import choose, without_draft
    from k3cli.engine.drafting.policy import describe

    yield Check("chosen", "step", counted(window, "row"), "always this many, so that drafts change no bit")
    source = settings.sources.get("spec")
    choice = choose(settings.spec, f"asked for by {source}" if source else "", folder)
    problem = _trouble(choice, folder, config)
    if problem is not None and settings.spec == "auto":
        choice, problem = without_draft(problem), None
    yield Check("chosen", "drafts", choice.kind, choice.reason)
    if choice.model_based:
        where = choice.folder or "the model's own"
        why = "after a resume it has what was kept of the last 256 tokens" if problem is None else str(problem)
        yield Check("chosen", "draft model", where, why, Exit.OK if problem is None else problem.exit_code)
    most = window if settings.window is None else settings.window
    if most > window:
        raise UsageError(f"window is {most}", f"1 to {window}, the rows of a step")
    if choice.kind != "off":
        yield Check("chosen", "window", f"up to {counted(most, 'token')}", settings.sources.get("window", "default"))
        for name, value, reason in describe():
            yield Check("chosen", name, value, reason)


def _trouble(choice: Choice, folder: Path, config: ModelConfig) -> K3Error | None:
    """Why a draft model can't be used, as far as its config.json and the headers of its files tell."""
    if not choice.model_based:
        return None
    from k3cli.engine.drafting.choose import draft_folder
    from k3cli.model.dspark.weights import check_draft

    try:
        check_draft(draft_folder(choice, folder), config)
    except K3Error as refused:
        return refused
    return None
