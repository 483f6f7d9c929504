"""Weights that MLX quantized: `weight` in words of 32 bits, `scales`, and `biases`, which are the values of code 0."""

from __future__ import annotations

from app.errors import CheckpointInvalid
from app.models.config_reader import ConfigReader
from app.weights.quantized.entries import (
    FLOATS,
    CodeLayout,
    PackedEntry,
    Parts,
    four_bit_form,
    has_whole_groups,
    packed_entry,
)

BITS = (2, 3, 4, 5, 6, 8)


def join_mlx(parts: Parts, config: ConfigReader) -> dict[str, PackedEntry]:
    """Return the weights that MLX quantized, by name, and remove their parts.

    A layer may have bits and a group size of its own, as an object under its name.

    Raises:
        CheckpointInvalid: The configuration or a part cannot be used.
    """
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
