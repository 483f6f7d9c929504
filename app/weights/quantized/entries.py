"""A quantized weight that is stored as several tensors, and checks of these tensors.

The files are untrusted: dtypes and shapes of all parts are checked against each other before anything is read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from io import BufferedReader

from app.errors import CheckpointInvalid
from app.weights.files import open_regular
from app.weights.safetensors import EncodedEntry, TensorEntry

FLOATS = ("F32", "F16", "BF16")
GROUP = 32  # inputs that share a scale in our forms


class CodeLayout(Enum):
    """How the codes of a weight are stored; `values.py` reads each."""

    GPTQ = "gptq"  # int32 [inputs * bits / 32, outputs], packed along the inputs
    AWQ = "awq"  # int32 [inputs, outputs / 8], packed along the outputs in the order 0, 2, 4, 6, 1, 3, 5, 7
    WORDS = "words"  # [outputs, inputs * bits / 32] of 32 bits, packed along the inputs
    INTEGERS = "integers"  # int8 [outputs, inputs]
    FP8 = "fp8"  # 8-bit floats [outputs, inputs]
    BITSANDBYTES = "bitsandbytes"  # a byte for each two values, in one row
    MXFP4 = "mxfp4"  # E2M1 [outputs, turns, inputs / 32, 16], a byte for each two codes


@dataclass(frozen=True, slots=True)
class PackedEntry(EncodedEntry):
    """A weight [outputs, inputs] that is stored as codes and other tensors; the location is that of the codes.

    `kind` is the format, for messages. `parts` are the tensors by their role: codes, scales, and zeros (integers that
    mean zero), minimums, order (the group of each input), or what the packing needs. `form` is the layout
    (`armature_kernels/linear/layout.py`) that holds the values, empty if none does without a visible cost. `group`
    inputs share a scale. `added` is added to each stored zero; codes without zeros have the zero `middle`. `block` is
    the number of outputs and inputs that share a scale of FP8. The rows of `turns` weights may take turns in the parts;
    this is weight `place` of them.
    """

    kind: str
    packing: CodeLayout
    parts: tuple[tuple[str, TensorEntry], ...]
    form: str = ""
    bits: int = 8
    group: int = 0
    added: int = 0
    middle: int = 0
    block: tuple[int, int] = (0, 0)
    table: str = ""
    offset: float = 0.0
    nested_block: int = 0
    turns: int = 1
    place: int = 0
    name: str = ""

    @property
    def nbytes(self) -> int:
        return sum(part.end - part.start for _, part in self.parts) // self.turns

    def part(self, role: str) -> TensorEntry | None:
        return next((entry for name, entry in self.parts if name == role), None)


def packed_entry(
    values: tuple[int, ...], kind: str, packing: CodeLayout, parts: Mapping[str, TensorEntry | None], **options: object
) -> PackedEntry:
    """Return the entry of a weight with these sizes; parts that are None are left out."""
    codes = parts["codes"]
    assert codes is not None, "a quantized weight has codes"
    there = tuple((role, part) for role, part in parts.items() if part is not None)
    return PackedEntry(codes.file, "F32", values, codes.start, codes.end, kind, packing, there, **options)  # type: ignore[arg-type]


class Parts:
    def __init__(self, found: Mapping[str, TensorEntry]) -> None:
        self.tensors = dict(found)

    def stems(self, suffix: str) -> list[str]:
        return [name.removesuffix(suffix) for name in self.tensors if name.endswith(suffix)]

    def take(self, name: str, dtypes: Collection[str], shape: tuple[int, ...] | None = None) -> TensorEntry:
        """Remove and return a tensor of these dtypes and this shape; None: any matrix. Raises `CheckpointInvalid`."""
        entry = self.take_optional(name, dtypes, shape)
        if entry is None:
            raise CheckpointInvalid(
                f"{name[:120]} is missing: the weight is quantized, and not all of its parts are stored."
            )
        return entry

    def take_optional(
        self, name: str, dtypes: Collection[str], shape: tuple[int, ...] | None = None
    ) -> TensorEntry | None:
        """Remove and return a tensor that may be missing. Raises as `take`."""
        entry = self.tensors.pop(name, None)
        if entry is None:
            return None
        if entry.dtype not in dtypes:
            raise CheckpointInvalid(
                f"{entry.file.name}: {name[:120]} is stored as {entry.dtype}; its quantization asks for {' or '.join(dtypes)}."
            )
        fits = len(entry.shape) == 2 and entry.num_elements > 0 if shape is None else entry.shape == shape
        if not fits:
            asked = "a matrix" if shape is None else f"{list(shape)}"
            raise CheckpointInvalid(
                f"{entry.file.name}: {name[:120]} has shape {list(entry.shape)}, and its quantization asks for {asked}."
            )
        return entry

    def take_vector(self, name: str, dtypes: Collection[str], count: int | None = None) -> TensorEntry:
        """Remove and return a vector of `count` elements. Raises as `take`."""
        entry = self.tensors.get(name)
        size = count if count is not None or entry is None else entry.num_elements
        return self.take(name, dtypes, (size or 0,))

    def take_any(self, name: str) -> TensorEntry:
        """Remove and return a tensor of any shape and dtype. Raises as `take`."""
        entry = self.tensors.get(name)
        return self.take(name, () if entry is None else (entry.dtype,), None if entry is None else entry.shape)

    def drop(self, *names: str) -> None:
        for name in names:
            self.tensors.pop(name, None)


def is_zero_bias(name: str, found: Mapping[str, TensorEntry]) -> bool:
    """Return True for a bias of a quantized weight that is zero: old exports of GPTQ have one for every weight.

    `found` has the parts of quantized weights joined. Raises `OSError` if its file cannot be read.
    """
    bias, weight = found.get(name), found.get(f"{name.removesuffix('.bias')}.weight")
    if bias is None or not name.endswith(".bias") or not isinstance(weight, PackedEntry):
        return False
    if bias.shape != weight.shape[:1]:
        return False
    with BufferedReader(open_regular(bias.file)) as stream:
        stream.seek(bias.start)
        return not any(stream.read(bias.nbytes))


def group_count(name: str, inputs: int, group: int) -> int:
    """Return the number of groups of a weight, the last of which may be shorter. Raises `CheckpointInvalid`."""
    if group > inputs:
        raise CheckpointInvalid(f"config.json: groups of {group} do not fit {name[:120]}, which has {inputs} inputs.")
    return -(-inputs // group)


def has_whole_groups(inputs: int, group: int) -> bool:
    """Return True if groups of 32 divide the weight and its groups, so that our forms can repeat its scales."""
    return group % GROUP == 0 and inputs % GROUP == 0


def four_bit_form(inputs: int, group: int, *, symmetric: bool) -> str:
    """Return the form that holds codes of up to four bits; empty if groups are not multiples of 32."""
    if not has_whole_groups(inputs, group):
        return ""
    return "int4/32" if symmetric else "int4/32 with zero points"
