"""Texts that end generation, found in text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopFilter:
    """Lets text through up to the first stop text, and never a part of one.

    The first is the one that is complete first (of several, the longest), so the result does not
    depend on how the text is cut into pieces. An end that could be the beginning of a stop text
    is held back until it is known.

    Args:
        stops: not empty texts; none lets everything through at once.

    Attributes:
        met: whether a stop text has come; nothing passes from then on.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.met = False
        # Longest first: of those that end at the same place it begins earliest.
        self._stops = sorted(stops, key=len, reverse=True)
        self._held = ""

    def feed(self, piece: str) -> str:
        """The text that is now known to stand before any stop text."""
        if self.met:
            return ""
        text, fresh = self._held + piece, len(self._held)
        for end in range(fresh + 1, len(text) + 1) if self._stops else ():
            found = next((stop for stop in self._stops if text.endswith(stop, 0, end)), None)
            if found is not None:
                self.met, self._held = True, ""
                return text[: end - len(found)]
        known = len(text) - self._could_begin(text)
        self._held = text[known:]
        return text[:known]

    def close(self) -> str:
        """What was held back and has turned out to be no stop text."""
        rest, self._held = self._held, ""
        return rest

    def _could_begin(self, text: str) -> int:
        """Length of the longest end of ``text`` that is the beginning of a stop text."""
        longest = len(self._stops[0]) - 1 if self._stops else 0
        for size in range(min(longest, len(text)), 0, -1):
            end = text[-size:]
            if any(len(stop) > size and stop.startswith(end) for stop in self._stops):
                return size
        return 0
