"""Weights of bitsandbytes: NF4 and FP4 in blocks (Dettmers et al., "QLoRA", 2023), and int8 with a scale per output.

The sizes of a four-bit weight are in a tensor with JSON text, `quant_state`.
"""

from __future__ import annotations

import json
import math
from io import BufferedReader
from typing import Any

from app.errors import CheckpointInvalid
from app.models.config_reader import ConfigReader
from app.weights.files import open_regular
from app.weights.quantized.entries import GROUP, CodeLayout, PackedEntry, Parts, packed_entry
from app.weights.safetensors import TensorEntry

TABLES = ("nf4", "fp4")
_STATE = ".weight.quant_state.bitsandbytes__"
_MAX_STATE_BYTES = 4096


def join_bitsandbytes(parts: Parts, config: ConfigReader) -> dict[str, PackedEntry]:
    """Return the weights that bitsandbytes quantized, by name, and remove their parts.

    Raises:
        CheckpointInvalid: The configuration or a part cannot be used.
    """
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
