"""Any measurement gives a plan or a sentence that says why not; a model that fits before measuring fits afterwards."""

from __future__ import annotations

import dataclasses
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from app.errors import NoRecipe, PlanImpossible
from app.hardware.decision import Measurements, TrialTimes
from app.hardware.facts import NativeLibrary, Needs
from app.hardware.plan.plan import ServingPlan, make_plan
from app.settings import Settings, settings_with
from hypothesis_examples import examples
from planned_machines import GIB, RECIPES, machine

NUMBERS = st.floats(allow_nan=True, allow_infinity=True) | st.floats(1e-6, 10)
TABLES = st.dictionaries(st.integers(-1, 2048), NUMBERS, max_size=6)
TRIALS = st.builds(
    TrialTimes, st.sampled_from(["fp32", "bf16", "int8", "int4", "?"]), st.integers(-1, 9), TABLES, TABLES, NUMBERS,
    st.integers(0, 10**10), NUMBERS, st.booleans(), NUMBERS, st.just({}) | TABLES,
)  # fmt: skip
MEASURED = st.builds(
    Measurements,
    st.none() | NUMBERS,
    st.dictionaries(st.sampled_from(["bf16", "int8", "int4"]), NUMBERS),
    st.lists(TRIALS, max_size=6).map(tuple),
    st.none() | st.integers(0, 100),
    NUMBERS,
    st.sampled_from(["", "the machine is busy"]),
)
ASKED = st.fixed_dictionaries(
    {},
    optional={
        "precision": st.sampled_from(["fp32", "bf16", "int8", "int4"]),
        "threads": st.integers(1, 9),
        "int8_copy": st.sampled_from(["on", "off"]),
        "kv_precision": st.sampled_from(["bf16", "int8"]),
        "max_batch_tokens": st.integers(1, 1000),
        "max_running_seqs": st.integers(1, 1000),
        "compile": st.sampled_from(["on", "off"]),
        "deterministic": st.sampled_from(["on", "off"]),
        "quality_budget": st.sampled_from([0, 0.03]),
        "keep_layers": st.just("lm_head=int8"),
        "max_model_len": st.sampled_from([512, 8192]),
        "kv_cache_bytes": st.sampled_from([2**28, 2**30]),
    },
)


@settings(deadline=None, max_examples=examples(150))
@given(MEASURED, ASKED, st.integers(GIB, 8 * GIB), st.sampled_from(["decoder", "encoder"]), st.booleans())
def test_a_plan_can_be_made_of_anything(
    measurements: Measurements, asked: dict[str, Any], memory: int, kind: Any, has_bf16: bool
) -> None:
    needs = Needs(
        kind, "X", 10**9, 2 * 10**9, {"fp32": 4 * 10**9, "bf16": 2 * 10**9, "int8": 10**9, "int4": 5 * 10**8},
        16384 if kind == "decoder" else 0, 8192 if kind == "decoder" else 100, 16, 2048, 32_000, "bfloat16", 9 * 10**8, 4,
    )  # fmt: skip
    host = machine(memory=memory, native=NativeLibrary(("avx2", "portable"), None))
    if not has_bf16:
        host = dataclasses.replace(host, isa=frozenset("sse4_2 popcnt avx avx2 fma".split()))
    if kind == "encoder":
        asked = {name: value for name, value in asked.items() if name not in settings_with(generates_only=True)}
    provisional: ServingPlan | None
    try:
        provisional = make_plan(host, None, Settings(**asked), needs, RECIPES)
    except (PlanImpossible, NoRecipe):
        provisional = None
    try:
        final = make_plan(host, measurements, Settings(**asked), needs, RECIPES)
    except (PlanImpossible, NoRecipe):
        assert provisional is None, "what was planned before measuring can still be served afterwards"
        return
    assert provisional is not None, "and what is refused at once could not be served afterwards either"
    assert final.cpu.threads <= provisional.cpu.threads
    assert final.memory.weight_bytes + final.memory.kv_cache_bytes < memory
    assert final.memory.max_running_seqs <= final.memory.max_batch_tokens
    assert final.memory.batch_target_tokens <= final.memory.max_batch_tokens
    assert kind == "decoder" or final.memory.max_model_len <= final.memory.max_batch_tokens, "no text is ever divided"
    for decision in final.decisions.values():
        assert decision.reason.endswith(".")
