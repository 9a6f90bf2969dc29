"""pending: the store's interface is not there yet."""

from __future__ import annotations


def command() -> None:
    raise NotImplementedError
