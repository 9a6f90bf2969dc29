"""`--model`: a folder, or a hub id found in the local Hugging Face cache. Nothing is downloaded here."""

from __future__ import annotations

import os
from pathlib import Path

from k3cli.config import path_of
from k3cli.errors import ModelError


def hub_cache() -> Path:
    """The hub cache as Hugging Face's own variables say, read now (not when their library was imported)."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if os.environ.get(name):
            return path_of(os.environ[name])
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or f"{caches}/huggingface"
    return path_of(home) / "hub"


def resolve_model(ref: str | Path) -> Path:
    """The folder of a model. `ref`: a path, or OWNER/NAME with an optional @REVISION. Raises ModelError."""
    text = str(ref)
    path = path_of(text)
    if os.path.isdir(path):  # False for names that no file can have, too
        return path
    if os.path.exists(path):
        raise ModelError(f"--model {text} is a file", "a folder with config.json and safetensors", "pass its folder")
    owner_name, _, revision = text.partition("@")
    if text.startswith((".", "/", "~")) or os.sep in owner_name.replace("/", "", 1) or "/" not in owner_name:
        raise ModelError(f"no folder {text}", "a model folder or a hub id OWNER/NAME", "check the path")
    return _cached(owner_name, revision or None)


def _cached(repo: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    cache = hub_cache()
    try:
        found = snapshot_download(repo, revision=revision, cache_dir=cache, local_files_only=True)
    except HFValidationError as error:
        raise ModelError(f"{repo!r} is neither a folder nor a hub id", "a model folder or OWNER/NAME") from error
    except LocalEntryNotFoundError as error:
        shown = repo if revision is None else f"{repo}@{revision}"
        raise ModelError(
            f"model {shown} is not in the Hugging Face cache {cache}", "a downloaded model", f"run: hf download {repo}"
        ) from error
    return Path(found)
