"""How many bytes a packed weight takes, and what the forms of four and eight bits are called: plain numbers, without torch.

The layout itself is described in `csrc/ops.h`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

PANEL_OUTPUTS = 32
_MULTIPLE = 32  # inputs that share one scale are padded to a multiple of this: what the kernels take at a time


@dataclass(frozen=True, slots=True)
class PanelLayout:
    """Panels of 4- or 8-bit codes, `group` inputs to a scale (None: all of an output's); `zero_points`: each has a minimum beside it."""

    bits: int
    group: int | None
    zero_points: bool = False

    def group_of(self, inputs: int) -> int:
        """Inputs that share a scale, of a weight with this many."""
        return -(-inputs // _MULTIPLE) * _MULTIPLE if self.group is None else self.group

    def panel_bytes(self, inputs: int) -> int:
        group = self.group_of(inputs)
        header = 2 * PANEL_OUTPUTS * (2 if self.zero_points else 1)
        return -(-inputs // group) * (header + group * PANEL_OUTPUTS * self.bits // 8)

    def nbytes(self, outputs: int, inputs: int) -> int:
        """Of a whole weight [outputs, inputs], without its bias."""
        return -(-outputs // PANEL_OUTPUTS) * self.panel_bytes(inputs)


LAYOUTS: Mapping[str, PanelLayout] = {
    "int8": PanelLayout(8, None),
    "int8/128": PanelLayout(8, 128),
    **{f"int4/{group}": PanelLayout(4, group) for group in (32, 64, 128)},
    **{f"int4/{group} with zero points": PanelLayout(4, group, zero_points=True) for group in (32, 64, 128)},
}


# On a device with memory of its own: what torch's int4 product wants of a weight (aten's int4mm.cu and its Metal twin).
DEVICE_GROUP = 64
_TILE_OUTPUTS, _TILE_INPUTS = 8, 64


def device_int4_suits(outputs: int, inputs: int) -> bool:
    """Whether a weight of this size can be held in four bits there."""
    return outputs % _TILE_OUTPUTS == 0 and inputs % _TILE_INPUTS == 0


def device_int4_bytes(outputs: int, inputs: int) -> int:
    """Codes, and a scale and a zero of two bytes each for every group: 0.5625 bytes a weight."""
    return outputs * inputs // 2 + 4 * outputs * (inputs // DEVICE_GROUP)
