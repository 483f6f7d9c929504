"""Defines which small batches of texts are recorded on a device, and which recorded shape a batch is padded to.

Counts only, no tensors.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

# Tokens of a batch: a sixteenth or so above a power of two. Texts are often cut at a power of two,
# and the batch also contains a text that only fills it. Beyond the last size, computing a step takes longer than
# submitting it.
TOKENS = (16, 32, 48, 80, 144, 272, 528)
TEXTS = (2, 8, 32, 128)
_SHORT_TEXT = 3  # tokens; texts are rarely shorter, so a batch rarely has more texts than its tokens divided by this


@dataclass(frozen=True, slots=True, order=True)
class TextShape:
    """Tokens and texts of a batch, including the texts that only fill it."""

    tokens: int
    texts: int


def recorded_shapes(most_tokens: int) -> tuple[TextShape, ...]:
    """Return all shapes that are worth recording, of at most `most_tokens` tokens, the smallest first."""
    sizes = (size for size in TOKENS if size <= most_tokens)
    return tuple(TextShape(size, texts) for size in sizes for texts in TEXTS if texts == TEXTS[0] or texts * _SHORT_TEXT <= size)


def filled_up(tokens: int, texts: int, shapes: Iterable[TextShape]) -> TextShape | None:
    """Return the smallest shape that fits the batch and one more text of at least one token, or None."""
    return min((shape for shape in shapes if shape.tokens > tokens and shape.texts > texts), default=None)
