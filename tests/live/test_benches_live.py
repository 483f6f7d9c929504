"""The HTTP benches with servers that they start on a tiny checkpoint: every figure and every failure."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from app.settings import DEMO_DIRECTORY
from armature_bench.console import Figure, MeasurementFailed
from armature_bench.http import latency, overhead, process
from armature_bench.http.embed import EmbedBench, EmbedWorkload
from armature_bench.http.generate import GenerateBench
from armature_bench.http.infer import InferBench, InferWorkload
from armature_bench.http.load import LoadJob, LoadLevel, ServerBenchJob, ServerTarget, measure_load, measure_server
from armature_bench.http.loops import RunLimits
from armature_bench.http.server import running_server
from armature_bench.http.tally import GenerateWorkload
from armature_bench.http.workload import UniformLengths
from exported_programs import write_program

pytestmark = pytest.mark.nightly


FLAGS = (
    "--threads=1",
    "--kv-cache-bytes=64MiB",
)  # of the demo: its tokens have text, so each comes as a piece of its own


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency, "QUIET_CHUNKS", 5)
    monkeypatch.setattr(overhead, "MAX_TOKENS", 40)
    monkeypatch.setattr(process, "MEMORY_PROMPT_TOKENS", 32)
    monkeypatch.setattr(process, "MEMORY_MAX_TOKENS", 8)


def told(_: str) -> None:
    """Progress that nobody watches."""


def shares(figures: list[Figure]) -> list[float]:
    return [figure.ratio for figure in figures if figure.ratio is not None]


async def test_one_server_under_every_bench() -> None:
    async with running_server(None, FLAGS) as server:
        itl = await latency.inter_token_latency(server.client, prompt_tokens=500, rounds=1, advance=told)
        prefix = await latency.shared_prefix(server.client, prefix_tokens=600, rounds=2, advance=told)
        outside = await overhead.overhead_outside_model(server.client, rounds=1, advance=told)
        memory = await process.resident_memory(server, weight_bytes=2**20, kv_bytes_per_token=64, advance=told)
        info = await server.client.info()
    assert [figure.p99 is not None for figure in itl] == [True, True]
    assert shares(itl)[0] > 0.0
    assert shares(prefix)[0] < 1.0, "a prefix that was seen before is computed again"
    assert 0.0 < shares(outside)[0] < 1.0
    assert outside[0].value > 0.0
    # Torch alone is more than this, and a process that holds gigabytes for a model of some kilobytes would be mistaken.
    assert 2**26 < memory[-1].value * 2**20 < 2**32
    assert info["model"]["architecture"] == "LlamaForCausalLM"


async def test_a_streamed_token_is_measured_with_a_simulated_engine() -> None:
    told: list[str] = []
    figures = await overhead.streamed_token_cost(DEMO_DIRECTORY, rounds=1, advance=told.append, seconds=0.2)
    assert len(told) == 9
    in_place = ["µs", "tok/s", "tok/s"]
    assert [figure.unit for figure in figures] == [*in_place, *in_place, "tok/s", "tok/s", "ms", "ms", "ms", "ms"]
    assert all(figure.value > 0 for figure in figures[:-1])
    assert all(figure.parts["cores"] > 0 for figure in figures if figure.unit == "tok/s")


async def test_a_short_request_is_measured_with_a_simulated_engine() -> None:
    told: list[str] = []
    figures = await overhead.short_request_cost(DEMO_DIRECTORY, rounds=1, advance=told.append, seconds=0.2)
    assert len(told) == len(figures) == overhead.NUM_SHORT_REQUESTS
    for figure in figures:
        # The event loop is a part of the process, and an answer takes less than the window.
        assert 0 < figure.parts["event loop"] < figure.value
        assert figure.parts["req/s"] > 5


async def test_a_prompt_that_does_not_fit_is_reported_in_the_servers_words() -> None:
    async with running_server(None, FLAGS) as server:
        with pytest.raises(MeasurementFailed, match="context"):
            await server.client.generate([5] * 5000, 1)
        url = server.url
        async with running_server(url, ()) as found:
            assert found.pid is None
            with pytest.raises(MeasurementFailed, match="leave out --url"):
                await process.resident_memory(found, 1, 1, told)
    with pytest.raises(MeasurementFailed, match="is not ready"):
        async with running_server(url, ()):
            pass


@pytest.mark.parametrize("api", ["native", "completions", "openai"])
async def test_a_load_on_a_server_of_ours(api: str) -> None:
    wanted = GenerateWorkload(UniformLengths(40, 40), UniformLengths(8, 8))
    async with running_server(None, FLAGS) as server:
        job = LoadJob(
            "demo",
            [ServerTarget(server.url, api=api)],
            [LoadLevel(clients=2)],
            GenerateBench(wanted),
            RunLimits(num_requests=6),
        )
        outcome = await asyncio.to_thread(measure_load, job)
    requests = outcome.details["runs"][0]["requests"]
    assert [request["tokens"] for request in requests] == [8] * 6
    asked = [request["prompt_tokens"] for request in requests]
    assert asked == [40] * 6 if api != "openai" else all(30 <= tokens <= 50 for tokens in asked)
    assert not any("failed" in figure.name for figure in outcome.figures)
    assert outcome.figures[0].value > 0.0


@pytest.mark.parametrize("api", ["openai", "native", "oip"])
def test_texts_are_embedded_by_a_server_of_ours(api: str) -> None:
    work = EmbedBench(EmbedWorkload(2, UniformLengths(10, 10)))
    flags = ("--threads=1", f"--model={DEMO_DIRECTORY.parent / 'bert'}")
    outcome = measure_load(
        LoadJob("demo", [ServerTarget(None, flags, api)], [LoadLevel(clients=2)], work, RunLimits(num_requests=6))
    )
    requests = outcome.details["runs"][0]["requests"]
    assert [request["texts"] for request in requests] == [2] * 6
    assert all(10 <= request["tokens"] <= 40 for request in requests), "a word has a piece or two"
    assert not any("failed" in figure.name for figure in outcome.figures)


def test_rows_of_a_program_are_asked_of_a_server_of_ours(tmp_path: Path) -> None:
    flags = ("--threads=1", f"--model={write_program(tmp_path, 'recommender')}")
    work = InferBench(InferWorkload(3, below=50))
    outcome = measure_load(
        LoadJob("demo", [ServerTarget(None, flags, "oip")], [LoadLevel(clients=2)], work, RunLimits(num_requests=6))
    )
    assert [request["rows"] for request in outcome.details["runs"][0]["requests"]] == [3] * 6
    assert not any("failed" in figure.name for figure in outcome.figures)


def test_a_load_starts_a_server_of_its_own() -> None:
    job = LoadJob(
        "demo",
        [ServerTarget(None, FLAGS)],
        [LoadLevel(rate=20.0)],
        GenerateBench(GenerateWorkload(UniformLengths(8, 16), UniformLengths(4, 8))),
        RunLimits(num_requests=5),
    )
    assert measure_load(job).figures[0].parts["answered"] == 5


def test_a_start_is_timed_from_the_process_to_the_token() -> None:
    outcome = measure_server(ServerBenchJob("start", "demo", FLAGS, rounds=1))
    seconds = {figure.name: figure.value for figure in outcome.figures}
    assert seconds["process start to first token"] > seconds["process start to ready"] > 0.0
    assert seconds["importing torch, alone in a process"] > 0.0


def test_a_server_that_refuses_to_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(MeasurementFailed, match="is empty: is a volume mounted there"):
        measure_server(ServerBenchJob("prefix", "nothing", (f"--model={tmp_path}",), rounds=1, tokens=10))


async def test_whoever_leaves_takes_the_server_along() -> None:
    started: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def stay() -> None:
        async with running_server(None, FLAGS) as server:
            assert server.pid is not None
            started.set_result(server.pid)
            await asyncio.Event().wait()

    staying = asyncio.create_task(stay())
    pid = await started
    os.kill(pid, 0)
    staying.cancel()
    with pytest.raises(asyncio.CancelledError):
        await staying
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_resident_memory_is_this_processs_too() -> None:
    assert process.resident_bytes(os.getpid()) > 2**23
