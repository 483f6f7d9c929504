"""Several engines of one model behind one address: the same answers, an engine that ends, and which one gets a request."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from app.errors import StepFailed
from app.messages import Abort, Generate, RequestFailed, SamplingParams, SequenceFinished
from app.metrics.steps import EngineSnapshot, StateUsage
from app.server.engine_replicas import REQUEST_TOKENS, EngineLoad, EngineReplicas, merge_snapshots, prompt_blocks
from app.settings import DEMO_DIRECTORY
from tests.live.live_server import LiveServer, live, until
from tests.live.test_live_engine_process import open_stream


@pytest.fixture(scope="module")
def two() -> Iterator[LiveServer]:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("each of the two engines needs a CPU")
    with live(DEMO_DIRECTORY, calibrate="off", engine_process="auto", api_processes=1, data_parallel=2) as server:
        yield server


def engines_of(server: LiveServer) -> EngineReplicas:
    worker = server.find_served.worker
    assert isinstance(worker, EngineReplicas)
    return worker


def given(server: LiveServer) -> list[float]:
    return [server.metric("armature_engine_requests_total", engine=str(place)) for place in range(2)]


def test_both_engines_answer_alike(two: LiveServer) -> None:
    before = given(two)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: two.generate(max_tokens=24).json(), range(8)))
    assert len({answer["text"] for answer in answers}) == 1
    assert all(now > earlier for now, earlier in zip(given(two), before, strict=True)), "one engine got everything"
    assert two.client.get("/info").json()["plan"]["data_parallel"]["value"] == 2
    assert [two.metric("armature_engine_ready", engine=str(place)) for place in range(2)] == [1, 1]


def test_a_beginning_goes_to_the_engine_that_knows_it(two: LiveServer) -> None:
    """Also to the second engine, though the first one is preferred where all else is equal."""
    until(lambda: two.idle)
    engines = engines_of(two)
    prompt = "There was a small green house near the river, and " * 8

    def ask(word: str) -> None:
        assert two.client.post("/generate", json={"prompt": prompt + word, "max_tokens": 2}).status_code == 200

    with open_stream(two, max_tokens=400, prompt="Zebra"):
        until(lambda: engines._loads[0].num_tokens > 0)
        before = given(two)
        ask("one")
    until(lambda: two.idle)
    for word in ("two", "three"):
        ask(word)
    assert [now - earlier for now, earlier in zip(given(two), before, strict=True)] == [0, 3]


def test_an_engine_that_ends_takes_only_its_own_requests(two: LiveServer) -> None:
    until(lambda: two.idle)
    engines = engines_of(two)
    with open_stream(two, max_tokens=400), open_stream(two, max_tokens=400):
        until(lambda: [len(load.requests.open) for load in engines._loads] == [1, 1])
        pid = engines.pids[1]
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        until(lambda: two.metric("armature_engine_ends_total", engine="1") == 1)
        assert two.client.get("/readyz").status_code == 200
        assert two.generate(max_tokens=4).status_code == 200
        assert len(engines._loads[0].requests.open) == 1, "the other engine's request has ended too"
    until(lambda: two.metric("armature_engine_ready", engine="1") == 1)
    assert engines.pids[1] != pid and not two.fatal
    until(lambda: two.idle)


def request(name: str, *token_ids: int, n: int = 1) -> Generate:
    return Generate(name, token_ids, SamplingParams(n=n), 0.0)


def test_the_load_of_an_engine() -> None:
    load, prompt = EngineLoad(), tuple(range(100))

    def known(*token_ids: int) -> int:
        return load.num_known(prompt_blocks(request("", *token_ids)))

    def begin(asked: Generate) -> None:
        load.begin(asked, prompt_blocks(asked))

    assert known(*prompt) == 0
    begin(request("a", *prompt, n=2))
    assert load.num_tokens == 100 + REQUEST_TOKENS
    assert (known(*prompt[:64], 7, 8), known(7, *prompt[1:])) == (64, 0)
    load.note(SequenceFinished("a", 0, "stop"))
    assert load.num_tokens, "its other choice is open"
    load.note(SequenceFinished("a", 1, "stop"))
    assert load.num_tokens == 0
    begin(request("c", 1))
    load.note(Abort("c"))
    begin(request("d", 1))
    load.note(RequestFailed("d", StepFailed("It failed.")))
    assert load.num_tokens == 0
    begin(request("e", 1))
    assert (load.lose(), load.num_tokens, known(*prompt)) == (["e"], 0, 0)


def test_the_state_of_several_engines() -> None:
    busy = EngineSnapshot(4, 2, 100, 1000, 5.0, queue=(9, 9), states=StateUsage(10, 1, 2, 3))
    free = EngineSnapshot(1, 0, 10, 1000, 4.0, rows=((1, 2),), states=StateUsage(1, 1, 1, 1))
    both = merge_snapshots([busy, free])
    assert (both.num_running, both.num_waiting, both.kv_usage_ratio, both.stepped_at) == (5, 2, 0.055, 5.0)
    assert (both.queue, both.rows, both.states) == ((), ((1, 2),), StateUsage(11, 2, 3, 4))
