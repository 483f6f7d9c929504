"""Runs a batch of texts on a CPU: fills buffers, runs the layers, pools, and returns the rows of each text as bytes.

The queue decides which texts are in the batch.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate
from operator import itemgetter
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from app.engine.encode_replay import EncodeReplay
from app.engine.lanes import USUAL, Lanes
from app.engine.text_batch import TextBatch
from app.engine.texts import TextSpan
from app.models.context import EncodeContext
from app.models.encoder_config import EncoderConfig


class EncoderModel(Protocol):
    """An encoder's layers and heads. `starts` [texts + 1] int64 contains the borders of the texts."""

    config: EncoderConfig

    def rows(self, starts: Tensor, names: Collection[str]) -> Tensor | None:
        """Return the tokens [n] int64 whose hidden states these outputs need, or None for all."""
        ...

    def hidden(self, context: EncodeContext, rows: Tensor | None = None) -> Tensor:
        """Return the hidden states after the last norm, FP32 [tokens or rows, size]."""
        ...

    def outputs(
        self, hidden: Tensor, starts: Tensor, names: Collection[str], rows: Tensor | None = None, skipped: Tensor | None = None
    ) -> Mapping[str, Tensor]:
        """Return the requested outputs, FP32.

        `embedding` (not normalised) and `logits` have a row for each text, `last_hidden_state` has one for each
        token. The first `skipped` [texts] tokens of a text are not pooled.
        """
        ...


class EncodeRunner:
    """Runs batches of texts. It belongs to the worker thread and keeps only buffers between calls."""

    overlaps = False

    def __init__(self, model: EncoderModel, room: int, off: str = "", usual: int | None = None, lanes: Lanes = USUAL) -> None:
        """Create the buffers and the recordings.

        Args:
            model: The encoder.
            room: The most tokens of a batch.
            off: The reason why no batch is replayed; empty if batches are.
            usual: Batches of up to this many tokens are replayed natively (None: all).
            lanes: The lane planner.
        """
        self.model = model
        self._batch = TextBatch(room, model.config.num_types)
        self.replay = EncodeReplay(model.hidden, self._batch, room if usual is None else usual, off, lanes)
        self.model_seconds = 0.0  # seconds of the last batch in the model's forward pass

    def run(self, spans: Sequence[TextSpan]) -> list[dict[str, bytes]]:
        """Return the rows of each text by output name, as little-endian FP32 bytes."""
        with torch.inference_mode():
            names = {name for span in spans for name in span.request.order.outputs}
            cut = self.replay.cut([span.num_tokens for span in spans])
            spans = [spans[text] for text in cut.order]
            self._batch.fill(spans)
            starts = self._batch.starts
            rows = self._batch.want(self.model.rows(starts, names))
            started = time.perf_counter()
            hidden = self.replay(cut)
            self.model_seconds = time.perf_counter() - started
            outputs = self.model.outputs(hidden, starts, names, rows, self._skipped(spans))
            return as_they_came(rows_of_texts(outputs, spans, self.model.config.pooling.normalizes), cut.order)

    def launch(self, spans: Sequence[TextSpan]) -> list[dict[str, bytes]]:
        """Compute the batch at once: a CPU has no queue to submit it to."""
        return self.run(spans)

    def wait(self, flight: list[dict[str, bytes]]) -> list[dict[str, bytes]]:
        """Return the results of `launch`, which are complete."""
        return flight

    def survives(self, error: Exception) -> bool:
        """Return False: the operating system ends a process that has no CPU memory left."""
        return False

    def _skipped(self, spans: Sequence[TextSpan]) -> Tensor | None:
        """Return the prompt tokens before each text, or None if they are pooled too."""
        if not self.model.config.pooling.skips_prompt:
            return None
        return torch.tensor([span.text.num_prompt_tokens for span in spans])


def rows_of_texts(outputs: Mapping[str, Tensor], spans: Sequence[TextSpan], normalizes: bool) -> list[dict[str, bytes]]:
    """Return the rows of each text by output name, as little-endian FP32 bytes.

    Vectors have unit length if the request asks for it, or by default if `normalizes`.
    """
    parts: list[dict[str, bytes]] = [{} for _ in spans]
    for name, tensor in outputs.items():
        if name == "embedding":
            cut = finished(tensor, spans, normalizes)
        elif name == "last_hidden_state":
            cut = in_parts(tensor, [span.num_tokens for span in spans])
        else:
            cut = in_parts(tensor, [1] * len(spans))
        for own, part in zip(parts, cut, strict=True):
            own[name] = part
    return parts


def finished(vectors: Tensor, spans: Sequence[TextSpan], usual: bool) -> list[bytes]:
    """Cut pooled vectors [texts, size] to the requested dimensions and normalise them.

    A request decides whether its vectors get unit length; `usual` is the default.
    """
    asked = [(span.request.order.dimensions, span.request.order.normalize) for span in spans]
    found: dict[int, bytes] = {}
    for dimensions, normalize in dict.fromkeys(asked):
        own = [row for row, one in enumerate(asked) if one == (dimensions, normalize)]
        rows = (vectors if len(own) == len(asked) else vectors[own])[:, :dimensions]
        rows = F.normalize(rows, dim=-1) if (usual if normalize is None else normalize) else rows
        found.update(zip(own, in_parts(rows, [1] * len(own)), strict=True))
    return [found[row] for row in range(len(asked))]


def as_they_came(rows: Sequence[dict[str, bytes]], order: Sequence[int]) -> list[dict[str, bytes]]:
    """Return the rows in arrival order; `rows[i]` belongs to the text that arrived as number `order[i]`."""
    return [row for _, row in sorted(zip(order, rows, strict=True), key=itemgetter(0))]


def in_parts(rows: Tensor, counts: Sequence[int]) -> list[bytes]:
    """Split rows [n, size] FP32 into parts of `counts` rows each, as bytes."""
    whole = rows.contiguous().numpy().astype("<f4", copy=False).tobytes()
    width = rows.shape[1] * rows.itemsize
    ends = list(accumulate(counts))
    return [whole[(end - count) * width : end * width] for count, end in zip(counts, ends, strict=True)]
