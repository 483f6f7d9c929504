"""Lays out a batch of texts for a device: one int64 buffer, copied at once, and views of it.

Padding is used only to fill a recorded shape. `recorded_shapes` lists the small batches that are recorded on a device.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from app.backends.base import DeviceBackend
from app.engine.encoder.batching import TextSpan
from app.models.encoders.config import EncoderConfig, positions_of
from armature_kernels.attention.attention import QkvHeads
from armature_kernels.attention.context import AttentionSpec, EncodeContext
from armature_kernels.attention.paged import PackedTexts

# Tokens of a batch: a sixteenth or so above a power of two. Texts are often cut at a power of two,
# and the batch also contains a text that only fills it. Beyond the last size, computing a step takes longer than
# submitting it.
RECORDED_TOKENS = (16, 32, 48, 80, 144, 272, 528)
RECORDED_TEXTS = (2, 8, 32, 128)
_SHORT_TEXT = 3  # tokens; texts are rarely shorter, so a batch rarely has more texts than its tokens divided by this


@dataclass(frozen=True, slots=True, order=True)
class TextBatchShape:
    """Tokens and texts of a batch, including the texts that only fill it."""

    tokens: int
    texts: int


def recorded_shapes(most_tokens: int) -> tuple[TextBatchShape, ...]:
    """Return all shapes that are worth recording, of at most `most_tokens` tokens, the smallest first."""
    sizes = (size for size in RECORDED_TOKENS if size <= most_tokens)
    return tuple(
        TextBatchShape(size, texts)
        for size in sizes
        for texts in RECORDED_TEXTS
        if texts == RECORDED_TEXTS[0] or texts * _SHORT_TEXT <= size
    )


def padded_shape(tokens: int, texts: int, shapes: Iterable[TextBatchShape]) -> TextBatchShape | None:
    """Return the smallest shape that fits the batch and one more text of at least one token, or None."""
    return min((shape for shape in shapes if shape.tokens > tokens and shape.texts > texts), default=None)


Int64Array = NDArray[np.int64]
_ALIGNED = 16  # elements; kernels are compiled for aligned addresses, and compiled again for others


@dataclass(frozen=True, slots=True)
class _BatchLayout:
    """The slices of a batch in its int64 buffer.

    Texts are packed end to end. `starts` is [texts + 1]. `skipped` is [texts], and None if prompts are pooled too.
    """

    token_ids: slice
    positions: slice
    starts: slice
    type_ids: slice | None
    skipped: slice | None
    count: int


class DeviceTextBatch:
    """The buffer of a batch on the device, and two staging buffers on the host.

    The next batch uses the same device buffer: the queue of the device keeps them apart. The host needs two, since
    the next batch is described while the copy of one may be unfinished.
    """

    def __init__(self, backend: DeviceBackend, max_tokens: int, config: EncoderConfig) -> None:
        """Allocate the buffers. `max_tokens` is the most tokens of a batch, and so also the most texts."""
        self.max_tokens = max_tokens
        self._backend = backend
        self._has_types, self._skips = config.num_types > 1, config.pooling.skips_prompt
        self._padding_id = config.padding_id
        size = self._layout(TextBatchShape(max_tokens, max_tokens)).count
        self._staged = [backend.staging_buffer(size) for _ in range(2)]
        # numpy views of the same memory, which are faster to write than tensors
        self._written = [staged.numpy() for staged in self._staged]
        self._buffer = torch.empty(size, dtype=torch.int64, device=backend.device)

    def fill(self, spans: Sequence[TextSpan], shape: TextBatchShape) -> None:
        """Describe these texts and send them; at most one earlier batch may be unfinished.

        If the shape is larger, it is filled by empty texts and then by one text with all tokens that are left.
        """
        starts = list(accumulate((span.num_tokens for span in spans), initial=0))
        tokens, more = starts[-1], shape.texts - len(spans)
        assert tokens <= shape.tokens <= self.max_tokens, "a step has a budget"
        assert (more == 0) == (tokens == shape.tokens), "a text that fills a batch has a token"
        layout, buffer = self._layout(shape), self._written[0]
        _fill_numbers(buffer[layout.token_ids], [span.text.token_ids for span in spans])
        if layout.type_ids is not None:
            _fill_numbers(buffer[layout.type_ids], [span.text.type_ids or (0,) * span.num_tokens for span in spans])
        if layout.skipped is not None:
            _fill_numbers(buffer[layout.skipped], [[span.text.num_prompt_tokens for span in spans]])
        _fill_numbers(buffer[layout.starts], [starts, [tokens] * (more - 1), [shape.tokens] * bool(more)])
        # Zeros follow, since a model has no more positions than its longest text.
        _fill_numbers(buffer[layout.positions], [positions_of(span.text.token_ids, self._padding_id) for span in spans])
        self._buffer[: layout.count].copy_(self._staged[0][: layout.count], non_blocking=True)
        self._staged.reverse()
        self._written.reverse()

    def view(self, shape: TextBatchShape, most_tokens: int) -> DeviceTextView:
        """Return the views of a batch of this shape, whenever they are read.

        The longest text of the batch has at most `most_tokens` tokens.
        """
        return DeviceTextView(self._buffer, self._layout(shape), most_tokens, self._backend)

    def _layout(self, shape: TextBatchShape) -> _BatchLayout:
        tokens, texts = shape.tokens, shape.texts
        sizes = (tokens, tokens, texts + 1, tokens * self._has_types, texts * self._skips)
        begins = list(accumulate((-(-size // _ALIGNED) * _ALIGNED for size in sizes), initial=0))
        ids, positions, starts, types, skipped = (slice(at, at + size) for at, size in zip(begins, sizes, strict=False))
        return _BatchLayout(
            ids, positions, starts, types if self._has_types else None, skipped if self._skips else None, begins[-1]
        )


class DeviceTextView:
    """A batch on the device, as layers and heads read it."""

    def __init__(self, buffer: Tensor, layout: _BatchLayout, most_tokens: int, backend: DeviceBackend) -> None:
        self.starts = buffer[layout.starts]
        self.skipped = None if layout.skipped is None else buffer[layout.skipped]
        self._token_ids, self._positions = buffer[layout.token_ids], buffer[layout.positions]
        self._type_ids = None if layout.type_ids is None else buffer[layout.type_ids]
        self._most_tokens, self._backend = most_tokens, backend

    def context(self) -> EncodeContext:
        """Return the context of one forward pass.

        The int32 offsets that kernels need are computed on the device, again in each recording.
        """
        texts = PackedTexts(self.starts.to(torch.int32), self._most_tokens)

        def attend(layer: int, heads: QkvHeads, spec: AttentionSpec) -> Tensor:
            return self._backend.encoder_attention(heads, texts, spec)

        return EncodeContext(self._token_ids, self._positions, self._type_ids, self.starts, attend)


def _fill_numbers(target: Int64Array, rows: Sequence[Sequence[int]]) -> None:
    """Write the numbers end to end and fill the rest with zeros."""
    numbers = array("q")
    for row in rows:
        numbers.extend(row)
    target[: len(numbers)] = numbers
    target[len(numbers) :] = 0
