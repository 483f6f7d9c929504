"""One Prometheus with two busy servers for all tests of rules, dashboards and queries that scale."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.deploy.live_prometheus import LivePrometheus, live_prometheus


@pytest.fixture(scope="package")  # it takes a fifth of a core while it runs
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LivePrometheus]:
    """Skips where there is no `prometheus`."""
    with live_prometheus(tmp_path_factory.mktemp("prometheus")) as watched:
        yield watched
