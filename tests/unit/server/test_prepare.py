"""How a start uses an earlier start's measurements or measures: when, which shapes, and the files that it keeps."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from app.cli.main import main
from app.engine.calibration.cache import Calibration
from app.errors import PlanImpossible
from app.hardware.decision import Measurements, TrialTimes
from app.hardware.facts import Cache, Facts, NativeLibrary, TorchBuild
from app.hardware.probe.host_files import HostFiles
from app.hardware.step_times import StepTimeTable
from app.server import prepare
from app.server.prepare import (
    Prepared,
    measurement_subject,
    measuring_budget_seconds,
    other_cpu_seconds,
    with_kept_calibration,
)
from app.settings import DEMO_DIRECTORY, Settings
from app.weights.checkpoint import Checkpoint, open_checkpoint
from armature_kernels.linear.torchao_config import INT8_REFERENCE, KLEIDI_INT4
from planned_machines import machine

TRIAL = TrialTimes("bf16", 8, {1: 0.02, 8: 0.03}, {64: 0.1, 512: 0.7}, 1e-7, 10**9, 2e9, pair_seconds=1e-8)
# As quick as the estimate of the demo model: four times slower would say that other work used the cores.
QUICK = dataclasses.replace(TRIAL, decode_seconds={1: 0.0004, 8: 0.0006}, prefill_seconds={64: 0.002, 512: 0.014})
FOUND = Measurements(5e10, {"bf16": 8e11}, (TRIAL,), 48, 2.5)


@pytest.fixture(autouse=True)
def _nobody_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ARMATURE_CALIBRATE", raising=False)
    monkeypatch.setattr(prepare, "other_cpu_seconds", lambda cpu_ids: 0.0)


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return open_checkpoint(DEMO_DIRECTORY)


def measure_of(found: Measurements, asked: list[float]) -> Callable[..., Measurements]:
    def measure(what: Any, budget: float, report: Any) -> Measurements:
        asked.append(budget)
        return found

    return measure


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """Budgets of all measurements that were made; each finds `FOUND`, at the threads of the machine."""
    budgets: list[float] = []
    monkeypatch.setattr("app.engine.calibration.measure.measure_machine", measure_of(FOUND, budgets))
    yield budgets


def start(tmp_path: Path, checkpoint: Checkpoint, **settings: Any) -> Prepared:
    facts = machine(torch=TorchBuild("2.13.0"))
    return prepare.calibrate(
        with_kept_calibration(facts, Settings(cache_dir=tmp_path, **settings), checkpoint), lambda stage: None
    )


def test_the_second_start_reads_what_the_first_measured(
    tmp_path: Path, checkpoint: Checkpoint, asked: list[float]
) -> None:
    first, second = (start(tmp_path, checkpoint) for _ in range(2))
    assert len(asked) == 1
    assert first.calibration is not None and second.calibration is not None
    assert (first.calibration.from_cache, second.calibration.from_cache) == (False, True)
    assert first.plan == second.plan
    assert second.step_time_table == second.expected_step_times == StepTimeTable.from_trial(TRIAL)


def test_on_measures_at_every_start_and_off_never(tmp_path: Path, checkpoint: Checkpoint, asked: list[float]) -> None:
    for _ in range(2):
        start(tmp_path, checkpoint, calibrate="on")
    assert len(asked) == 2
    off = start(tmp_path, checkpoint, calibrate="off")
    assert (len(asked), off.calibration, off.step_time_table) == (2, None, None)


def test_a_small_model_is_measured_for_a_moment(checkpoint: Checkpoint, tmp_path: Path, asked: list[float]) -> None:
    start(tmp_path, checkpoint)
    assert asked == [prepare.SMALL_BUDGET_SECONDS]
    large = dataclasses.replace(
        checkpoint, tensors={name: _larger(entry) for name, entry in checkpoint.tensors.items()}
    )
    assert measuring_budget_seconds(large) == prepare.BUDGET_SECONDS


def _larger(entry: Any) -> Any:
    return dataclasses.replace(entry, end=entry.start + 100 * (entry.end - entry.start))


def test_a_measurement_ends_no_start(
    tmp_path: Path, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(what: Any, budget: float, report: Any) -> Measurements:
        raise PlanImpossible("no address space")

    monkeypatch.setattr("app.engine.calibration.measure.measure_machine", fail)
    with caplog.at_level(logging.WARNING):
        served = start(tmp_path, checkpoint)
    assert "no address space" in caplog.text
    assert (served.is_final, served.step_time_table) == (True, None)
    assert served.expected_step_times is not None and served.plan.speed.speed_source == "estimated"
    assert "no address space" in served.plan.decisions["speed_source"].reason
    assert start(tmp_path, checkpoint).calibration != served.calibration, "nothing was kept of it"


def test_what_was_measured_beside_other_work_is_kept_as_noisy(
    tmp_path: Path, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seven threads may be a little quicker than eight; four times as quick is somebody else's doing."""
    for gain, threads, source in ((1.1, 7, "measured"), (4.0, 8, "noisy")):
        quicker = {rows: seconds / gain for rows, seconds in QUICK.decode_seconds.items()}
        prompts = {size: seconds / gain for size, seconds in QUICK.prefill_seconds.items()}
        fewer = dataclasses.replace(QUICK, threads=7, decode_seconds=quicker, prefill_seconds=prompts)
        budgets: list[float] = []
        monkeypatch.setattr(
            "app.engine.calibration.measure.measure_machine", measure_of(Measurements(trials=(QUICK, fewer)), budgets)
        )
        assert start(tmp_path / str(gain), checkpoint).plan.cpu.threads == 7
        second = start(tmp_path / str(gain), checkpoint).plan
        assert (second.cpu.threads, second.speed.speed_source) == (threads, source)
        assert len(budgets) == 1, "the next start begins at once"


