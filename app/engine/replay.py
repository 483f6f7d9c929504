"""Steps that decode are run again natively once they have been seen: what the interpreter would do between two products is left out.

Only what does not change from step to step is recorded; tokens, positions and where keys and values lie are refreshed in place. A model
or a machine that does something else in a layer than our operations stays eager, and says why.
"""

from __future__ import annotations

from torch import Tensor

from app.kernels.activations import Activations
from app.kernels.best import Best
from app.kernels.recording import Pool, Recorded, Unrecordable, record
from app.models.context import Attend, StepContext
from app.models.decoder import Decoder

SEEN_BEFORE = 2  # how often a batch of some size must have come before it is worth recording


class Replay:
    """Belongs to one model and one KV cache; the worker thread's."""

    def __init__(self, model: Decoder, off: str = "", seen_before: int = SEEN_BEFORE) -> None:
        self.model = model
        self.reason = off  # why every step is eager; empty: it is not
        self.num_runs = 0  # steps that were run again
        self._pool = Pool()
        self._seen: dict[int, int] = {}
        self._seen_before = seen_before
        self._recorded: dict[int, Recorded] = {}

    def __call__(self, context: StepContext) -> Tensor | Best:
        """As the model's own `forward`."""
        return self.model.outputs(self._rows(context, self.model.inputs(context)), context.best)

    def _rows(self, context: StepContext, inputs: list[Tensor]) -> Activations:
        """What the output layer takes."""
        count = len(context.token_ids)
        if not context.decodes or self.reason or not self._known(count):
            return self.model.body(inputs, context.attend, None if context.decodes else context.logit_rows)
        recorded = self._recorded.get(count)
        if recorded is None:
            return self._record(count, inputs, context.attend)
        self.num_runs += 1
        rows: Activations = recorded.run(inputs)
        return rows

    def _known(self, rows: int) -> bool:
        self._seen[rows] = self._seen.get(rows, 0) + 1
        return self._seen[rows] > self._seen_before

    def _record(self, rows: int, inputs: list[Tensor], attend: Attend) -> Activations:
        kept = [tensor.clone() for tensor in inputs]
        try:
            recorded = record(self._pool, lambda own: self.model.body(own, attend, None), inputs)
        except Unrecordable as reason:
            self.reason = f"{reason} is not an operation of ours"
            return self.model.body(kept, attend, None)
        self._recorded[rows] = recorded
        result: Activations = recorded.result
        return result
