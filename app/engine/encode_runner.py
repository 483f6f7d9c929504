"""Carries out a batch of texts: describes it where the model reads, runs the layers, pools, and gives each text its rows as bytes.

Which texts are in the batch is the queue's decision.
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
    """Layers and what becomes of them; `starts` [texts + 1] int64 says where texts begin and end."""

    config: EncoderConfig

    def rows(self, starts: Tensor, names: Collection[str]) -> Tensor | None:
        """Tokens [n] int64 whose hidden states these outputs need; None: all."""
        ...

    def hidden(self, context: EncodeContext, rows: Tensor | None = None) -> Tensor:
        """Hidden states behind the last norm, fp32 [tokens or rows, size]."""
        ...

    def outputs(
        self, hidden: Tensor, starts: Tensor, names: Collection[str], rows: Tensor | None = None, skipped: Tensor | None = None
    ) -> Mapping[str, Tensor]:
        """`embedding` (not normalised) and `logits` a row for each text, `last_hidden_state` one for each token, fp32.

        The first `skipped` [texts] tokens of a text are not pooled.
        """
        ...


class EncodeRunner:
    """Texts in, rows out. Lives on the worker thread; between two calls it holds no state but room."""

    overlaps = False

    def __init__(self, model: EncoderModel, room: int, off: str = "", usual: int | None = None, lanes: Lanes = USUAL) -> None:
        """Batches have at most `room` tokens, and up to the `usual` number of them are run again natively (None: all).

        `off`: why they are not; empty: they are. `lanes`: how they are cut.
        """
        self.model = model
        self._batch = TextBatch(room, model.config.num_types)
        self.replay = EncodeReplay(model.hidden, self._batch, room if usual is None else usual, off, lanes)
        self.model_seconds = 0.0  # of the last batch, in the model's forward pass

    def run(self, spans: Sequence[TextSpan]) -> list[dict[str, bytes]]:
        """Of each text, by output: its rows, little-endian fp32."""
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
        """Computed at once: a processor has nobody else to do it."""
        return self.run(spans)

    def wait(self, flight: list[dict[str, bytes]]) -> list[dict[str, bytes]]:
        return flight

    def survives(self, error: Exception) -> bool:
        """Who has no memory left on a processor is ended by the system."""
        return False

    def _skipped(self, spans: Sequence[TextSpan]) -> Tensor | None:
        """Tokens of a prompt before each text, where those are not pooled."""
        if not self.model.config.pooling.skips_prompt:
            return None
        return torch.tensor([span.text.num_prompt_tokens for span in spans])


def rows_of_texts(outputs: Mapping[str, Tensor], spans: Sequence[TextSpan], normalizes: bool) -> list[dict[str, bytes]]:
    """Of each text, by output: its rows, little-endian fp32. Vectors are of unit length where a request wants that, or as usual."""
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
    """Pooled vectors [texts, size] cut to the dimensions that each asked for, then of unit length where it did, or as is `usual`."""
    asked = [(span.request.order.dimensions, span.request.order.normalize) for span in spans]
    found: dict[int, bytes] = {}
    for dimensions, normalize in dict.fromkeys(asked):
        own = [row for row, one in enumerate(asked) if one == (dimensions, normalize)]
        rows = (vectors if len(own) == len(asked) else vectors[own])[:, :dimensions]
        rows = F.normalize(rows, dim=-1) if (usual if normalize is None else normalize) else rows
        found.update(zip(own, in_parts(rows, [1] * len(own)), strict=True))
    return [found[row] for row in range(len(asked))]


def as_they_came(rows: Sequence[dict[str, bytes]], order: Sequence[int]) -> list[dict[str, bytes]]:
    """rows[i] are those of the text that came as `order[i]`."""
    return [row for _, row in sorted(zip(order, rows, strict=True), key=itemgetter(0))]


def in_parts(rows: Tensor, counts: Sequence[int]) -> list[bytes]:
    """rows [n, size] fp32 as bytes, so many rows in each part."""
    whole = rows.contiguous().numpy().astype("<f4", copy=False).tobytes()
    width = rows.shape[1] * rows.itemsize
    ends = list(accumulate(counts))
    return [whole[(end - count) * width : end * width] for count, end in zip(counts, ends, strict=True)]
