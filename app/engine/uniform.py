"""Random numbers that depend on a seed and a position alone: no state, so neither the batch nor a preemption can change a draw."""

from __future__ import annotations

# SplitMix64: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014; it passes BigCrush.
_GAMMA = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits: number `position` of the stream of `seed`.

    The seed is mixed before it becomes a stream's start: seeds that differ by a multiple of the increment (the choices of one
    request do) would otherwise name one and the same stream, shifted.
    """
    return (_mix(_mix(seed) + (position + 1) * _GAMMA) >> 11) * 2.0**-53


def _mix(bits: int) -> int:
    bits &= _MASK
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & _MASK
    return bits ^ (bits >> 31)
