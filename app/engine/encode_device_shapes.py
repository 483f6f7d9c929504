"""Which small batches of texts are recorded on a device, and which of these a batch is filled up to. Counts only."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

# Of a batch. A sixteenth row or so beyond a power of two: texts are often cut at one, and a text that only fills the batch stands beside
# them. Beyond the last, a step's products take longer than it takes to ask for them.
TOKENS = (16, 32, 48, 80, 144, 272, 528)
TEXTS = (2, 8, 32, 128)
_SHORT_TEXT = 3  # tokens: hardly any text has fewer, so a batch has hardly more texts than its tokens over this


@dataclass(frozen=True, slots=True, order=True)
class TextShape:
    """Tokens and texts of a batch, those that only fill it included."""

    tokens: int
    texts: int


def recorded_shapes(most_tokens: int) -> tuple[TextShape, ...]:
    """All that are worth it, of at most so many tokens; the smallest first."""
    sizes = (size for size in TOKENS if size <= most_tokens)
    return tuple(TextShape(size, texts) for size in sizes for texts in TEXTS if texts == TEXTS[0] or texts * _SHORT_TEXT <= size)


def filled_up(tokens: int, texts: int, shapes: Iterable[TextShape]) -> TextShape | None:
    """The smallest with room for so many and for one more text of at least one token; None: there is none."""
    return min((shape for shape in shapes if shape.tokens > tokens and shape.texts > texts), default=None)
