"""Sizes of packed weights, names of the four-bit and eight-bit layouts, limits of products; does not import torch.

The layouts are described in `csrc/ops.h`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

PANEL_OUTPUTS = 32
MAX_LORA_RANK = 64
LORA_RANK_STEP, LORA_INPUT_STEP = 4, 16  # ranks and inputs are padded to multiples of these (csrc/ops.h)
_MULTIPLE = 32  # inputs that share a scale are padded to a multiple of this, which the kernels read at a time


class PanelHeader(IntEnum):
    """What a panel holds beside the codes of its weights (csrc/ops.h)."""

    SCALES = 0
    SCALES_AND_MINIMUMS = 1
    DOUBLE_QUANTIZED = 2


_HEADER_BYTES = {PanelHeader.SCALES: 2, PanelHeader.SCALES_AND_MINIMUMS: 4, PanelHeader.DOUBLE_QUANTIZED: 1}


def lora_elements(rank: int, outputs: int, inputs: int) -> int:
    """Return the number of elements of the packed matrices of an adapter for a layer."""
    ranks, columns = (-(-n // step) * step for n, step in ((rank, LORA_RANK_STEP), (inputs, LORA_INPUT_STEP)))
    return ranks * columns + -(-outputs // PANEL_OUTPUTS) * PANEL_OUTPUTS * rank


@dataclass(frozen=True, slots=True)
class PanelLayout:
    """Panels of 4-bit or 8-bit codes with `group` inputs per scale (None: all inputs of an output).

    With `zero_points`, each scale has a minimum. With `double_quantized`, the scales of groups are quantized to eight
    bits, with one scale per output (Dettmers et al., "QLoRA", 2023, call it so).
    """

    bits: int
    group: int | None
    zero_points: bool = False
    double_quantized: bool = False

    @property
    def header(self) -> PanelHeader:
        """What a panel holds beside the codes of its weights."""
        if self.double_quantized:
            return PanelHeader.DOUBLE_QUANTIZED
        return PanelHeader.SCALES_AND_MINIMUMS if self.zero_points else PanelHeader.SCALES

    def group_of(self, inputs: int) -> int:
        """Return the number of inputs that share a scale in a weight with this many inputs."""
        return -(-inputs // _MULTIPLE) * _MULTIPLE if self.group is None else self.group

    def panel_bytes(self, inputs: int) -> int:
        """Return the bytes of one panel of `PANEL_OUTPUTS` outputs."""
        group = self.group_of(inputs)
        groups = -(-inputs // group)
        scales, codes = (
            groups * _HEADER_BYTES[self.header] * PANEL_OUTPUTS,
            groups * group * PANEL_OUTPUTS * self.bits // 8,
        )
        return codes + (64 + -(-scales // 64) * 64 if self.double_quantized else scales)

    def nbytes(self, outputs: int, inputs: int) -> int:
        """Return the bytes of a whole weight [outputs, inputs] without its bias."""
        return -(-outputs // PANEL_OUTPUTS) * self.panel_bytes(inputs)


LAYOUTS: Mapping[str, PanelLayout] = {
    "int8": PanelLayout(8, None),
    **{f"int8/{group}": PanelLayout(8, group) for group in (32, 64, 128)},
    **{f"int4/{group}": PanelLayout(4, group) for group in (32, 64, 128)},
    **{f"int4/{group} double quantized": PanelLayout(4, group, double_quantized=True) for group in (32, 64)},
    **{f"int4/{group} with zero points": PanelLayout(4, group, zero_points=True) for group in (32, 64, 128)},
}


# Requirements of torch's int4 product on devices with separate memory (aten's int4mm.cu and the Metal version).
DEVICE_GROUP = 64
_TILE_OUTPUTS, _TILE_INPUTS = 8, 64


# Most rows that a GPU multiplies by eight-bit codes, which are read once per 64 rows: 2 bytes per weight at 128, against 5 if
# they are dequantized to 16 bits and read again.
MAX_CODE_ROWS = 128
FEW_CODE_ROWS = 16  # rows of the smallest block of such a product
MAX_FEW_ROWS = 4  # most rows that a GPU multiplies without its matrix units, together with the norm before the product
MIN_FP8_CAPABILITY = (8, 9)  # Ada, the first with products of E4M3
BLOCKS_CAPABILITY = (9, 0)  # Hopper, the only one with products of E4M3 by scales of blocks


def supports_device_int4(outputs: int, inputs: int) -> bool:
    """Return True if a weight of this size can be packed to four bits for a device."""
    return outputs % _TILE_OUTPUTS == 0 and inputs % _TILE_INPUTS == 0


def device_int4_bytes(outputs: int, inputs: int) -> int:
    """Return the bytes of codes, with a scale and a zero of two bytes each per group: 0.5625 bytes per weight."""
    return outputs * inputs // 2 + 4 * outputs * (inputs // DEVICE_GROUP)


def device_int8_bytes(outputs: int, inputs: int) -> int:
    """Return the bytes of codes, with a scale of two bytes for each output."""
    return outputs * inputs + 2 * outputs


def device_fp8_bytes(outputs: int, inputs: int, block: tuple[int, int] | None = None) -> int:
    """Return the bytes of codes, with a scale of four bytes for each block of outputs and inputs; None: each output."""
    height, width = block or (1, inputs)
    return outputs * inputs + 4 * -(-outputs // height) * -(-inputs // width)
