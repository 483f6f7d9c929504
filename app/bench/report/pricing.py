"""What an hour of each machine costs: as the operator said, else as the table of instances has the one that was named."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from app.bench.compare.result import Result
from app.bench.tco.prices import Prices, read_prices


@dataclass(frozen=True, slots=True)
class Priced:
    """`origin`: where the price is from; empty where there is none."""

    result: Result
    origin: str


def priced(results: Sequence[Result]) -> list[Priced]:
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
