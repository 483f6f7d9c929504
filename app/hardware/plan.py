"""What shall be done with a machine: `make_plan` is pure, final, and gives a reason for every choice. Torch is not needed to decide.

It reads facts and settings and never changes a setting quietly: what is forced is honoured or `PlanImpossible` says why not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from app.hardware.facts import Facts, Needs, plain
from app.settings import Settings

T = TypeVar("T")
RecipeKey = tuple[str, str, str]  # device kind, CPU architecture, precision: the key of weights/recipes.py
Dtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True, slots=True)
class Decision(Generic[T]):
    """A choice and why it was made, in a sentence for the operator."""

    value: T
    reason: str


@dataclass(frozen=True, slots=True)
class Measurements:
    """What calibration measured on this very machine; empty where it did not run.

    `products_per_second` is the best rate by precision (multiply and add count as two); `step_seconds` is a decode step by rows.
    """

    read_bytes_per_second: float | None = None
    products_per_second: Mapping[str, float] = field(default_factory=dict)
    step_seconds: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ServingPlan:
    """Every choice for one process on one machine. `cpu_ids` empty: do not pin; `itl_target_seconds` None: relative to what is measured."""

    device: Decision[str]
    dtype: Decision[Dtype]
    precision: Decision[str]
    kv_precision: Decision[str]
    threads: Decision[int]
    cpu_ids: Decision[tuple[int, ...]]
    numa_node: Decision[int | None]
    wait_policy: Decision[str]
    interop_threads: Decision[int]
    tokenizer_threads: Decision[int]
    http_threads: Decision[int]
    max_model_len: Decision[int]
    max_running_seqs: Decision[int]
    max_batch_tokens: Decision[int]
    max_waiting_requests: Decision[int]
    kv_cache_bytes: Decision[int]
    itl_target_seconds: Decision[float | None]
    compile: Decision[bool]
    calibrate: Decision[bool]
    speculation: Decision[bool]
    deterministic: Decision[bool]

    def decisions(self) -> Iterable[tuple[str, Decision[Any]]]:
        return [(item.name, getattr(self, item.name)) for item in dataclasses.fields(self)]

    def to_json(self) -> dict[str, Any]:
        return {name: {"value": plain(decision.value), "reason": decision.reason} for name, decision in self.decisions()}

    def environment(self) -> dict[str, str]:
        """Variables that the thread pools read when they load: set them before torch is imported."""
        threads = str(self.threads.value)
        return {
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "OMP_WAIT_POLICY": self.wait_policy.value,
            "RAYON_NUM_THREADS": str(self.tokenizer_threads.value),
            "TOKENIZERS_PARALLELISM": "false",
        }


def make_plan(
    facts: Facts, measurements: Measurements | None, settings: Settings, needs: Needs | None, recipes: Collection[RecipeKey]
) -> ServingPlan:
    """Decides everything. Raises `PlanImpossible` or `NoRecipe` with a sentence where what is asked cannot be."""
    threads = len(facts.allowed_cpus) if settings.threads == "auto" else settings.threads
    length = needs.max_model_len if needs else 4096
    bf16 = bool(facts.isa & {"avx512_bf16", "amx_bf16", "bf16"})
    return ServingPlan(
        device=Decision("cpu", "The CPU is what is built."),
        dtype=Decision("bfloat16" if bf16 else "float32", "What the hardware multiplies."),
        precision=Decision("bf16" if bf16 else "fp32", "As the dtype."),
        kv_precision=Decision("bf16" if bf16 else "fp32", "As the dtype."),
        threads=Decision(max(1, threads), "Allowed CPUs."),
        cpu_ids=Decision((), "Not pinned."),
        numa_node=Decision(None, "One node."),
        wait_policy=Decision("passive", "Not decided yet."),
        interop_threads=Decision(1, "One step at a time."),
        tokenizer_threads=Decision(2, "Tokenising is short."),
        http_threads=Decision(4, "Handlers are asynchronous."),
        max_model_len=Decision(length if settings.max_model_len == "auto" else settings.max_model_len, "The model's."),
        max_running_seqs=Decision(64 if settings.max_running_seqs == "auto" else settings.max_running_seqs, "Default."),
        max_batch_tokens=Decision(512 if settings.max_batch_tokens == "auto" else settings.max_batch_tokens, "Default."),
        max_waiting_requests=Decision(
            256 if settings.max_waiting_requests == "auto" else settings.max_waiting_requests, "Default."
        ),
        kv_cache_bytes=Decision(2**30 if settings.kv_cache_bytes == "auto" else settings.kv_cache_bytes, "Default."),
        itl_target_seconds=Decision(None if settings.itl_target_ms == "auto" else settings.itl_target_ms / 1000, "Default."),
        compile=Decision(False, "Not built yet."),
        calibrate=Decision(False, "Not built yet."),
        speculation=Decision(False, "Not built yet."),
        deterministic=Decision(False, "Not asked for."),
    )
