"""The serving plan: `make_plan` decides everything about one process on one machine, with reasons.

The function is pure. A value that was set is used, or `PlanImpossible` says why not.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from app.errors import NoRecipe, PlanImpossible
from app.hardware.decision import Decided, Decision, Measurements, RecipeKey
from app.hardware.facts import CudaDevice, Facts, Needs, to_json_value
from app.hardware.plan import capacity, devices, memory_budget, speed, step_options
from app.hardware.plan import threads as parallel
from app.hardware.plan.capacity import MemoryCapacity
from app.hardware.plan.devices import DeviceChoice, DevicePlan
from app.hardware.plan.memory_budget import MemoryDemand
from app.hardware.plan.precision import PrecisionCandidates, available_precisions
from app.hardware.plan.speed import NO_TRIALS, EstimateInputs, SpeedEstimate, TrialTimings, known_timing
from app.hardware.plan.step_options import StepOptions
from app.hardware.plan.threads import ThreadPlan
from app.hardware.plan.weights import WeightsAndKv, check_torch_can_run, decide_weights_and_kv
from app.hardware.probe import software
from app.settings import Settings


@dataclass(frozen=True)
class ServingPlan:
    """Every choice for one process, in parts: `plan.memory.max_model_len`, `plan.decisions["..."].reason`."""

    placement: DevicePlan
    weights: WeightsAndKv
    cpu: ThreadPlan
    memory: MemoryCapacity
    steps: StepOptions
    speed: SpeedEstimate

    @property
    def decisions(self) -> Mapping[str, Decision[Any]]:
        return {name: decision for part in vars(self).values() for name, decision in part.decisions.items()}

    def changed(self, **values: Any) -> ServingPlan:
        """Return a copy with other values, for the same reasons."""
        unknown = values.keys() - self.decisions.keys()
        assert not unknown, f"the plan does not decide {', '.join(unknown)}"
        return ServingPlan(
            *(
                part.changed(**{name: value for name, value in values.items() if name in part.decisions})
                for part in vars(self).values()
            )
        )

    def to_json(self) -> dict[str, Any]:
        return {
            name: {"value": to_json_value(decision.value), "reason": decision.reason}
            for name, decision in self.decisions.items()
        }

    def gpu(self, facts: Facts) -> CudaDevice | None:
        """Return the GPU that `cuda_device` names; MIG instances share its index, so their UUIDs are compared too."""
        here = [gpu for gpu in facts.cuda if gpu.index == self.placement.cuda_device]
        return next((gpu for gpu in here if devices.cuda_name(gpu) == self.placement.visible_devices), None)

    def environment(self) -> dict[str, str]:
        """Return variables that thread pools read when they load; set them before torch is imported."""
        threads = str(self.cpu.threads)
        return {
            "OMP_NUM_THREADS": threads,
            "OMP_DYNAMIC": "false",
            "OMP_PROC_BIND": "false",  # the worker thread's mask is enough; binding would pin the event loop too
            "MKL_NUM_THREADS": threads,
            "VECLIB_MAXIMUM_THREADS": threads,
            "OPENBLAS_NUM_THREADS": "1",  # NumPy's own pool is not used
            "RAYON_NUM_THREADS": str(self.cpu.tokenizer_threads),
            "TOKENIZERS_PARALLELISM": "false",
            **parallel.WAIT_POLICY_VARIABLES[self.cpu.wait_policy],
            **self._device_environment(),
        }

    def _device_environment(self) -> dict[str, str]:
        """Return variables for torch and Triton: the GPU, and the folder of compiled kernels unless it is set."""
        if self.placement.device == "mps":
            return {
                "PYTORCH_ENABLE_MPS_FALLBACK": "0"
            }  # operations that torch lacks fail instead of running on the processor
        variables = {
            "CUDA_VISIBLE_DEVICES": self.placement.visible_devices,
            "TRITON_CACHE_DIR": self.weights.kernel_folder,
        }
        if "TRITON_CACHE_DIR" in os.environ:
            del variables["TRITON_CACHE_DIR"]
        device_order = (
            {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"} if self.placement.device == "cuda" else {}
        )  # makes an index mean the same as in nvidia-smi, if there is no UUID
        return {**device_order, **{name: value for name, value in variables.items() if value is not None}}


DECLARED: Mapping[str, Decided[Any]] = {
    name: field
    for part in (DevicePlan, WeightsAndKv, ThreadPlan, MemoryCapacity, StepOptions, SpeedEstimate)
    for name, field in vars(part).items()
    if isinstance(field, Decided)
}


def make_plan(
    facts: Facts,
    measurements: Measurements | None,
    settings: Settings,
    needs: Needs | None,
    recipes: Collection[RecipeKey],
) -> ServingPlan:
    """Decide everything. Raises `PlanImpossible` or `NoRecipe` for what cannot be satisfied."""
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
    kind = choice.plan.device
    device = memory_budget.find_device_memory(facts, settings, kind, choice.gpu)
    kernels = software.decide_native_kernels(facts) if device is None else devices.decide_device_kernels(kind)
    all_threads = _decide_threads(facts, settings, kind)
    node, trials = all_threads.numa_node, TrialTimings.from_measurements(measurements)
    built = available_precisions(inputs.recipes, kind, facts.architecture, settings)
    candidates = PrecisionCandidates(facts, settings, needs, node, built, kernels.value, device)
    weights = decide_weights_and_kv(candidates, kernels, measurements, all_threads.threads)
    cpu = _decide_threads(facts, settings, kind, trials, weights.precision)
    timing = trials.find_served(weights.precision, cpu.threads, int8_copy=weights.int8_copy)
    demand = MemoryDemand(needs, weights.precision, weights.kv_precision, node, weights.int8_copy, device)
    inputs_of_estimate = EstimateInputs(facts, needs, kernels.value, kind, measurements)
    expected = timing or known_timing(inputs_of_estimate, weights.precision, cpu.threads)
    if needs is None or needs.generates:
        memory = capacity.decide_capacity(facts, settings, demand, timing)
    else:
        memory = capacity.decide_encoder_capacity(facts, settings, demand, timing, expected)
    limits = speed.SpeedLimits(memory.batch_target_tokens, memory.max_running_seqs, memory.weight_bytes)
    served = step_options.StepOptionInputs(needs, kind, kernels.value, weights.precision, weights.int8_copy, timing)
    return ServingPlan(
        choice.plan,
        weights,
        cpu,
        memory,
        step_options.decide_step_options(settings, measurements, served),
        speed.estimate_speed(measurements, speed.SpeedInputs(needs, weights.precision, limits, expected)),
    )


def _decide_threads(
    facts: Facts, settings: Settings, kind: str, trials: TrialTimings = NO_TRIALS, precision: str = ""
) -> ThreadPlan:
    if kind != "cpu":
        return parallel.decide_host_threads(facts, settings)
    return parallel.decide_threads(facts, settings, trials, precision)
