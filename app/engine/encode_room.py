"""How much of a step texts may take: as planned, or less for a while where a step wanted more memory than there was. Counts only."""

from __future__ import annotations

from collections.abc import Collection

from app.engine.texts import Room, TextSpan

_GOOD_STEPS = 32  # after which twice as much is tried again; one that fails costs a step, and nobody is told


class StepRoom:
    """Belongs to the engine. Texts are never divided, so the smallest step is one of them."""

    def __init__(self, most_texts: int) -> None:
        self._most_texts = most_texts
        self._less: Room | None = None  # None: as planned
        self._good_steps = 0

    def of(self, target_tokens: int) -> Room:
        """Of the next step, where so many tokens are planned."""
        if self._less is None:
            return Room(target_tokens, self._most_texts)
        return Room(min(self._less.tokens, target_tokens), min(self._less.texts, self._most_texts))

    def shrink(self, spans: Collection[TextSpan]) -> bool:
        """These wanted too much: the next step has half of it. False where there is but one text."""
        if len(spans) < 2:
            return False
        self._less, self._good_steps = Room(sum(span.num_tokens for span in spans) // 2, len(spans) // 2), 0
        return True

    def worked(self, target_tokens: int) -> None:
        """A step was computed, where so many tokens were planned."""
        if self._less is None:
            return
        self._good_steps += 1
        if self._good_steps < _GOOD_STEPS:
            return
        more = Room(2 * self._less.tokens, 2 * self._less.texts)
        self._less, self._good_steps = more, 0
        if more.tokens >= target_tokens and more.texts >= self._most_texts:
            self._less = None
