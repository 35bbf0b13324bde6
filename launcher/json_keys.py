"""Tables of the keys that a JSON object may have, with what the value of each must be."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from buddy_pipeline.launcher.nearest import nearest
from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.ranks.checkpoint.shown import shown


@dataclass(frozen=True)
class Kind:
    """What a key's value must be: in words for the message, and as a test."""

    words: str
    accepts: Callable[[Any], bool]
    keys: Mapping[str, Kind] | None = None
    """The keys of a value that is an object itself."""
    required: tuple[str, ...] = ()
    """Those of them that must be there."""


def check_entries(
    where: str, entry: Any, keys: Mapping[str, Kind], required: tuple[str, ...] = ()
) -> None:
    """Raises UserError, prefixed with `where`, for what is not an object, for an unknown key, a
    value that is not as its key wants it, and a required key that is missing."""
    if not isinstance(entry, dict):
        wanted = f"with {', '.join(required)}" if required else "of keys"
        raise UserError(f"{where} is {shown(entry)}: it must be an object {wanted}")
    for key, value in entry.items():
        if key not in keys:
            raise UserError(f"{where}: unknown key {key!r}: {nearest(key, keys)}")
        kind = keys[key]
        if not kind.accepts(value):
            raise UserError(f"{where}: {key} is {value!r}: it must be {kind.words}")
        if kind.keys is not None and isinstance(value, dict):
            check_entries(f"{where}: {key}", value, kind.keys, kind.required)
    for key in required:
        if key not in entry:
            raise UserError(f"{where} lacks the key {key!r}: add it")


def is_count(value: Any, least: int, most: int | None = None) -> TypeGuard[int]:
    """Whether a value is a whole number from `least` to `most`."""
    # JSON's true and false are ints to Python, never to the writer of a file.
    whole = isinstance(value, int) and not isinstance(value, bool)
    return whole and value >= least and (most is None or value <= most)
