"""Pools of machines for a simulated day: how fast a pod is, what it costs, and from where these figures are.

The x86 pool was measured. No Arm machine was: its rates are declared, which every output says.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from armature_bench.compare.result import CompareResult, LoadPoint, read_result
from armature_bench.console import MeasurementFailed
from armature_bench.tco.prices import read_prices
from tools.measure.simulated_server import Server

PLACES = 64  # max_running_seqs of a CPU, if nothing is set (app/hardware/plan/capacity.py)
QUEUE = 256  # max_waiting_requests: four for each place
MEASURED = "measured: docs/performance.md, `llama-1b` int4, two cores of a Sapphire Rapids guest, the second table"
X86_SIZE, ARM_SIZE = "c7i.xlarge", "c7g.xlarge"  # 4 vCPUs each: two cores of x86, four of Arm
POOL_FORM = "NAME=DOLLARS,PREFILL,ROWS:RATE[/ROWS:RATE...] or NAME=RESULT.json[,DOLLARS]"


@dataclass(frozen=True, slots=True)
class Pool:
    """Pods of one kind. A pod has a machine for itself.

    `hourly_price` is in dollars. `prefill_rate` is in prompt tokens per second, `decode_rates` the tokens per second of
    1 to `PLACES` sequences together. `source` says from where the rates are.
    """

    name: str
    machine: str
    hourly_price: float
    prefill_rate: float
    decode_rates: tuple[float, ...]
    source: str

    def server(self) -> Server:
        """Return a new idle server."""
        return Server(places=PLACES, queue=QUEUE, rates=self.decode_rates, prompt_rate=self.prefill_rate)

    def requests_per_second(self, prompt_tokens: float, completion_tokens: float) -> float:
        """Return the rate at which a pod with every place taken completes requests of these mean sizes."""
        return 1 / (prompt_tokens / self.prefill_rate + (completion_tokens - 1) / self.decode_rates[-1])

    def faster(self, factor: float, why: str) -> Pool:
        """Return the pool with all rates multiplied."""
        rates = tuple(factor * rate for rate in self.decode_rates)
        return replace(self, prefill_rate=factor * self.prefill_rate, decode_rates=rates, source=why)


def decode_rates(points: Sequence[tuple[int, float]]) -> tuple[float, ...]:
    """Return the rate of 1 to `PLACES` sequences: linear between measured numbers, constant outside of them."""
    measured = sorted(points)
    found = []
    for rows in range(1, PLACES + 1):
        below = max((point for point in measured if point[0] <= rows), default=measured[0])
        above = min((point for point in measured if point[0] >= rows), default=measured[-1])
        share = 0.0 if above[0] == below[0] else (rows - below[0]) / (above[0] - below[0])
        found.append(below[1] + share * (above[1] - below[1]))
    return tuple(found)


def listed_price(size: str) -> float:
    """Return the dollars an hour of the shipped price table."""
    found = read_prices(None).find(size)
    assert found is not None and found[1].hourly_price is not None, f"{size} has no price"
    return found[1].hourly_price


def default_pools(arm_factor: float = 1.0) -> dict[str, Pool]:
    """Return the pools `x86`, as measured, and `arm`, declared as `arm_factor` times as fast with the same vCPUs."""
    rates = decode_rates([(1, 33.5), (8, 172.0), (16, 206.0), (32, 309.0)])
    x86 = Pool("x86", X86_SIZE, listed_price(X86_SIZE), 723.0, rates, MEASURED)
    why = f"declared, not measured: {arm_factor:g} times the x86 pod's rates"
    arm = replace(x86, name="arm", machine=ARM_SIZE, hourly_price=listed_price(ARM_SIZE)).faster(arm_factor, why)
    return {"arm": arm, "x86": x86}


def read_pool(text: str) -> Pool:
    """Read a pool from the command line.

    Raises:
        MeasurementFailed: The text has another form; the message says which.
    """
    name, _, rest = text.partition("=")
    parts = rest.split(",")
    try:
        if parts[0].endswith(".json"):
            return pool_of_result(name, read_result(Path(parts[0])), *map(float, parts[1:2]))
        price, prefill, curve = parts
        points = [(int(rows), float(rate)) for rows, rate in (each.split(":") for each in curve.split("/"))]
        pool = Pool(name, name, float(price), float(prefill), decode_rates(points), "declared on the command line")
    except ValueError as error:
        raise MeasurementFailed(f"--pool {text!r} is not understood ({error}): write {POOL_FORM}.") from error
    if not name or min(pool.hourly_price, pool.prefill_rate, *pool.decode_rates) <= 0:
        raise MeasurementFailed(f"--pool {text!r} must have a name and only figures above 0: write {POOL_FORM}.")
    return pool


def pool_of_result(name: str, result: CompareResult, hourly_price: float | None = None) -> Pool:
    """Return the pool of a result of `armature bench compare`.

    The rate of prompts is that of a lone client's first token. The rate of completions at a number of clients is that
    number over the median time of a token, in which prompts of the others are included: it errs to the slow side.

    Raises:
        MeasurementFailed: The result has no completions, or nobody named a price.
    """
    points = [point for point in result.points if point.load.kind == "generate" and point.tpot_seconds]
    lone = [point for point in points if point.load.clients == 1 and point.first_token_seconds]
    if not lone:
        raise MeasurementFailed(f"{result.name} has no completions of one client, so a pod's rates are not known.")
    listed = None if result.instance is None else read_prices(None).find(result.instance)
    price = hourly_price or result.hourly_price or (None if listed is None else listed[1].hourly_price)
    if price is None:
        raise MeasurementFailed(f"{result.name} has no price: write --pool {name}=RESULT.json,DOLLARS.")
    longest = max(lone, key=lambda point: point.load.tokens)
    prefill = longest.load.tokens / statistics.median(longest.first_token_seconds)
    rates = decode_rates([(point.load.clients, _decode_rate(point)) for point in points])
    machine = result.instance or result.name
    return Pool(name, machine, price, prefill, rates, f"measured: {result.name}, {result.measured_by}")


def _decode_rate(point: LoadPoint) -> float:
    return point.load.clients / statistics.median(point.tpot_seconds)
