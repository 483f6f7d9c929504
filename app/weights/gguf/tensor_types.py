"""The types of tensors in GGUF files, with ggml's numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TensorType:
    """A type: each block of `values` neighbours in a row is stored in `nbytes`."""

    name: str
    values: int
    nbytes: int

    @property
    def is_quantized(self) -> bool:
        """True if a block's values share a scale."""
        return self.values > 1


# Sizes: ggml-common.h of llama.cpp.
TENSOR_TYPES: Mapping[int, TensorType] = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    30: TensorType("BF16", 1, 2),
    8: TensorType("Q8_0", 32, 34),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    39: TensorType("MXFP4", 32, 17),
}
TYPES: Mapping[str, TensorType] = {kind.name: kind for kind in TENSOR_TYPES.values()}
# Names of the types that are not supported, for messages.
TYPE_NAMES: Mapping[int, str] = {
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0",
}  # fmt: skip
