"""Typed access to the metadata of one GGUF architecture."""

from typing import Any

import numpy as np

from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.ranks.checkpoint.gguf_header import GgufHeader
from buddy_pipeline.ranks.checkpoint.shown import shown

# Sizes in a model's configuration; far above any real one, far below what overflows later.
_MAX_SIZE = 1 << 31


def shortest_decimal(value: float) -> float:
    """Return the float with the fewest digits that is `value` in float32, if `value` is one."""
    single = np.float32(value)
    return float(str(single)) if single == value else float(value)


class Fields:
    """The fields `{architecture}.*` of a header; every getter raises `UserError` naming the key."""

    def __init__(self, header: GgufHeader, architecture: str) -> None:
        self.path = header.path
        self.architecture = architecture
        self._fields = header.fields
        self._prefix = architecture + "."

    def __contains__(self, key: str) -> bool:
        return self._prefix + key in self._fields

    def value(self, key: str) -> Any:
        """Return the field as stored; an array of one repeated value counts as that value.

        Some converters write a value for each layer; layers that differ are not supported.
        """
        if key not in self:
            raise UserError(f"{self.path} has no metadata {self._prefix}{key}; convert it again")
        value = self._fields[self._prefix + key]
        if isinstance(value, list):
            if not value or any(item != value[0] for item in value):
                raise self.error(key, "one value for all layers")
            return value[0]
        return value

    def size(self, key: str, default: int | None = None) -> int:
        """Return a positive integer."""
        if default is not None and key not in self:
            return default
        value = self.value(key)
        if type(value) is not int or not 0 < value < _MAX_SIZE:
            raise self.error(key, f"an integer from 1 to {_MAX_SIZE - 1}")
        return value

    def window(self, key: str) -> int | None:
        """Return a positive integer, or None where the field is absent or zero."""
        if key not in self or self.value(key) == 0:
            return None
        return self.size(key)

    def number(self, key: str, default: float | None = None) -> float:
        """Return a positive finite number.

        A float32 is given as the shortest decimal that rounds to it, which is what the original
        configuration said (1e-05, not 9.999999747378752e-06).
        """
        if default is not None and key not in self:
            return default
        value = self.value(key)
        if type(value) not in (int, float) or not 0 < value < float("inf"):
            raise self.error(key, "a positive number")
        return shortest_decimal(value)

    def text(self, key: str, default: str) -> str:
        """Return a string."""
        value = self.value(key) if key in self else default
        if not isinstance(value, str):
            raise self.error(key, "a string")
        return value

    def error(self, key: str, needed: str) -> UserError:
        """Return the error for a field that is not what is `needed`."""
        name = self._prefix + key
        return UserError(
            f"{self.path}: metadata {name} is {shown(self._fields.get(name))}; it must be {needed}"
        )
