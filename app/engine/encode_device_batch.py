"""Lays out a batch of texts for a device: one int64 buffer, copied at once, and views of it.

Padding is used only to fill a recorded shape.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from app.backends.base import DeviceBackend
from app.engine.encode_device_shapes import TextShape
from app.engine.texts import TextSpan
from app.kernels.paged import PackedTexts
from app.kernels.turn import Heads
from app.models.context import AttentionSpec, EncodeContext
from app.models.encoder_config import EncoderConfig

Numbers = NDArray[np.int64]
_ALIGNED = 16  # elements; kernels are compiled for aligned addresses, and compiled again for others
_ALIGNED = 16  # elements; kernels are compiled for aligned addresses, and compiled again for others


@dataclass(frozen=True, slots=True)
class _Places:
    """The slices of a batch in its int64 buffer.

    Texts are packed end to end. `starts` is [texts + 1]. `skipped` is [texts], and None if prompts are pooled too.
    """

    token_ids: slice
    positions: slice
    starts: slice
    type_ids: slice | None
    skipped: slice | None
    count: int


class DeviceTexts:
    """The buffer of a batch on the device, and two staging buffers on the host.

    The next batch uses the same device buffer: the queue of the device keeps them apart. The host needs two, since
    the next batch is described while the copy of one may be unfinished.
    """

    def __init__(self, backend: DeviceBackend, room: int, config: EncoderConfig) -> None:
        """Allocate the buffers. `room` is the most tokens of a batch, and so also the most texts."""
        self.room = room
        self._backend = backend
        self._has_types, self._skips = config.num_types > 1, config.pooling.skips_prompt
        words = self._places(TextShape(room, room)).count
        self._staged = [backend.staging(words) for _ in range(2)]
        # numpy views of the same memory, which are faster to write than tensors
        self._written = [staged.numpy() for staged in self._staged]
        self._words = torch.empty(words, dtype=torch.int64, device=backend.device)

    def fill(self, spans: Sequence[TextSpan], shape: TextShape) -> None:
        """Describe these texts and send them; at most one earlier batch may be unfinished.

        If the shape is larger, it is filled by empty texts and then by one text with all tokens that are left.
        """
        starts = list(accumulate((span.num_tokens for span in spans), initial=0))
        tokens, more = starts[-1], shape.texts - len(spans)
        assert tokens <= shape.tokens <= self.room, "a step has a budget"
        assert (more == 0) == (tokens == shape.tokens), "a text that fills a batch has a token"
        places, words = self._places(shape), self._written[0]
        _put(words[places.token_ids], [span.text.token_ids for span in spans])
        if places.type_ids is not None:
            _put(words[places.type_ids], [span.text.type_ids or (0,) * span.num_tokens for span in spans])
        if places.skipped is not None:
            _put(words[places.skipped], [[span.text.num_prompt_tokens for span in spans]])
        _put(words[places.starts], [starts, [tokens] * (more - 1), [shape.tokens] * bool(more)])
        positions = words[places.positions]
        positions[:tokens] = np.arange(tokens) - np.repeat(starts[:-1], np.diff(starts))
        positions[tokens:] = 0  # zeros, since a model has no more positions than its longest text
        self._words[: places.count].copy_(self._staged[0][: places.count], non_blocking=True)
        self._staged.reverse()
        self._written.reverse()

    def view(self, shape: TextShape, most_tokens: int) -> TextsView:
        """Return the views of a batch of this shape, whenever they are read.

        The longest text of the batch has at most `most_tokens` tokens.
        """
        return TextsView(self._words, self._places(shape), most_tokens, self._backend)

    def _places(self, shape: TextShape) -> _Places:
        tokens, texts = shape.tokens, shape.texts
        sizes = (tokens, tokens, texts + 1, tokens * self._has_types, texts * self._skips)
        begins = list(accumulate((-(-size // _ALIGNED) * _ALIGNED for size in sizes), initial=0))
        ids, positions, starts, types, skipped = (slice(at, at + size) for at, size in zip(begins, sizes, strict=False))
        return _Places(ids, positions, starts, types if self._has_types else None, skipped if self._skips else None, begins[-1])


class TextsView:
    """A batch on the device, as layers and heads read it."""

    def __init__(self, words: Tensor, places: _Places, most_tokens: int, backend: DeviceBackend) -> None:
        self.starts = words[places.starts]
        self.skipped = None if places.skipped is None else words[places.skipped]
        self._token_ids, self._positions = words[places.token_ids], words[places.positions]
        self._type_ids = None if places.type_ids is None else words[places.type_ids]
        self._most_tokens, self._backend = most_tokens, backend

    def context(self) -> EncodeContext:
        """Return the context of one forward pass.

        The int32 offsets that kernels need are computed on the device, again in each recording.
        """
        texts = PackedTexts(self.starts.to(torch.int32), self._most_tokens)

        def attend(layer: int, heads: Heads, spec: AttentionSpec) -> Tensor:
            return self._backend.attend_texts(heads, texts, spec)

        return EncodeContext(self._token_ids, self._positions, self._type_ids, self.starts, attend)


def _put(target: Numbers, rows: Sequence[Sequence[int]]) -> None:
    """Write the numbers end to end and fill the rest with zeros."""
    numbers = array("q")
    for row in rows:
        numbers.extend(row)
    target[: len(numbers)] = numbers
    target[len(numbers) :] = 0
