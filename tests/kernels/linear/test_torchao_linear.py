"""Products of weights that torchao quantized, against what the codes mean, and a model that nothing else serves."""

from __future__ import annotations

import logging
import subprocess
import sys
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from armature_kernels.errors import KernelError
from armature_kernels.linear.torchao_config import EXAMPLE, INT4_REFERENCE, INT8_REFERENCE
from armature_kernels.linear.torchao_linear import TorchaoFactory, build_config, check_runs, torchao_module
from external_tools import ROOT
from hypothesis_examples import examples

FORMATS = {
    INT8_REFERENCE: 1.1,
    INT4_REFERENCE: 0.66,
    EXAMPLE: 1.2,
    "torchao:Int8WeightOnlyConfig(granularity=PerGroup(32))": 1.2,
    "torchao:Int8DynamicActivationInt8WeightConfig": 1.1,
    "torchao:Int8DynamicActivationIntxWeightConfig": 1.2,
    "torchao:Float8WeightOnlyConfig": 1.1,
}
CPU = torch.device("cpu")


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 5, 33])
@pytest.mark.parametrize("name", FORMATS)
@torch.inference_mode()
def test_products_are_those_of_what_the_codes_mean(name: str, rows: int, with_bias: bool) -> None:
    """Within what rounding activations to BF16, or to eight bits, costs."""
    factory, generator = TorchaoFactory(name), torch.Generator().manual_seed(rows)
    weight, wide = torch.randn(48, 192, generator=generator), torch.randn(rows, 200, generator=generator).bfloat16()
    bias = torch.randn(48, generator=generator).bfloat16() if with_bias else None
    assert factory.supports(48, 192, torch.bfloat16)
    form, hidden, x = factory.pack(weight, bias), torch.ones(rows, 48), wide[:, :192]  # rows that lie apart
    # The products of the unit rows are the columns of the quantized weight.
    meant = factory.pack(weight, None).multiply(torch.eye(192).bfloat16()).float().T
    assert 0 < (meant - weight).norm() < 0.12 * weight.norm()
    expected = F.linear(x.float(), meant, None if bias is None else bias.float())
    form.add_to(hidden, x)
    product = form.multiply(x)
    assert product.dtype == torch.bfloat16 and product.shape == (rows, 48) and form.activation_group(rows) is None
    for result in (product.float(), hidden - 1):
        assert (result - expected).norm() <= 0.02 * expected.norm()
    assert form.nbytes <= FORMATS[name] * weight.numel() + 4 * 48


@given(
    outputs=st.integers(1, 80),
    inputs=st.integers(1, 8).map(lambda count: 32 * count),
    rows=st.integers(1, 16),
    with_bias=st.booleans(),
    extreme=st.sampled_from([1.0, 0.0, 1e30, 1e-30]),
)
@settings(max_examples=examples(60), deadline=None)
@torch.inference_mode()
def test_few_rows_of_int8_are_multiplied_as_torchao_does(
    outputs: int, inputs: int, rows: int, with_bias: bool, extreme: float
) -> None:
    """torch's product of codes, against torchao's, which converts the whole weight; both round to BF16."""
    generator = torch.Generator().manual_seed(outputs)
    weight, x = torch.randn(outputs, inputs, generator=generator), torch.randn(rows, 2 * inputs, generator=generator)
    x = (x * extreme).bfloat16()[:, :inputs]  # rows that lie apart
    bias = torch.randn(outputs, generator=generator) if with_bias else None
    form = TorchaoFactory(INT8_REFERENCE).pack(weight, bias)
    with mock.patch.object(form.module, "forward", side_effect=AssertionError):
        product = form.multiply(x)
    expected = form.module(x.to(form.module.weight.dtype).contiguous()).float()
    size = (x.float().abs() @ form.module.weight.dequantize().float().abs().T) + 2
    assert product.dtype == torch.bfloat16 and product.shape == (rows, outputs)
    assert bool(((product.float() - expected).abs() <= 2**-6 * size).all())


@torch.inference_mode()
def test_few_rows_of_int8_with_nan_give_nan_in_that_row_alone() -> None:
    x = torch.ones(3, 64).bfloat16()
    x[1, 5] = torch.nan
    product = TorchaoFactory(INT8_REFERENCE).pack(torch.randn(48, 64), None).multiply(x)
    assert bool(product[1].isnan().all()) and not product[::2].isnan().any()


