"""What shall be done with a machine: `make_plan` is pure, final, and gives a reason for every choice. Torch is not needed to decide.

It reads facts and settings and never changes a setting quietly: what is forced is honoured or `PlanImpossible` says why not.
The choices themselves are made in `holding`, `parallel`, `capacity` and `stepping`; what to expect of them is worked out in `speed`.
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

    `cpu_ids` is the mask the compute threads are confined to, before their pool starts; empty: leave them alone.
    `cuda_device` is nvidia-smi's number; `visible_devices` names it to the process, which then sees no other: torch's number of it is 0.
    `pack_folder` None: no packed weights are kept; `kernel_folder` None: nothing is compiled while serving, or it has no place.
    `batch_target_tokens`: up to so many tokens texts are put together; only one that is longer by itself makes a step of more.
    `itl_target_seconds` None: relative to the decode steps as they are measured while serving.
    `compile`: steps are run again natively from what was recorded of them, or replayed by a device.
    `most_few_rows`: up to so many rows four-bit weights multiply where an int8 copy lies beside them; None: as the recipe says.
    `capacity_tokens_per_second`: phase (`prefill`, `decode`) → rows of a step → tokens; empty where not measured, as `roofline_ratio`.
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
        return [(item.name, getattr(self, item.name)) for item in dataclasses.fields(self)]

    def to_json(self) -> dict[str, Any]:
        return {name: {"value": plain(decision.value), "reason": decision.reason} for name, decision in self.decisions()}

    def gpu(self, facts: Facts) -> CudaDevice | None:
        """What `cuda_device` names; instances of a divided GPU share its number, so their own names tell them apart."""
        here = [gpu for gpu in facts.cuda if gpu.index == self.cuda_device.value]
        return next((gpu for gpu in here if devices.name_of(gpu) == self.visible_devices.value), None)

    def environment(self) -> dict[str, str]:
        """Variables that the thread pools read when they load: set them before torch is imported."""
        threads = str(self.threads.value)
        return {
            "OMP_NUM_THREADS": threads,
            "OMP_DYNAMIC": "false",
            "OMP_PROC_BIND": "false",  # the mask of the worker thread is enough; binding would pin the event loop too
            "MKL_NUM_THREADS": threads,
            "VECLIB_MAXIMUM_THREADS": threads,
            "OPENBLAS_NUM_THREADS": "1",  # NumPy's own pool has nothing to do
            "RAYON_NUM_THREADS": str(self.tokenizer_threads.value),
            "TOKENIZERS_PARALLELISM": "false",
            **parallel.WAITING[self.wait_policy.value],
            **self._of_device(),
        }

    def _of_device(self) -> dict[str, str]:
        """What torch and Triton read of a GPU: which one, and where to keep what was compiled for it, unless that is said already."""
        if self.device.value == "mps":
            return {"PYTORCH_ENABLE_MPS_FALLBACK": "0"}  # what torch lacks there is told, not moved to the processor
        variables = {"CUDA_VISIBLE_DEVICES": self.visible_devices.value, "TRITON_CACHE_DIR": self.kernel_folder.value}
        if "TRITON_CACHE_DIR" in os.environ:
            del variables["TRITON_CACHE_DIR"]
        ordered = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"} if self.device.value == "cuda" else {}  # where a number must do for a name
        return {**ordered, **{name: value for name, value in variables.items() if value is not None}}


def make_plan(
    facts: Facts, measurements: Measurements | None, settings: Settings, needs: Needs | None, recipes: Collection[RecipeKey]
) -> ServingPlan:
    """Decides everything. Raises `PlanImpossible` or `NoRecipe` with a sentence where what is asked cannot be."""
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
            raise refusal from None  # the processor cannot either


@dataclass(frozen=True, slots=True)
class _Asked:
    """What `make_plan` is given."""

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
