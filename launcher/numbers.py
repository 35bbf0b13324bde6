"""Numbers on the command line, refused with the text that was given."""

from collections.abc import Callable

import typer


def number(text: str) -> float:
    """Any number, also one out of the option's range; for `parser=` of an option."""
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a number") from None


def whole_number(least: int | None = None) -> Callable[[str], int]:
    """Makes a `parser=` for whole numbers, of `least` or more if that is given."""
    wanted = "a whole number" if least is None else f"a whole number of {least} or more"

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise typer.BadParameter(f"{text!r} is not {wanted}") from None
        if least is not None and value < least:
            raise typer.BadParameter(f"{text!r} is not {wanted}")
        return value

    return parse
