"""Weights in 8-bit floats: one scale for blocks of outputs and inputs (DeepSeek, Qwen), for an output, or for all."""

from __future__ import annotations

from app.errors import CheckpointInvalid
from app.models.config_reader import ConfigReader
from app.weights.quantized.entries import FLOATS, CodeLayout, PackedEntry, Parts, packed_entry

FP8_DTYPES = ("F8_E4M3", "F8_E5M2")


def join_fp8(parts: Parts, config: ConfigReader) -> dict[str, PackedEntry]:
    """Return the weights in 8-bit floats, by name, and remove their parts; scales of activations are not used.

    Raises:
        CheckpointInvalid: The configuration or a part cannot be used.
    """
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
    return packed_entry((outputs, inputs), "FP8", CodeLayout.FP8, stored, block=sizes[shape])
