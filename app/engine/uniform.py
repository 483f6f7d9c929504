"""Random numbers that depend on a seed and a position alone: no state, so neither the batch nor a preemption can change a draw."""

from __future__ import annotations

from typing import Any, TypeVar

from numpy.typing import NDArray

# SplitMix64: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014; it passes BigCrush.
Bits = TypeVar("Bits", int, NDArray[Any])
_GAMMA = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits: number `position` of the stream of `seed`.

    The seed is mixed before it becomes a stream's start: seeds that differ by a multiple of the increment (the choices of one
    request do) would otherwise name one and the same stream, shifted.
    """
    return (_mix(stream(seed) + (position + 1) * _GAMMA) >> 11) * 2.0**-53


def stream(seed: int) -> int:
    """Where the stream of a seed starts."""
    return _mix(seed)


def uniforms(streams: NDArray[Any], positions: NDArray[Any]) -> NDArray[Any]:
    """The same of many `streams` uint64, each at its position: such numbers wrap around by themselves."""
    bits: NDArray[Any] = _mix(streams + (positions + 1).astype(streams.dtype) * _GAMMA)
    numbers: NDArray[Any] = (bits >> 11) * 2.0**-53
    return numbers


def _mix(bits: Bits) -> Bits:
    """Of an int, or of each in an array of uint64."""
    bits = bits & _MASK
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & _MASK
    return bits ^ (bits >> 31)
