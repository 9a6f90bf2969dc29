"""What most commands start from: settings, the store, a loaded engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from k3cli.commands.output import Printer, human_bytes, human_seconds
from k3cli.config import KEYS, Settings, load_settings
from k3cli.errors import K3Error, ModelError, SessionError

if TYPE_CHECKING:
    from k3_sessions.config import StoreConfig
    from k3_sessions.errors import IdentityMismatch
    from k3_sessions.store import Store

    from k3cli.engine.engine import Engine
    from k3cli.engine.sampling import Sampling
    from k3cli.model.weights import LoadProgress

SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens")
RECOMMENDED_KEYS = ("temperature", "top_p", "top_k", "min_p")
HEAD_KEYS = ("effort", "thinking")


def store_config(settings: Settings) -> StoreConfig:
    """The store's settings: its own defaults, changed where the user set a key."""
    from k3_sessions.config import StoreConfig

    asked: dict[str, Any] = {
        "quota_bytes": settings.quota,
        "free_floor_bytes": settings.free_floor,
        "force_network_fs": settings.force_network_fs,
    }
    if settings.free_floor is not None:
        asked["free_floor_share"] = 1.0  # the user's figure, not the smaller of it and a share of the disk
    kept = {"last": settings.keep_last, "max_kept": settings.keep_max, "log_spaced": settings.keep_log_spaced}
    config = replace(StoreConfig(), **_given(asked))
    return replace(config, thinning=replace(config.thinning, **_given(kept)))


def open_store(settings: Settings, *, mend: bool = False) -> Store:
    """The store under K3_HOME; a home made here is its owner's alone. mend: for `k3 repair`, see Store.open."""
    from k3_sessions.store import Store

    try:
        settings.home.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as problem:
        raise K3Error(f"{settings.home}: {problem.strerror}", "a folder k3 may make", "set K3_HOME to one") from None
    return Store.open(settings.store_root, config=store_config(settings), mend=mend)


def require_session(store: Store, name: str) -> None:
    """Refuse a session that is not there, before minutes are spent on loading a model."""
    store.session(name)


def refuse_existing(store: Store, name: str) -> None:
    if store.exists(name):
        raise SessionError(
            f"session {name} exists", "a new name", f"choose another, or go on with it: k3 resume {name}"
        )


def recorded_model(settings: Settings, store: Store, name: str, printer: Printer) -> Settings:
    """With no model configured, an existing session names its own, if that is a hub id; a folder's name is no path."""
    if settings.model is not None:
        return settings
    made_with = str(store.session(name).fixed.get("model", ""))
    if "/" not in made_with:
        return settings
    printer.notice(f"no model configured: using {made_with}, which session {name} was made with")
    return replace(settings, model=made_with)


def other_model(problem: IdentityMismatch, store: Store, name: str) -> ModelError:
    """The store's refusal, with the name of the model that the session was made with."""
    made_with = store.session(name).fixed.get("model", "unknown")
    return ModelError(
        problem.found,
        problem.expected,
        f"pass --model with the model it was made with ({made_with}), or evaluate its tokens under this one: "
        f"k3 replay {name} --into NEW",
    )


def loading_bar(printer: Printer) -> Callable[[LoadProgress], None]:
    """What a model loader reports to: a bar with bytes, rate and time left, of all ranks together, on a terminal."""

    def progress(step: LoadProgress) -> None:
        size, rate = human_bytes(step.bytes_total), human_bytes(step.rate)
        left = "" if step.left is None else f", {human_seconds(math.ceil(step.left))} left"
        printer.progress("loading", step.bytes_done, step.bytes_total, f"of {size}", f"{rate}/s{left}")

    return progress


def load_engine(settings: Settings, printer: Printer) -> Engine:
    """Load the configured model, with a bar on a terminal and a line when it is the shipped one."""
    if settings.model is None:
        printer.notice("no model configured: using the shipped k3-nano (set K3_MODEL or --model)")
    from k3cli.engine.engine import Engine

    engine = Engine.load(
        settings.model_ref,
        device=settings.device,
        dtype=settings.dtype,
        gpus=settings.gpus,
        progress=loading_bar(printer),
        tell=printer.notice,
    )
    printer.clear_bar()
    for line in engine.notices:
        printer.notice(line)
    return engine


def one_piece(settings: Settings, printer: Printer) -> None:
    """Says so where a command that runs the model in one piece was asked for several GPUs by a file or variable."""
    if settings.gpus not in (None, "1"):
        printer.notice(f"{settings.sources['gpus']} is {settings.gpus}: this command runs the model in one piece")


def sampling_of(settings: Settings) -> Sampling:
    """How to draw: the engine's defaults < what the model recommends < what the user set."""
    from k3cli.engine.sampling import Sampling

    asked = _given({key: getattr(settings, key) for key in SAMPLING_KEYS})
    return Sampling(**(recommended_sampling(settings.model_ref) | asked))


def recommended_sampling(model_ref: str) -> dict[str, Any]:
    """Sampling keys of the model's generation_config.json; {} without such a file. Raises ModelError."""
    from k3cli.model.config_keys import Keys
    from k3cli.model.hub import resolve_model
    from k3cli.model_files import lies_there, read_object

    again = "correct or remove it"
    file = resolve_model(model_ref) / "generation_config.json"
    if not lies_there(file):
        return {}
    keys = Keys(read_object(file, "a JSON object", again), file=str(file), do=again)
    if not keys.flag("do_sample", True):
        return {"temperature": 0.0}
    found = {}
    for key in RECOMMENDED_KEYS:
        try:
            if keys.get(key) is not None:
                found[key] = KEYS[key](keys.get(key))
        except ValueError as problem:
            raise keys.refused(key, str(problem)) from None
    return found


def setting_options(params: Mapping[str, Any]) -> dict[str, Any]:
    """Of a command's parameters (`Context.params`) those that are settings: each has the name of its key."""
    return {key: value for key, value in params.items() if key in KEYS or key == "no_thinking"}


def settings_from(options: Mapping[str, Any]) -> Settings:
    """Settings with command-line values, where switches that were not given count as not set."""
    known = {key: (value if value is not False else None) for key, value in options.items()}
    if known.pop("no_thinking", None):
        known["thinking"] = False
    return load_settings(known)


def head_of(settings: Settings, system: str | None, tools: list[dict[str, Any]] | None, *, new: bool) -> dict[str, Any]:
    """What to ask of a session's head.

    A new session takes every setting; an existing one is only asked for what the command line itself says, since a
    preference in a file must not turn an old session away.
    """
    head: dict[str, Any] = {"system": system, "tools": tools}
    for key in HEAD_KEYS:
        source = settings.sources.get(key, "")
        if source.startswith("--") or (new and source):
            head[key] = getattr(settings, key)
    return _given(head)


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}
