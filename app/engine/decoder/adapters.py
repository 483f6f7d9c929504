"""The LoRA adapters of a decoder: slots for their weights, and which rows of a step use which of them.

A step is one batch whatever the adapters of its sequences are (`armature_kernels/linear/lora.py`, on a device
`device_lora.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from io import BufferedReader

import torch
from torch import Tensor

from app.engine.scheduler.batch import ScheduledSpan
from app.errors import CheckpointInvalid
from app.models.decoders.decoder import Decoder
from app.weights.files import open_regular, readable_or_invalid
from app.weights.lora.adapter import WEIGHTS, LoraAdapter, ServedAdapters
from app.weights.safetensors import TensorEntry
from armature_kernels.linear.device_lora import DeviceLoraProduct, DeviceLoraRows
from armature_kernels.linear.linear import Linear
from armature_kernels.linear.lora import LoraProduct, LoraRows, LoraSlots, LoraWeights, RowRun

MAX_STEP_TOKENS = 2**16  # larger steps are not recorded
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def load_adapter(
    adapter: LoraAdapter, dtype: torch.dtype, input_scales: Mapping[str, Tensor]
) -> dict[str, LoraWeights]:
    """Return the packed weights by the name of the layer; B has the adapter's scale.

    `dtype` is bf16 or fp32. `input_scales` [inputs]: what the inputs of a layer are divided by. Raises
    `CheckpointInvalid` if the file changed or a value is not finite, `OSError` if it cannot be read.
    """
    packed = {}
    for layer, matrices in adapter.matrices.items():
        a, b = _read(matrices.a), _read(matrices.b) * matrices.scale
        if matrices.rows is not None:
            b = b[torch.tensor(matrices.rows)]
        if layer in input_scales:
            a = a * input_scales[layer]
        if not all(bool(matrix.to(dtype).isfinite().all()) for matrix in (a, b)):
            raise CheckpointInvalid(
                f"{adapter.directory}/{WEIGHTS}: the matrices of {layer} have values that are not finite."
            )
        packed[layer] = LoraWeights.pack(a, b, dtype)
    return packed


def _read(entry: TensorEntry) -> Tensor:
    with BufferedReader(open_regular(entry.file)) as stream:
        stream.seek(entry.start)
        content = bytearray(stream.read(entry.nbytes))
    if len(content) != entry.nbytes:
        raise CheckpointInvalid(f"{entry.file} became shorter while it was read.")
    return torch.frombuffer(content, dtype=_DTYPES[entry.dtype]).view(entry.shape).float()


class AdapterSlots:
    """The adapters of one model. It is used on the worker thread only, except `read` and `read_for`."""

    def __init__(
        self, model: Decoder, layers: Iterable[str], slots: LoraSlots, device: torch.device | None = None
    ) -> None:
        """Let the products of these layers (`adapted_layers`) add adapters; `device` None: on the processor."""
        self._dtype = slots.dtype
        self._input_scales: dict[str, Tensor] = {}  # what the inputs of a layer are divided by
        self._read: dict[int, Mapping[str, LoraWeights]] = {}  # weights by slot that are not used yet
        self._rows = LoraRows(MAX_STEP_TOKENS)
        self._places: dict[str, tuple[LoraProduct | DeviceLoraProduct, int]] = {}
        self.device_rows = None if device is None else DeviceLoraRows(slots, device)
        names = set(layers)
        for linear in model.modules():
            if not isinstance(linear, Linear) or not names.intersection(linear.sources):
                continue
            sizes = linear.in_features, linear.source_rows, slots
            if device is None or self.device_rows is None:
                linear.lora = LoraProduct(self._rows, *sizes)
            else:
                linear.lora = DeviceLoraProduct(self.device_rows, *sizes, device)
            for source, name in enumerate(linear.sources):
                self._places[name] = linear.lora, source
                if linear.input_scales is not None:
                    self._input_scales[name] = linear.input_scales.cpu()
        assert names == self._places.keys(), "every layer that an adapter may change is a product of the model"

    def read(self, adapter: LoraAdapter) -> dict[str, LoraWeights]:
        """Return the packed weights of an adapter, on any thread. Raises `CheckpointInvalid` if the file is damaged."""
        with readable_or_invalid(adapter.directory):
            return load_adapter(adapter, self._dtype, self._input_scales)

    def read_for(self, slot: int, adapter: LoraAdapter) -> None:
        """Read the weights that `use_read_weights` puts into a slot, on any thread. Raises `CheckpointInvalid`."""
        self._read[slot] = self.read(adapter)

    def use_read_weights(self, slot: int, is_loaded: bool) -> None:
        self.set_weights(slot, self._read.pop(slot) if is_loaded else None)

    def set_weights(self, slot: int, weights: Mapping[str, LoraWeights] | None) -> None:
        """Put an adapter's weights, by the name of the layer, into a slot; None: empty it."""
        with torch.inference_mode():
            for name, (product, source) in self._places.items():
                product.set_weights(slot, source, None if weights is None else weights.get(name))

    def begin(self, spans: Iterable[ScheduledSpan]) -> None:
        tokens: list[RowRun] = []
        wanted: list[RowRun] = []
        num_tokens = num_wanted = 0
        for span in spans:
            slot = None if span.sequence.adapter is None else span.sequence.adapter.slot
            tokens.append((slot, num_tokens, span.num_tokens))
            wanted.append((slot, num_wanted, span.num_samples))
            num_tokens += span.num_tokens
            num_wanted += span.num_samples
        self._rows.fill(tokens, wanted, num_tokens)


def load_adapter_slots(
    model: Decoder, served: ServedAdapters, report: Callable[[str], None], device: torch.device | None = None
) -> AdapterSlots:
    """Return the slots of a loaded model, the named adapters in the first ones. Raises `CheckpointInvalid`."""
    slots = AdapterSlots(model, served.layers, LoraSlots(served.slots, served.max_rank, model.norm.dtype), device)
    for slot, (name, adapter) in enumerate(served.named.items()):
        report(f"loading the adapter {name}")
        slots.set_weights(slot, slots.read(adapter))
    return slots
