"""Limits the texts of a step: as planned, or fewer for a while after a step that ran out of memory.

Counts only, no tensors.
"""

from __future__ import annotations

from collections.abc import Collection

from app.engine.texts import Room, TextSpan

_GOOD_STEPS = 32  # steps, after which the limit is doubled; a step that then fails is repeated, and no request fails


class StepRoom:
    """The batch limit of one engine. Texts are never divided, so the smallest step is one text."""

    def __init__(self, most_texts: int) -> None:
        self._most_texts = most_texts
        self._less: Room | None = None  # None: as planned
        self._good_steps = 0

    def of(self, target_tokens: int) -> Room:
        """Return the limit of the next step, for which `target_tokens` are planned."""
        if self._less is None:
            return Room(target_tokens, self._most_texts)
        return Room(min(self._less.tokens, target_tokens), min(self._less.texts, self._most_texts))

    def shrink(self, spans: Collection[TextSpan]) -> bool:
        """Halve the limit after these texts needed too much memory. Return False if there is only one text."""
        if len(spans) < 2:
            return False
        self._less, self._good_steps = Room(sum(span.num_tokens for span in spans) // 2, len(spans) // 2), 0
        return True

    def worked(self, target_tokens: int) -> None:
        """Record a successful step, for which `target_tokens` were planned."""
        if self._less is None:
            return
        self._good_steps += 1
        if self._good_steps < _GOOD_STEPS:
            return
        more = Room(2 * self._less.tokens, 2 * self._less.texts)
        self._less, self._good_steps = more, 0
        if more.tokens >= target_tokens and more.texts >= self._most_texts:
            self._less = None
