"""Typed look-ups in a parsed config.json, a model's or a draft's, which name the key when something is wrong."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from k3cli.errors import ModelError
from k3cli.model_files import shown

LARGEST = sys.float_info.max
MOST_LAYERS, MOST_ROWS, MOST_HEADS, MOST_EXPERTS = 1024, 1024, 1 << 16, 1 << 16
MOST_WIDTH, MOST_IDS = 1 << 20, (1 << 31) - 1
"""Bounds of what a config.json may say: far beyond any model, and low enough that what a wrong number makes is refused,
not allocated, and that sizes of tensors are numbers a machine can hold."""
LEAST_EPS = 1e-12
"""Below it, or at none, a row of zeros has no norm."""


class Keys:
    """One object of a config.json. Look-ups raise ModelError naming the key; for all but `only` null means missing."""

    def __init__(
        self, values: Mapping[str, Any], where: str = "", *, file: str = "config.json", do: str | None = None
    ) -> None:
        """where: the way to this object, "" at the top, else "section." or "section.inner." and so on.

        file, do: what messages call the file, and the next step that they name.
        """
        self.values, self.where, self.file, self.do = values, where, file, do

    def name(self, key: str) -> str:
        """The key as messages call it."""
        return f"{self.file} key {self.where}{key}"

    def refused(self, key: str, expected: str) -> ModelError:
        """The error for a value that is not what is expected."""
        return ModelError(f"{self.name(key)} is {shown(self.get(key))}", expected, self.do)

    def get(self, key: str) -> Any:
        return self.values.get(key)

    def section(self, key: str) -> Keys:
        value = self.get(key)
        if not isinstance(value, Mapping):
            raise self.refused(key, "an object")
        return Keys(value, f"{self.where}{key}.", file=self.file, do=self.do)

    def integer(self, key: str, default: int | None = None, *, least: int = 1, most: int | None = None) -> int:
        value = self.get(key)
        if value is None and default is not None:
            return default
        whole = isinstance(value, int) and not isinstance(value, bool)
        if not whole or value < least or (most is not None and value > most):
            raise self.refused(
                key, f"an integer of at least {least}" if most is None else f"an integer from {least} to {most:,}"
            )
        return int(value)

    def number(
        self, key: str, default: float | None = None, *, least: float = -LARGEST, most: float = LARGEST
    ) -> float:
        value = self.get(key)
        if value is None and default is not None:
            return default
        number = isinstance(value, int | float) and not isinstance(value, bool)
        # Compared as it is: an integer may be too large for a float. NaN is in no range.
        if not number or not least <= value <= most:
            raise self.refused(key, "a number" if most == LARGEST else f"a number from {least:g} to {most:g}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.refused(key, "true or false")
        return value

    def only(self, key: str, allowed: tuple[Any, ...]) -> None:
        """Refuses a present value that is not one of `allowed`."""
        value = self.get(key)
        if key in self.values and value not in allowed:
            wanted = " or ".join(shown(item) for item in allowed)
            raise ModelError(f"unsupported {self.name(key)} = {shown(value)}", wanted, "use a model of the K3 family")
