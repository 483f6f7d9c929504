"""Which library quantized a checkpoint, by its config.json, and the weights that its tensors hold.

A `join_` function returns the weights by name and removes their parts; it raises `CheckpointInvalid` if the
configuration or a part cannot be used.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from io import BufferedReader
from typing import Any

from app.errors import CheckpointInvalid
from app.models.config_reader import ConfigReader
from app.models.decoders.stored import EXPERT_PRODUCTS
from app.weights.files import join_names, open_regular
from app.weights.quantized.entries import (
    FLOATS,
    GROUP,
    CodeLayout,
    PackedEntry,
    Parts,
    four_bit_form,
    group_count,
    has_whole_groups,
    packed_entry,
)
from app.weights.safetensors import TensorEntry, join_quantized

TABLES = ("nf4", "fp4")
_STATE = ".weight.quant_state.bitsandbytes__"
_MAX_STATE_BYTES = 4096
_BLOCKS, _SCALES, _BLOCK_BYTES = "_blocks", "_scales", GROUP // 2
BITS = (2, 3, 4, 5, 6, 8)
GPTQ_BITS = (2, 3, 4, 8)
_FORMATS = {"gptq": 1, "gptq_v2": 0}  # what is added to a stored zero: the first version stores zeros less 1
_WORD = 32  # bits
FP8_DTYPES = ("F8_E4M3", "F8_E5M2")
_MXFP4_PACKED = "mxfp4-pack-quantized"
FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", _MXFP4_PACKED)
_PACKED_BITS = (4, 8)
_Join = Callable[[Parts, ConfigReader], dict[str, PackedEntry]]
MLX = "mlx"
TORCHAO = "torchao"
# Ends of names that only quantized weights have.
_QUANTIZED_NAMES = (
    ".qweight", ".qzeros", ".scales", ".g_idx", ".weight_packed", ".weight_scale", ".weight_scale_inv", ".absmax",
    ".quant_map", ".SCB", "_blocks", "_scales",
)  # fmt: skip


def join_bitsandbytes(parts: Parts, config: ConfigReader) -> dict[str, PackedEntry]:
    kind = config.text("bnb_4bit_quant_type", "fp4")
    if kind not in TABLES:
        raise CheckpointInvalid(f"{config.where}: bnb_4bit_quant_type must be nf4 or fp4, not {kind[:40]!r}.")
    found = {}
    for table in TABLES:
        for stem in parts.stems(_STATE + table):
            found[f"{stem}.weight"] = _four_bits(parts, stem, table)
    for stem in parts.stems(".SCB"):
        found[f"{stem}.weight"] = _int8(parts, stem)
    return found


def _four_bits(parts: Parts, stem: str, table: str) -> PackedEntry:
    name = f"{stem}.weight"
    state = ConfigReader(_state(parts.take_vector(f"{stem}{_STATE}{table}", ("U8",))), f"{name[:120]}.quant_state")
    sizes = tuple(int(size) for size in state.numbers("shape", 2))
    block = state.integer("blocksize", at_least=2, at_most=2**20)
    codes = parts.take_any(name)
    if min(sizes) < 1 or -(-math.prod(sizes) // 2) != codes.nbytes or block % 2:
        raise CheckpointInvalid(f"{state.where} does not fit the {codes.nbytes} bytes of the weight.")
    blocks = -(-math.prod(sizes) // block)
    nested, offset, scales, nested_scales, nested_table = 0, 0.0, None, None, None
    if f"{name}.nested_absmax" in parts.tensors:
        nested = state.integer("nested_blocksize", at_most=2**20)
        offset = state.offset("nested_offset")
        scales = parts.take_vector(f"{name}.absmax", ("U8",), blocks)
        nested_scales = parts.take_vector(f"{name}.nested_absmax", ("F32",), -(-blocks // nested))
        nested_table = parts.take_vector(f"{name}.nested_quant_map", ("F32",), 256)
    else:
        scales = parts.take_vector(f"{name}.absmax", ("F32",), blocks)
    parts.drop(f"{name}.quant_map")
    stored = {"codes": codes, "scales": scales, "nested_scales": nested_scales, "nested_table": nested_table}
    kind = f"bitsandbytes {table.upper()}"
    return packed_entry(
        sizes,
        kind,
        CodeLayout.BITSANDBYTES,
        stored,
        bits=4,
        group=block,
        table=table,
        offset=offset,
        nested_block=nested,
    )


def _state(entry: TensorEntry) -> dict[str, Any]:
    if entry.nbytes > _MAX_STATE_BYTES:
        return {}
    with BufferedReader(open_regular(entry.file)) as stream:
        stream.seek(entry.start)
        text = stream.read(entry.nbytes)
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}


def _int8(parts: Parts, stem: str) -> PackedEntry:
    codes = parts.take(f"{stem}.weight", ("I8",))
    outputs, inputs = codes.shape
    stored = {"codes": codes, "largest": parts.take_vector(f"{stem}.SCB", ("F32",), outputs)}
    parts.drop(f"{stem}.weight_format")
    form = "int8/32" if inputs % GROUP == 0 else ""
    return packed_entry((outputs, inputs), "bitsandbytes int8", CodeLayout.INTEGERS, stored, form=form, group=inputs)


def join_mxfp4(parts: Parts, config: ConfigReader) -> dict[str, PackedEntry]:
    """Return the weights of each expert."""
    found: dict[str, PackedEntry] = {}
    for stem in parts.stems(_BLOCKS):
        found |= dict(_experts(parts, stem))
    return found


def _experts(parts: Parts, stem: str) -> Iterator[tuple[str, PackedEntry]]:
    at, _, product = stem.rpartition(".")
    names = EXPERT_PRODUCTS.get(product, ())
    if not names or not at.endswith(".experts"):
        raise CheckpointInvalid(f"{stem[:120]}{_BLOCKS} is in MXFP4, which is supported for experts' weights only.")
    if stem in parts.tensors:
        raise CheckpointInvalid(f"The weights hold {stem[:120]} twice: quantized, and as it was before.")
    shape = parts.tensors[stem + _BLOCKS].shape
    if len(shape) != 4 or 0 in shape or shape[3] != _BLOCK_BYTES or shape[1] % len(names):
        raise CheckpointInvalid(
            f"{stem[:120]}{_BLOCKS} has shape {list(shape)}; MXFP4 asks for [experts, outputs, groups, {_BLOCK_BYTES}]."
        )
    codes, scales = parts.take(stem + _BLOCKS, ("U8",), shape), parts.take(stem + _SCALES, ("U8",), shape[:3])
    outputs, inputs = shape[1] // len(names), shape[2] * GROUP
    for expert in range(shape[0]):
        for place, name in enumerate(names):
            stored: dict[str, TensorEntry | None] = {
                "codes": _of_expert(codes, expert, len(names)),
                "scales": _of_expert(scales, expert, len(names)),
            }
            entry = packed_entry(
                (outputs, inputs), "MXFP4", CodeLayout.MXFP4, stored,
                form="int8/32", group=GROUP, turns=len(names), place=place,
            )  # fmt: skip
            yield f"{at}.{expert}.{name}.weight", entry


def _of_expert(entry: TensorEntry, expert: int, turns: int) -> TensorEntry:
    """Return an expert's rows, in turns: [outputs, turns, ...]."""
    nbytes = entry.nbytes // entry.shape[0]
    start = entry.start + expert * nbytes
    shape = (entry.shape[1] // turns, turns, *entry.shape[2:])
    return replace(entry, shape=shape, start=start, end=start + nbytes)


def join_mlx(parts: Parts, config: ConfigReader) -> dict[str, PackedEntry]:
    """Return the weights that MLX quantized; an object under a layer's name has bits and a group size of its own."""
    found = {}
    for stem in parts.stems(".scales"):
        own = config.section(stem) if isinstance(config.values.get(stem), dict) else config
        bits, group, mode = own.integer("bits"), own.integer("group_size"), own.text("mode", "affine")
        if bits not in BITS or mode != "affine":
            raise CheckpointInvalid(
                f"{own.where}: MLX's mode {mode[:40]!r} with {bits} bits is not supported; 'affine' with 2, 3, 4, 5, 6 or 8 is."
            )
        found[f"{stem}.weight"] = _mlx(parts, stem, bits, group)
    return found


def _mlx(parts: Parts, stem: str, bits: int, group: int) -> PackedEntry:
    codes = parts.take(f"{stem}.weight", ("U32",))
    outputs, inputs = codes.shape[0], codes.shape[1] * 32 // bits
    if codes.shape[1] % bits or inputs % group:
        raise CheckpointInvalid(f"{stem[:120]}.weight does not have whole groups of {group} codes with {bits} bits.")
    grid = (outputs, inputs // group)
    stored = {
        "codes": codes,
        "scales": parts.take(f"{stem}.scales", FLOATS, grid),
        "minimums": parts.take(f"{stem}.biases", FLOATS, grid),
    }
    if bits <= 4:
        form = four_bit_form(inputs, group, symmetric=False)
    else:
        form = "int8/32" if has_whole_groups(inputs, group) else ""
    return packed_entry(
        (outputs, inputs), f"MLX in {bits} bits", CodeLayout.WORDS, stored, form=form, bits=bits, group=group
    )


def join_gptq(parts: Parts, config: ConfigReader) -> dict[str, PackedEntry]:
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
    if config.values.get("group_size") == -1:
        return -1
    return config.integer("group_size")


def join_awq(parts: Parts, config: ConfigReader) -> dict[str, PackedEntry]:
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


def join_fp8(parts: Parts, config: ConfigReader) -> dict[str, PackedEntry]:
    """Return the weights in 8-bit floats; scales of activations are not used."""
    block = None
    if config.has("weight_block_size"):
        rows, columns = config.numbers("weight_block_size", 2)
        if min(rows, columns) < 1 or not (rows.is_integer() and columns.is_integer()):
            raise CheckpointInvalid(f"{config.where}: weight_block_size must be two whole numbers of at least 1.")
        block = (int(rows), int(columns))
    found: dict[str, PackedEntry] = {}
    for scale in ("weight_scale_inv", "weight_scale"):
        found |= {f"{stem}.weight": fp8_entry(parts, stem, scale, block) for stem in parts.stems(f".{scale}")}
    for name in ("input_scale", "activation_scale", "input_scale_ub", "k_scale", "v_scale"):
        parts.drop(*(f"{stem}.{name}" for stem in parts.stems(f".{name}")))
    return found


def fp8_entry(parts: Parts, stem: str, scale: str, block: tuple[int, int] | None) -> PackedEntry:
    """Return a weight whose scales are stored under this name: for each block, each output, or all of it."""
    codes = parts.take(f"{stem}.weight", FP8_DTYPES)
    outputs, inputs = codes.shape
    there = parts.tensors.get(f"{stem}.{scale}")
    shape = () if there is None else there.shape
    sizes = {(): (outputs, inputs), (1,): (outputs, inputs), (outputs,): (1, inputs), (outputs, 1): (1, inputs)}
    if block is not None:
        sizes = {(-(-outputs // block[0]), -(-inputs // block[1])): block}
    if shape not in sizes:
        raise CheckpointInvalid(
            f"{stem[:120]}.{scale} has shape {list(shape)}, which does not fit the weight's {list(codes.shape)} and its blocks."
        )
    stored = {"codes": codes, "scales": parts.take(f"{stem}.{scale}", FLOATS, shape)}
    kind = "FP8" if codes.dtype == FP8_DTYPES[0] else "FP8 (E5M2)"
    return packed_entry((outputs, inputs), kind, CodeLayout.FP8, stored, block=sizes[shape])


def join_compressed(parts: Parts, config: ConfigReader) -> dict[str, PackedEntry]:
    scheme = _scheme(config)
    packed = _packed_floats if config.text("format") == _MXFP4_PACKED else _packed
    found = {f"{stem}.weight": packed(parts, stem, scheme) for stem in parts.stems(".weight_packed")}
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


def _packed_floats(parts: Parts, stem: str, scheme: _Scheme) -> PackedEntry:
    """Return a weight in MXFP4, whose rows are stored one after the other."""
    codes = parts.take(f"{stem}.weight_packed", ("U8",))
    outputs, inputs = codes.shape[0], 2 * codes.shape[1]
    if (scheme.bits, scheme.group, scheme.symmetric) != (4, GROUP, True) or inputs % GROUP:
        raise CheckpointInvalid(
            f"config.json: weights in {_MXFP4_PACKED} have 4 bits in groups of {GROUP} without zero points, and"
            f" {stem[:120]} does not."
        )
    grid = (outputs, 1, inputs // GROUP)
    scales = parts.take(f"{stem}.weight_scale", ("U8",), (outputs, inputs // GROUP))
    stored = {"codes": replace(codes, shape=(*grid, _BLOCK_BYTES)), "scales": replace(scales, shape=grid)}
    return packed_entry((outputs, inputs), "MXFP4", CodeLayout.MXFP4, stored, form="int8/32", group=GROUP)


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


METHODS: Mapping[str, _Join] = {
    "gptq": join_gptq,
    "awq": join_awq,
    "compressed-tensors": join_compressed,
    "fp8": join_fp8,
    "fbgemm_fp8": join_fp8,
    "bitsandbytes": join_bitsandbytes,
    "mxfp4": join_mxfp4,
    MLX: join_mlx,
}


def quantization_method(config: Mapping[str, Any]) -> str:
    """Return the method that quantized the weights, empty if none. Raises `CheckpointInvalid` if it is unknown."""
    quantization = _quantization(config)
    if not quantization:
        return ""
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    if method is None and isinstance(quantization, dict) and {"bits", "group_size"} <= set(quantization):
        return MLX  # which has no quant_method
    if method == TORCHAO or (isinstance(method, str) and method in METHODS):
        return str(method)
    raise CheckpointInvalid(
        f"config.json: the weights are already quantized by {str(method)[:40]} (quantization_config), which is not supported."
        f" Supported are {', '.join((*METHODS, TORCHAO))}. Use the original weights, or another quantization of them."
    )


def _quantization(config: Mapping[str, Any]) -> Any:
    return config.get("quantization_config") or config.get("quantization")


def join_weights(method: str, config: Mapping[str, Any], found: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """Return the tensors by name, with the parts of each quantized weight joined to one entry.

    `method` is what `quantization_method` returned, not empty. Raises `CheckpointInvalid`.
    """
    if method == TORCHAO:
        return join_quantized(found)
    parts = Parts(found)
    reader = ConfigReader(_quantization(config), "config.json: quantization_config")
    joined = METHODS[method](parts, reader)
    both = sorted(set(joined) & set(parts.tensors))
    if both:
        raise CheckpointInvalid(f"The weights hold {both[0][:120]} twice: quantized, and as it was before.")
    return {**parts.tensors, **{name: replace(entry, name=name) for name, entry in joined.items()}}


def check_not_quantized(found: Mapping[str, TensorEntry]) -> None:
    """Raise `CheckpointInvalid` for quantized tensors where config.json names no quantization."""
    names = sorted(name for name in found if name.endswith(_QUANTIZED_NAMES))
    if names:
        raise CheckpointInvalid(
            f"The weights are quantized ({join_names(names)}), and config.json does not say how: it has no quantization_config."
            " Take the config.json that was published with these weights."
        )
