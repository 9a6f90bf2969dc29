"""A loaded model and what belongs to it: tokenizer, chat format, identity, limits."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from k3_sessions.identity import layout_digest
from k3_sessions.types import Identity, RestoredState, StateLayout

import k3cli
from k3cli.config import path_of
from k3cli.engine.drafting.choose import OFF, Choice, draft_folder, drafter_maker
from k3cli.engine.drafting.costs import Costs
from k3cli.engine.drafting.rehearsal import time_draft, time_steps
from k3cli.engine.drafting.speculator import Speculator
from k3cli.engine.timeline import Timeline
from k3cli.errors import FitError, UsageError
from k3cli.words import counted

if TYPE_CHECKING:
    from k3cli.chat.renderer import Renderer
    from k3cli.chat.tokenizer import Tokenizer
    from k3cli.engine.drafting.drafter import Drafter
    from k3cli.model.dspark.network import DraftModel
    from k3cli.model.weights import LoadProgress


class Engine:
    """One loaded model. Timelines and conversations are made from it.

    identity, layout: what stored state must match. context_limit: tokens a timeline may hold. name: the model as people
    call it (folder name or hub id). notices: lines the user should see after loading.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Tokenizer,
        renderer: Renderer,
        *,
        weights_digest: str,
        name: str,
        context_limit: int,
        device: torch.device | str = "cpu",
        dtype: str = "float32",
        reasons: dict[str, str] | None = None,
        notices: Sequence[str] = (),
        folder: Path | None = None,
    ) -> None:
        """model: has the interface of snapshot.ModelLike plus `new_state` and `state_layout` (K3Model has).

        folder: where its files are.
        """
        self.model = model
        self.tokenizer = tokenizer
        self.renderer = renderer
        self.name = name
        self.folder = folder
        self.context_limit = context_limit
        self.device = torch.device(device)
        self.dtype = dtype
        self.notices = tuple(notices)
        self._reasons = dict(reasons or {})
        self.speculation: Choice = OFF
        self._draft_rows = model.window
        self._costs = Costs(model.window)
        self._rehearsed: tuple[tuple[int, ...], int] = ((), 0)
        self._make_drafter: Callable[[], Drafter] | None = None
        self.layout: StateLayout = model.state_layout()
        self.identity = Identity(
            weights=weights_digest,
            tokenizer=tokenizer.digest,
            chat_format=renderer.format_version,
            layout=layout_digest(self.layout),
            compute=dtype,
        )

    @classmethod
    def load(
        cls,
        model_ref: str | Path,
        *,
        device: str = "auto",
        dtype: str = "auto",
        window: int = 8,
        gpus: str | None = None,
        progress: Callable[[LoadProgress], None] | None = None,
        tell: Callable[[str], None] = lambda line: None,
    ) -> Engine:
        """Load a model folder, or a hub id found in the local cache.

        device: "auto", "cpu", "cuda" or "cuda:N". dtype: "auto", "float32" or "bfloat16".
        window: rows of a decode step, 1 to 64. gpus: "N", "all" or "0,1": one rank on each, started here and ended
        with this process; None: as torchrun says, else one. tell: one line for people, while ranks are waited for.
        Raises UsageError, ModelError, FitError.
        """
        from k3cli.chat.renderer import renderer_for
        from k3cli.chat.tokenizer import Tokenizer
        from k3cli.model.config import ModelConfig
        from k3cli.model.hub import resolve_model
        from k3cli.model.launch import launched
        from k3cli.model.ranks import load_ranks, rank_devices
        from k3cli.model.weights import load_model

        devices = rank_devices(gpus, device)
        if not 1 <= window <= 64:
            raise UsageError(f"window is {window}", "1 to 64 rows")
        folder = resolve_model(model_ref)
        # The small files first: what is wrong with them is told before gigabytes are read.
        config = ModelConfig.from_dir(folder)
        tokenizer = Tokenizer.from_dir(folder)
        tokenizer.check_model(config.vocab)
        renderer = renderer_for(config.model_type, tokenizer)
        if len(devices) > 1 or launched() is not None:
            how: dict[str, Any] = {"device": device, "dtype": dtype, "window": window}
            loaded, _ = load_ranks(folder, config, devices, **how, progress=progress, tell=tell)
        else:
            one = devices[0] if devices else device
            loaded = load_model(folder, device=one, dtype=dtype, window=window, progress=progress)
        model = loaded.model
        ref = str(model_ref)
        return cls(
            model,
            tokenizer,
            renderer,
            weights_digest=loaded.weights_digest,
            name=folder.resolve().name if path_of(ref).is_dir() else ref,
            context_limit=config.context_limit,
            device=model.device,
            dtype=str(model.dtype).removeprefix("torch."),
            reasons=loaded.reasons,
            notices=loaded.notices,
            folder=folder,
        )

    def speculate(
        self, choice: Choice, rows: int | None = None, *, make: Callable[[], Drafter] | None = None, **sources: Any
    ) -> None:
        """What timelines made from now on draft with; until this is called they decode plainly.

        rows: most rows of a step, 1 to the model's window (default). make: a drafter of the caller's own, instead of
        the chosen one. sources: see choose.drafter_maker. UsageError for rows out of range.
        """
        window = self.model.window
        rows = window if rows is None else rows
        if not 1 <= rows <= window:
            raise UsageError(f"window is {rows}", f"1 to {window}, the rows of a step of this model")
        self.speculation = choice
        self._draft_rows = rows
        if choice.model_based and make is None:
            sources["draft"] = self._load_draft(choice)
        self._make_drafter = make or drafter_maker(choice, **sources)
        if self._make_drafter is not None and rows > 1:
            self._rehearse(rows, sources.get("draft"))

    def _rehearse(self, rows: int, draft: DraftModel | None) -> None:
        """On a GPU a number of rows is recorded when it comes for the second time, which is no work for a turn."""
        steps: dict[int, float] = {}
        ready = (getattr(self.model, "tap_layers", ()), rows)
        if self.device.type == "cuda" and ready != self._rehearsed:
            steps = time_steps(self.model, rows)
            self._rehearsed = ready
        self._costs = self._costs.copy()  # timelines that were made before keep what their drafts take
        self._costs.rehearsed(steps, 0.0 if draft is None else time_draft(draft))

    def _load_draft(self, choice: Choice) -> DraftModel:
        """The draft model of a choice; the target hands out what it reads from here on.

        Of several ranks, rank 0 drafts, and tells the others the rows of each step like any other. Raises ModelError,
        UsageError, FitError.
        """
        from k3cli.model.dspark.tables import whole_tables
        from k3cli.model.dspark.weights import load_draft

        assert self.folder is not None
        folder, model = draft_folder(choice, self.folder), self.model
        if self.ranks > 1:
            # The states' memory first: how much every rank has of it was settled when the model was loaded.
            assert model.pool
            embed, head = whole_tables(self.folder, model.config, self.device, model.dtype)
        else:
            embed, head = model.weights.embed, model.weights.head
        try:
            draft = load_draft(folder, model.config, embed, head)
        except (MemoryError, torch.OutOfMemoryError):
            raise FitError(
                f"memory ran out for the draft in {folder}", "room for it beside the model", "use --spec suffix"
            ) from None
        model.tap_layers = draft.config.taps
        return draft

    @property
    def ranks(self) -> int:
        """Processes that compute together."""
        world = getattr(self.model, "world", None)
        return 1 if world is None else int(world.size)

    def timeline(self, tokens: Sequence[int] = ()) -> Timeline:
        """A timeline at position 0; `tokens` are pending."""
        return self._timeline(self.model.new_state(), tokens)

    def restored_timeline(self, restored: RestoredState, tokens: Sequence[int], *, share: bool = False) -> Timeline:
        """A timeline over state from the store, read and verified before this returns. tokens: the whole history.

        share: keep it for `known_timeline`; it must be what prefilling these very tokens chunk by chunk gives here.
        """
        state = self.model.new_state()
        if restored.position:
            state.load(restored)
            if share and hasattr(state, "publish"):
                state.publish(torch.tensor(tokens, dtype=torch.long))
        return self._timeline(state, tokens)

    def known_timeline(self, tokens: Sequence[int]) -> Timeline | None:
        """A timeline behind the longest prefix of tokens, whole chunks of it, that this process evaluated before and
        still has in its pool; None when it has nothing of them."""
        known = getattr(self.model, "known_prefix", None)
        state = None if known is None else known(torch.tensor(tokens, dtype=torch.long))
        return None if state is None else self._timeline(state, tokens)

    def _timeline(self, state: Any, tokens: Sequence[int]) -> Timeline:
        speculator = None
        if self._make_drafter is not None and self._draft_rows > 1:
            vocab = getattr(getattr(self.model, "config", None), "vocab", self.tokenizer.n_vocab)
            drafter = self._make_drafter()
            here = json.dumps([self.runtime(), drafter.name], sort_keys=True)
            machine = hashlib.sha256(here.encode()).hexdigest()[:32]
            speculator = Speculator(drafter, self._costs, self._draft_rows, vocab, machine)
        return Timeline(self.model, state, tokens, limit=self.context_limit, device=self.device, speculator=speculator)

    def runtime(self) -> dict[str, Any]:
        """What the bits of a computation may depend on beside its inputs; recorded with every turn."""
        cuda = self.device.type == "cuda"
        return {
            "k3": k3cli.__version__,
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name(self.device) if cuda else torch.backends.cpu.get_cpu_capability(),
            "dtype": self.dtype,
            "window": self.model.window,
            "kernels": getattr(self.model, "kernels", "reference"),
            "threads": 0 if cuda else torch.get_num_threads(),
            "ranks": self.ranks,
        }

    def describe(self) -> list[dict[str, str]]:
        """What was chosen and why, for `k3 doctor`: rows of `what`, `choice`, `reason`."""
        rows = []
        for what, line in self._reasons.items():
            choice, _, reason = line.partition(": ")
            rows.append({"what": what, "choice": choice, "reason": reason})
        rows += [
            {
                "what": "window",
                "choice": counted(self.model.window, "row"),
                "reason": "decode and verify always run this many rows, so that they give the same bits",
            },
            {
                "what": "speculation",
                "choice": self.speculation.kind,
                "reason": self.speculation.reason,
            },
            {
                "what": "prefill chunk",
                "choice": counted(self.model.prefill_chunk, "token"),
                "reason": "chunks end at multiples of the absolute position, so that equal prompts take equal paths",
            },
            {
                "what": "chat format",
                "choice": self.renderer.format_version,
                "reason": f"{self.tokenizer.family} special tokens ({self.tokenizer.family_reason})",
            },
            {"what": "context limit", "choice": counted(self.context_limit, "token"), "reason": "config.json"},
        ]
        return rows
