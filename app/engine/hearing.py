"""What a text shows of a model: which inputs of each product belong together. Rounding makes use of it (kernels/compensate.py).

A token counts by how open the next one is: where only one can follow, no rounding changes that, and most text is like this. On the demo
the loss of four bits is a fifth smaller for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from app.backends.base import Backend
from app.engine.build import KV_DTYPES
from app.engine.scoring import Reader, Window
from app.hardware.plan import ServingPlan
from app.kernels.activations import Activations, plain
from app.kernels.linear import Linear, LinearForm
from app.weights.checkpoint import Checkpoint
from app.weights.load import load_model

Correlations = Mapping[tuple[str, ...], Tensor]  # by a product's sources: the weighed sum of x xᵀ over its inputs, FP32 [in, in]


class Heard:
    """A form that multiplies as before, and remembers what by, until it is known how much that counts."""

    __slots__ = ("form", "rows", "total")

    def __init__(self, form: LinearForm, size: int) -> None:
        self.form, self.total = form, torch.zeros(size, size)
        self.rows = torch.empty(0, size)

    @property
    def nbytes(self) -> int:
        return self.form.nbytes

    def takes(self, rows: int) -> int | None:
        return self.form.takes(rows)

    def multiply(self, x: Activations) -> Tensor:
        self.rows = plain(x).float()
        return self.form.multiply(x)

    def add_to(self, hidden: Tensor, x: Activations) -> None:
        self.rows = plain(x).float()
        self.form.add_to(hidden, x)

    def count(self, weights: Tensor) -> None:
        """Adds the step's inputs, each as often as its weight [tokens] says."""
        self.total.addmm_((self.rows * weights[:, None]).T, self.rows)


@torch.inference_mode()
def correlations_of(
    checkpoint: Checkpoint, plan: ServingPlan, backend: Backend, windows: Sequence[Window], progress: Callable[[int, int], None]
) -> Correlations:
    """Of every product, over all windows; `plan` names a precision that is not rounded. `progress` hears (windows done, windows in all).

    Held at once: the model and a square of each product's inputs, 5 GB for a Llama of 1B.
    """
    model = load_model(checkpoint, plan, backend)
    heard = {}
    for linear in (module for module in model.modules() if isinstance(module, Linear)):
        heard[linear.sources] = linear.form = Heard(linear.form, linear.in_features)
    reader = Reader(model, checkpoint.decoder, KV_DTYPES[plan.kv_precision.value], backend)
    for done, window in enumerate(windows):
        for _, logits in reader.steps(window):
            openness = (1 - logits.softmax(-1).square_().sum(-1)).clamp_min(0).sqrt()
            for form in heard.values():
                form.count(openness)
        progress(done + 1, len(windows))
    return {sources: form.total for sources, form in heard.items()}
