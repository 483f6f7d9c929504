"""Calibration of tiny models: steps run with synthetic weights, and the whole model's times follow from theirs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from app.backends.selection import select_backend, select_host_backend
from app.engine.calibration import measure as measuring
from app.engine.calibration.measure import CalibrationSubject, TrialSession, measure_machine
from app.engine.calibration.synthetic_weights import TrialScope
from app.engine.calibration.trials import CHUNK_TOKENS, CONTEXT_ROWS, CpuTrialStage, DecoderTrial, TrialStep
from app.hardware.decision import Measurements, TrialTimes
from app.hardware.plan.plan import ServingPlan, make_plan
from app.hardware.probe.probe import probe
from app.settings import Settings
from app.weights.checkpoint import Checkpoint, open_checkpoint
from app.weights.forms import RECIPES
from app.weights.load import load_model
from armature_kernels import ceilings
from armature_kernels.native.arguments import OpCode
from armature_kernels.native.operations import has_kernel
from armature_kernels.timing import MAX_SPREAD
from tiny_checkpoints import write_checkpoint

INTEGERS = pytest.mark.skipif(not has_kernel(OpCode.LINEAR_INT), reason="integer forms need the native library")
PRECISIONS = ["fp32", "bf16", pytest.param("int8", marks=INTEGERS), pytest.param("int4", marks=INTEGERS)]
FIXED, LAYER, ROW, CONTEXT = 1e-3, 1e-4, 1e-5, 1e-9  # seconds of a step on the machine of these tests


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(write_checkpoint(tmp_path_factory.mktemp("measuring") / "tiny", num_hidden_layers=8))


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def plan_of(checkpoint: Checkpoint, **settings: Any) -> ServingPlan:
    asked = {"threads": 1, "max_batch_tokens": 128, "max_running_seqs": 8, "int8_copy": "off", **settings}
    return make_plan(probe(), None, Settings(**asked), checkpoint.needs(), RECIPES.keys())


def _replay_of(rehearsal: DecoderTrial, layers: int) -> Any:
    run: Any = rehearsal._runners[layers]
    return run.__self__.model


def rehearsal_of(checkpoint: Checkpoint, **settings: Any) -> DecoderTrial:
    plan = plan_of(checkpoint, **settings)
    return DecoderTrial(
        checkpoint.model_config,
        plan,
        torch.device("cpu"),
        partial(CpuTrialStage, select_host_backend(plan)),
        TrialScope(0, 4),
    )


# ---- steps that really run -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", PRECISIONS)
def test_steps_run_with_weights_that_nobody_read(checkpoint: Checkpoint, precision: str) -> None:
    with torch.inference_mode():
        rehearsal = rehearsal_of(checkpoint, precision=precision)
        for shape in (
            TrialStep("decode", 4, 2),
            TrialStep("decode", 8, 1, rehearsal.context),
            TrialStep("prefill", 100, 2),
        ):
            step = rehearsal.step(shape)
            for _ in range(3):  # logits that are not finite would raise
                assert step()


@INTEGERS
def test_steps_are_run_again_from_the_second_on(checkpoint: Checkpoint) -> None:
    with torch.inference_mode():
        rehearsal = rehearsal_of(checkpoint, precision="int4")
        step = rehearsal.step(TrialStep("decode", 4, 2))
        step()
        replay: Any = _replay_of(rehearsal, 2)
        assert (replay.reason, replay.num_replays) == ("", 0)
        step()
        assert replay.num_replays == 1


@INTEGERS
def test_compile_off_leaves_them_eager(checkpoint: Checkpoint) -> None:
    replay: Any = _replay_of(rehearsal_of(checkpoint, precision="int4", compile="off"), 2)
    assert "Asked for" in replay.reason


@pytest.mark.parametrize("architecture", ["Gemma2ForCausalLM", "Qwen3ForCausalLM", "Phi3ForCausalLM"])
def test_every_family_can_be_tried(tmp_path: Path, architecture: str) -> None:
    checkpoint = open_checkpoint(write_checkpoint(tmp_path / "tiny", architecture))
    with torch.inference_mode():
        assert rehearsal_of(checkpoint, precision="bf16").step(TrialStep("decode", 2, 2))()


@pytest.mark.parametrize("precision", ["bf16", "int4"])
def test_few_layers_have_fewer_inputs_of_their_own(tmp_path: Path, precision: str) -> None:
    checkpoint = open_checkpoint(write_checkpoint(tmp_path / "tiny", "Gemma3nForCausalLM"))
    with torch.inference_mode():
        rehearsal = rehearsal_of(checkpoint, precision=precision)
        assert len(rehearsal.layer_counts) > 1
        for layers in rehearsal.layer_counts:
            assert rehearsal.step(TrialStep("decode", 2, layers))()


def test_synthetic_hidden_states_do_not_grow_from_layer_to_layer(tmp_path: Path) -> None:
    many = {
        "num_hidden_layers": 60,
        "intermediate_size": 48,
        "layer_types": ["full_attention", "sliding_attention"] * 30,
        "activation_sparsity_pattern": [0.0] * 60,
        "altup_num_inputs": 8,
    }
    checkpoint = open_checkpoint(write_checkpoint(tmp_path / "tiny", "Gemma3nForCausalLM", **many))
    plan = plan_of(checkpoint, precision="fp32")
    stage = partial(CpuTrialStage, select_host_backend(plan))
    with torch.inference_mode():
        trial = DecoderTrial(checkpoint.decoder, plan, torch.device("cpu"), stage, TrialScope(0, 1))
        assert trial.few_layers == 60
        assert trial.step(TrialStep("decode", 8, 60))()  # logits that are not finite would raise


@pytest.mark.parametrize("precision", PRECISIONS)
def test_weights_that_a_step_reads_are_counted_as_they_are_loaded(checkpoint: Checkpoint, precision: str) -> None:
    plan = plan_of(checkpoint, precision=precision)
    model = load_model(checkpoint, plan, select_backend(plan))
    held = sum(
        module.form.nbytes for module in model.modules() if hasattr(module, "form") and hasattr(module, "sources")
    )
    assert rehearsal_of(checkpoint, precision=precision).read_bytes == held


def test_layers_exceed_the_cache_twice(checkpoint: Checkpoint) -> None:
    plan = plan_of(checkpoint, precision="fp32")

    def layers(scope: TrialScope) -> int:
        return DecoderTrial(
            checkpoint.model_config, plan, torch.device("cpu"), partial(CpuTrialStage, select_host_backend(plan)), scope
        ).few_layers

    layer, output = rehearsal_of(checkpoint, precision="fp32")._sizes(checkpoint.model_config)
    assert layers(TrialScope(0, 8)) == 2
    assert layers(TrialScope(0, 2)) == 4
    assert layers(TrialScope((output + 5 * layer) // 2, 8)) == 5
    assert layers(TrialScope(2**40, 8)) == 8, "no more than the model has"


# ---- what is said of the whole model ---------------------------------------------------------------------------------


class Machine:
    """A clock that only steps move, by what they would take on a machine without noise (or with)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, factor: Callable[[DecoderTrial, int], float]) -> None:
        self.now, self.factor, self.steps = 0.0, factor, 0
        monkeypatch.setattr(DecoderTrial, "step", lambda rehearsal, shape: lambda: self._run(rehearsal, shape))

    def __call__(self) -> float:
        return self.now

    def _run(self, rehearsal: DecoderTrial, shape: TrialStep) -> None:
        self.steps += 1
        rows = FIXED + shape.layers * (LAYER + shape.size * ROW + shape.size * shape.context * CONTEXT)
        self.now += rows * self.factor(rehearsal, torch.get_num_threads())


