"""The instruments: counters, histograms and gauges in a registry of their own, rendered for Prometheus on request."""

from __future__ import annotations

from typing import Literal

Api = Literal["chat", "completions", "embeddings", "rerank", "classify", "native", "oip"]


class Metrics:
    """Filled by listening; a scrape only reads."""

    def refused(self, api: Api) -> None:
        """A request that was refused before the service saw it (a schema error, an unknown model)."""

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """The exposition and its content type; OpenMetrics where `accept` asks for it. Any thread."""
