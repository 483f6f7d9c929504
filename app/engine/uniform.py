"""Counter-based random numbers that depend only on a seed and a position.

There is no state, so neither the batch nor a preemption changes a sampled token.
"""

from __future__ import annotations

from typing import Any, TypeVar

from numpy.typing import NDArray

# SplitMix64 from Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014; it passes
# BigCrush.
Bits = TypeVar("Bits", int, NDArray[Any])
_GAMMA = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1


def uniform(seed: int, position: int) -> float:
    """Return a number in [0, 1) with 53 random bits: number `position` of the stream of `seed`.

    The seed is mixed before it becomes the start of a stream. Otherwise, seeds that differ by a multiple of the
    increment (the choices of one request do) would give the same stream, shifted.
    """
    return (_mix(stream(seed) + (position + 1) * _GAMMA) >> 11) * 2.0**-53


def stream(seed: int) -> int:
    """Return the start state of a seed's stream."""
    return _mix(seed)


def uniforms(streams: NDArray[Any], positions: NDArray[Any]) -> NDArray[Any]:
    """Return one number per stream (`streams` uint64), each at its position.

    uint64 arithmetic wraps around without a mask.
    """
    bits: NDArray[Any] = _mix(streams + (positions + 1).astype(streams.dtype) * _GAMMA)
    numbers: NDArray[Any] = (bits >> 11) * 2.0**-53
    return numbers


def _mix(bits: Bits) -> Bits:
    """Return the SplitMix64 mix of an int, or of each element of a uint64 array."""
    bits = bits & _MASK
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & _MASK
    return bits ^ (bits >> 31)
