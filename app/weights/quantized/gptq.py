"""Weights of GPTQ and AWQ: `qweight`, `qzeros` and `scales`, and of GPTQ `g_idx`, which has the group of each input."""

from __future__ import annotations

from app.errors import CheckpointInvalid
from app.models.config_reader import ConfigReader
from app.weights.quantized.entries import (
    FLOATS,
    CodeLayout,
    PackedEntry,
    Parts,
    four_bit_form,
    group_count,
    has_whole_groups,
    packed_entry,
)

GPTQ_BITS = (2, 3, 4, 8)
_FORMATS = {"gptq": 1, "gptq_v2": 0}  # what is added to a stored zero: the first version stores zeros less 1
_WORD = 32  # bits


def join_gptq(parts: Parts, config: ConfigReader) -> dict[str, PackedEntry]:
    """Return the weights that GPTQ quantized, by name, and remove their parts.

    Raises:
        CheckpointInvalid: The configuration or a part cannot be used.
    """
    bits, group = config.integer("bits"), _group(config)
    stored_as = config.text("checkpoint_format", config.text("format", "gptq"))
    if bits not in GPTQ_BITS:
        raise CheckpointInvalid(f"{config.where}: GPTQ with {bits} bits is not supported; 2, 3, 4 and 8 are.")
    if stored_as not in _FORMATS:
        raise CheckpointInvalid(
            f"{config.where}: GPTQ's format {stored_as[:40]!r} is not supported; supported are {', '.join(_FORMATS)}."
        )
    symmetric, ordered = config.boolean("sym", True), config.boolean("desc_act", False)
    return {
        f"{stem}.weight": _gptq(parts, stem, bits, group, (symmetric, ordered, _FORMATS[stored_as]))
        for stem in parts.stems(".qweight")
    }


def _gptq(parts: Parts, stem: str, bits: int, group: int, flags: tuple[bool, bool, int]) -> PackedEntry:
    symmetric, ordered, added = flags
    codes = parts.take(f"{stem}.qweight", ("I32",))
    inputs, outputs = codes.shape[0] * _WORD // bits, codes.shape[1]
    if inputs % _WORD or (outputs % _WORD and bits == 3):
        raise CheckpointInvalid(f"{stem[:120]}.qweight has {inputs} inputs; they must be a multiple of 32.")
    size = inputs if group < 0 else group
    groups = group_count(stem, inputs, size)
    scales = parts.take(f"{stem}.scales", FLOATS, (groups, outputs))
    zeros = parts.take(f"{stem}.qzeros", ("I32",), (groups, -(-outputs * bits // _WORD)))
    order = parts.take_optional(f"{stem}.g_idx", ("I32", "I64"), (inputs,))
    form = ""
    if not ordered and bits <= 4:
        form = four_bit_form(inputs, size, symmetric=symmetric)
    elif not ordered and symmetric and has_whole_groups(inputs, size):
        form = "int8/32"
    stored = {"codes": codes, "scales": scales, "zeros": zeros, "order": order}
    kind = f"GPTQ in {bits} bits" + (" in the order of activations" if ordered else "")
    return packed_entry((outputs, inputs), kind, CodeLayout.GPTQ, stored, form=form, bits=bits, group=size, added=added)


def _group(config: ConfigReader) -> int:
    """Return the inputs that share a scale; -1: all."""
    if config.values.get("group_size") == -1:
        return -1
    return config.integer("group_size")


def join_awq(parts: Parts, config: ConfigReader) -> dict[str, PackedEntry]:
    """Return the weights that AWQ quantized, by name, and remove their parts.

    Raises:
        CheckpointInvalid: The configuration or a part cannot be used.
    """
    bits, group = config.integer("bits"), _group(config)
    version = config.text("version", "gemm").lower()
    if bits != 4 or version != "gemm":
        raise CheckpointInvalid(
            f"{config.where}: AWQ with {bits} bits in version {version[:40]!r} is not supported; 4 bits in version 'gemm' are."
        )
    return {f"{stem}.weight": _awq(parts, stem, group) for stem in parts.stems(".qweight")}


def _awq(parts: Parts, stem: str, group: int) -> PackedEntry:
    codes = parts.take(f"{stem}.qweight", ("I32",))
    inputs, outputs = codes.shape[0], codes.shape[1] * 8
    size = inputs if group < 0 else group
    groups = group_count(stem, inputs, size)
    stored = {
        "codes": codes,
        "scales": parts.take(f"{stem}.scales", FLOATS, (groups, outputs)),
        "zeros": parts.take(f"{stem}.qzeros", ("I32",), (groups, codes.shape[1])),
    }
    form = four_bit_form(inputs, size, symmetric=False)
    return packed_entry((outputs, inputs), "AWQ in 4 bits", CodeLayout.AWQ, stored, form=form, bits=4, group=size)
