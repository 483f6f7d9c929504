"""The serving plan: `make_plan` decides everything about one process on one machine.

Every choice has a reason. The function is pure and needs no torch. It never changes a setting silently: a value
that was set is used, or `PlanImpossible` says why not. The choices are made in the other modules of this folder.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from app.errors import NoRecipe, PlanImpossible
from app.hardware.decision import Decision, Measurements, RecipeKey, decisions_of
from app.hardware.facts import CudaDevice, Facts, Needs, to_json_value
from app.hardware.plan import capacity, devices, dtypes, encoder_capacity, expected_speed, memory_budget, step_options
from app.hardware.plan import threads as parallel
from app.hardware.plan.capacity import MemoryCapacity
from app.hardware.plan.devices import DeviceChoice, DevicePlan
from app.hardware.plan.dtypes import WeightsAndKv, check_torch_can_run
from app.hardware.plan.estimates import EstimateInputs, known_timing
from app.hardware.plan.expected_speed import SpeedEstimate
from app.hardware.plan.memory_budget import MemoryDemand
from app.hardware.plan.precision import PrecisionCandidates, available_precisions
from app.hardware.plan.step_options import StepOptions
from app.hardware.plan.threads import ThreadPlan
from app.hardware.plan.trials import NO_TRIALS, TrialTimings
from app.hardware.probe import software
from app.settings import Settings


@dataclass(frozen=True)
class ServingPlan(SpeedEstimate, StepOptions, MemoryCapacity, ThreadPlan, WeightsAndKv, DevicePlan):
    """Every choice for one process on one machine.

    The fields are those of the parts, which name and explain them. Dataclasses list the last base first, so `/info`
    shows the device first and the expected speed last.
    """

    def decisions(self) -> Iterable[tuple[str, Decision[Any]]]:
        """Return the name and the decision of each choice."""
        return [(item.name, getattr(self, item.name)) for item in dataclasses.fields(self)]

    def shown_for(self, kind: str) -> Iterable[tuple[str, Decision[Any]]]:
        """Return the decisions that matter to people for a model of this kind."""
        shown = {item.name for item in dataclasses.fields(self) if kind in item.metadata["show_for"]}
        return [(name, decision) for name, decision in self.decisions() if name in shown]

    def to_json(self) -> dict[str, Any]:
        """Return the value and the reason of each choice."""
        return {
            name: {"value": to_json_value(decision.value), "reason": decision.reason}
            for name, decision in self.decisions()
        }

    def gpu(self, facts: Facts) -> CudaDevice | None:
        """Return the GPU that `cuda_device` names; MIG instances share its index, so their UUIDs are compared too."""
        here = [gpu for gpu in facts.cuda if gpu.index == self.cuda_device.value]
        return next((gpu for gpu in here if devices.cuda_name(gpu) == self.visible_devices.value), None)

    def environment(self) -> dict[str, str]:
        """Return variables that thread pools read when they load; set them before torch is imported."""
        threads = str(self.threads.value)
        return {
            "OMP_NUM_THREADS": threads,
            "OMP_DYNAMIC": "false",
            "OMP_PROC_BIND": "false",  # the worker thread's mask is enough; binding would pin the event loop too
            "MKL_NUM_THREADS": threads,
            "VECLIB_MAXIMUM_THREADS": threads,
            "OPENBLAS_NUM_THREADS": "1",  # NumPy's own pool is not used
            "RAYON_NUM_THREADS": str(self.tokenizer_threads.value),
            "TOKENIZERS_PARALLELISM": "false",
            **parallel.WAIT_POLICY_VARIABLES[self.wait_policy.value],
            **self._device_environment(),
        }

    def _device_environment(self) -> dict[str, str]:
        """Return variables for torch and Triton: the GPU, and the folder of compiled kernels unless it is set."""
        if self.device.value == "mps":
            return {
                "PYTORCH_ENABLE_MPS_FALLBACK": "0"
            }  # operations that torch lacks fail instead of running on the processor
        variables = {"CUDA_VISIBLE_DEVICES": self.visible_devices.value, "TRITON_CACHE_DIR": self.kernel_folder.value}
        if "TRITON_CACHE_DIR" in os.environ:
            del variables["TRITON_CACHE_DIR"]
        device_order = (
            {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"} if self.device.value == "cuda" else {}
        )  # makes an index mean the same as in nvidia-smi, if there is no UUID
        return {**device_order, **{name: value for name, value in variables.items() if value is not None}}


def make_plan(
    facts: Facts,
    measurements: Measurements | None,
    settings: Settings,
    needs: Needs | None,
    recipes: Collection[RecipeKey],
) -> ServingPlan:
    """Decide everything.

    Raises:
        PlanImpossible: a setting cannot be satisfied on this machine.
        NoRecipe: no weights recipe exists for what was asked for.
    """
    check_torch_can_run(facts)
    inputs = _PlanInputs(facts, measurements, settings, needs, recipes)
    choice = devices.choose_device(facts, settings, needs, recipes)
    try:
        return _plan_on(choice, inputs)
    except (PlanImpossible, NoRecipe) as refusal:
        fallback = devices.fallback_to_cpu(choice, settings, refusal.message)
        if fallback is None:
            raise
        try:
            return _plan_on(fallback, inputs)
        except (PlanImpossible, NoRecipe):
            raise refusal from None  # the processor cannot serve it either


@dataclass(frozen=True, slots=True)
class _PlanInputs:
    """Arguments of `make_plan`."""

    facts: Facts
    measurements: Measurements | None
    settings: Settings
    needs: Needs | None
    recipes: Collection[RecipeKey]


def _plan_on(choice: DeviceChoice, inputs: _PlanInputs) -> ServingPlan:
    facts, measurements, settings, needs = inputs.facts, inputs.measurements, inputs.settings, inputs.needs
    kind = choice.device.value
    device = memory_budget.find_device_memory(facts, settings, kind, choice.gpu)
    kernels = software.decide_native_kernels(facts) if device is None else devices.decide_device_kernels(kind)
    all_threads = _decide_threads(facts, settings, kind)
    node, trials = all_threads.numa_node.value, TrialTimings.from_measurements(measurements)
    built = available_precisions(inputs.recipes, kind, facts.architecture, settings)
    weights_and_kv = dtypes.decide_weights_and_kv(
        PrecisionCandidates(facts, settings, needs, node, built, kernels.value, device),
        kernels,
        measurements,
        all_threads.threads.value,
    )
    precision, has_copy = weights_and_kv.precision.value, weights_and_kv.int8_copy.value
    threads = _decide_threads(facts, settings, kind, trials, precision)
    timing = trials.find_served(precision, threads.threads.value, int8_copy=has_copy)
    demand = MemoryDemand(needs, precision, weights_and_kv.kv_precision.value, node, has_copy, device)
    inputs_of_estimate = EstimateInputs(facts, needs, kernels.value, kind, measurements)
    expected = timing or known_timing(inputs_of_estimate, precision, threads.threads.value)
    if needs is None or needs.generates:
        memory = capacity.decide_capacity(facts, settings, demand, timing)
    else:
        memory = encoder_capacity.decide_encoder_capacity(facts, settings, demand, timing, expected)
    limits = expected_speed.SpeedLimits(
        memory.batch_target_tokens.value, memory.max_running_seqs.value, memory.weight_bytes.value
    )
    served = step_options.StepOptionInputs(needs, kind, kernels.value, precision, has_copy, timing)
    options = step_options.decide_step_options(settings, measurements, served)
    speed = expected_speed.estimate_speed(measurements, expected_speed.SpeedInputs(needs, precision, limits, expected))
    return ServingPlan(
        **decisions_of(choice, DevicePlan),
        **decisions_of(weights_and_kv, WeightsAndKv),
        **decisions_of(threads, ThreadPlan),
        **decisions_of(memory, MemoryCapacity),
        **decisions_of(options, StepOptions),
        **decisions_of(speed, SpeedEstimate),
    )


def _decide_threads(
    facts: Facts, settings: Settings, kind: str, trials: TrialTimings = NO_TRIALS, precision: str = ""
) -> ThreadPlan:
    if kind != "cpu":
        return parallel.decide_host_threads(facts, settings)
    return parallel.decide_threads(facts, settings, trials, precision)
