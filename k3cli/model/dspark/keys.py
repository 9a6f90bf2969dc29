"""Values of a draft's config.json within bounds, refused by name: it is read before anything else of a draft is."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from k3cli.errors import ModelError


class DraftKeys:
    """One object of the config.json `file`. Look-ups raise ModelError with key, value and bounds; null means missing.

    Bounds are far beyond any draft, and low enough that what a wrong number makes is refused, not allocated.
    """

    def __init__(self, values: Mapping[str, Any], file: str, where: str = "") -> None:
        """where: the way to this object, "" at the top, else "section."."""
        self.values, self.file, self.where = values, file, where

    def get(self, key: str) -> Any:
        return self.values.get(key)

    def refused(self, key: str, expected: str) -> ModelError:
        """The error for a value that is no `expected`."""
        value = self.get(key)
        found = "missing" if value is None else json.dumps(value)[:60]
        return ModelError(f"{self.file} key {self.where}{key} is {found}", expected, "use a DSpark draft's own file")

    def section(self, key: str) -> DraftKeys:
        value = self.get(key)
        if not isinstance(value, Mapping):
            raise self.refused(key, "an object")
        return DraftKeys(value, self.file, f"{self.where}{key}.")

    def integer(self, key: str, most: int, *, least: int = 1, default: int | None = None) -> int:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise self.refused(key, f"an integer from {least} to {most:,}")
        return value

    def number(self, key: str, least: float, most: float, *, default: float | None = None) -> float:
        value = self.get(key)
        if value is None and default is not None:
            return default
        # Compared as it is: an integer may be too large for a float. NaN is in no range.
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not least <= value <= most or not math.isfinite(value):
            raise self.refused(key, f"a number from {least:g} to {most:g}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.refused(key, "true or false")
        return value

    def layers(self, key: str, most: int) -> tuple[int, ...]:
        """A list of 0-based layers below `most`."""
        values = self.get(key)
        fine = isinstance(values, list) and len(values) <= most
        if not fine or not all(isinstance(x, int) and not isinstance(x, bool) and 0 <= x < most for x in values):
            raise self.refused(key, f"a list of layer numbers from 0 to {most - 1:,}")
        return tuple(values)
