"""The setting `quantization`: what is read from it, what is refused and in which words, and what the plan makes of it."""

from __future__ import annotations

import dataclasses
import importlib

import pytest

from app.errors import PlanImpossible
from app.hardware.facts import CudaDevice, NativeLibrary, Needs
from armature_kernels.errors import KernelError
from armature_kernels.linear import torchao_config
from armature_kernels.linear.torchao_config import (
    CONFIGS,
    EXAMPLE,
    INT4_REFERENCE,
    KLEIDI_INT4,
    ConfigCall,
    parse_config,
    stored_bytes_per_weight,
)
from armature_kernels.linear.torchao_linear import _group_size, build_config, torchao_module
from planned_machines import GIB, ON_GPUS, machine, plan


def test_names_constants_and_granularities_are_read() -> None:
    text = (
        "torchao:IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32), scale_dtype=None, version=-2)"
    )
    granularity = ConfigCall("PerGroup", (32,))
    expected = (("weight_dtype", "int4"), ("granularity", granularity), ("scale_dtype", None), ("version", -2))
    assert parse_config(text) == ConfigCall("IntxWeightOnlyConfig", (), expected)
    rows = (ConfigCall("PerTensor"), ConfigCall("PerRow"))
    text = "torchao:Int8DynamicActivationInt8WeightConfig(granularity=[PerTensor, PerRow()])"
    assert parse_config(text).keywords == (("granularity", rows),)
    assert parse_config("torchao: Int8WeightOnlyConfig") == parse_config("torchao:Int8WeightOnlyConfig()")


@pytest.mark.parametrize(
    "text",
    [
        "int8",
        "torchao:",
        "torchao:__import__('os').system('true')",
        "torchao:Int8WeightOnlyConfig(group_size=(lambda: 1)())",
        "torchao:Int8WeightOnlyConfig(granularity=open('x'))",
        "torchao:Int8WeightOnlyConfig(granularity=Int8WeightOnlyConfig())",
        "torchao:Int8WeightOnlyConfig(**arguments)",
        "torchao:Int8WeightOnlyConfig(32)",
        "torchao:os.Int8WeightOnlyConfig()",
        "torchao:Int8WeightOnlyConfig(group_size=a.b.c)",
        "torchao:Int8WeightOnlyConfig(version=" + "(" * 150,
        "torchao:Int8WeightOnlyConfig(version=" + "9" * torchao_config.MAX_LENGTH + ")",
        "torchao:Int8WeightOnlyConfig(group_size='\0')",
    ],
)
def test_anything_else_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(KernelError) as caught:
        parse_config(text)
    assert EXAMPLE in caught.value.message and len(caught.value.message) < 500


@pytest.mark.parametrize("name", ["Int9WeightOnlyConfig", "quantize_", "Int8StaticActivationInt8WeightConfig"])
def test_an_unknown_name_lists_the_known_ones(name: str) -> None:
    with pytest.raises(KernelError) as caught:
        parse_config(f"torchao:{name}")
    assert name in caught.value.message and all(known in caught.value.message for known in CONFIGS)


def test_the_table_has_every_weight_only_and_dynamic_config_of_torchao() -> None:
    stable = torchao_module("torchao.quantization")
    found = {name for name in dir(stable) if name.endswith("Config") and ("WeightOnly" in name or "Dynamic" in name)}
    assert found == {name for name, module in CONFIGS.items() if module == "torchao.quantization"}
    for name, module in CONFIGS.items():
        torchao_module(module)
        assert isinstance(getattr(importlib.import_module(module), name), type)
    granularity = torchao_module("torchao.quantization.granularity")
    assert all(isinstance(getattr(granularity, name), type) for name in torchao_config.GRANULARITIES)


def test_the_plan_names_the_format_and_why(llama_1b: Needs) -> None:
    planned = plan(machine(), llama_1b, quantization=EXAMPLE)
    assert planned.weights.precision == EXAMPLE and "torchao" in planned.decisions["precision"].reason
    assert (planned.weights.dtype, planned.weights.kv_precision) == ("bfloat16", "bf16")
    assert not planned.steps.compile and planned.weights.pack_folder is None and not planned.weights.int8_copy
    old = plan(machine(isa=frozenset({"avx", "avx2", "sse4_2", "popcnt"})), llama_1b, quantization=EXAMPLE)
    assert (old.weights.dtype, old.weights.kv_precision) == ("float32", "fp32")


