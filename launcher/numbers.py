"""Numbers on the command line, refused with the text that was given."""

import math
from collections.abc import Callable

import typer


def number(text: str) -> float:
    """Any number, also one out of the option's range; for `parser=` of an option."""
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a number") from None


def positive_number(text: str) -> float:
    """A finite number above 0; for `parser=` of an option."""
    value = number(text)
    if not 0 < value < math.inf:
        raise typer.BadParameter(f"{text!r} is not a finite number above 0")
    return value


_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def byte_size(text: str) -> int:
    """A number of bytes, such as 500M or 2.5G (powers of 1000); for `parser=` of an option."""
    digits = text.upper().removesuffix("B")
    unit = digits[-1:] if digits[-1:] in _UNITS else ""
    try:
        size = float(digits.removesuffix(unit)) * _UNITS[unit]
    except ValueError:
        size = 0.0
    if not 1 <= size < math.inf:
        raise typer.BadParameter(f"{text!r} is not a number of bytes, such as 500M or 2G")
    return int(size)


def whole_number(least: int | None = None, most: int | None = None) -> Callable[[str], int]:
    """Makes a `parser=` for whole numbers, from `least` up to `most` as far as these are given."""
    wanted = "a whole number" if least is None else f"a whole number of {least} or more"
    if most is not None:
        wanted += f" and at most {most:,}"

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise typer.BadParameter(f"{text!r} is not {wanted}") from None
        if (least is not None and value < least) or (most is not None and value > most):
            raise typer.BadParameter(f"{text!r} is not {wanted}")
        return value

    return parse
