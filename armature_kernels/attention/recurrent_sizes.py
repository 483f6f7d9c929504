"""The sizes of a recurrent layer. Torch is not needed."""

from __future__ import annotations

from dataclasses import dataclass

STATE_COLUMNS = 32  # csrc/ops.h
MAX_WIDTH = 8  # MOST_WIDTH of csrc/ops.h
MAX_KEY_SIZE = 256  # MOST_KEYS of csrc/ops.h
_ALIGNMENT = 16  # fp32 elements of a cache line


def tail_elements(width: int, channels: int) -> int:
    """Return the fp32 elements of a convolution's state, the inputs before a token, rounded up to whole cache lines."""
    return -(-(width - 1) * channels // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True, slots=True)
class RecurrentSizes:
    """The heads of a recurrent layer, and the positions of its convolution.

    Each of `heads` has a state [key_size, value_size]; queries and keys are those of `key_heads`. `has_delta`: the gated
    delta rule, else Mamba-2, where keys are called B, queries C, values x, and key heads groups.
    """

    heads: int
    key_heads: int
    key_size: int
    value_size: int
    width: int
    has_delta: bool

    @property
    def keys(self) -> int:
        """Elements of the keys of a token."""
        return self.key_heads * self.key_size

    @property
    def values(self) -> int:
        """Elements of the values of a token."""
        return self.heads * self.value_size

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values, or in Mamba-2 values, keys and queries."""
        return 2 * self.keys + self.values

    @property
    def places(self) -> tuple[int, int, int]:
        """The first channels of queries, keys and values."""
        return (0, self.keys, 2 * self.keys) if self.has_delta else (self.values + self.keys, self.values, 0)

    @property
    def input_elements(self) -> int:
        """Elements of what a layer's products make of a token: channels, steps and betas."""
        return self.channels + 2 * self.heads

    @property
    def tail_elements(self) -> int:
        return tail_elements(self.width, self.channels)

    @property
    def state_elements(self) -> int:
        """fp32 elements of a sequence's state in this layer."""
        matrices = self.heads * -(-self.value_size // STATE_COLUMNS) * STATE_COLUMNS * self.key_size
        return self.tail_elements + matrices
