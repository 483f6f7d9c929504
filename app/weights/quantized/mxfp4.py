"""Experts in MXFP4, as gpt-oss is published: E2M1 codes in blocks of 32 with an E8M0 scale (OCP MX, version 1.0).

`*_blocks` [experts, outputs, inputs / 32, 16] hold two codes in a byte, the first in the low half; `*_scales` [experts,
outputs, inputs / 32] hold the exponents of scales, plus 127. Gates and ups take turns among the outputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from app.errors import CheckpointInvalid
from app.models.config_reader import ConfigReader
from app.models.decoders.stored import EXPERT_PRODUCTS
from app.weights.quantized.entries import GROUP, CodeLayout, PackedEntry, Parts, packed_entry
from app.weights.safetensors import TensorEntry

_BLOCKS, _SCALES, _BLOCK_BYTES = "_blocks", "_scales", GROUP // 2


def join_mxfp4(parts: Parts, config: ConfigReader) -> dict[str, PackedEntry]:
    """Return the weights of each expert by name, and remove their parts.

    Raises:
        CheckpointInvalid: A part is missing, does not fit, or belongs to no expert.
    """
    found: dict[str, PackedEntry] = {}
    for stem in parts.stems(_BLOCKS):
        found |= dict(_experts(parts, stem))
    return found


def _experts(parts: Parts, stem: str) -> Iterator[tuple[str, PackedEntry]]:
    """Yield the weights of all experts of one product of a layer."""
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
