"""A worker for the tests of it, ended with them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from app.messages import Stop
from worker_bench import Bench


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    if made.worker.alive:
        made.worker.put(Stop())
        made.end()
