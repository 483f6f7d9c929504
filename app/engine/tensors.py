"""Converts the arrays of messages to torch tensors and back, and makes synthetic inputs to try a program."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from app.messages import Array, Signature, TensorSpec

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

FREE_SIZE = 16  # size of a dimension that a client may choose, in synthetic inputs


def tensor_of(array: Array) -> Tensor:
    """Return a tensor with a copy of the array's bytes, whose number matches the shape."""
    dtype = DTYPES[array.datatype]
    if not array.data:
        return torch.empty(array.shape, dtype=dtype)
    return torch.frombuffer(bytearray(array.data), dtype=dtype).view(array.shape)


def array_of(tensor: Tensor, datatype: str = "FP32") -> Array:
    """Return the tensor's values as `datatype`, in row-major order."""
    plain = tensor.to(DTYPES[datatype]).contiguous()
    return Array(datatype, tuple(plain.shape), plain.view(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b"")


def made_up(signature: Signature, rows: int) -> dict[str, Tensor]:
    """Return synthetic inputs with `rows` different rows: small numbers, and indices that are valid in any table."""
    generator = torch.Generator().manual_seed(0)
    return {spec.name: _made_up(spec, rows, generator) for spec in signature.inputs}


def _made_up(spec: TensorSpec, rows: int, generator: torch.Generator) -> Tensor:
    shape = (rows, *(FREE_SIZE if size < 0 else size for size in spec.shape[1:]))
    dtype = DTYPES[spec.datatype]
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(0, 2, shape, generator=generator).to(dtype)
