"""Numbers of things as people write them."""


def counted(number: int, one: str, more: str | None = None) -> str:
    """A number with its noun, as "1 rank", "4 ranks"; `more`: a plural that is no added s."""
    return f"{number} {one if number == 1 else more or f'{one}s'}"
