"""Settings of one run: defaults < `$K3_HOME/config.toml` < environment `K3_*` < command-line options.

Every key has one name everywhere: `top_p` in the file, `K3_TOP_P` in the environment, `--top-p` on the command line.
Keys that are None here have their default in the component that owns them (sampling, the store).
"""

from __future__ import annotations

import math
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import platformdirs

from k3cli.errors import UsageError

NANO = Path(__file__).parent / "assets" / "k3-nano"
"""The model that ships with the package, used when no other is configured."""

K3_SHAPE = Path(__file__).parent / "assets" / "k3-shape"
"""Kimi K3's configuration without weights: what `k3 plan k3` and `k3 bench --slice` measure against."""

ENV_ONLY = {
    "K3_HOME": "folder of sessions, history and config.toml",
    "K3_CACHE": "folder of recomputable files (weights digests)",
    "K3_DEBUG": "1: show tracebacks; 0: do not",
    "K3_KERNELS": "reference: plain torch instead of Triton kernels; triton: them, for tests with TRITON_INTERPRET=1",
}
"""Environment variables without a key in the file: they are needed before the file can be found."""

ENV_VALUES = {"K3_DEBUG": ("0", "1"), "K3_KERNELS": ("reference", "triton")}
"""What those may be that are no path; empty is not set."""

_SIZES = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_SIZES |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


_COUNT = "a whole number, at least 1"


class _InvalidError(ValueError):
    """What a value should have been; the caller adds which key and where it came from."""


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise _InvalidError("a non-empty string")
    return value


def _choice(*names: str) -> Callable[[Any], str]:
    def parse(value: Any) -> str:
        if value not in names:
            raise _InvalidError("one of " + ", ".join(names))
        return str(value)

    return parse


def _device(value: Any) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"auto|cpu|cuda(:\d+)?", value):
        raise _InvalidError("auto, cpu, cuda or cuda:N")
    return value


def _spec(value: Any) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"auto|off|suffix|(dspark|both)(:.+)?", value):
        raise _InvalidError("auto, off, suffix, dspark[:DIR] or both[:DIR]")
    return value


def _gpus(value: Any) -> str:
    text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    if not isinstance(text, str) or not re.fullmatch(r"all|[1-9]\d{0,3}|\d{1,4}(,\d{1,4})+", text):
        raise _InvalidError("a number of GPUs, all, or a list as 0,1")
    return text


def _boolean(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    known = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    if isinstance(value, str) and value.lower() in known:
        return known[value.lower()]
    raise _InvalidError("true or false")


def _number(kind: type[int] | type[float], low: float, high: float, what: str) -> Callable[[Any], Any]:
    def parse(value: Any) -> Any:
        if isinstance(value, bool) or not isinstance(value, (int, float, str)):
            raise _InvalidError(what)
        try:
            number = kind(value)
        except (ValueError, OverflowError):  # OverflowError: int() of an infinity
            raise _InvalidError(what) from None
        if not low <= number <= high or (kind is int and isinstance(value, float) and value != number):
            raise _InvalidError(what)
        return number

    return parse


def _top_p(value: Any) -> float:
    what = "a number above 0, at most 1 (1 keeps every token; --temperature 0 takes the likeliest)"
    number = float(_number(float, 0, 1, what)(value))
    if not number > 0:
        raise _InvalidError(what)
    return number


def parse_bytes(value: Any) -> int:
    """`"200 GB"`, `"1.5GiB"` or a count of bytes -> bytes. Raises ValueError saying what was expected."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63:
        return value
    match = (
        re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?i?B?)\s*", value, re.IGNORECASE) if isinstance(value, str) else None
    )
    unit = match[2].upper() if match else ""
    unit = unit if unit in _SIZES else unit + "B"
    count = float(match[1]) * _SIZES[unit] if match and unit in _SIZES else math.inf
    if not count < 2**63:
        raise _InvalidError("bytes, as 500000000, 200 GB or 1.5 GiB")
    return int(count)


@dataclass(frozen=True)
class Settings:
    """Effective values. `sources` says for each key that is not a default where its value came from."""

    home: Path
    """Everything k3 writes for the user: sessions, history, config.toml."""

    model: str | None = field(default=None, metadata={"parse": _text})
    """Model folder or hub id in the local Hugging Face cache. None: the shipped nano model."""
    device: str = field(default="auto", metadata={"parse": _device})
    dtype: str = field(default="auto", metadata={"parse": _choice("auto", "float32", "bfloat16")})
    gpus: str | None = field(default=None, metadata={"parse": _gpus})
    """GPUs that compute together: N, all, or a list as 0,1; ranks on the CPU: N. None: one."""
    spec: str = field(default="auto", metadata={"parse": _spec})
    """Where drafts come from: auto, off, suffix, dspark[:DIR] or both[:DIR]."""
    window: int | None = field(default=None, metadata={"parse": _number(int, 1, 64, "a whole number from 1 to 64")})
    """Most tokens of one verify step, drafts included; None: as many as the model's step has rows."""

    effort: str | None = field(default=None, metadata={"parse": _choice("low", "high", "max")})
    thinking: bool = field(default=True, metadata={"parse": _boolean})
    hide_thinking: bool = field(default=False, metadata={"parse": _boolean})

    temperature: float | None = field(
        default=None, metadata={"parse": _number(float, 0, 100, "a number from 0 to 100")}
    )
    top_p: float | None = field(default=None, metadata={"parse": _top_p})
    top_k: int | None = field(default=None, metadata={"parse": _number(int, 0, 2**31, "a whole number, 0: no limit")})
    min_p: float | None = field(default=None, metadata={"parse": _number(float, 0, 1, "a number from 0 to 1")})
    seed: int | None = field(
        default=None, metadata={"parse": _number(int, 0, 2**63 - 1, "a whole number from 0 to 2^63 - 1")}
    )
    max_tokens: int | None = field(default=None, metadata={"parse": _number(int, 1, 2**31, _COUNT)})
    """Longest answer, tokens, thinking included."""
    require_cached: bool = field(default=False, metadata={"parse": _boolean})
    """Refuse to evaluate old tokens again."""

    quota: int | None = field(default=None, metadata={"parse": parse_bytes})
    """Most bytes the store may take on disk."""
    free_floor: int | None = field(default=None, metadata={"parse": parse_bytes})
    """Bytes of the disk the store leaves free."""
    keep_last: int | None = field(default=None, metadata={"parse": _number(int, 1, 10**6, _COUNT)})
    """Newest turns of a session that keep their KDA checkpoint."""
    keep_max: int | None = field(default=None, metadata={"parse": _number(int, 1, 10**6, _COUNT)})
    """Most KDA checkpoints of a session kept by age; fork points and marks come on top."""
    keep_log_spaced: bool | None = field(default=None, metadata={"parse": _boolean})
    """Also keep one KDA checkpoint for each doubling of age."""
    force_network_fs: bool | None = field(default=None, metadata={"parse": _boolean})
    """Use a store on a network file system all the same."""

    sources: Mapping[str, str] = field(default_factory=dict)

    @property
    def store_root(self) -> Path:
        return self.home / "sessions"

    @property
    def config_file(self) -> Path:
        return self.home / "config.toml"

    @property
    def model_ref(self) -> str:
        """The model to load: the configured one, or the shipped nano."""
        return self.model if self.model is not None else str(NANO)


KEYS: Mapping[str, Callable[[Any], Any]] = {
    f.name: f.metadata["parse"] for f in fields(Settings) if "parse" in f.metadata
}
"""Every configurable key and how its value is checked."""


def load_settings(options: Mapping[str, Any] | None = None, env: Mapping[str, str] | None = None) -> Settings:
    """The effective settings.

    `options` are command-line values by key; None means not given. `env` defaults to the process environment.
    Raises UsageError naming the key, where it came from, and what is valid there.
    """
    env = os.environ if env is None else env
    home = _home(env)
    _check_environment(env)
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}

    def take(key: str, value: Any, source: str) -> None:
        try:
            values[key] = KEYS[key](value)
        except _InvalidError as problem:
            raise UsageError(f"{source} is {value!r}", str(problem)) from None
        sources[key] = source

    for key, value in _read_file(home / "config.toml").items():
        take(key, value, f"{key} in {home / 'config.toml'}")
    for name, value in sorted(env.items()):
        if not name.startswith("K3_") or name in ENV_ONLY or value == "":
            continue
        key = name[3:].lower()
        if key not in KEYS or name != name.upper():
            valid = ", ".join(sorted({*ENV_ONLY, *("K3_" + key.upper() for key in KEYS)}))
            raise UsageError(f"environment variable {name} is not known", f"one of {valid}", "unset or correct it")
        take(key, value, name)
    for key, value in (options or {}).items():
        if value is not None:
            take(key, value, "--" + key.replace("_", "-"))
    return Settings(home=home, **values, sources=sources)