@pytest.mark.parametrize(
    ("name", "rows", "inputs", "dtype"),
    [
        (INT8_REFERENCE, 17, 64, torch.bfloat16),
        (INT8_REFERENCE, 1, 64, torch.float32),
        (INT8_REFERENCE, 1, 40, torch.bfloat16),
        ("torchao:Int8WeightOnlyConfig(granularity=PerGroup(32))", 1, 64, torch.bfloat16),
        ("torchao:Int8DynamicActivationInt8WeightConfig", 1, 64, torch.bfloat16),
        ("torchao:IntxWeightOnlyConfig", 1, 64, torch.bfloat16),
    ],
)
@torch.inference_mode()
def test_torchao_multiplies_the_rest(name: str, rows: int, inputs: int, dtype: torch.dtype) -> None:
    form = TorchaoFactory(name).pack(torch.randn(48, inputs), None)
    x = torch.randn(rows, inputs).to(dtype)
    assert torch.equal(form.multiply(x), form.module(x.to(form.module.weight.dtype)).to(dtype))
    with mock.patch.object(form.module, "forward", side_effect=AssertionError), pytest.raises(AssertionError):
        form.multiply(x)


def test_a_weight_that_is_reused_does_not_change_the_form() -> None:
    weight, x = torch.randn(48, 64), torch.randn(3, 64).bfloat16()
    form = TorchaoFactory(INT8_REFERENCE).pack(weight, None)
    before = form.multiply(x)
    weight.zero_()
    assert torch.equal(form.multiply(x), before)


def test_sizes_without_whole_groups_are_not_offered() -> None:
    int4 = TorchaoFactory(INT4_REFERENCE)
    assert int4.supports(48, 64, torch.bfloat16)
    assert not int4.supports(48, 40, torch.bfloat16) and not int4.supports(24, 64, torch.bfloat16)
    assert not TorchaoFactory("torchao:PrototypeInt4WeightOnlyConfig").supports(48, 64, torch.bfloat16)  # groups of 128
    assert TorchaoFactory(INT8_REFERENCE).supports(24, 40, torch.bfloat16)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "torchao:Int4WeightOnlyConfig(group_size=64, int4_packing_format=plain_int32)",
            "does not support device 'cpu'",
        ),
        ("torchao:IntxWeightOnlyConfig(weight_dtype=int9)", "weight_dtype must be torch.intx"),
        ("torchao:IntxWeightOnlyConfig(bits=4)", "no argument 'bits'; it has weight_dtype, granularity"),
        ("torchao:IntxWeightOnlyConfig(mapping_type=round)", "mapping_type is 'round'; it may be symmetric"),
        ("torchao:Int8WeightOnlyConfig(granularity=PerGroup)", "group_size"),
    ],
)
def test_a_config_that_cannot_run_is_refused_in_the_words_of_torchao(name: str, words: str) -> None:
    with pytest.raises(KernelError) as caught:
        check_runs(name, CPU, torch.float32)
    assert words in caught.value.message and name in caught.value.message


def test_arguments_become_those_of_the_config() -> None:
    config = build_config(
        "torchao:IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(64), mapping_type=asymmetric)"
    )
    quantization = torchao_module("torchao.quantization")
    assert config == quantization.IntxWeightOnlyConfig(
        weight_dtype=torch.int4,
        granularity=quantization.PerGroup(64),
        mapping_type=quantization.MappingType.ASYMMETRIC,
    )
    assert build_config(INT8_REFERENCE).set_inductor_config is False  # it would change torch's settings


def test_other_messages_of_torchao_are_kept(caplog: pytest.LogCaptureFixture) -> None:
    torchao_module("torchao.quantization")
    caplog.set_level(logging.WARNING, logger="torchao")
    logging.getLogger("torchao").warning("Failed to load a weight")
    assert [record.getMessage() for record in caplog.records] == ["Failed to load a weight"]


@pytest.mark.full
def test_the_first_use_prints_nothing_and_nothing_imports_it_before() -> None:
    """In a process of its own, since torchao may be imported here already."""
    program = (
        "import sys, app.weights.load, app.server.prepare; assert 'torchao' not in sys.modules\n"
        "from armature_kernels.linear.torchao_linear import TorchaoFactory\n"
        f"assert not TorchaoFactory({INT8_REFERENCE!r}).refusal(); assert 'torchao' in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
