"""Arrays as messages carry them to torch's tensors and back; and tensors that nobody sent, to try a program with."""

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

FREE_SIZE = 16  # of a dimension that a client may choose, where nobody has


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


def made_up(signature: Signature, rows: int) -> dict[str, Tensor]:
    """Inputs of so many rows, each another: small numbers, and indices that any table has."""
    generator = torch.Generator().manual_seed(0)
    return {spec.name: _made_up(spec, rows, generator) for spec in signature.inputs}


def _made_up(spec: TensorSpec, rows: int, generator: torch.Generator) -> Tensor:
    shape = (rows, *(FREE_SIZE if size < 0 else size for size in spec.shape[1:]))
    dtype = DTYPES[spec.datatype]
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(0, 2, shape, generator=generator).to(dtype)
