"""Finds stop texts in a stream of text and never lets a part of one out."""


class StopTexts:
    """Passes text on, except what belongs to, or may turn out to begin, a stop text."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """The text that is certain now, and whether a stop text has been found right behind it.

        Of several that this text completes, the one that begins first counts. Cost per call: the
        length of `text` plus the longest stop text.
        """
        text = self._held + text
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self._held = ""
            return text[: min(found)], True
        certain = len(text) - self._possible_start(text)
        self._held = text[certain:]
        return text[:certain], False

    def finish(self) -> str:
        """What was held back, now that no more text comes."""
        held, self._held = self._held, ""
        return held

    def _possible_start(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop text."""
        longest = min(len(text), max(map(len, self._stops), default=1) - 1)
        for length in range(longest, 0, -1):
            end = text[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0