def subject_of(checkpoint: Checkpoint, *precisions: str, **changes: Any) -> CalibrationSubject:
    ways = tuple(plan_of(checkpoint, precision=name) for name in precisions)
    return CalibrationSubject(
        checkpoint.model_config, ways, **{"threads": (1,), "choose": lambda found: (precisions[0], 1), **changes}
    )


def quiet(rehearsal: DecoderTrial, threads: int) -> float:
    return 1.0


def measured(machine: Machine, subject: CalibrationSubject, budget: float = 0.7) -> Measurements:
    return measure_machine(subject, budget, lambda stage: None, machine)


def test_the_whole_models_seconds(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, quiet)
    found = measured(machine, subject_of(checkpoint, "fp32"))
    (trial,) = found.trials
    assert (trial.precision, trial.threads, found.fallback) == ("fp32", 1, "")
    assert trial.decode_seconds == pytest.approx({rows: FIXED + 8 * (LAYER + rows * ROW) for rows in (1, 2, 4, 8)})
    assert trial.prefill_seconds == pytest.approx({size: FIXED + 8 * (LAYER + size * ROW) for size in (32, 64, 128)})
    assert trial.context_token_seconds == pytest.approx(8 * CONTEXT)
    assert trial.pair_seconds == pytest.approx(8 * CONTEXT)
    assert found.seconds == pytest.approx(machine.now)
    assert trial.operations_per_token == 2 * 8 * (32 * 64 + 32 * 32 + 2 * 32 * 48 + 48 * 32)


