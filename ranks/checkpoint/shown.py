"""Putting a value from a stranger's file into a one-line message."""

from typing import Any

_MAX_SHOWN = 80


def shown(value: Any) -> str:
    """Return `value` as short printable text: a plain name as it is, anything else as its repr.

    A name in a damaged or hostile file may hold line breaks, terminal escapes, lone surrogates, or
    a megabyte of text; none of that may reach an error message.
    """
    plain = isinstance(value, str) and value.isprintable() and value != ""
    text = value if plain else ascii(value)
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."
