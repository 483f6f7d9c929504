"""The hourly price of each result's machine: given by the operator, or from the price table by instance name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from app.bench.compare.result import Result
from app.bench.tco.prices import Prices, read_prices


@dataclass(frozen=True, slots=True)
class Priced:
    """A result with its price. `origin`: the source of the price; empty without one."""

    result: Result
    origin: str


def priced(results: Sequence[Result]) -> list[Priced]:
    """Return the results with prices from the shipped price table filled in."""
    prices = read_prices(None)
    return [_priced(result, prices) for result in results]


def _priced(result: Result, prices: Prices) -> Priced:
    if result.hourly_price is not None:
        return Priced(result, "the operator's setting")
    found = prices.find(result.instance) if result.instance else None
    if found is None or found[1].dollars_an_hour is None:
        return Priced(result, "")
    family, size = found
    origin = f"{family.region}, {family.as_of or family.read}, {family.source}"
    return Priced(result.model_copy(update={"hourly_price": size.dollars_an_hour}), origin)
