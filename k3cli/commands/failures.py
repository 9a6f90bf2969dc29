"""Errors that are not of our family, as K3Errors: what the option parser found, and what the store refused."""

from __future__ import annotations

import errno
import re
import sys
from collections.abc import Sequence
from typing import Any

import typer

from k3cli.errors import BusyError, DamagedError, FitError, K3Error, ModelError, SessionError, UsageError

# Typer ships its own copy of the parser's exceptions, older releases use click's: found through what it exports.
_PARSER_ERROR: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")


def usage_message(problem: Exception, command: Any, prog: str, args: Sequence[str]) -> UsageError | None:
    """A refused command line as a UsageError that says what is valid there; None for other exceptions.

    command, prog, args: what was asked to parse them, since some of its errors do not know where they came up.
    """
    if not isinstance(problem, _PARSER_ERROR):
        return None
    parsed: Any = problem
    context = getattr(parsed, "ctx", None)
    command, path = _asked(command, prog, args) if context is None else (context.command, context.command_path)
    found, expected = _told(parsed, command, path)
    return UsageError(found, expected, f"see {path} --help")


def _asked(command: Any, prog: str, args: Sequence[str]) -> tuple[Any, str]:
    """The command that a command line names, and the words it is called by."""
    path, value = [prog], False
    for word in args:
        if value or word.startswith("-"):
            taking = {name for param in command.params if not getattr(param, "is_flag", True) for name in param.opts}
            value = not value and word in taking
        elif word in getattr(command, "commands", {}):
            command = command.commands[word]
            path.append(word)
        else:
            break
    return command, " ".join(path)


def _told(parsed: Any, command: Any, path: str) -> tuple[str, str | None]:
    """What was found, and what was expected. The parser tells its cases apart by words and by what it attaches."""
    text = " ".join(parsed.format_message().rstrip(".").split())
    low = text.lower()
    options = {name: param for param in command.params for name in param.opts if param.param_type_name == "option"}
    arguments = [_shown(param) for param in command.params if param.param_type_name == "argument"]
    call = " ".join((path, *arguments))
    name = getattr(parsed, "option_name", None)
    param = getattr(parsed, "param", None)
    if low.startswith("no such option"):
        longest = {max(param.opts, key=len) for param in (*options.values(), *_help(parsed))}
        return f"no such option {name}", "one of " + ", ".join(sorted(longest))
    if low.startswith(("no such command", "missing command")):
        # The parser's guess at what was meant is one of those that are listed.
        return low[:1] + text[1:].partition(". Did you mean")[0], "one of " + ", ".join(command.commands)
    if "requires" in low and name in options:
        return f"{name} without a value", f"{name} {options[name].metavar or 'VALUE'}"
    if "does not take a value" in low:
        return f"{name} with a value", f"{name} alone"
    if low.startswith("missing") and param is not None:
        if param.param_type_name == "option":
            return f"missing option {max(param.opts, key=len)}", f"{max(param.opts, key=len)} {param.metavar}"
        return f"missing argument {param.metavar}", call
    if "unexpected extra argument" in low:
        extra = re.sub(r"^[^(]*(?:\(s\) )?\((.*)\)$", r"\1", text)
        return f"unexpected argument {extra or repr(extra)}", call if arguments else f"{path} without one"
    if low.startswith("invalid value") and param is not None:
        wrong: list[Any] = getattr(parsed.__cause__, "errors", list)()
        given = f"is {wrong[0]['input']!r}" if wrong else "has a value that it can't have"
        kind = "a whole number" if "integer" in low or isinstance(param.default, int) else "a number"
        least = getattr(param, "min", None)
        return f"{max(param.opts, key=len)} {given}", kind if least is None else f"{kind}, at least {least}"
    return text[:1].lower() + text[1:], None


def _shown(argument: Any) -> str:
    name = f"{argument.metavar or argument.name}{'...' if argument.nargs != 1 else ''}"
    return name if argument.required else f"[{name}]"


def _help(parsed: Any) -> list[Any]:
    """The option --help, which only a context knows."""
    context = getattr(parsed, "ctx", None)
    return [] if context is None else [context.command.get_params(context)[-1]]


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
