"""Names the known word that a mistyped one is nearest to, for error messages."""

import difflib
from collections.abc import Iterable


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint for the end of an error message: the nearest of `known`, or all of them."""
    words = sorted(known)
    close = difflib.get_close_matches(word, words, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known are {', '.join(words)}"
