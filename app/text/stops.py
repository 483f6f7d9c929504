"""Stop strings in text that arrives in parts: decides what can be shown, what must be held back, and where it ends."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """A filter that lets text through up to the first complete stop string; the text ends before it.

    If two stop strings end at the same character, the longer one counts. The boundaries between the parts make no
    difference. Each stop string is matched with the Knuth-Morris-Pratt automaton, so a character costs one step per
    stop string, however much text is held back.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.matched: str | None = None
        self._held = ""  # not shown yet: the longest suffix of the text that is a prefix of a stop string
        self._stops = [(stop, _borders(stop)) for stop in stops]
        self._progress = [0] * len(stops)  # characters of each stop string that the end of the text matches

    def push(self, text: str) -> str:
        """Add text and return what can be shown now."""
        if not self._stops or self.matched is not None:
            return "" if self.matched is not None else text
        for place, letter in enumerate(text):
            stop = self._advance(letter)
            if stop is not None:
                self.matched = stop
                shown = self._held + text[: place + 1]
                self._held = ""
                return shown[: -len(stop)]
        joined = self._held + text
        first_held = len(joined) - max(self._progress)
        self._held = joined[first_held:]
        return joined[:first_held]

    def flush(self) -> str:
        """End the text and return what was held back, since it is not a stop string."""
        held, self._held = self._held, ""
        return held

    def _advance(self, letter: str) -> str | None:
        """Advance every automaton by one character; return the longest stop string that this completes."""
        found: str | None = None
        for index, (stop, borders) in enumerate(self._stops):
            matched = self._progress[index]
            while matched and stop[matched] != letter:
                matched = borders[matched - 1]
            matched += stop[matched] == letter
            self._progress[index] = matched
            if matched == len(stop) and (found is None or matched > len(found)):
                found = stop
        return found


def _borders(stop: str) -> list[int]:
    """Return for each prefix of `stop` the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(stop)
    length = 0
    for place in range(1, len(stop)):
        while length and stop[place] != stop[length]:
            length = borders[length - 1]
        length += stop[place] == stop[length]
        borders[place] = length
    return borders
