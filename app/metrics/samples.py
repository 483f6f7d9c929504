"""The text of `/metrics` as values by name and labels."""

from __future__ import annotations

import math
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

_PREFIX = "armature_"

Labels = dict[str, str]


@dataclass(frozen=True, slots=True)
class MetricSamples:
    """Samples by metric name, without the buckets of histograms."""

    by_name: dict[str, list[tuple[Labels, float]]]

    def value(self, name: str, **labels: str) -> float | None:
        """Return the sum of the series with these labels, None without one. Our prefix may be left out of the name."""
        series = self.by_name.get(f"{_PREFIX}{name}") or self.by_name.get(name, [])
        found = [value for has, value in series if labels.items() <= has.items() and not math.isnan(value)]
        return sum(found) if found else None


def parse_samples(text: str) -> MetricSamples:
    found: dict[str, list[tuple[Labels, float]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if not sample.name.endswith("_bucket"):
                found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return MetricSamples(found)
