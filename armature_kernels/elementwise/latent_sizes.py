"""The sizes of the heads of multi-head latent attention. Torch is not needed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LatentHeads:
    """The sizes of the parts of a head.

    `plain` and `rotated`: of queries and keys. `value`: of values, at most `plain + rotated`. `interleaved`: neighbours of
    a rotated part are rotated together, instead of elements of its two halves.
    """

    heads: int
    plain: int
    rotated: int
    value: int
    interleaved: bool

    @property
    def size(self) -> int:
        """Elements of a head of queries or keys."""
        return self.plain + self.rotated