def test_few_layers_and_few_outputs_stand_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shallow = open_checkpoint(write_checkpoint(tmp_path / "shallow"))  # two layers: all are made
    machine = Machine(monkeypatch, quiet)
    subject = subject_of(shallow, "fp32", "bf16")
    few_outputs = dataclasses.replace(measuring.COARSE_TRIAL, most_outputs=32)
    monkeypatch.setattr(measuring, "COARSE_TRIAL", few_outputs)
    by_precision = {trial.precision: trial for trial in measured(machine, subject).trials}
    assert by_precision["fp32"].decode_seconds[8] == pytest.approx(FIXED + 2 * (LAYER + 8 * ROW))
    outputs = (320 - 32) * 32 / (32 * 64 + 32 * 32 + 2 * 32 * 48 + 48 * 32)  # what is left out, in layers
    assert by_precision["bf16"].decode_seconds[8] == pytest.approx(FIXED + (2 + outputs) * (LAYER + 8 * ROW), rel=0.01)


def test_a_noisy_machine_gives_the_least_samples_and_a_reason(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(monkeypatch, lambda rehearsal, threads: (1.0, 5.0, 2.0)[machine.steps % 3])
    found = measured(machine, subject_of(checkpoint, "fp32"))
    (trial,) = found.trials
    assert (found.fallback, "too busy" in trial.noise, trial.spread > MAX_SPREAD) == ("", True, True)
    assert trial.decode_seconds == pytest.approx({rows: FIXED + 8 * (LAYER + rows * ROW) for rows in (1, 2, 4, 8)})


def test_steps_that_are_shorter_with_more_rows_give_a_noisy_table_that_rises(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(monkeypatch, quiet)
    run = machine._run

    def shorter(rehearsal: DecoderTrial, shape: TrialStep) -> None:
        before = machine.now
        run(rehearsal, shape)
        machine.now = before + (machine.now - before) * (0.2 if (shape.kind, shape.size) == ("decode", 4) else 1.0)

    monkeypatch.setattr(machine, "_run", shorter)
    (trial,) = measured(machine, subject_of(checkpoint, "fp32")).trials
    assert "more rows" in trial.noise and trial.spread < MAX_SPREAD
    seconds = [trial.decode_seconds[rows] for rows in (1, 2, 4, 8)]
    assert seconds == sorted(seconds) and seconds[2] < FIXED + 8 * LAYER


@INTEGERS
def test_nothing_further_is_decided_from_noise(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether an int8 copy makes prompts faster is not asked of a machine whose steps differ fivefold."""
    noise = Random(3)
    machine = Machine(monkeypatch, lambda rehearsal, threads: noise.choice((1.0, 2.0, 5.0)))
    copy = plan_of(checkpoint, precision="int4", int8_copy="on")
    found = measured(machine, subject_of(checkpoint, "int4", copy=copy))
    assert [trial.int8_copy for trial in found.trials] == [False] and found.most_few_rows is None


def test_without_time_the_first_step_is_known_and_no_table(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(monkeypatch, lambda rehearsal, threads: 1000.0)
    found = measured(machine, subject_of(checkpoint, "fp32"), budget=0.5)
    assert (found.trials, found.single_steps.keys(), found.fallback) == ((), {"fp32"}, "")
    assert machine.steps <= 4


@INTEGERS
@pytest.mark.parametrize("fewer", [False, True])
def test_all_that_may_be_chosen_is_looked_at_and_the_choice_looked_at_closely(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, fewer: bool
) -> None:
    def factor(rehearsal: DecoderTrial, threads: int) -> float:
        return (0.5 if rehearsal.plan.weights.precision == "int4" else 1.0) * (0.8 if (threads == 1) == fewer else 1.0)

    machine = Machine(monkeypatch, factor)

    def quickest(found: Measurements) -> tuple[str, int]:
        best = min(found.trials, key=lambda trial: trial.decode_seconds[1])
        return best.precision, best.threads

    subject = subject_of(checkpoint, "bf16", "int8", "int4", choose=quickest, threads=(2, 1))
    found = measured(machine, subject)
    ways = {(trial.precision, trial.threads): trial for trial in found.trials}
    assert ways.keys() == {("bf16", 2), ("int8", 2), ("int4", 2), ("int4", 1)}
    full = ways["int4", 1 if fewer else 2]
    assert all((len(trial.decode_seconds) > 2) == (trial is full) for trial in found.trials)
    assert machine.now <= 0.75


def quickest_step(found: Measurements) -> tuple[str, int]:
    """The precision with the shortest step of one sequence, whether it was timed fully or once."""
    seconds = {trial.precision: trial.decode_seconds[1] for trial in found.trials}
    return min(((each, name) for name, each in {**found.single_steps, **seconds}.items()))[1], 1


@pytest.mark.parametrize(("slower", "dropped"), [(10.0, True), (measuring.CLEARLY_SLOWER - 0.05, False), (0.5, False)])
def test_one_step_is_enough_to_drop_what_cannot_be_chosen(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, slower: float, dropped: bool
) -> None:
    steps = {"fp32": 0, "bf16": 0}

    def factor(rehearsal: DecoderTrial, threads: int) -> float:
        steps[rehearsal.plan.weights.precision] += 1
        return slower if rehearsal.plan.weights.precision == "fp32" else 1.0

    subject = subject_of(checkpoint, "bf16", "fp32", choose=quickest_step)
    found = measured(Machine(monkeypatch, factor), subject)
    assert found.trials[0].precision == ("bf16" if slower > 1 else "fp32")
    assert found.single_steps == (
        {"fp32": pytest.approx(slower * (FIXED + 8 * (LAYER + ROW)), rel=0.05)} if dropped else {}
    )
    assert len(found.trials) == (1 if dropped else 2)
    assert not dropped or steps["fp32"] <= 2 + 2 * measuring.LEAST_RUNS, "what prepares each model, and its first steps"


def test_a_cold_first_run_does_not_count_even_without_time(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Making a mixture of experts takes all the time, and its first run takes five times as long as the next ones."""
    machine = Machine(monkeypatch, lambda trial, threads: 5.0 if machine.steps <= 2 * len(trial.layer_counts) else 1.0)
    found = measured(machine, subject_of(checkpoint, "fp32"), budget=0.0)
    assert found.trials == ()
    assert found.single_steps == {"fp32": pytest.approx(FIXED + 8 * (LAYER + ROW), rel=0.05)}


def test_nothing_that_may_be_chosen_is_left_without_a_time(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no time for three samples of a precision, and it is not dropped: its first step is kept."""
    machine = Machine(
        monkeypatch, lambda rehearsal, threads: 40.0 if rehearsal.plan.weights.precision == "fp32" else 1.0
    )
    subject = subject_of(checkpoint, "bf16", "fp32", choose=lambda found: ("fp32", 1))
    found = measured(machine, subject)
    assert [trial.precision for trial in found.trials] == ["bf16"]
    assert found.single_steps == {"fp32": pytest.approx(40 * (FIXED + 8 * (LAYER + ROW)), rel=0.05)}


def test_bursts_of_other_work_do_not_decide(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other work lengthens the early steps of the faster precision by far, and most of the others."""
    steps = {"bf16": 0, "fp32": 0}

    def factor(rehearsal: DecoderTrial, threads: int) -> float:
        precision = rehearsal.plan.weights.precision
        steps[precision] += 1
        bursts = 8.0 if precision == "bf16" and steps[precision] <= 10 else 1.0
        return (1.0 if precision == "bf16" else 3.0) * bursts * (1.0, 2.0, 2.0)[steps[precision] % 3]

    subject = subject_of(checkpoint, "bf16", "fp32", choose=lambda found: ("fp32", 1))
    found = measured(Machine(monkeypatch, factor), subject)
    assert found.single_steps["bf16"] == pytest.approx(FIXED + 8 * (LAYER + ROW), rel=0.05)


def test_a_disturbed_trial_whose_samples_agree_is_repeated(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All steps of the faster precision take four times as long until the other one was tried."""
    tried: list[str] = []

    def factor(rehearsal: DecoderTrial, threads: int) -> float:
        tried.append(rehearsal.plan.weights.precision)
        return 4.0 if tried[-1] == "bf16" and "fp32" not in tried else 1.0

    def best(found: Measurements) -> tuple[str, int]:
        return min(found.trials, key=lambda trial: trial.decode_seconds[1]).precision, 1

    monkeypatch.setattr(TrialSession, "step_work", lambda session: (1.0, 0.0))
    monkeypatch.setattr(
        measuring, "_peaks", lambda subject, backend, part: Measurements(1.0, {"bf16": 1.0, "fp32": 1.0})
    )
    subject = subject_of(checkpoint, "bf16", "fp32", choose=best)
    found = measured(Machine(monkeypatch, factor), subject, budget=2.0)
    by_precision = {trial.precision: trial for trial in found.trials}
    assert by_precision["bf16"].decode_seconds[1] == pytest.approx(FIXED + 8 * (LAYER + ROW), rel=0.01)


@pytest.mark.parametrize(("making", "timed"), [(0.4, ["bf16", "fp32"]), (1.0, ["bf16"])])
def test_where_making_the_models_takes_the_time_their_first_steps_count(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, making: float, timed: list[str]
) -> None:
    """With a cache of hundreds of megabytes the models are large: they are not made again for nothing."""
    machine, built, make = Machine(monkeypatch, quiet), [], TrialSession.model_trial

    def slowly(session: TrialSession, scope: TrialScope) -> Any:
        built.append(session.plan.weights.precision)
        model = make(session, scope)
        machine.now += making
        return model

    monkeypatch.setattr(TrialSession, "model_trial", slowly)
    subject = subject_of(checkpoint, "bf16", "fp32", choose=lambda found: ("fp32", 1))
    found = measured(machine, subject)
    assert built == timed
    assert (found.trials, found.fallback, found.single_steps.keys()) == ((), "", set(timed))


def test_a_model_is_built_once_for_its_first_step_and_its_trial(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[str] = []
    make = TrialSession.model_trial

    def counted(session: TrialSession, scope: TrialScope) -> Any:
        built.append(session.plan.weights.precision)
        return make(session, scope)

    monkeypatch.setattr(TrialSession, "model_trial", counted)
    subject = subject_of(checkpoint, "bf16", "fp32", choose=quickest_step)
    measured(Machine(monkeypatch, quiet), subject)
    assert built[:2] == ["bf16", "fp32"] and len(built) == 3, "the third one is the full trial"


@INTEGERS
def test_where_eight_bits_are_quicker_than_four(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, quiet)
    seconds = machine._run

    def run(rehearsal: DecoderTrial, shape: TrialStep) -> None:
        before = machine.now
        seconds(rehearsal, shape)
        if rehearsal.plan.weights.int8_copy:  # slower for few tokens, quicker for many
            machine.now = before + (machine.now - before) * (0.75 if shape.size > 64 else 1.1)

    monkeypatch.setattr(machine, "_run", run)
    copy = plan_of(checkpoint, precision="int4", int8_copy="on")
    found = measured(machine, subject_of(checkpoint, "int4", copy=copy))
    lean, both = found.trials
    assert found.most_few_rows == 64
    assert (lean.int8_copy, both.int8_copy) == (False, True)
    assert both.prefill_seconds[64] == lean.prefill_seconds[64]
    assert both.prefill_seconds[128] == pytest.approx(0.75 * lean.prefill_seconds[128])


def test_ceilings_are_sampled_where_the_budget_has_room(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ceilings, "SPIN_DOWN_SECONDS", 0.0)
    monkeypatch.setattr(measuring, "READ_BYTES", 2**20)
    monkeypatch.setattr(measuring, "PRODUCT_SHAPES", ((64, 64, 64),))
    found = measured(Machine(monkeypatch, quiet), subject_of(checkpoint, "fp32"), budget=3.0)
    assert found.read_bytes_per_second and found.read_bytes_per_second > 1e6
    assert found.products_per_second.keys() == {"fp32"}


def test_the_progress_callback_may_stop_it(checkpoint: Checkpoint) -> None:
    def stop(stage: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure_machine(subject_of(checkpoint, "fp32"), 0.5, stop)


def test_a_context_needs_room(checkpoint: Checkpoint) -> None:
    short = rehearsal_of(checkpoint, precision="fp32", max_model_len=32)
    assert (short.context, short.prefill_tokens()) == (0, [32])
    tight = rehearsal_of(checkpoint, precision="fp32", kv_cache_bytes=2**18)
    assert 0 < tight.context * CONTEXT_ROWS * tight._stage.bytes_per_token <= 2**18
    assert tight.context < rehearsal_of(checkpoint, precision="fp32").context
    assert CONTEXT_ROWS <= 8 < CHUNK_TOKENS


def test_a_trial_of_a_tiny_model_is_believable(checkpoint: Checkpoint) -> None:
    """With the real clock: whatever the machine is doing, there is a sane table, at least a step, or a reason."""
    found = measure_machine(subject_of(checkpoint, "fp32"), 0.3, lambda stage: None)
    assert bool(found.trials or found.single_steps) != bool(found.fallback)
    assert all(_is_sane(trial) for trial in found.trials)


def _is_sane(trial: TrialTimes) -> bool:
    tables = (trial.decode_seconds, trial.prefill_seconds)
    return all(list(table.values()) == sorted(table.values()) and min(table.values()) > 0 for table in tables)


def test_under_a_quota_that_binds_speed_is_what_it_leaves(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quarter of a core: steps take four times what the CPU needs for them, and the budget is of as much work."""
    whole, quarter = Machine(monkeypatch, quiet), Machine(monkeypatch, quiet)
    (asked,) = subject_of(checkpoint, "fp32").plans
    throttled = asked.changed(throttling_quota=0.25)
    found = {}
    for machine, plan in ((whole, asked), (quarter, throttled)):
        monkeypatch.setattr(
            DecoderTrial, "step", lambda rehearsal, shape, machine=machine: lambda: machine._run(rehearsal, shape)
        )
        monkeypatch.setattr(
            measuring, "throttle_corrected_clock", lambda quota, machine=machine: lambda: machine.now / (quota or 1.0)
        )
        subject = CalibrationSubject(checkpoint.model_config, (plan,), (1,), lambda found: ("fp32", 1))
        found[machine] = measure_machine(subject, 0.7, lambda stage: None).trials[0]
    assert quarter.steps == pytest.approx(whole.steps, rel=0.3)  # of a step in long seconds fewer samples are enough
    for size, seconds in found[whole].decode_seconds.items():
        assert found[quarter].decode_seconds[size] == pytest.approx(4 * seconds)
