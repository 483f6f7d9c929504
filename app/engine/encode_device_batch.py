"""A batch of texts as a device reads it: one block of words, copied there at once, and views of it. No padding but to a recorded shape."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from app.backends.base import DeviceBackend
from app.engine.encode_device_shapes import TextShape
from app.engine.texts import TextSpan
from app.kernels.paged import PackedTexts
from app.kernels.turn import Heads
from app.models.context import AttentionSpec, EncodeContext
from app.models.encoder_config import EncoderConfig


@dataclass(frozen=True, slots=True)
class _Parts:
    """The words of one batch: texts end to end, int64. `starts` [texts + 1]; `skipped` [texts], where prompts are not pooled."""

    token_ids: Tensor
    positions: Tensor
    starts: Tensor
    type_ids: Tensor | None
    skipped: Tensor | None


class DeviceTexts:
    """Room for the words of a batch on the device, where the next batch lies as well: the device's queue keeps them apart. On the host
    there are two: while one batch is sent, which nobody waits for, the next is described."""

    def __init__(self, backend: DeviceBackend, room: int, config: EncoderConfig) -> None:
        """`room`: tokens of a batch, and so the most texts that it can have."""
        self.room = room
        self._backend = backend
        self._has_types, self._skips = config.num_types > 1, config.pooling.skips_prompt
        words = self._count(TextShape(room, room))
        self._staged = [backend.staging(words) for _ in range(2)]
        self._words = torch.empty(words, dtype=torch.int64, device=backend.device)

    def fill(self, spans: Sequence[TextSpan], shape: TextShape) -> None:
        """Describes these texts and sends the words; at most one batch that was sent before may be unfinished.

        What the shape has more is one text of all tokens that are left, behind empty ones.
        """
        starts = list(accumulate((span.num_tokens for span in spans), initial=0))
        tokens, more = starts[-1], shape.texts - len(spans)
        assert tokens <= shape.tokens <= self.room, "a step has a budget"
        assert (more == 0) == (tokens == shape.tokens), "a text that fills a batch has a token"
        staged = self._staged[0]
        parts = self._parts(staged, shape)
        _put(parts.token_ids, [span.text.token_ids for span in spans])
        if parts.type_ids is not None:
            _put(parts.type_ids, [span.text.type_ids or (0,) * span.num_tokens for span in spans])
        if parts.skipped is not None:
            _put(parts.skipped, [[span.text.num_prompt_tokens for span in spans]])
        _put(parts.starts, [starts, [tokens] * (more - 1), [shape.tokens] * bool(more)])
        begins = parts.starts[: len(starts) - 1]
        parts.positions[:tokens] = torch.arange(tokens) - begins.repeat_interleave(parts.starts[: len(starts)].diff())
        parts.positions[tokens:] = 0  # a model has no more positions than its longest text
        count = self._count(shape)
        self._words[:count].copy_(staged[:count], non_blocking=True)
        self._staged.reverse()

    def view(self, shape: TextShape, most_tokens: int) -> TextsView:
        """What `fill` sends for this shape, wherever it is read later; the longest text has at most so many tokens."""
        return TextsView(self._parts(self._words, shape), most_tokens, self._backend)

    def _count(self, shape: TextShape) -> int:
        return shape.tokens * (2 + self._has_types) + shape.texts * (1 + self._skips) + 1

    def _parts(self, words: Tensor, shape: TextShape) -> _Parts:
        sizes = [shape.tokens] * (2 + self._has_types) + [shape.texts + 1] + [shape.texts] * self._skips
        token_ids, positions, *more = torch.split(words[: sum(sizes)], sizes)
        type_ids = more.pop(0) if self._has_types else None
        return _Parts(token_ids, positions, more[0], type_ids, more[1] if self._skips else None)


class TextsView:
    """A batch on the device, as layers and heads read it."""

    def __init__(self, parts: _Parts, most_tokens: int, backend: DeviceBackend) -> None:
        self.starts, self.skipped = parts.starts, parts.skipped
        self._parts, self._most_tokens, self._backend = parts, most_tokens, backend

    def context(self) -> EncodeContext:
        """For one forward pass: what kernels want of the words is worked out on the device, again in each that is recorded."""
        texts = PackedTexts(self.starts.to(torch.int32), self._most_tokens)

        def attend(layer: int, heads: Heads, spec: AttentionSpec) -> Tensor:
            return self._backend.attend_texts(heads, texts, spec)

        return EncodeContext(self._parts.token_ids, self._parts.positions, self._parts.type_ids, self.starts, attend)


def _put(target: Tensor, rows: Sequence[Sequence[int]]) -> None:
    """Numbers end to end, and zeros behind them."""
    numbers = array("q")
    for row in rows:
        numbers.extend(row)
    if numbers:
        target[: len(numbers)] = torch.frombuffer(numbers, dtype=torch.int64)
    target[len(numbers) :] = 0
