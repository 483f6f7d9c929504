"""Prices and power of machines: the table shipped in this folder, and the user's table, which takes precedence.

A family is a set of machines with the same processor in different sizes. Rates are scaled only within a family. Every
price names its source and the day it was read.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from armature_bench.console import MeasurementFailed

SHIPPED_TABLE = Path(__file__).with_name("instances.toml")
HOURS_A_YEAR = 8760
Architecture = Literal["arm64", "x86_64", "gpu"]


class _PriceModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class PowerRating(_PriceModel):
    """The power of a number of cores (or GPUs): watts, how many cores, the kind of figure, and its source."""

    watts: float = Field(gt=0)
    of: int = Field(ge=1)
    basis: str
    source: str


class InstanceSize(_PriceModel):
    """A machine to rent, or to buy for `purchase_price` and keep for `years`.

    With neither price, its cost is unknown.
    """

    name: str
    vcpus: int = Field(ge=1)
    gpus: int = Field(0, ge=0)
    hourly_price: float | None = Field(None, gt=0)
    purchase_price: float | None = Field(None, gt=0)
    years: float | None = Field(None, gt=0)

    @model_validator(mode="after")
    def _priced_once(self) -> InstanceSize:
        if (self.purchase_price is None) != (self.years is None):
            raise ValueError("purchase_price and years must be given together")
        if self.purchase_price is not None and self.hourly_price is not None:
            raise ValueError("give either hourly_price or purchase_price, not both")
        return self

    @property
    def price_basis(self) -> str:
        """How the price is known: "bought", "list", or "" if it is not."""
        if self.purchase_price is not None:
            return "bought"
        return "" if self.hourly_price is None else "list"

    @property
    def dollars_an_hour(self) -> float | None:
        """The hourly cost of a machine that is used all year. None if unknown."""
        return self.hourly_cost(HOURS_A_YEAR)

    def hourly_cost(self, hours_a_year: float) -> float | None:
        """Return the hourly price; for a bought machine, its price divided by the hours of its use."""
        if self.purchase_price is not None and self.years is not None:
            return self.purchase_price / (self.years * hours_a_year)
        return self.hourly_price


class InstanceFamily(_PriceModel):
    """Machines with the same processor.

    `as_of`: the day for which the source states the prices; `read`: the day on which they were read.
    """

    name: str
    cloud: str
    processor: str
    architecture: Architecture
    region: str
    threads_per_core: int = Field(ge=1, le=8)
    memory_gib_per_vcpu: float | None = Field(None, gt=0)
    source: str = Field("", description="where the prices were read")
    as_of: date | None = None
    read: date | None = None
    note: str = ""
    power: PowerRating | None = None
    sizes: list[InstanceSize] = Field(min_length=1)

    @model_validator(mode="after")
    def _sourced(self) -> InstanceFamily:
        priced = any(size.dollars_an_hour is not None for size in self.sizes)
        if priced and not (self.source.strip() and self.read):
            raise ValueError(f"the prices of {self.name} need `source` and `read`: where they were read, and when")
        return self

    def cores(self, size: InstanceSize) -> int:
        """Return the number of physical cores."""
        return max(1, size.vcpus // self.threads_per_core)

    def units(self, size: InstanceSize) -> int:
        """Return the count with which rates and watts scale in this family: GPUs if any, else physical cores."""
        return size.gpus or self.cores(size)

    def memory_bytes(self, size: InstanceSize) -> float | None:
        """Return the memory of a size in bytes, or None if unknown."""
        return None if self.memory_gib_per_vcpu is None else self.memory_gib_per_vcpu * size.vcpus * 2**30

    def watts(self, size: InstanceSize) -> float | None:
        """Return the power of a size in watts, or None if unknown."""
        return None if self.power is None else self.power.watts * self.units(size) / self.power.of


class _PriceFile(_PriceModel):
    family: list[InstanceFamily]


@dataclass(frozen=True, slots=True)
class PriceTable:
    families: Mapping[str, InstanceFamily]

    def find(self, instance: str) -> tuple[InstanceFamily, InstanceSize] | None:
        return next(((family, size) for family, size in self.sizes() if size.name == instance), None)

    def sizes(self) -> Iterator[tuple[InstanceFamily, InstanceSize]]:
        for family in self.families.values():
            for size in family.sizes:
                yield family, size


def read_prices(own: Path | None) -> PriceTable:
    """Read the shipped price table and the user's file. Raises `MeasurementFailed`.

    A family in the user's file replaces the shipped one of the same name.
    """
    tables = [_read(SHIPPED_TABLE)] + ([] if own is None else [_read(own)])
    return PriceTable({family.name: family for table in tables for family in table.family})


def _read(path: Path) -> _PriceFile:
    try:
        fields: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise MeasurementFailed(f"{path} cannot be read: {error}.") from error
    except tomllib.TOMLDecodeError as error:
        raise MeasurementFailed(f"{path} is not valid TOML: {error}.") from error
    try:
        table = _PriceFile.model_validate(fields)
    except ValidationError as error:
        raise MeasurementFailed(
            f"{path}: {_first_error(error)}. {SHIPPED_TABLE.name} in the package shows the format."
        ) from error
    names = [size.name for family in table.family for size in family.sizes]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise MeasurementFailed(f"{path}: {twice} is listed twice.")
    return table


def _first_error(error: ValidationError) -> str:
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg'].removeprefix('Value error, ')}"
