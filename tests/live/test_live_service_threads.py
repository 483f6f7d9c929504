"""Masks of a server's threads on a machine with two kinds of cores, which this one is taken for."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from app.hardware.facts import Core
from app.hardware.plan import threads as plan_threads
from app.hardware.probe.probe import probe
from app.server import prepare
from app.settings import DEMO_DIRECTORY
from tests.live.live_server import live

pytestmark = pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity") or len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs and masks"
)


@pytest.fixture
def _masks_as_before() -> Iterator[None]:
    before = os.sched_getaffinity(0)
    yield
    for thread in threading.enumerate():
        if thread.native_id is not None:
            os.sched_setaffinity(thread.native_id, before)


def masks() -> dict[str, set[int]]:
    """The mask of each thread that Python started, by its name."""
    threads = [(thread.name, thread.native_id) for thread in threading.enumerate()]
    return {name: os.sched_getaffinity(number) for name, number in threads if number is not None}


@pytest.mark.usefixtures("_masks_as_before")
def test_only_the_worker_uses_the_performance_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    fast, *small = sorted(os.sched_getaffinity(0))
    cores = (Core((fast,)), *(Core((cpu,), kind="efficiency") for cpu in small))
    monkeypatch.setattr(prepare, "probe", lambda: replace(probe(), cores=cores))
    monkeypatch.setattr(plan_threads, "_MIN_SERVICE_CORES", 1)
    with live(DEMO_DIRECTORY) as server:
        # A long prompt is tokenized by a thread that starts now.
        assert server.generate(prompt="Once upon a time " * 70, max_tokens=2).status_code == 200
        found = masks()
        assert found.pop("armature-worker") == {fast}
        assert any(name.startswith("armature-text") for name in found)
        assert all(mask == set(small) for mask in found.values()), found
        decision = server.client.get("/info").json()["plan"]["service_cpu_ids"]
        assert decision["value"] == small and "efficiency core" in decision["reason"]


@pytest.mark.usefixtures("_masks_as_before")
def test_no_mask_is_changed_where_all_cores_are_alike() -> None:
    before = os.sched_getaffinity(0)
    with live(DEMO_DIRECTORY) as server:
        assert server.generate(max_tokens=2).status_code == 200
        found = masks()
        found.pop("armature-worker")
        assert all(mask == before for mask in found.values()), found
