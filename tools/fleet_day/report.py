"""Figures of simulated days, as rows of tables, as a file and as sentences about what was assumed."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy

from tools.fleet_day.scenarios import PEAK_LOAD, Fleets, Scenario
from tools.fleet_day.simulation import Day
from tools.fleet_day.traffic import DAY, HOUR

SCHEMA = "armature-fleet-day/1"
SERIES_SECONDS = 900.0  # of the series for the pictures
TITLES = {
    "sizes": "autoscaler as configured",
    "waits": "autoscaler by waits alone",
    "changes": "changes to the mixed fleet",
    "speeds": "other speeds of the first pool",
}
HEADER = (
    "| {} | pods' worth | $ a day | $ per million requests | first token p50 / p99 s | whole answer p50 / p99 s "
    "| refused | sent again | pods | capacity used |\n|---|---|---|---|---|---|---|---|---|---|"
)

Figures = dict[str, Any]


def figures(scenario: Scenario, day: Day, with_series: bool) -> Figures:
    """Return the figures of a day as JSON-serializable values. Counts are of the whole fleet."""
    pods = [sum(minute.ready) for minute in day.minutes]
    return {
        "table": scenario.table,
        "name": scenario.name,
        "pods": scenario.pods,
        "scale": round(day.scale, 2),
        "simulated_requests": day.sent,
        "dollars": [round(each, 2) for each in day.dollars],
        "pools": [each.pool.name for each in scenario.plan.pools],
        "dollars_per_million": round(sum(day.dollars) / (day.scale * len(day.whole)) * 1e6, 2),
        "first_token": [percentile(day.first_token, share) for share in (50, 99)],
        "whole": [percentile(day.whole, share) for share in (50, 99)],
        "refused": day.refused / max(1, day.sent),
        "sent_again": day.retried / max(1, day.sent),
        "least_pods": round(min(pods)),
        "most_pods": round(max(pods)),
        "used": round(day.busy_seconds / sum(day.pod_seconds), 4),
        **({"series": series(day)} if with_series else {}),
    }


def percentile(seconds: Sequence[float], share: float) -> float:
    """Return the nearest-rank percentile in seconds, with four digits."""
    return round(float(numpy.percentile(seconds, share, method="inverted_cdf")), 4) if seconds else float("inf")


def series(day: Day) -> dict[str, list[Any]]:
    """Return what the pictures show, for each quarter of an hour."""
    arrived, waits = numpy.array(day.arrived), numpy.array(day.first_token)
    parts = range(int(max(minute.moment for minute in day.minutes) // SERIES_SECONDS) + 1)
    minutes = [[each for each in day.minutes if each.moment // SERIES_SECONDS == part] for part in parts]
    inside = [waits[arrived // SERIES_SECONDS == part].tolist() for part in parts]
    return {
        "hours": [part * SERIES_SECONDS / HOUR for part in parts],
        "requests_per_second": [_mean([each.requests_per_second for each in some]) for some in minutes],
        "ready": [[_mean(pool) for pool in zip(*(each.ready for each in some), strict=True)] for some in minutes],
        "first_token_p99": [percentile(some, 99) if some else None for some in inside],
    }


def _mean(numbers: Sequence[float]) -> float:
    return round(sum(numbers) / len(numbers), 2)


def row(found: Figures) -> str:
    """Return the row of a table in Markdown."""
    cells = [
        found["name"],
        f"{found['pods']:,}",
        f"{sum(found['dollars']):,.0f}",
        f"{found['dollars_per_million']:.1f}",
        " / ".join(f"{each:.2f}" for each in found["first_token"]),
        " / ".join(f"{each:.1f}" for each in found["whole"]),
        f"{found['refused']:.2%}",
        f"{found['sent_again']:.3%}",
        f"{found['least_pods']:,} to {found['most_pods']:,}",
        f"{found['used']:.0%}",
    ]
    return f"| {' | '.join(cells)} |"


def tables(found: Sequence[Figures]) -> Iterator[str]:
    """Yield the lines of all tables."""
    for table, title in TITLES.items():
        rows = [row(each) for each in found if each["table"] == table]
        if rows:
            yield from (*HEADER.format(title).splitlines(), *rows, "")


def assumptions(fleets: Fleets) -> Iterator[str]:
    """Yield a sentence for everything that was put in."""
    traffic, starts, spot = fleets.traffic, fleets.starts, fleets.spot
    for pool in fleets.pools.values():
        eight, all_rows = pool.decode_rates[7], pool.decode_rates[-1]
        yield (
            f"Pool {pool.name}: {pool.machine} at ${pool.hourly_price:g} an hour; prompts at {pool.prefill_rate:,.0f} "
            f"tokens/s, decode at {pool.decode_rates[0]:.3g}, {eight:.3g} and {all_rows:.3g} tokens/s with 1, 8 and "
            f"{len(pool.decode_rates)} sequences ({pool.source})."
        )
    yield (
        f"Requests: a Poisson process; the rate follows a cosine with its peak at {traffic.peak_hour:g} h and "
        f"{traffic.trough:.0%} of it at the trough, with {traffic.bursts:g} bursts a day on average to "
        f"{traffic.burst_factor:g} times for {traffic.burst_seconds:g} s (declared)."
    )
    yield (
        f"Sizes: prompts log-normal around {traffic.prompts.median:g} tokens (mean {traffic.prompts.mean:.0f}, at most "
        f"{traffic.prompts.most:,}), completions around {traffic.completions.median:g} (mean "
        f"{traffic.completions.mean:.0f}, at most {traffic.completions.most}); no prefix is cached (declared)."
    )
    yield (
        f"N pods' worth: at the peak, N pods of pool {list(fleets.pools)[-1]} would be at {PEAK_LOAD:.0%} of full load."
    )
    yield (
        f"A new pod is ready after {starts.seconds:g} s: {starts.machine:g} for a machine and {starts.image:g} for the "
        f"image (declared), {starts.model:g} for the model's first start (measured: docs/performance.md, an empty cache)."
    )
    yield (
        f"Spot machines, where named: {spot.price:.0%} of the price, {spot.losses:g} losses per machine and hour, "
        f"sent again after {spot.retry:g} s (declared)."
    )
    yield (
        "Autoscalers: those of the manifests, with higher maxReplicas; gauges every 15 s, their mean of a minute. "
        f"Balancing: {_BALANCERS[fleets.balancer]}. Every pod has a machine, paid from its launch."
    )


_BALANCERS = {
    "wait": "the pod that would finish first with its requests and one more",
    "weights": "by chance, in proportion to each pod's rate",
    "even": "by chance, each pod alike",
}


def wrapped(sentences: Iterator[str]) -> Iterator[str]:
    """Yield a list in Markdown."""
    for sentence in sentences:
        yield from textwrap.wrap(f"- {sentence}", 119, subsequent_indent="  ", break_on_hyphens=False)


def read(path: Path) -> Mapping[str, Any]:
    """Read a file that `write` wrote."""
    found: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    assert found["schema"] == SCHEMA, f"{path} has the schema {found['schema']!r}"
    return found


def write(path: Path, fleets: Fleets, seed: int, found: Sequence[Figures]) -> None:
    """Write all figures with their assumptions, a run per line."""
    content = {"schema": SCHEMA, "seed": seed, "seconds": DAY, "assumptions": list(assumptions(fleets))}
    lines = ",\n    ".join(json.dumps(each) for each in found)
    head = json.dumps(content, indent=2, ensure_ascii=False).removesuffix("\n}")
    path.write_text(f'{head},\n  "runs": [\n    {lines}\n  ]\n}}\n', encoding="utf-8")
