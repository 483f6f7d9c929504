"""Queries as Grafana would send them, and what counts as empty."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tools.monitoring.check_dashboards import Prometheus, Window, check, queries, substituted, variables

WINDOW = Window(1000.0, 1600.0, 15)
Answer = Callable[[httpx.Request], Any]


def dashboard(expr: str, **target: Any) -> dict[str, Any]:
    shown = {"type": "timeseries", "title": "Shown", "targets": [{"refId": "A", "expr": expr, **target}]}
    pool = {"name": "pool", "type": "query", "query": {"query": "label_values(up, pool)"}, "allValue": ".*"}
    instance = {"name": "instance", "type": "query", "query": {"query": 'label_values(up{pool=~"$pool"}, instance)'}}
    source = {"name": "datasource", "type": "datasource", "query": "prometheus"}
    rows = [{"type": "row", "title": "Open", "panels": []}, {"type": "row", "title": "Closed", "panels": [shown]}]
    return {"title": "Board", "templating": {"list": [source, pool, instance]}, "panels": rows}


def scripted(of_query: list[Any], known: list[Any] | None = None) -> tuple[Prometheus, list[httpx.URL]]:
    """Answers each kind of question with the same; and the questions."""
    asked: list[httpx.URL] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url)
        if request.url.path.endswith("/values"):
            return httpx.Response(200, json={"status": "success", "data": ["a.1", "b"]})
        found: Any = (known or []) if request.url.path.endswith("/series") else {"result": of_query}
        return httpx.Response(200, json={"status": "success", "data": found})

    return Prometheus(httpx.Client(base_url="http://prometheus", transport=httpx.MockTransport(answer))), asked


def test_variables_come_from_their_own_queries_one_after_the_other() -> None:
    prometheus, asked = scripted([])
    filled = variables(prometheus, dashboard("up"), WINDOW)
    assert filled == {
        "__range": "600s",
        "__rate_interval": "15s",
        "__interval": "15s",
        "pool": ".*",
        "instance": r"a\.1|b",
    }
    assert [url.params["match[]"] for url in asked] == ["up", 'up{pool=~".*"}']
    assert substituted('rate(x{i=~"$instance"}[${__rate_interval}])', filled) == r'rate(x{i=~"a\\.1|b"}[15s])'
    with pytest.raises(KeyError, match="nobody"):
        substituted("$nobody", filled)


@pytest.mark.parametrize(("value", "faults"), [("NaN", 1), ("+Inf", 1), ("0", 0)])
def test_a_panel_without_a_number_is_empty(value: str, faults: int) -> None:
    series = {"metric": {}, "value": [1600, value], "values": [[1000, "NaN"], [1600, value]]}
    for target in ({}, {"instant": True}):
        prometheus, asked = scripted([series])
        assert len(check(prometheus, dashboard("up", **target), WINDOW)[0]) == faults
        assert asked[2].path == ("/api/v1/query" if target else "/api/v1/query_range")


def test_only_what_is_nowhere_may_be_missing() -> None:
    quota = dashboard("rate(process_cgroup_cpu_throttled_seconds_total[$__rate_interval])")
    assert check(scripted([])[0], quota, WINDOW) == ([], ["Board: Shown (A) is empty: no CPU quota"])
    faults, excused = check(scripted([], known=[{"pool": "amd64"}])[0], quota, WINDOW)
    assert (
        faults == ["Board: Shown (A) is empty: rate(process_cgroup_cpu_throttled_seconds_total[15s])"] and not excused
    )


def test_a_legend_must_find_its_label() -> None:
    series = {"metric": {"phase": "decode"}, "values": [[1000, "1"]]}
    wrong = check(scripted([series])[0], dashboard("up", legendFormat="{{phase}} {{rows}} {{pool}}"), WINDOW)[0]
    assert wrong == ["Board: Shown (A): its legend wants the label rows, which no series has"]


def test_what_prometheus_refuses_is_reported() -> None:
    transport = httpx.MockTransport(
        lambda request: httpx.Response(400, json={"status": "error", "error": "parse error"})
    )
    with pytest.raises(SystemExit, match="parse error"):
        check(Prometheus(httpx.Client(base_url="http://prometheus", transport=transport)), dashboard("up("), WINDOW)


def test_panels_in_rows_are_found() -> None:
    (found,) = queries(dashboard("up", legendFormat="x"))
    assert str(found) == "Board: Shown (A)"
    assert not found.instant
