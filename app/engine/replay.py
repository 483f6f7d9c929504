"""Recorded decode steps: a step whose shape was seen before is replayed natively, without the Python interpreter.

A recording covers the model from token ids to each row's top logits, or to the input of the output layer if full
logits are needed. Only values at fixed addresses change from step to step. If a model or machine uses operations
that cannot be recorded, all steps stay eager and the reason is kept.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Any

from torch import Tensor

from app.kernels.best import Best, Wanted
from app.kernels.recording import Pool, Recorded, Unrecordable, record
from app.models.context import StepContext
from app.models.decoder import Decoder

SEEN_BEFORE = 2  # number of steps of a shape before one is recorded
MOST_TOKENS = 256  # per step; above this the interpreter's time is negligible, and results would need much memory
MOST_RECORDED = 128  # the least recently used recording is dropped
_MOST_SEEN = 4096  # number of shapes that are counted

Shape = tuple[int, int, Wanted | None]  # tokens, rows of logits, required top logits


class Replay:
    """The recorded steps of one model and one KV cache. It is used on the worker thread only."""

    def __init__(self, model: Decoder, off: str = "", seen_before: int = SEEN_BEFORE) -> None:
        self.model = model
        self.reason = off  # reason why every step is eager; empty if steps are recorded
        self.num_runs = 0  # number of replayed steps
        self.is_first = False  # the last step had a shape that is not replayed yet, so it took longer
        self._pool = Pool()
        self._seen: Counter[Shape] = Counter()
        self._seen_before = seen_before
        self.recorded: OrderedDict[Shape, Recorded] = OrderedDict()

    def __call__(self, context: StepContext) -> Tensor | Best:
        """Compute a step as the model's `forward` does."""
        self.is_first = False
        if self.reason or context.shape is None or context.shape[0] > MOST_TOKENS:
            return self.model.forward(context)
        shape = (*context.shape, context.best)
        recorded = self.recorded.get(shape)
        if recorded is None:
            return self._eager(shape, context)
        self.recorded.move_to_end(shape)
        self.num_runs += 1
        return self._outputs(recorded.run(), context)

    def _eager(self, shape: Shape, context: StepContext) -> Tensor | Best:
        """Compute a step eagerly, and record it if its shape was seen often enough."""
        self._seen[shape] += 1
        self.is_first = True
        if self._seen[shape] <= self._seen_before:
            if len(self._seen) > _MOST_SEEN:
                self._seen.clear()
            return self.model.forward(context)
        body = self.model.forward if context.best is not None and self.model.output.picks else self.model.body
        try:
            recorded = record(self._pool, lambda: body(context))
        except Unrecordable as reason:
            self.reason = f"{reason} is not a native operation"
            return self.model.forward(context)  # values that were already written are written again
        self.recorded[shape] = recorded
        if len(self.recorded) > MOST_RECORDED:
            self.recorded.popitem(last=False)
        return self._outputs(recorded.result, context)

    def _outputs(self, result: Any, context: StepContext) -> Tensor | Best:
        return result if isinstance(result, Best) else self.model.outputs(result, context.best)
