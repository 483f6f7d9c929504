"""The serving plan: `make_plan` decides everything about one process on one machine.

Every choice has a reason. The function is pure and needs no torch. It never changes a setting silently: a value
that was set is used, or `PlanImpossible` says why not. The choices are made in the other modules of this folder.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from app.errors import NoRecipe, PlanImpossible
from app.hardware import (
    capacity,
    device_memory,
    devices,
    encoding,
    holding,
    int8_copy,
    native_library,
    numerics,
    parallel,
    speed,
    stepping,
)
from app.hardware.capacity import Capacity
from app.hardware.decision import Decision, Dtype, Measurements, RecipeKey
from app.hardware.devices import Devices
from app.hardware.facts import CudaDevice, Facts, Needs, plain
from app.hardware.holding import Holding
from app.hardware.numerics import check_torch_can_run
from app.hardware.parallel import Parallelism
from app.hardware.precision import Candidates, built_for
from app.hardware.room import Demand
from app.hardware.speed import Speed
from app.hardware.stepping import Stepping
from app.hardware.trials import NOTHING, Trials
from app.settings import Settings

__all__ = ["Decision", "Dtype", "Measurements", "RecipeKey", "ServingPlan", "check_torch_can_run", "make_plan"]


@dataclass(frozen=True, slots=True)
class ServingPlan:
    """Every choice for one process on one machine.

    `cpu_ids` is the mask of the compute threads, set before their pool starts; empty: not pinned. `cuda_device` is
    nvidia-smi's index. `visible_devices` names that GPU to the process, which then sees no other, so it is index 0
    for torch. `pack_folder` is None if packed weights are not kept. `kernel_folder` is None if nothing is compiled
    while serving, or no folder is known. `batch_target_tokens` is the number of tokens up to which texts are
    batched together; only a single longer text makes a larger step. `itl_target_seconds` is None if the target is
    relative to the decode steps measured while serving. `compile` is true if steps are recorded and replayed,
    natively or by the device. `most_few_rows` is the number of rows up to which 4-bit weights are used if there is
    an int8 copy; None: the recipe's value. `capacity_tokens_per_second` maps a phase (`prefill`, `decode`,
    `encode`) and the rows of a step to a rate; it and `roofline_ratio` are empty if not measured.
    """

    device: Decision[str]
    cuda_device: Decision[int | None]
    visible_devices: Decision[str | None]
    precision: Decision[str]
    dtype: Decision[Dtype]
    int8_copy: Decision[bool]
    most_few_rows: Decision[int | None]
    pack_folder: Decision[str | None]
    kernel_folder: Decision[str | None]
    kv_precision: Decision[str]
    kernels: Decision[str]
    threads: Decision[int]
    cpu_ids: Decision[tuple[int, ...]]
    numa_node: Decision[int | None]
    wait_policy: Decision[str]
    throttling_quota: Decision[float | None]
    interop_threads: Decision[int]
    tokenizer_threads: Decision[int]
    http_threads: Decision[int]
    weight_bytes: Decision[int]
    kv_cache_bytes: Decision[int]
    max_model_len: Decision[int]
    max_running_seqs: Decision[int]
    max_batch_tokens: Decision[int]
    batch_target_tokens: Decision[int]
    max_waiting_requests: Decision[int]
    itl_target_seconds: Decision[float | None]
    compile: Decision[bool]
    calibrate: Decision[bool]
    speculation: Decision[bool]
    deterministic: Decision[bool]
    decode_tokens_per_second: Decision[float | None]
    prefill_tokens_per_second: Decision[float | None]
    capacity_tokens_per_second: Decision[Mapping[str, Mapping[int, float]]]
    roofline_ratio: Decision[Mapping[str, float]]

    def decisions(self) -> Iterable[tuple[str, Decision[Any]]]:
        """Return the name and the decision of each choice."""
        return [(item.name, getattr(self, item.name)) for item in dataclasses.fields(self)]

    def to_json(self) -> dict[str, Any]:
        """Return the value and the reason of each choice."""
        return {name: {"value": plain(decision.value), "reason": decision.reason} for name, decision in self.decisions()}

    def gpu(self, facts: Facts) -> CudaDevice | None:
        """Return the GPU that `cuda_device` names; MIG instances share its index, so their UUIDs are compared too."""
        here = [gpu for gpu in facts.cuda if gpu.index == self.cuda_device.value]
        return next((gpu for gpu in here if devices.name_of(gpu) == self.visible_devices.value), None)

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
            **parallel.WAITING[self.wait_policy.value],
            **self._of_device(),
        }

    def _of_device(self) -> dict[str, str]:
        """Return variables for torch and Triton: the GPU, and the folder of compiled kernels unless it is set."""
        if self.device.value == "mps":
            return {"PYTORCH_ENABLE_MPS_FALLBACK": "0"}  # operations that torch lacks fail instead of running on the processor
        variables = {"CUDA_VISIBLE_DEVICES": self.visible_devices.value, "TRITON_CACHE_DIR": self.kernel_folder.value}
        if "TRITON_CACHE_DIR" in os.environ:
            del variables["TRITON_CACHE_DIR"]
        ordered = (
            {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"} if self.device.value == "cuda" else {}
        )  # makes an index mean the same as in nvidia-smi, if there is no UUID
        return {**ordered, **{name: value for name, value in variables.items() if value is not None}}


def make_plan(
    facts: Facts, measurements: Measurements | None, settings: Settings, needs: Needs | None, recipes: Collection[RecipeKey]
) -> ServingPlan:
    """Decide everything.

    Raises:
        PlanImpossible: a setting cannot be satisfied on this machine.
        NoRecipe: no weights recipe exists for what was asked for.
    """
    check_torch_can_run(facts)
    asked = _Asked(facts, measurements, settings, needs, recipes)
    place = devices.decide(facts, settings, needs, recipes)
    try:
        return _plan_on(place, asked)
    except (PlanImpossible, NoRecipe) as refusal:
        instead = devices.instead(place, settings, refusal.message)
        if instead is None:
            raise
        try:
            return _plan_on(instead, asked)
        except (PlanImpossible, NoRecipe):
            raise refusal from None  # the processor cannot serve it either


@dataclass(frozen=True, slots=True)
class _Asked:
    """Arguments of `make_plan`."""

    facts: Facts
    measurements: Measurements | None
    settings: Settings
    needs: Needs | None
    recipes: Collection[RecipeKey]


def _plan_on(place: Devices, asked: _Asked) -> ServingPlan:
    facts, measurements, settings, needs = asked.facts, asked.measurements, asked.settings, asked.needs
    kind = place.device.value
    device = device_memory.of_device(facts, settings, kind, place.gpu)
    kernels = native_library.kernels(facts) if device is None else devices.kernels(kind)
    most = _threads(facts, settings, kind)
    node, trials = most.numa_node.value, Trials.of(measurements)
    built = built_for(asked.recipes, kind, facts.architecture, settings)
    held = holding.decide(Candidates(facts, settings, needs, node, built, kernels.value, device), trials, most.threads.value)
    precision, has_copy = held.precision.value, held.int8_copy.value
    threads = _threads(facts, settings, kind, trials, precision)
    timing = trials.serving(precision, threads.threads.value, int8_copy=has_copy)
    demand = Demand(needs, precision, held.kv_precision.value, node, has_copy, device)
    generates = needs is None or needs.generates
    decide = capacity.decide if generates else encoding.decide
    memory = decide(facts, settings, demand, timing)
    limits = speed.Limits(memory.batch_target_tokens.value, memory.max_running_seqs.value, memory.weight_bytes.value)
    return ServingPlan(
        device=place.device,
        cuda_device=place.cuda_device,
        visible_devices=devices.visible(place),
        kernels=kernels,
        **_fields(held),
        most_few_rows=int8_copy.most_few_rows(measurements, has_copy),
        pack_folder=numerics.pack_folder(settings, precision, kind),
        kernel_folder=devices.kernel_folder(settings, kind),
        **_fields(threads),
        **_fields(memory),
        **_fields(stepping.decide(settings, measurements, stepping.Served(needs, kind, kernels.value, timing))),
        deterministic=numerics.deterministic(settings, precision, has_copy, kernels.value, generates),
        **_fields(speed.expect(measurements, speed.Served(needs, precision, limits, timing))),
    )


def _threads(facts: Facts, settings: Settings, kind: str, trials: Trials = NOTHING, precision: str = "") -> Parallelism:
    if kind != "cpu":
        return parallel.decide_on_device(facts, settings)
    return parallel.decide(facts, settings, trials, precision)


def _fields(part: Holding | Parallelism | Capacity | Stepping | Speed) -> dict[str, Any]:
    return {item.name: getattr(part, item.name) for item in dataclasses.fields(part)}
