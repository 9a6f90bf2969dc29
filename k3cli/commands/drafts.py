"""`--spec`, `--window` and `--draft-from`: where drafts come from, read before the model is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from k3cli.config import path_of
from k3cli.errors import FitError, ModelError, UsageError

if TYPE_CHECKING:
    from k3_sessions.store import Store

    from k3cli.config import Settings
    from k3cli.engine.drafting.choose import Choice
    from k3cli.engine.engine import Engine

SESSION = "session:"
LARGEST = 64 << 20
"""Bytes of one text to draft from."""


@dataclass(frozen=True)
class Drafts:
    """What drafts are made from. texts: contents of files; sessions: names of stored ones. auto: the model decides."""

    choice: Choice
    window: int | None
    texts: tuple[str, ...]
    sessions: tuple[str, ...]
    auto: bool = False

    @classmethod
    def read(cls, settings: Settings, draft_from: Sequence[str], store: Store) -> Drafts:
        """UsageError for a drafter that can't be had or a file that can't be read; SessionError for no such session;
        ModelError for a draft's config.json."""
        from k3cli.engine.drafting.choose import choose
        from k3cli.model.network import DEFAULT_WINDOW

        if settings.window is not None and settings.window > DEFAULT_WINDOW:
            raise UsageError(
                f"{settings.sources['window']} is {settings.window}", f"1 to {DEFAULT_WINDOW}, a step's rows"
            )
        source = settings.sources.get("spec")
        choice = choose(settings.spec, f"asked for by {source}" if source else "")
        if draft_from and choice.kind in ("off", "dspark"):
            raise UsageError(f"--draft-from with --spec {choice.kind}", "auto, suffix or both, which draft from texts")
        if choice.kind == "off" and settings.window not in (None, 1) and settings.sources["window"].startswith("--"):
            raise UsageError(
                f"--window {settings.window} with {source} off", "a drafter: without one a step has one token"
            )
        if choice.model_based:
            from k3cli.engine.drafting.choose import draft_folder
            from k3cli.model.dspark.config import DraftConfig
            from k3cli.model.hub import resolve_model

            DraftConfig.from_dir(draft_folder(choice, resolve_model(settings.model_ref)))
        names = [name.removeprefix(SESSION) for name in draft_from if name.startswith(SESSION)]
        for name in names:
            store.session(name)
        texts = [_text(path_of(path)) for path in draft_from if not path.startswith(SESSION)]
        return cls(choice, settings.window, tuple(texts), tuple(names), settings.spec == "auto")

    def apply(self, engine: Engine, store: Store) -> str:
        """The timelines of this engine draft so from here on. UsageError when --window is out of range.

        Returns what the user should know, "" for nothing: that the model's own draft can't be used.
        """
        sources = [engine.tokenizer.encode_text(text) for text in self.texts]
        for name in self.sessions:
            head = store.session(name).head
            # Ids of another tokenizer are only bad guesses; those the model does not have are left out.
            ids = [] if head is None else [int(token) for token in store.tokens(head)]
            sources.append([token for token in ids if token < engine.tokenizer.n_vocab])
        choice, problem = self.choice, ""
        if self.auto:
            from k3cli.engine.drafting.choose import choose, without_draft

            choice = choose("auto", model=engine.folder)
            if choice.model_based:
                try:
                    engine.speculate(choice, self.window, sources=sources)
                    return ""
                except (ModelError, FitError) as error:
                    # Nobody asked for this draft: text is drafted from all the same.
                    choice = without_draft(error)
                    problem = f"drafts come from matches in the text alone: {choice.reason.removeprefix('auto: ')}"
        engine.speculate(choice, self.window, sources=sources)
        return problem


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            raw = file.read(LARGEST + 1)  # no more, whatever size a device or a pipe claims to have
        if len(raw) > LARGEST:
            raise UsageError(f"--draft-from {path} has more than {LARGEST >> 20} MiB", "a smaller text")
        return raw.decode().replace("\r\n", "\n")
    except OSError as problem:
        raise UsageError(f"--draft-from {path}: {problem.strerror}", "a text file, or session:NAME") from None
    except ValueError:
        raise UsageError(f"--draft-from {path} is no UTF-8", "a text file, or session:NAME") from None
