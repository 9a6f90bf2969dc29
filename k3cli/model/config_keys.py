"""Typed look-ups in a parsed config.json, which name the key when something is wrong."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from k3cli.errors import ModelError


class Keys:
    """One object of a config.json. Look-ups raise ModelError naming the key; for all but `only` null means missing."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        """where: the way to this object, "" at the top, else "section." or "section.inner." and so on."""
        self.values = values
        self.where = where

    def name(self, key: str) -> str:
        """The key as messages call it."""
        return f"config.json key {self.where}{key}"

    def get(self, key: str) -> Any:
        return self.values.get(key)

    def section(self, key: str) -> Keys:
        value = self.values.get(key)
        if not isinstance(value, Mapping):
            raise ModelError(f"{self.name(key)} is {shown(value)}", "an object")
        return Keys(value, f"{self.where}{key}.")

    def integer(self, key: str, default: int | None = None, least: int = 1) -> int:
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ModelError(f"{self.name(key)} is {shown(value)}", f"an integer of at least {least}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ModelError(f"{self.name(key)} is {shown(value)}", "a number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ModelError(f"{self.name(key)} is {shown(value)}", "true or false")
        return value

    def only(self, key: str, allowed: tuple[Any, ...]) -> None:
        """Refuses a present value that is not one of `allowed`."""
        value = self.values.get(key)
        if key in self.values and value not in allowed:
            wanted = " or ".join(shown(item) for item in allowed)
            raise ModelError(f"unsupported {self.name(key)} = {shown(value)}", wanted, "use a model of the K3 family")


def shown(value: Any) -> str:
    """A value as messages show it."""
    return "missing" if value is None else json.dumps(value)[:80]
