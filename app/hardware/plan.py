"""What shall be done with a machine: `make_plan` is pure, final, and gives a reason for every choice. Torch is not needed to decide.

It reads facts and settings and never changes a setting quietly: what is forced is honoured or `PlanImpossible` says why not.
The choices themselves are made in `holding`, `parallel`, `capacity` and `stepping`; what to expect of them is worked out in `speed`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from app.hardware import (
    capacity,
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
from app.hardware.facts import Facts, Needs, plain
from app.hardware.holding import Holding
from app.hardware.numerics import check_torch_can_run
from app.hardware.parallel import Parallelism
from app.hardware.precision import Candidates, built_for
from app.hardware.room import Demand
from app.hardware.speed import Speed
from app.hardware.stepping import Stepping
from app.hardware.trials import Trials
from app.settings import Settings

__all__ = ["Decision", "Dtype", "Measurements", "RecipeKey", "ServingPlan", "check_torch_can_run", "make_plan"]


@dataclass(frozen=True, slots=True)
class ServingPlan:
    """Every choice for one process on one machine.

    `cpu_ids` is the mask the compute threads are confined to, before their pool starts; empty: leave them alone.
    `pack_folder` None: no packed weights are kept.
    `batch_target_tokens`: up to so many tokens texts are put together; only one that is longer by itself makes a step of more.
    `itl_target_seconds` None: relative to the decode steps as they are measured while serving.
    `compile`: steps are run again natively from what was recorded of them.
    `most_few_rows`: up to so many rows four-bit weights multiply where an int8 copy lies beside them; None: as the recipe says.
    `capacity_tokens_per_second`: phase (`prefill`, `decode`) → rows of a step → tokens; empty where not measured, as `roofline_ratio`.
    """

    device: Decision[str]
    cuda_device: Decision[int | None]
    precision: Decision[str]
    dtype: Decision[Dtype]
    int8_copy: Decision[bool]
    most_few_rows: Decision[int | None]
    pack_folder: Decision[str | None]
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
        }


def make_plan(
    facts: Facts, measurements: Measurements | None, settings: Settings, needs: Needs | None, recipes: Collection[RecipeKey]
) -> ServingPlan:
    """Decides everything. Raises `PlanImpossible` or `NoRecipe` with a sentence where what is asked cannot be."""
    check_torch_can_run(facts)
    place = devices.decide(facts, settings, needs, recipes)
    device = place.device
    kernels = native_library.kernels(facts)
    most = parallel.decide(facts, settings)
    node, trials = most.numa_node.value, Trials.of(measurements)
    built = built_for(recipes, device.value, facts.architecture, settings)
    held = holding.decide(Candidates(facts, settings, needs, node, built, kernels.value), trials, most.threads.value)
    precision, has_copy = held.precision.value, held.int8_copy.value
    threads = parallel.decide(facts, settings, trials, precision)
    timing = trials.serving(precision, threads.threads.value, int8_copy=has_copy)
    demand = Demand(needs, precision, held.kv_precision.value, node, has_copy)
    generates = needs is None or needs.generates
    decide = capacity.decide if generates else encoding.decide
    memory = decide(facts, settings, demand, timing)
    limits = speed.Limits(memory.batch_target_tokens.value, memory.max_running_seqs.value, memory.weight_bytes.value)
    return ServingPlan(
        device=device,
        cuda_device=place.cuda_device,
        kernels=kernels,
        **_fields(held),
        most_few_rows=int8_copy.most_few_rows(measurements, has_copy),
        pack_folder=numerics.pack_folder(settings, precision),
        **_fields(threads),
        **_fields(memory),
        **_fields(stepping.decide(settings, measurements, stepping.Served(needs, device.value, kernels.value, timing))),
        deterministic=numerics.deterministic(settings, precision, has_copy, kernels.value, generates),
        **_fields(speed.expect(measurements, speed.Served(needs, precision, limits, timing))),
    )


def _fields(part: Holding | Parallelism | Capacity | Stepping | Speed) -> dict[str, Any]:
    return {item.name: getattr(part, item.name) for item in dataclasses.fields(part)}
