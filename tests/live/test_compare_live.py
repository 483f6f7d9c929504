"""`armature bench compare` with demo servers, one of which is killed, and as an interrupted process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, get_args

import pytest

from app.metrics.steps import Cause
from app.version import VERSION
from armature_bench.compare import loads
from armature_bench.compare import measure as measuring
from armature_bench.compare.measure import CompareJob, MachineLabels, run_compare
from armature_bench.compare.result import CompareResult, read_result
from armature_bench.http.load import ServerTarget
from armature_bench.http.server import BenchServer, running_server
from scripted_machine import ScriptedMachine, running

pytestmark = pytest.mark.full

FLAGS = (
    "--threads=1",
    "--calibrate=off",
    "--kv-cache-bytes=64MiB",
    "--max-model-len=150",
    "--max-running-seqs=2",
    "--watts=50",
    "--hourly-price=2",
)


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loads, "ANSWER_TOKENS", 16)


def measured(path: Path, *flags: str) -> CompareResult:
    outcome = run_compare(CompareJob(ServerTarget(None, flags), MachineLabels(), VERSION, path, seconds=0.1))
    assert outcome.details["file"] == str(path)
    return read_result(path)


@pytest.fixture
def _killed_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server, when its last load is to begin."""
    servers: list[BenchServer] = []
    loads_begun: list[Any] = []
    measure = measuring.measure_point

    @asynccontextmanager
    async def noted(url: str | None, flags: Sequence[str]) -> AsyncIterator[BenchServer]:
        async with running_server(url, flags) as server:
            servers.append(server)
            yield server

    async def killed(subject: Any, load: Any, seed: int, run: Any) -> Any:
        loads_begun.append(load)
        if len(loads_begun) == 4:
            assert servers[0].pid is not None
            os.kill(servers[0].pid, signal.SIGKILL)
        return await measure(subject, load, seed, run)

    monkeypatch.setattr(measuring, "running_server", noted)
    monkeypatch.setattr(measuring, "measure_point", killed)


@pytest.mark.usefixtures("_killed_at_the_end")
def test_the_demo_decoder_until_its_server_is_killed(tmp_path: Path) -> None:
    result = measured(tmp_path / "decoder.json", *FLAGS)
    assert not result.complete
    assert any(doubt.startswith("The server stopped answering") and "3 of 4 loads" in doubt for doubt in result.doubts)
    assert (result.flags, result.url, result.watts, result.hourly_price) == (list(FLAGS), None, 50.0, 2.0)
    assert result.info["plan"]["max_running_seqs"]["value"] == 2
    assert [point.load.clients for point in result.points] == [1, 2]
    assert len(result.repeats) == 1
    for point in result.points:
        assert point.generated_tokens > 0
        assert not point.failures
        assert {"prefill", "decode"} <= set(point.steps.phase)
        assert sum(point.steps.tokens) >= 128 + 16 - 1
        assert set(point.steps.cause) <= {"", *get_args(Cause)}
        assert point.energy is None or point.energy.idle_watts is None, "modelled"
        assert max(point.gap_at) <= point.began + 0.1 + 2 * max(point.request_seconds)
    assert not any("version" in doubt or "network" in doubt for doubt in result.doubts)
    assert any("not calibrated" in doubt for doubt in result.doubts)


@pytest.mark.nightly
def test_the_demo_encoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loads, "BATCHES", (1, 8))
    monkeypatch.setattr(loads, "CLIENTS", (1, 8))
    result = measured(
        tmp_path / "encoder.json", "--model=bert", "--threads=1", "--calibrate=off", "--max-model-len=128"
    )
    assert result.complete
    assert len(result.repeats) == 2
    assert [(point.load.clients, point.load.batch) for point in result.points] == [(1, 1), (1, 8), (8, 1)]
    for point in result.points:
        assert point.read_tokens == pytest.approx(128 * point.samples, rel=0.15), (
            "texts are about as long as was meant, and cut"
        )
        assert set(point.steps.phase) == {"encode"}
        assert not point.failures


def test_a_process_that_is_interrupted_keeps_what_it_has(tmp_path: Path) -> None:
    machine = ScriptedMachine()
    path = tmp_path / "part.json"
    with running(machine):
        words = ["bench", "compare", "--url", machine.url, "--seconds", "0.05", "--output", str(path)]
        process = subprocess.Popen(
            [sys.executable, "-m", "app", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

        sent: list[int] = []  # once: a second one, while the first is heard, would end the process without a word

        def interrupt(number: int) -> None:
            if machine.paths.count("/metrics") >= 4 and not sent:  # two at rest, two around the first load
                sent.append(number)
                process.send_signal(signal.SIGINT)

        machine.on_request = interrupt
        _, told = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Interrupted" in told
    result = read_result(path)
    assert not result.complete
    assert len(result.points) == 1
