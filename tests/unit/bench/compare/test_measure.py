"""`armature bench compare` from the first look at a server to the file: every kind of model, and whatever ends it."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from armature_bench.compare import loads
from armature_bench.compare.measure import (
    CompareJob,
    CompareState,
    MachineLabels,
    build_result,
    is_local_server,
    result_path,
    run_compare,
)
from armature_bench.compare.result import CompareResult, LoadPoint, LoadSpec, read_result
from armature_bench.console import BenchOutcome, MeasurementFailed
from armature_bench.http.load import ServerTarget
from scripted_machine import WATTS, ScriptedMachine, running

SECONDS = 0.02


def job(machine: ScriptedMachine, folder: Path, **changed: Any) -> CompareJob:
    given: dict[str, Any] = {"output": folder / "result.json", "seconds": SECONDS, "labels": MachineLabels()} | changed
    return CompareJob(ServerTarget(machine.url, api_key=machine.api_key), version="1.2.3", **given)


def measured(machine: ScriptedMachine, folder: Path, **changed: Any) -> tuple[BenchOutcome, CompareResult]:
    with running(machine):
        outcome = run_compare(job(machine, folder, **changed))
    return outcome, read_result(Path(outcome.details["file"]))


def test_keys_stay_out_of_the_file() -> None:
    given = ("--precision=int4", '--api-keys=["secret"]', "--api-key-file=/etc/keys")
    asked = CompareJob(ServerTarget(None, given), MachineLabels("desk"), "1.2.3")
    point = LoadPoint(load=LoadSpec(kind="embed", clients=1, tokens=1), began=0.0, seconds=1.0, samples=1.0)
    found = CompareState(
        info={"version": "1.2.3", "model": {"name": "small"}, "calibration": None}, points=[point], complete=True
    )
    found.info_after = found.info
    assert build_result(asked, found).flags == ["--precision=int4"]


def test_a_decoder_in_one_file(tmp_path: Path) -> None:
    outcome, result = measured(ScriptedMachine(), tmp_path, labels=MachineLabels("desk", "c7g.large", 0.5, 80.0))
    assert outcome.complete
    assert result.complete
    assert [point.load.name for point in result.points] == ["1 client, prompts of 128", "2 clients, prompts of 128"]
    assert [figure.name for figure in outcome.figures] == [point.load.name for point in result.points]
    assert [point.load for point in result.repeats] == [result.points[0].load] * 2
    assert (result.name, result.instance, result.hourly_price, result.watts) == ("desk", "c7g.large", 0.5, 80.0)
    assert (result.measured_by, result.info["version"]) == ("1.2.3", "1.2.3")
    assert result.model_shape == {"kind": "decoder", "num_parameters": 1000}
    for point in result.points:
        answers = len(point.request_seconds)
        assert answers == len(point.first_token_seconds) >= point.load.clients
        assert point.read_tokens == pytest.approx(point.samples * 128, abs=1)
        assert point.generated_tokens == pytest.approx(point.samples * 128, abs=1)
        assert len(point.gap_at) == len(point.gap_seconds)
        assert all(moment >= point.began for moment in point.gap_at)
        assert point.energy is not None
        assert (point.energy.source, point.energy.idle_watts) == ("rapl", pytest.approx(WATTS, rel=0.5))
        assert set(point.steps.cause) <= {"", "page_fault"}
    whole = result.points[0]
    until = whole.began + SECONDS + max(whole.request_seconds)
    assert all(whole.began - 0.001 <= moment <= until for moment in whole.steps.at), "steps of another load"
    assert sum(len(point.steps.at) for point in result.points) > 0
    assert sum(len(point.gap_at) for point in result.points) > 0
    assert not any("price table" in note for note in outcome.notes)
    told = "\n".join(result.doubts)
    assert "Prompts of 512 tokens with answers of 128 are left out: the model has a context of 256 tokens." in told
    assert "More than 2 clients are left out" in told
    assert list(outcome.notes[: len(result.doubts)]) == result.doubts


@pytest.mark.parametrize(
    ("url", "kernel", "local"),
    [
        ("http://127.0.0.1:8000", os.uname().release, True),
        ("localhost:8000", None, True),
        ("http://[::1]:8000", None, True),
        ("http://127.0.0.1:8000", "another, behind a tunnel", False),
        ("http://10.0.0.7:8000", os.uname().release, False),
    ],
)
def test_whether_a_server_shares_our_cores(url: str, kernel: str | None, local: bool) -> None:
    assert is_local_server(url, {"facts": {"kernel": kernel}}) is local


def test_an_instance_without_a_price_is_said(tmp_path: Path) -> None:
    outcome, _ = measured(ScriptedMachine(), tmp_path, labels=MachineLabels(instance="c7g.4xlrage"))
    assert any(note.startswith("c7g.4xlrage is not in the price table") for note in outcome.notes)
    machine = ScriptedMachine(architecture="x86_64")
    outcome, _ = measured(machine, tmp_path, labels=MachineLabels(instance="c7g.large"))
    assert any("tco will refuse this" in note and "arm64" in note for note in outcome.notes)


def test_prompts_never_come_twice(tmp_path: Path) -> None:
    machine = ScriptedMachine()
    measured(machine, tmp_path)
    assert {body["max_tokens"] for body in machine.bodies} == {16, 128}
    assert machine.bodies[0]["max_tokens"] == 16, "a load is warmed up"
    prompts = Counter(tuple(body["token_ids"]) for body in machine.bodies)
    assert set(prompts.values()) == {1}
    assert all(body["ignore_eos"] for body in machine.bodies)
    again = ScriptedMachine()
    measured(again, tmp_path)
    assert again.bodies[0] == machine.bodies[0], "the same on every machine"


@pytest.fixture
def _few_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loads, "BATCHES", (1, 4, 16))
    monkeypatch.setattr(loads, "CLIENTS", (1, 4))


@pytest.mark.usefixtures("_few_loads")
def test_texts_by_batch_and_by_clients(tmp_path: Path) -> None:
    machine = ScriptedMachine(kind="encoder", context=128)
    _, result = measured(machine, tmp_path)
    assert all(body["truncate"] for body in machine.bodies), "a text may have a word more than was meant"
    assert [(point.load.clients, point.load.batch) for point in result.points] == [(1, 1), (1, 4), (1, 16), (4, 1)]
    for point in result.points:
        assert point.read_tokens == 128 * point.samples
        assert point.generated_tokens == 0
        assert len(point.request_seconds) >= point.load.clients
        assert point.first_token_seconds == point.gap_seconds == []


@pytest.mark.usefixtures("_few_loads")
def test_a_classifier_is_asked_for_scores(tmp_path: Path) -> None:
    machine = ScriptedMachine(kind="encoder", context=128, outputs=("logits", "scores"))
    _, result = measured(machine, tmp_path)
    assert len(result.points) == 4
    assert all("input" in body and body["truncate"] for body in machine.bodies)


@pytest.mark.usefixtures("_few_loads")
def test_rows_of_a_program_and_batches_that_it_refuses(tmp_path: Path) -> None:
    machine = ScriptedMachine(kind="program", outputs=("output",), send_error=lambda rows: rows > 8)
    _, result = measured(machine, tmp_path)
    assert [point.load.batch for point in result.points if point.load.clients == 1] == [1, 4]
    told = "\n".join(result.doubts)
    assert "batch 16 is left out" in told
    assert "16 are too many" in told
    assert result.complete


def test_ctrl_c_keeps_what_was_measured(tmp_path: Path) -> None:
    machine = ScriptedMachine()

    def interrupt(number: int) -> None:
        if machine.paths.count("/metrics") >= 6:  # two at rest, two around each load
            os.kill(os.getpid(), signal.SIGINT)

    machine.on_request = interrupt
    outcome, result = measured(machine, tmp_path)
    assert not outcome.complete
    assert not result.complete
    assert len(result.points) + len(result.repeats) == 2
    assert result.doubts[2].startswith("Interrupted while measuring")
    assert "2 of 4 loads were measured" in result.doubts[2]


def test_ctrl_c_before_anything_was_measured(tmp_path: Path) -> None:
    machine = ScriptedMachine(on_request=lambda number: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(MeasurementFailed, match="interrupted before anything"):
        measured(machine, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_dies_half_way(tmp_path: Path) -> None:
    machine = ScriptedMachine()

    def die(number: int) -> None:
        machine.dead = machine.paths.count("/metrics") >= 4

    machine.on_request = die
    outcome, result = measured(machine, tmp_path)
    assert not outcome.complete
    assert not result.complete
    assert len(result.points) == 1
    assert any(doubt.startswith("The server stopped answering") and "1 of 4 loads" in doubt for doubt in result.doubts)


def test_a_server_that_dies_at_once_leaves_no_file(tmp_path: Path) -> None:
    machine = ScriptedMachine()
    machine.on_request = lambda number: setattr(machine, "dead", True)
    with pytest.raises(MeasurementFailed):
        measured(machine, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_server_behind_a_key_and_without_steps(tmp_path: Path) -> None:
    machine = ScriptedMachine(api_key="secret", has_steps=False)
    _, result = measured(machine, tmp_path)
    assert result.points[0].steps.at == []
    assert machine.paths.count("/info/steps") == 1


def test_a_name_is_made_of_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    outcome, result = measured(ScriptedMachine(), tmp_path, output=None)
    assert outcome.details["file"] == "armature-fast-9000-tiny-int4.json"
    assert result.name == "Fast 9000"


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_no_time_is_refused(tmp_path: Path, seconds: float) -> None:
    with pytest.raises(MeasurementFailed, match="above 0"):
        run_compare(job(ScriptedMachine(), tmp_path, seconds=seconds))


def test_only_results_are_replaced(tmp_path: Path) -> None:
    wanted = job(ScriptedMachine(), tmp_path)
    for content in ("", '{"schema":"armature-compare/0"}'):
        (tmp_path / "result.json").write_text(content)
        assert result_path(wanted, {}) == wanted.output
    (tmp_path / "result.json").write_text("my diary")
    for path, complaint in (
        (wanted.output, "is not replaced"),
        (tmp_path, "cannot be"),
        (tmp_path / "no" / "where", "cannot be"),
    ):
        with pytest.raises(MeasurementFailed, match=complaint):
            measured(ScriptedMachine(), tmp_path, output=path)
    assert (tmp_path / "result.json").read_text() == "my diary"


def test_servers_of_others_are_refused(tmp_path: Path) -> None:
    machine = ScriptedMachine(kind="oracle")
    with pytest.raises(MeasurementFailed, match="bench compare only measures Armature servers"):
        measured(machine, tmp_path)
