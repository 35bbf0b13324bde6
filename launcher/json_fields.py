"""Dataclasses of JSON objects that users may have edited: each mistake is named with its field."""

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any, TypeVar, get_type_hints

from buddy_pipeline.launcher.nearest import nearest
from buddy_pipeline.partition.errors import UserError

T = TypeVar("T")

_WORDS: Mapping[Any, str] = {
    str: "a text",
    int: "a whole number",
    bool: "true or false",
    Mapping[str, str]: "an object of texts",
}


def read_object(value: Any, name: str) -> dict[str, Any]:
    """`value` itself; UserError, naming `name`, if it is no JSON object."""
    if not isinstance(value, dict):
        raise UserError(f"{name} is {value!r}: it must be an object")
    return value


def read_value(data: Mapping[str, Any], key: str, kind: Any) -> Any:
    """`data[key]`; UserError unless it is there and of `kind`, one of those in `_WORDS`."""
    if key not in data:
        raise UserError(f"{key} is missing")
    value = data[key]
    if kind == Mapping[str, str]:
        fits = isinstance(value, dict) and all(isinstance(v, str) for v in value.values())
    else:
        fits = type(value) is kind  # JSON's true is an int to Python, never to the writer
    if not fits:
        raise UserError(f"{key} is {value!r}: it must be {_WORDS[kind]}")
    return value


def check_keys(data: Mapping[str, Any], known: frozenset[str]) -> None:
    """Raises UserError for a key that nothing reads, with the nearest that is read."""
    for key in data:
        if key not in known:
            raise UserError(f"key {key!r} is unknown: {nearest(key, known)}")


def read_fields(kind: type[T], value: Any, name: str) -> T:
    """The dataclass `kind` of what `asdict` made of one; UserError, naming the field within
    `name`, for a key that is missing or unknown and for a value of another type."""
    data = read_object(value, name)
    hints = get_type_hints(kind)
    try:
        check_keys(data, frozenset(hints))
        given = {
            field.name: read_value(data, field.name, hints[field.name])
            for field in fields(kind)  # type: ignore[arg-type]
            if field.name in data or (field.default, field.default_factory) == (MISSING, MISSING)
        }
    except UserError as error:
        raise UserError(f"{name}: {error}") from None
    return kind(**given)
