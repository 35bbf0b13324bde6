"""Values from outside, such as those of JSON or of a program, checked for their kind."""

from numbers import Integral, Real
from typing import Any

from buddy_pipeline.partition.errors import UserError

_KINDS: dict[Any, tuple[str, tuple[type, ...]]] = {
    int: ("a whole number", (Integral,)),
    int | None: ("a whole number or null", (Integral, type(None))),
    float: ("a number", (Real,)),
    bool: ("true or false", (bool,)),
    str | None: ("a text or null", (str, type(None))),
}


def check_kind(name: str, value: Any, kind: Any) -> None:
    """Raises UserError for a value that is not of `kind`, a type such as `int` or `int | None`."""
    words, types = _KINDS[kind]
    # True and false are whole numbers to Python, never to the writer of a line.
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        raise UserError(f"{name} is {value!r}: it must be {words}")
