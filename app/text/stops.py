"""Stop strings in a text that arrives in pieces: what may be shown now, what might still become a stop string, and where it ends."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Lets text through up to the first stop string to be complete (of two that end together, the longer): the answer ends before it.

    Where the pieces are cut makes no difference. Each stop string is matched by Knuth, Morris and Pratt's automaton,
    so a character costs a step per stop string however much is held back.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.matched: str | None = None
        self._held = ""  # shown to nobody yet: the longest end of the text that begins a stop string
        self._stops = [(stop, _borders(stop)) for stop in stops]
        self._progress = [0] * len(stops)  # characters of each stop string that the text's end matches

    def push(self, text: str) -> str:
        """Takes more text, returns what may be shown."""
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
        """The text has ended: what was held back is no stop string after all."""
        held, self._held = self._held, ""
        return held

    def _advance(self, letter: str) -> str | None:
        """One character further in every automaton; the longest stop string that it completes."""
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
    """For each beginning of `stop`, the length of its longest proper beginning that is also its end."""
    borders = [0] * len(stop)
    length = 0
    for place in range(1, len(stop)):
        while length and stop[place] != stop[length]:
            length = borders[length - 1]
        length += stop[place] == stop[length]
        borders[place] = length
    return borders
