"""Errors that are not of our family, as K3Errors: what the option parser found, and what the store refused."""

from __future__ import annotations

import errno
import sys
from typing import Any

import typer

from k3cli.errors import BusyError, DamagedError, FitError, K3Error, ModelError, SessionError, UsageError

# Typer ships its own copy of the parser's exceptions, older releases use click's: found through what it exports.
_PARSER_ERROR: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")


def usage_message(problem: Exception) -> UsageError | None:
    """A refused command line as a UsageError that lists what is valid there; None for other exceptions."""
    if not isinstance(problem, _PARSER_ERROR):
        return None
    parsed: Any = problem
    found = " ".join(parsed.format_message().rstrip(".").split())
    context = getattr(parsed, "ctx", None)
    if context is None:
        return UsageError(found)
    expected = None
    if getattr(parsed, "option_name", None) is not None and found.lower().startswith("no such option"):
        found = f"no such option {parsed.option_name}"
        options = {max(p.opts, key=len) for p in context.command.get_params(context) if p.param_type_name == "option"}
        expected = "one of " + ", ".join(sorted(options))
    elif found.lower().startswith("no such command"):
        expected = "one of " + ", ".join(context.command.list_commands(context))
    return UsageError(found[:1].lower() + found[1:], expected, f"see {context.command_path} --help")


_STORE_ERRORS: dict[str, type[K3Error]] = {
    "SessionExists": SessionError,
    "SessionMissing": SessionError,
    "SessionLocked": SessionError,
    "SessionChanged": BusyError,
    "StoreBusy": BusyError,
    "IdentityMismatch": ModelError,
    "Damaged": DamagedError,
    "FormatUnsupported": DamagedError,
    "StoreFull": FitError,
    "BadName": UsageError,
    "NetworkFilesystem": UsageError,
}
"""Our class, and so the exit code, by store error; any other store error is a failure while running (1)."""


def as_k3_error(problem: Exception) -> K3Error | None:
    """Store errors, exhausted memory and file errors as K3Errors; None for what nobody foresaw."""
    if isinstance(problem, K3Error):
        return problem
    store = sys.modules.get("k3_sessions.errors")
    if store is not None and isinstance(problem, store.StoreError):
        names = [kind.__name__ for kind in type(problem).__mro__]
        kind = next((_STORE_ERRORS[name] for name in names if name in _STORE_ERRORS), K3Error)
        return kind(problem.found, problem.expected, problem.do)
    if isinstance(problem, MemoryError) or type(problem).__name__ == "OutOfMemoryError":
        return FitError(
            "memory ran out", do="free some, or use a smaller model or a shorter session; `k3 doctor` shows what fits"
        )
    if _refused_memory(problem):
        return FitError(
            "memory ran out: the system refused room for a library, a thread or a buffer",
            do="free some, or raise the limit this process has (ulimit -v, ulimit -u)",
        )
    if isinstance(problem, OSError) and problem.filename is not None:
        return K3Error(f"{problem.filename}: {problem.strerror}")
    if isinstance(problem, OSError) and problem.errno == errno.ENOSPC:
        return K3Error("a write failed: no space left", do="make room where the output goes")
    return None


_NO_MEMORY = ("failed to map segment", "cannot allocate memory", "can't allocate memory", "can't start new thread")


def _refused_memory(problem: Exception) -> bool:
    """Whether the system gave no memory; the loader, threads and torch tell that only in words."""
    if isinstance(problem, OSError) and problem.errno == errno.ENOMEM:
        return True
    return isinstance(problem, (ImportError, RuntimeError)) and any(word in str(problem).lower() for word in _NO_MEMORY)
