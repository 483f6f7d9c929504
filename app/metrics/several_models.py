"""Metrics of a process with several models: one exposition, in which each sample of a model has the label `model`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from app.metrics.instruments import Metrics, RecentRate
from app.metrics.vllm_names import http_requests

LABEL = "model"
# Beginnings of the names of what the machine and the process have once, whatever models there are.
_OF_PROCESS = (
    "process_", "http_requests", "armature_http_requests", "armature_cpu_", "armature_energy_", "armature_power_",
    "armature_cost_", "llm_cost_", "armature_api_process_", "armature_lost_requests",
)  # fmt: skip


class ProcessMetrics(Metrics):
    """What several models share: the responses, and the totals of their work, for energy and cost."""

    def __init__(self, read: Callable[[], Iterable[Metrics]]) -> None:
        self._read = read
        super().__init__()
        self.rates = {kind: _SummedRate(kind, read) for kind in self.rates}
        self.gauges(lambda: [http_requests(self)])

    @property
    def busy_seconds(self) -> float:
        return sum(each.busy_seconds for each in self._read())

    @busy_seconds.setter
    def busy_seconds(self, _: float) -> None: ...

    @property
    def num_tokens(self) -> int:
        return sum(each.num_tokens for each in self._read())

    @num_tokens.setter
    def num_tokens(self, _: int) -> None: ...

    @property
    def num_vectors(self) -> int:
        return sum(each.num_vectors for each in self._read())

    @num_vectors.setter
    def num_vectors(self, _: int) -> None: ...

    def render_models(self, models: Mapping[str, Metrics], accept: str) -> tuple[bytes, str]:
        """Return the exposition of the process and of the models, and its content type."""
        encode, content_type = choose_encoder(accept)
        return encode(_Exposition(self, models)), content_type


class _SummedRate(RecentRate):
    def __init__(self, kind: str, read: Callable[[], Iterable[Metrics]]) -> None:
        super().__init__()
        self._kind, self._read = kind, read

    def per_second(self) -> float:
        return sum(each.rates[self._kind].per_second() for each in self._read())


class _Exposition(Collector):
    def __init__(self, process: Metrics, models: Mapping[str, Metrics]) -> None:
        self._process, self._models = process, models

    def collect(self) -> Iterator[Metric]:
        yield from (family for family in self._process.collect() if family.name.startswith(_OF_PROCESS))
        families: dict[str, Metric] = {}
        for name, metrics in self._models.items():
            for family in metrics.collect():
                if family.name.startswith(_OF_PROCESS):
                    continue
                merged = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                merged.samples += [each._replace(labels={LABEL: name, **each.labels}) for each in family.samples]
        yield from families.values()
