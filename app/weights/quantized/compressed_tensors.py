"""Weights of compressed-tensors: packed integers (W4A16), int8 (W8A8) and 8-bit floats.

Which layers are quantized is read from the stored tensors, not from the patterns of the configuration, which are
untrusted regular expressions. Scales of activations and of the KV cache are not used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
from app.weights.quantized.fp8 import fp8_entry

FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
_PACKED_BITS = (4, 8)


def join_compressed(parts: Parts, config: ConfigReader) -> dict[str, PackedEntry]:
    """Return the weights that compressed-tensors quantized, by name, and remove their parts.

    Raises:
        CheckpointInvalid: The configuration or a part cannot be used.
    """
    scheme = _scheme(config)
    found = {f"{stem}.weight": _packed(parts, stem, scheme) for stem in parts.stems(".weight_packed")}
    for stem in parts.stems(".weight_scale"):
        codes = parts.tensors.get(f"{stem}.weight")
        if codes is not None and codes.dtype == "I8":
            found[f"{stem}.weight"] = _integers(parts, stem, scheme)
        else:
            found[f"{stem}.weight"] = fp8_entry(parts, stem, "weight_scale", scheme.block)
    for name in ("input_scale", "output_scale", "k_scale", "v_scale"):
        parts.drop(*(f"{stem}.{name}" for stem in parts.stems(f".{name}")))
    return found


class _Scheme:
    """How the weights of all groups of the configuration are quantized."""

    def __init__(self, weights: ConfigReader) -> None:
        self.bits = weights.integer("num_bits", at_most=8)
        self.symmetric = weights.boolean("symmetric", True)
        self.strategy = weights.text("strategy", "tensor")
        self.group = weights.integer("group_size") if self.strategy == "group" else 0
        self.ordered = weights.values.get("actorder") in ("group", "dynamic", True)
        if self.strategy not in ("tensor", "channel", "group", "block"):
            raise CheckpointInvalid(
                f"{weights.where}: the strategy {self.strategy[:40]!r} is not supported; tensor, channel, group and block are."
            )
        block = weights.values.get("block_structure")
        is_block = isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)
        self.block = (block[0], block[1]) if isinstance(block, list) and is_block else None


def _scheme(config: ConfigReader) -> _Scheme:
    stored_as = config.text("format", "dense")
    if stored_as not in FORMATS:
        raise CheckpointInvalid(
            f"{config.where}: the format {stored_as[:40]!r} of compressed-tensors is not supported; supported are {', '.join(FORMATS)}."
        )
    for name in ("sparsity_config", "transform_config"):
        if config.section(name).values:
            raise CheckpointInvalid(f"{config.where}: {name} of compressed-tensors is not supported.")
    groups = config.section("config_groups")
    schemes: list[Mapping[str, Any]] = [
        dict(groups.section(name).section("weights").values) for name in groups.values if isinstance(name, str)
    ]
    if not schemes or any(scheme != schemes[0] for scheme in schemes):
        raise CheckpointInvalid(f"{config.where}: config_groups must quantize all weights alike to be supported.")
    return _Scheme(ConfigReader(schemes[0], f"{config.where}: weights"))


def _packed(parts: Parts, stem: str, scheme: _Scheme) -> PackedEntry:
    if scheme.bits not in _PACKED_BITS or scheme.strategy == "block":
        raise CheckpointInvalid(
            f"config.json: packed weights with {scheme.bits} bits by {scheme.strategy} are not supported; 4 and 8 are, without blocks."
        )
    codes = parts.take(f"{stem}.weight_packed", ("I32",))
    outputs, inputs = codes.shape[0], codes.shape[1] * 32 // scheme.bits
    size = scheme.group or inputs
    groups = group_count(stem, inputs, size)
    zeros = None
    if not scheme.symmetric:
        zeros = parts.take(f"{stem}.weight_zero_point", ("I32",), (-(-outputs * scheme.bits // 32), groups))
    stored = {
        "codes": codes,
        "scales": parts.take(
            f"{stem}.weight_scale", FLOATS, (1,) if scheme.strategy == "tensor" else (outputs, groups)
        ),
        "zeros": zeros,
        "order": parts.take_optional(f"{stem}.weight_g_idx", ("I32", "I64"), (inputs,)),
    }
    parts.drop(f"{stem}.weight_shape")
    form = ""
    if scheme.bits == 4 and not scheme.ordered and stored["order"] is None:
        form = four_bit_form(inputs, size, symmetric=scheme.symmetric)
    elif scheme.bits == 8 and has_whole_groups(inputs, size) and scheme.symmetric and stored["order"] is None:
        form = "int8/32"
    kind = f"compressed-tensors in {scheme.bits} bits"
    middle = 2 ** (scheme.bits - 1)
    return packed_entry(
        (outputs, inputs), kind, CodeLayout.WORDS, stored, form=form, bits=scheme.bits, group=size, middle=middle
    )


def _integers(parts: Parts, stem: str, scheme: _Scheme) -> PackedEntry:
    if not scheme.symmetric or scheme.strategy == "block":
        raise CheckpointInvalid(
            "config.json: int8 weights are supported only if they are symmetric, by group, channel or tensor."
        )
    codes = parts.take(f"{stem}.weight", ("I8",))
    outputs, inputs = codes.shape
    size = scheme.group or inputs
    groups = group_count(stem, inputs, size)
    scales = parts.take(f"{stem}.weight_scale", FLOATS, (1,) if scheme.strategy == "tensor" else (outputs, groups))
    parts.drop(f"{stem}.weight_zero_point")
    form = "int8/32" if has_whole_groups(inputs, size) else ""
    stored = {"codes": codes, "scales": scales}
    return packed_entry(
        (outputs, inputs), "compressed-tensors in int8", CodeLayout.INTEGERS, stored, form=form, group=size
    )
