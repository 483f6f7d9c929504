"""Arrays as messages carry them to torch's tensors and back."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from app.messages import Array

DTYPES: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool,
    "UINT8": torch.uint8,
    "INT8": torch.int8,
    "INT16": torch.int16,
    "INT32": torch.int32,
    "INT64": torch.int64,
    "FP16": torch.float16,
    "BF16": torch.bfloat16,
    "FP32": torch.float32,
    "FP64": torch.float64,
}


def tensor_of(array: Array) -> Tensor:
    """A tensor with memory of its own; the array's bytes are as many as its shape asks for."""
    dtype = DTYPES[array.datatype]
    if not array.data:
        return torch.empty(array.shape, dtype=dtype)
    return torch.frombuffer(bytearray(array.data), dtype=dtype).view(array.shape)


def array_of(tensor: Tensor, datatype: str = "FP32") -> Array:
    """Its values as `datatype`, row by row."""
    plain = tensor.to(DTYPES[datatype]).contiguous()
    return Array(datatype, tuple(plain.shape), plain.view(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b"")
