"""Steps are run again natively once their like has been seen: what the interpreter would do between two products is left out.

Recorded is all from token ids to each row's best logits, or to what the output layer takes where whole logits are wanted; only values at
addresses that stay change from step to step. A model or a machine that does something else in a step than our operations stays eager, and
says why.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Any

from torch import Tensor

from app.kernels.best import Best, Wanted
from app.kernels.recording import Pool, Recorded, Unrecordable, record
from app.models.context import StepContext
from app.models.decoder import Decoder

SEEN_BEFORE = 2  # how often a step of some shape must have come before it is worth recording
MOST_TOKENS = 256  # of a step: beyond, the interpreter is lost in the products, and results would want much memory
MOST_RECORDED = 128  # the least recently used goes
_MOST_SEEN = 4096  # shapes that are counted

Shape = tuple[int, int, Wanted | None]  # tokens, rows of logits, what is wanted of them


class Replay:
    """Belongs to one model and one KV cache; the worker thread's."""

    def __init__(self, model: Decoder, off: str = "", seen_before: int = SEEN_BEFORE) -> None:
        self.model = model
        self.reason = off  # why every step is eager; empty: it is not
        self.num_runs = 0  # steps that were run again
        self.is_first = False  # the last step was of a shape that will be run again, and is not yet: it took longer
        self._pool = Pool()
        self._seen: Counter[Shape] = Counter()
        self._seen_before = seen_before
        self.recorded: OrderedDict[Shape, Recorded] = OrderedDict()

    def __call__(self, context: StepContext) -> Tensor | Best:
        """As the model's own `forward`."""
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
        """As always; recorded for the steps to come where their like came before."""
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
            self.reason = f"{reason} is not an operation of ours"
            return self.model.forward(context)  # what was written by now is written again
        self.recorded[shape] = recorded
        if len(self.recorded) > MOST_RECORDED:
            self.recorded.popitem(last=False)
        return self._outputs(recorded.result, context)

    def _outputs(self, result: Any, context: StepContext) -> Tensor | Best:
        return result if isinstance(result, Best) else self.model.outputs(result, context.best)
