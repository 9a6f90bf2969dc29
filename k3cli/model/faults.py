"""What stopped a rank: told apart, put into words for the others, and raised on them."""

from __future__ import annotations

from k3cli import errors
from k3cli.errors import K3Error


def is_lost(error: BaseException) -> bool:
    """Whether a collective failed because another rank went away or did not come."""
    words = ("gloo", "Connection", "imed out", "NCCL", "peer")
    return isinstance(error, RuntimeError) and not ran_out(error) and any(word in str(error) for word in words)


def ran_out(error: BaseException) -> bool:
    """Whether memory ran out: torch's, or that of a library below it, which says so in its own words."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in ("out of memory", "ALLOC_FAILED"))


def described(error: BaseException) -> tuple[str, str, str | None, str | None]:
    """(class, found, expected, do) of what stopped a rank, for the others."""
    if isinstance(error, K3Error):
        return type(error).__name__, error.found, error.expected, error.do
    memory = ran_out(error)
    first = (str(error).splitlines() or [""])[0]
    found = "memory ran out" if memory else f"{type(error).__name__}: {first}"
    return "FitError" if memory else "K3Error", found, None, None


def raised(rank: int, kind: str, found: str, expected: str | None, do: str | None) -> K3Error:
    """What `described` says of another rank's error, as an error of this one. rank: whose it was."""
    made: K3Error = getattr(errors, kind, K3Error)(found if rank == 0 else f"rank {rank}: {found}", expected, do)
    return made
