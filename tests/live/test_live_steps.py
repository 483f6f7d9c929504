"""The step log and hang reports of a live server."""

from __future__ import annotations

import gc
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.live.live_server import LiveServer, until


def told(server: LiveServer, after: int) -> Any:
    return server.client.get("/info/steps", params={"after": after}).json()


def test_every_step_is_reported_with_its_time(server: LiveServer) -> None:
    began, first = time.time(), told(server, 10**17)["next"]
    assert server.generate(max_tokens=5, ignore_eos=True).status_code == 200
    until(lambda: told(server, first)["next"] == first + 5)
    steps = told(server, first)["steps"]
    assert steps["phase"] == ["prefill", *(4 * ["decode"])]
    assert steps["tokens"][1:] == [1, 1, 1, 1]
    assert all(0 < seconds < 60 for seconds in steps["seconds"])
    assert began - 0.01 <= steps["at"][0] <= told(server, first)["clock"]


def test_a_step_that_hangs_is_counted_with_a_cause(server: LiveServer) -> None:
    drawn = {"ignore_eos": True, "temperature": 1.0, "seed": 1}  # nothing to be guessed: a step makes a token
    assert server.generate(max_tokens=60, **drawn).status_code == 200  # what such steps take is known now
    first = told(server, 10**17)["next"]
    run = server.reins.run
    times = iter([0.0] * 10 + [0.3])

    def slow(batch: Any) -> Any:
        time.sleep(next(times, 0.0))
        return run(batch)

    server.reins.run = slow  # type: ignore[method-assign]
    try:
        assert server.generate(prompt="Twice", max_tokens=20, **drawn).status_code == 200
    finally:
        del server.reins.run
    until(lambda: told(server, first)["next"] >= first + 20)
    steps = told(server, first)["steps"]
    cause = next(cause for seconds, cause in zip(steps["seconds"], steps["cause"], strict=True) if seconds > 0.3)
    assert cause in ("unknown", "descheduled", "garbage_collection", "page_fault")
    assert server.metric("armature_step_stalls_total", cause=cause) >= 1


def test_a_step_that_never_ends_shows_its_age(server: LiveServer) -> None:
    """The thread lives, so /healthz is 200: who watches sees it here alone."""
    assert (server.metric("armature_ready"), server.metric("armature_step_age_seconds")) == (1.0, 0.0)
    server.reins.hold()
    try:
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(server.generate, max_tokens=1)
            until(lambda: server.metric("armature_step_age_seconds") > 0.05)
            assert server.client.get("/healthz").status_code == 200
            server.reins.release()
            assert answer.result().status_code == 200
    finally:
        server.reins.release()
    until(lambda: server.metric("armature_step_age_seconds") == 0.0)


def test_garbage_waits_while_the_engine_works(server: LiveServer) -> None:
    seen: list[bool] = []
    run = server.reins.run

    def look(batch: Any) -> Any:
        seen.append(gc.isenabled())
        return run(batch)

    server.reins.run = look  # type: ignore[method-assign]
    try:
        assert server.generate(max_tokens=3, ignore_eos=True).status_code == 200
    finally:
        del server.reins.run
    assert seen == [False, False, False]
    until(gc.isenabled)
