"""Reads the weights of a LoRA adapter and packs them for the products of a model."""

from __future__ import annotations

from collections.abc import Mapping
from io import BufferedReader

import torch
from torch import Tensor

from app.errors import CheckpointInvalid
from app.weights.files import open_regular
from app.weights.lora.adapter import WEIGHTS, LoraAdapter
from app.weights.safetensors import TensorEntry
from armature_kernels.linear.lora import LoraWeights

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
