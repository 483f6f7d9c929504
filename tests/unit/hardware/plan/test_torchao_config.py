"""The setting `quantization`: what is read from it, what is refused and in which words, and what the plan makes of it."""

from __future__ import annotations

import importlib

import pytest

from app.errors import PlanImpossible
from app.hardware.plan import torchao_config
from app.hardware.plan.torchao_config import CONFIGS, EXAMPLE, ConfigCall, parse_config
from app.kernels.linear.torchao_linear import torchao_module


def test_names_constants_and_granularities_are_read() -> None:
    text = "torchao:IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32), scale_dtype=None, version=-2)"
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
    with pytest.raises(PlanImpossible) as caught:
        parse_config(text)
    assert EXAMPLE in caught.value.message and len(caught.value.message) < 500


@pytest.mark.parametrize("name", ["Int9WeightOnlyConfig", "quantize_", "Int8StaticActivationInt8WeightConfig"])
def test_an_unknown_name_lists_the_known_ones(name: str) -> None:
    with pytest.raises(PlanImpossible) as caught:
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
