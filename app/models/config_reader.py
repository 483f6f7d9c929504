"""Reads single values of a config.json and describes errors in them, for decoders and encoders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from app.errors import CheckpointInvalid

_REQUIRED = object()
# Models compute in FP32, whose smallest number with all digits is 1.2e-38. No real config comes near either.
_SMALLEST_NUMBER, _LARGEST_NUMBER = 1e-37, 1e37
MAX_INTEGER = 2**40  # larger than any count in a real config
MAX_LAYERS = (
    # each layer is an object with a dozen tensors, so a damaged number could fill the memory before they are looked
    # up
    4096
)


@dataclass(frozen=True, slots=True)
class ConfigReader:
    """A JSON object with a name for messages. A null counts as absent, as in transformers.

    Every reader raises `CheckpointInvalid` if the value is missing without a default, or has the wrong type.
    """

    values: Mapping[str, Any]
    where: str = "config.json"

    def has(self, name: str) -> bool:
        """Return True if the value is present and not null."""
        return self.values.get(name) is not None

    def integer(
        self, name: str, default: int | object = _REQUIRED, at_least: int = 1, at_most: int = MAX_INTEGER
    ) -> int:
        """Return an integer in [at_least, at_most]; a float such as 2.0 is accepted."""
        value = self._get(name, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not at_least <= value <= at_most:
            raise self._wrong(name, f"an integer of {at_least} to {at_most:,}", value)
        return value

    def integers(self, name: str) -> tuple[int, ...]:
        """Return a list of at least one positive integer."""
        value = self._get(name, _REQUIRED)
        if not isinstance(value, list) or not value:
            raise self._wrong(name, "a list of integers", value)
        return tuple(ConfigReader({name: item}, self.where).integer(name) for item in value)

    def optional_integer(self, name: str, default: int | None = None) -> int | None:
        """Return a positive integer, or `default` if it is absent."""
        return self.integer(name) if self.has(name) else default

    def number(self, name: str, default: float | object = _REQUIRED) -> float:
        """Return a number greater than 0 that FP32 holds with all its digits."""
        value = self._get(name, default)
        if not _is_finite(value) or value < _SMALLEST_NUMBER:
            bounds = f"a number greater than 0, of {_SMALLEST_NUMBER:g} to {_LARGEST_NUMBER:g}"
            raise self._wrong(name, bounds if _is_number(value) and value > 0 else "a number greater than 0", value)
        return float(value)

    def optional_number(self, name: str) -> float | None:
        """Return a number greater than 0, or None if it is absent."""
        return self.number(name) if self.has(name) else None

    def boolean(self, name: str, default: bool | object = _REQUIRED) -> bool:
        """Return true or false."""
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self._wrong(name, "true or false", value)
        return value

    def text(self, name: str, default: str | object = _REQUIRED) -> str:
        """Return a string."""
        value = self._get(name, default)
        if not isinstance(value, str):
            raise self._wrong(name, "a string", value)
        return value

    def numbers(self, name: str, length: int) -> tuple[float, ...]:
        """Return a list of exactly `length` finite numbers."""
        value = self._get(name, _REQUIRED)
        if not isinstance(value, list) or len(value) != length or not all(map(_is_finite, value)):
            raise self._wrong(name, f"a list of {length} numbers", value)
        return tuple(float(item) for item in value)

    def texts(self, name: str, length: int) -> tuple[str, ...]:
        """Return a list of exactly `length` strings, one per layer."""
        value = self._get(name, _REQUIRED)
        if not isinstance(value, list) or len(value) != length or not all(isinstance(item, str) for item in value):
            raise self._wrong(name, f"a list of {length} strings, one a layer", value)
        return tuple(value)

    def section(self, name: str) -> ConfigReader:
        """Return a nested object, empty if it is absent."""
        value = self.values.get(name) or {}
        if not isinstance(value, Mapping):
            raise self._wrong(name, "an object", value)
        return ConfigReader(value, f"{self.where}: {name}")

    def offset(self, name: str) -> float:
        """Return a finite number of any sign."""
        value = self._get(name, _REQUIRED)
        if not _is_finite(value):
            raise self._wrong(name, "a number", value)
        return float(value)

    def _get(self, name: str, default: Any) -> Any:
        value = self.values.get(name)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise CheckpointInvalid(f"{self.where}: {name} is missing.")
        return default

    def _wrong(self, name: str, wanted: str, value: Any) -> CheckpointInvalid:
        shown = repr(value)
        return CheckpointInvalid(f"{self.where}: {name} must be {wanted}, not {shown[:80]}.")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_finite(value: Any) -> bool:
    """Return True for a number that FP32 can hold; JSON's integers have any length."""
    return _is_number(value) and abs(value) <= _LARGEST_NUMBER
