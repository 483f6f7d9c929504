"""LoRA adapters in products on a device: y += B (A x) for the rows of a step that have an adapter.

The matrices of all slots are one above the other, so the rows of all adapters share two products, between which the
columns of other slots than a row's own are zeroed. The work depends on no value, so a graph can capture it, and it serves
adapters that are loaded later. The reference is `LoraProduct.add_torch`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from armature_kernels.linear.activations import Activations
from armature_kernels.linear.lora import LoraSlots, LoraWeights

NO_ADAPTER = -1  # slot of a row without an adapter


class DeviceLoraRows:
    """The adapter slot of each row of the present step: of its tokens, and of the rows that the last layer still needs."""

    def __init__(self, slots: LoraSlots, device: torch.device) -> None:
        self._columns = torch.arange(slots.count, device=device).repeat_interleave(slots.max_rank)
        self._dtype = slots.dtype
        self._masks: dict[int, Tensor] = {}

    def set(self, tokens: Tensor, wanted: Tensor | None) -> None:
        """Set the slots of the step's tokens [tokens]; `wanted` [rows]: the tokens whose logits are needed, None: all."""
        self._masks = {len(tokens): self._mask(tokens)}
        if wanted is not None and len(wanted) != len(tokens):
            self._masks[len(wanted)] = self._mask(tokens.index_select(0, wanted))

    def mask(self, num_rows: int) -> Tensor:
        """Return [rows, slots * rank]: 1 in the columns of a row's own slot."""
        return self._masks[num_rows]

    def _mask(self, slots: Tensor) -> Tensor:
        return (slots[:, None] == self._columns).to(self._dtype)


class DeviceLoraProduct:
    """The adapters of one product [inputs to outputs], whose outputs are those of its sources one after the other."""

    def __init__(
        self, rows: DeviceLoraRows, inputs: int, source_rows: Sequence[int], slots: LoraSlots, device: torch.device
    ) -> None:
        self._rows, self._slots, self._outputs = rows, slots, tuple(source_rows)
        columns = slots.count * slots.max_rank
        self._a = torch.zeros((len(source_rows) * columns, inputs), dtype=slots.dtype, device=device)
        self._b = [torch.zeros((outputs, columns), dtype=slots.dtype, device=device) for outputs in source_rows]

    def set_weights(self, slot: int, source: int, weights: LoraWeights | None) -> None:
        """Set, or remove, an adapter's weights for one source. Steps that are launched later have them."""
        rank = self._slots.max_rank
        a, b = self._a.view(len(self._outputs), -1, rank, self._a.shape[1])[source, slot], self._b[source]
        own = b[:, slot * rank : (slot + 1) * rank]
        a.zero_()
        own.zero_()
        if weights is not None:
            given_a, given_b = weights.unpacked()
            a[: weights.rank].copy_(given_a)
            own[:, : weights.rank].copy_(given_b)

    def add(self, y: Tensor, x: Activations) -> None:
        """Add the products of the step's adapters with x [rows, inputs] to y [rows, outputs] in place."""
        assert isinstance(x, Tensor), "the forms of a device do not quantize their inputs"
        mask = self._rows.mask(len(x))
        shrunk = (x.to(self._a.dtype) @ self._a.T).view(len(x), len(self._outputs), -1) * mask[:, None]
        first = 0
        for source, outputs in enumerate(self._outputs):
            y[:, first : first + outputs] += (shrunk[:, source] @ self._b[source].T).to(y.dtype)
            first += outputs