@pytest.mark.parametrize(
    ("quantization", "bytes_per_weight"),
    [
        ("torchao:Int8WeightOnlyConfig", 1 + 5 / 2048),
        (EXAMPLE, 1 + 5 / 32),
        (INT4_REFERENCE, 0.5 + 5 / 32),
        ("torchao:PrototypeInt4WeightOnlyConfig", 0.5 + 5 / 128),
        (KLEIDI_INT4[32], 0.5 + 5 / 32),
        (KLEIDI_INT4[None], 0.5 + 5 / 2048),
        ("torchao:IntxWeightOnlyConfig(granularity=PerGroup(group_size=64))", 1 + 5 / 64),
        ("torchao:NVFP4WeightOnlyConfig", 0.5625),
        ("torchao:IntxWeightOnlyConfig(granularity=PerGroup(96))", None),
    ],
)
def test_bytes_of_a_weight_follow_from_the_config(quantization: str, bytes_per_weight: float | None) -> None:
    assert stored_bytes_per_weight(quantization, 2048) == bytes_per_weight


def test_the_plan_counts_codes_scales_and_the_exact_output_layer(llama_1b: Needs) -> None:
    layers, output = sum(llama_1b.layer_weights.values()), llama_1b.vocab_size * llama_1b.hidden_size
    norms = llama_1b.num_parameters - layers - output
    planned = plan(machine(), llama_1b, quantization=EXAMPLE)
    assert planned.memory.weight_bytes == layers * 37 // 32 + 2 * (output + norms)
    old = plan(machine(isa=frozenset({"avx", "avx2", "sse4_2", "popcnt"})), llama_1b, quantization=EXAMPLE)
    assert old.memory.weight_bytes == layers * 37 // 32 + 4 * output + 2 * norms
    of_96 = plan(machine(), llama_1b, quantization="torchao:IntxWeightOnlyConfig(granularity=PerGroup(96))")
    assert of_96.memory.weight_bytes == llama_1b.bytes_by_precision["bf16"]  # no layer has whole groups


def test_the_most_bytes_are_counted_for_a_model_of_unknown_layers(llama_1b: Needs) -> None:
    unknown = dataclasses.replace(llama_1b, layer_weights={})
    planned = plan(machine(), unknown, quantization=EXAMPLE)
    assert planned.memory.weight_bytes == max(llama_1b.bytes_by_precision.values())


def test_the_default_groups_are_those_of_torchao() -> None:
    for name in CONFIGS:
        if name.startswith(("MX", "NVFP4")):  # their blocks are part of the format
            continue
        size = _group_size(build_config(f"torchao:{name}"))
        assert torchao_config._GROUPS.get(name, 1) == size, name


@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8", "int4"])
def test_a_precision_beside_it_is_refused(llama_1b: Needs, precision: str) -> None:
    with pytest.raises(PlanImpossible, match=f"precision is {precision}: leave one of them out"):
        plan(machine(), llama_1b, quantization=EXAMPLE, precision=precision)


@pytest.mark.parametrize(
    ("others", "words"),
    [
        ({"deterministic": "on"}, "deterministic is on, but precision is torchao"),
        ({"int8_copy": "on"}, "only int4 weights have a copy"),
        ({"compile": "on"}, "torchao multiplies, and only native kernels can be recorded"),
    ],
)
def test_settings_that_need_our_products_are_refused(llama_1b: Needs, others: dict[str, str], words: str) -> None:
    host = machine(native=NativeLibrary(levels=("portable",)))
    with pytest.raises(PlanImpossible, match=words):
        plan(host, llama_1b, quantization=EXAMPLE, **others)


def test_exported_programs_are_refused(llama_1b: Needs) -> None:
    program = dataclasses.replace(llama_1b, kind="program", kv_elements_per_token=0)
    with pytest.raises(PlanImpossible, match="exported programs have no formats of torchao"):
        plan(machine(), program, quantization=EXAMPLE)


def test_text_that_is_no_config_is_refused_before_torch_is_needed(llama_1b: Needs) -> None:
    with pytest.raises(PlanImpossible, match="is no config of torchao"):
        plan(machine(), llama_1b, quantization="torchao:Int9WeightOnlyConfig")


def test_a_gpu_serves_it_too(llama_1b: Needs) -> None:
    gpu = CudaDevice(0, "NVIDIA H100", (9, 0), 80 * GIB, 79 * GIB, "GPU-1")
    planned = plan(machine(cuda=(gpu,)), llama_1b, ON_GPUS, quantization="torchao:Float8WeightOnlyConfig")
    assert (planned.placement.device, planned.weights.dtype) == ("cuda", "bfloat16")
    assert planned.weights.precision == "torchao:Float8WeightOnlyConfig"