def test_what_was_measured_while_other_programs_ran_is_kept_as_noisy(
    tmp_path: Path, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    readings, asked = iter((10.0, 15.0)), list[float]()
    fewer = {rows: seconds / 1.1 for rows, seconds in QUICK.decode_seconds.items()}
    found = Measurements(trials=(QUICK, dataclasses.replace(QUICK, threads=7, decode_seconds=fewer)))
    measure = measure_of(found, asked)
    monkeypatch.setattr("app.engine.calibration.measure.measure_machine", measure)
    monkeypatch.setattr(prepare, "other_cpu_seconds", lambda cpu_ids: next(readings))
    for plan in (start(tmp_path, checkpoint).plan, start(tmp_path, checkpoint).plan):
        assert (plan.speed.speed_source, plan.cpu.threads) == ("noisy", 8)
        assert "other programs used" in plan.decisions["speed_source"].reason
    assert len(asked) == 1


def test_the_time_of_other_programs_is_the_busy_time_of_the_cpus_without_our_own(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    lines = (
        "cpu  9 9 9 9 9 9 9 9 9 9",
        "cpu0 1000 0 500 7000 90 10 20 30 0 0",
        "cpu1 5000 0 0 0 0 0 0 0 0 0",
        "intr 1",
    )
    (tmp_path / "proc" / "stat").write_text("\n".join(lines))
    before = time.process_time()
    found = other_cpu_seconds({0}, HostFiles(tmp_path))
    assert found == pytest.approx(1560 / os.sysconf("SC_CLK_TCK") - before, abs=0.5)
    assert other_cpu_seconds({0}, HostFiles(tmp_path / "nothing")) == 0.0


def test_what_a_noisy_machine_measured_serves_the_next_start_at_once_until_the_idle_server_measures(
    tmp_path: Path, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    noise = "the machine is too busy: samples of one and the same step differ by 34%"
    noisy = dataclasses.replace(QUICK, noise=noise, spread=0.34)
    other = dataclasses.replace(noisy, precision="int8")
    budgets: list[float] = []
    found = Measurements(5e10, {"bf16": 8e11}, (noisy, other), single_steps={"int4": 0.1})
    monkeypatch.setattr("app.engine.calibration.measure.measure_machine", measure_of(found, budgets))
    for from_cache in (False, True):
        served = start(tmp_path, checkpoint)
        assert served.calibration is not None and served.calibration.from_cache is from_cache
        assert served.plan.speed.speed_source == "noisy" and noise in served.plan.decisions["speed_source"].reason
        assert (
            noise in served.plan.decisions["calibrate"].reason
            and "while idle" in served.plan.decisions["calibrate"].reason
        )
        assert served.step_time_table is None and served.calibration_spread == 0.34
        assert served.expected_step_times == StepTimeTable.from_trial(QUICK)
        assert served.plan.decisions["capacity_tokens_per_second"].reason.startswith(
            "From the least of noisy samples: "
        )
        assert not served.plan.speed.roofline_ratio and served.estimated_trial == noisy
    assert len(budgets) == 1
    idle = served.with_idle_trial(dataclasses.replace(noisy, decode_seconds={1: 0.01}))
    assert (idle.plan.speed.speed_source, idle.calibration_spread) == ("measured", 0.0)
    again = start(tmp_path, checkpoint)
    assert again.calibration is not None and len(again.calibration.measurements.trials) == 1, "int8 was noisy too"
    assert not again.calibration.measurements.single_steps and again.plan.speed.speed_source == "measured"
    assert len(budgets) == 1


def test_single_steps_serve_the_next_start_too(
    tmp_path: Path, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    budgets: list[float] = []
    found = Measurements(5e10, {"bf16": 8e11}, single_steps={"bf16": 0.001})
    monkeypatch.setattr("app.engine.calibration.measure.measure_machine", measure_of(found, budgets))
    for _ in range(2):
        served = start(tmp_path, checkpoint)
        assert served.step_time_table is None and served.expected_step_times is not None
        assert served.expected_step_times.decode(1) == pytest.approx(0.001)
    assert len(budgets) == 1 and served.calibration is not None and served.calibration.from_cache


def test_what_the_idle_server_measured_serves_the_next_start(
    tmp_path: Path, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    budgets: list[float] = []
    found = Measurements(fallback="measuring failed")
    monkeypatch.setattr("app.engine.calibration.measure.measure_machine", measure_of(found, budgets))
    first = start(tmp_path, checkpoint)
    assert first.estimated_trial is not None and first.plan.speed.speed_source == "estimated"
    idle = first.with_idle_trial(TRIAL)
    assert idle.step_time_table == StepTimeTable.from_trial(TRIAL) and idle.estimated_trial is None
    assert (
        idle.plan.speed.speed_source == "measured"
        and "while the server was idle" in idle.plan.decisions["speed_source"].reason
    )
    assert idle.plan.weights == first.plan.weights
    assert idle.plan.speed.capacity_tokens_per_second["decode"][1] == pytest.approx(1 / (0.02 + 512e-7), rel=0.01)
    second = start(tmp_path, checkpoint)
    assert second.step_time_table == StepTimeTable.from_trial(TRIAL) and second.plan.speed.speed_source == "measured"
    assert len(budgets) == 1, "the second start did not measure"
    start(tmp_path, checkpoint, calibrate="on")
    assert len(budgets) == 2


@pytest.mark.parametrize(("cores", "mebibytes"), [(1, 64), (2, 128), (8, 480)])
def test_a_few_threads_profit_from_a_part_of_the_hosts_cache(
    tmp_path: Path, checkpoint: Checkpoint, cores: int, mebibytes: int
) -> None:
    facts = machine(cores=cores, caches=(Cache(3, "unified", 480 * 2**20, cores),))
    subject = measurement_subject(with_kept_calibration(facts, Settings(cache_dir=tmp_path), checkpoint))
    assert subject.cache_bytes == mebibytes * 2**20


def test_every_precision_that_may_be_chosen_is_a_way(tmp_path: Path, checkpoint: Checkpoint) -> None:
    x86, torch = machine(), TorchBuild(version="2.13.0", kleidiai=True)
    arm = machine(architecture="arm64", isa=frozenset({"lse", "dotprod", "i8mm", "bf16"}), torch=torch)

    def ways(large: bool, facts: Facts = x86, **settings: Any) -> list[str]:
        needs = dataclasses.replace(checkpoint.needs(), num_parameters=10**9 if large else 10**6)
        monkey = pytest.MonkeyPatch()
        with monkey.context() as patch:
            patch.setattr(Checkpoint, "needs", lambda self: needs)
            made = measurement_subject(
                with_kept_calibration(facts, Settings(cache_dir=tmp_path, **settings), checkpoint)
            )
        assert (made.copy is not None) == ("int4" in [way.weights.precision for way in made.plans])
        return [way.weights.precision for way in made.plans]

    assert ways(large=True) == ["bf16", "int8", "int4"]
    native = machine(2, isa=x86.isa - {"avx512_bf16"} | {"fma"}, native=NativeLibrary(("avx2", "portable")))
    assert ways(large=True, facts=native)[-1] == "bf16", "the fastest first, as far as that is known"
    assert ways(large=False) == ["bf16"]
    assert ways(large=True, precision="int4") == ["int4"]
    kleidi = [KLEIDI_INT4[32], KLEIDI_INT4[None]]
    assert ways(large=True, facts=arm) == ["bf16", "int8", "int4", *kleidi]
    assert ways(large=True, facts=arm, precision="int4") == ["int4", *kleidi]
    assert ways(large=True, facts=arm, precision="int8") == ["int8"]
    assert ways(large=True, facts=arm, quantization=INT8_REFERENCE) == [INT8_REFERENCE]


@pytest.mark.parametrize(
    ("cores", "asked_for", "counts"), [(1, "auto", (1,)), (2, "auto", (2, 1)), (8, "auto", (8, 7)), (8, 5, (5,))]
)
def test_threads_that_may_serve(
    tmp_path: Path, checkpoint: Checkpoint, cores: int, asked_for: Any, counts: tuple[int, ...]
) -> None:
    settings = Settings(cache_dir=tmp_path, threads=asked_for)
    assert measurement_subject(with_kept_calibration(machine(cores=cores), settings, checkpoint)).threads == counts


@pytest.mark.parametrize(("found", "status"), [(FOUND, 0), (Measurements(fallback="the machine is too busy"), 1)])
def test_the_command_measures_now_and_says_what_follows(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    found: Measurements,
    status: int,
) -> None:
    budgets: list[float] = []
    monkeypatch.setattr(os, "environ", dict(os.environ))  # what thread pools would read is not for other tests
    monkeypatch.setattr("app.engine.calibration.measure.measure_machine", measure_of(found, budgets))
    assert main(["calibrate", "--json", f"--cache-dir={tmp_path}"]) == status
    out, told = capsys.readouterr()
    assert json.loads(out)["measurements"]["fallback"] == found.fallback
    assert found.fallback in told
    assert budgets == [prepare.CALIBRATE_COMMAND_SECONDS]
    assert len(list(tmp_path.rglob("*.json"))) == 1 - status


def test_ctrl_c_ends_it_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(what: Any, budget: float, report: Any) -> Measurements:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr("app.engine.calibration.measure.measure_machine", interrupted)
    assert main(["calibrate", f"--cache-dir={tmp_path}"]) == 130
    assert not list(tmp_path.rglob("*"))


def test_the_json_of_a_calibration_names_its_age_and_origin(tmp_path: Path) -> None:
    told = Calibration(FOUND, time.time() - 60, from_cache=True).to_json()
    assert told["from_cache"] is True
    assert 60 <= told["age_seconds"] < 70
    assert told["measurements"]["trials"][0]["decode_seconds"] == {"1": 0.02, "8": 0.03}
