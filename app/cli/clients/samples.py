"""The text of `/metrics` as values by name and labels."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

_LINE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_PREFIX = "armature_"

Labels = dict[str, str]


@dataclass(frozen=True, slots=True)
class MetricSamples:
    """Samples by metric name, without the buckets of histograms."""

    by_name: dict[str, list[tuple[Labels, float]]]

    def value(self, name: str, **labels: str) -> float | None:
        """Return the sum of the series with these labels, or None if there is none that is a number.

        The name is without our prefix, which a few metrics do not have.
        """
        series = self.by_name.get(f"{_PREFIX}{name}") or self.by_name.get(name, [])
        found = [value for has, value in series if labels.items() <= has.items() and not math.isnan(value)]
        return sum(found) if found else None


def parse_samples(text: str) -> MetricSamples:
    """Return the samples of a text in Prometheus' format."""
    found: dict[str, list[tuple[Labels, float]]] = {}
    for line in text.splitlines():
        match = _LINE.match(line)
        if match and not match[1].endswith("_bucket"):
            labels = dict(_LABEL.findall(match[2] or ""))
            found.setdefault(match[1], []).append((labels, float(match[3])))
    return MetricSamples(found)