def _check_environment(env: Mapping[str, str]) -> None:
    """UsageError for a value of a variable without a key that nothing would heed."""
    for name, valid in ENV_VALUES.items():
        if env.get(name) and env[name] not in valid:
            raise UsageError(f"{name} is {env[name]!r}", f"one of {', '.join(valid)}", "unset or correct it")
    cache = env.get("K3_CACHE")
    if cache and (folder := _folder("K3_CACHE", cache)).exists() and not folder.is_dir():
        raise UsageError(f"K3_CACHE is {cache!r}, which is no folder", "a folder k3 may write", "unset or correct it")


def _home(env: Mapping[str, str]) -> Path:
    """The folder K3_HOME names, or the platform's own for data."""
    return _folder("K3_HOME", env.get("K3_HOME") or platformdirs.user_data_dir("k3cli", appauthor=False))


def _folder(name: str, path: str) -> Path:
    """The folder that a variable names. UsageError for the home of a user whom nobody knows: k3 would make it here."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise UsageError(f"no home folder for {path}", "a path, or a user this machine knows", f"set {name}") from None


def debugging() -> bool:
    """Whether K3_DEBUG asks for what only people who look for a fault want to see."""
    return os.environ.get("K3_DEBUG", "0") not in ("", "0")


def path_of(text: str) -> Path:
    """A path as people write it, wherever they do: ~ at its beginning is the home folder, which no shell has put in
    where it stood behind a = or in a file. That of a user whom nobody knows stays as it is: it will not be found."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        return Path(text)


def _read_file(path: Path) -> dict[str, Any]:
    """The keys of config.toml; {} when there is no such file."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return {}
    except NotADirectoryError:
        raise UsageError(f"{path.parent} is no folder", "a folder k3 may write", "set K3_HOME to one") from None
    except OSError as problem:
        raise UsageError(f"{path} cannot be read ({problem.strerror})", "a readable file or none") from None
    try:
        data = tomllib.loads(raw.decode())
    # ValueError: not TOML, not UTF-8, or a number too long to convert; RecursionError: nested beyond any sense.
    except (ValueError, RecursionError) as problem:
        raise UsageError(f"{path} is not TOML: {problem}", 'lines like device = "cpu"') from None
    for key in data:
        if key not in KEYS:
            raise UsageError(f"unknown key {key!r} in {path}", "one of " + ", ".join(KEYS), "remove or correct it")
    return data
