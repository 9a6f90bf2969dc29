"""Options that only matter together with others: given where they would be ignored, they are refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from k3cli.errors import UsageError


def given(options: Mapping[str, Any]) -> list[str]:
    """The options that the command line names, of name -> value. None, False and an empty list are absent ones."""
    return [name for name, value in options.items() if value is not None and value is not False and value != []]


def refuse_unused(options: Mapping[str, Any], where: str, expected: str, do: str | None = None) -> None:
    """UsageError that names every option given. where: the words behind the names, as "without --spec"."""
    if found := given(options):
        *most, last = found
        raise UsageError(f"{', '.join(most)}{' and ' * bool(most)}{last} {where}", expected, do)
