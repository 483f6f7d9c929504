"""Packed weights of an x86 machine in the layout of i8mm, and the table of results."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from armature_kernels.linear.int_panels import IntPanelFactory, IntPanelLinear
from armature_kernels.linear.layout import LAYOUTS, PANEL_OUTPUTS
from armature_kernels.native.arguments import OpCode
from armature_kernels.native.operations import has_kernel
from hypothesis_examples import examples
from native_levels import at_level, levels
from tools.measure.arm64_quality import convert, table

FORMS = ("int8/32", "int4/32 double quantized", "int4/64 with zero points", "int8")
needs_kernels = pytest.mark.skipif(not has_kernel(OpCode.LINEAR_INT), reason="the native library has no kernels here")


def _codes(form: IntPanelLinear, block: int) -> Tensor:
    """The codes [panels, groups, outputs, inputs of a group], read one by one as csrc/ops.h describes the layout."""
    layout, groups, bits = form.packing.layout, form.padded // form.group, form.packing.bits
    panels, nbytes = (
        form.panels.view(-1, layout.panel_bytes(form.inputs)).tolist(),
        form.group * PANEL_OUTPUTS * bits // 8,
    )
    found = torch.empty(len(panels), groups, PANEL_OUTPUTS, form.group, dtype=torch.int16)
    for number, panel in enumerate(panels):
        end = len(panel) if layout.double_quantized else len(panel) // groups
        for g in range(groups):
            at = end - (groups - g) * nbytes if layout.double_quantized else (g + 1) * end - nbytes
            for output in range(PANEL_OUTPUTS):
                for k in range(form.group):
                    place, shift = _place(output, k, bits, block)
                    found[number, g, output, k] = panel[at + place] >> shift & (2**bits - 1)
    return found


def _place(output: int, k: int, bits: int, block: int) -> tuple[int, int]:
    """The byte of a code in its group, and the bits by which it is shifted."""
    half, o, eight, i = output // 16, output % 16, k // 8, k % 8
    if bits == 8:
        return eight * 256 + (i // 4 * 128 + half * 64 + o * 4 + i % 4 if block == 4 else half * 128 + o * 8 + i), 0
    if block == 4:
        return eight * 128 + half * 64 + o * 4 + i % 4, i // 4 * 4
    return eight * 128 + half * 64 + o % 8 * 8 + i, o // 8 * 4


def _packed(name: str, outputs: int, inputs: int) -> IntPanelLinear:
    layout = LAYOUTS[name]
    factory = IntPanelFactory(layout.bits, layout.group, layout.zero_points, layout.double_quantized)
    generator = torch.Generator().manual_seed(inputs)
    return factory.pack(torch.randn(outputs, inputs, generator=generator), None)


@needs_kernels
@pytest.mark.parametrize("name", FORMS)
@given(outputs=st.integers(1, 70), inputs=st.integers(1, 150))
@settings(max_examples=examples(12), deadline=None)
def test_codes_keep_their_values_and_scales_their_places(name: str, outputs: int, inputs: int) -> None:
    with at_level(next(level for level in levels() if level != "i8mm")):
        form = _packed(name, outputs, inputs)
    before, panels = _codes(form, 4), form.panels.clone()
    convert(form)
    assert torch.equal(_codes(form, 8), before)
    changed = (form.panels != panels).view(-1, form.packing.layout.panel_bytes(inputs)).any(0)
    scales = 64 if not form.packing.double_quantized else 64 + 32 * (form.padded // form.group)
    assert not changed[:scales].any()


@needs_kernels
@pytest.mark.arm64
@pytest.mark.skipif("i8mm" not in levels(), reason="this processor has no i8mm")
@pytest.mark.parametrize("name", FORMS)
def test_the_result_is_what_i8mm_packs(name: str) -> None:
    with at_level("dotprod"):
        form = _packed(name, 70, 150)
    convert(form)
    with at_level("i8mm"):
        assert torch.equal(form.panels, _packed(name, 70, 150).panels)


def test_the_table_compares_with_fp32_and_with_this_machine() -> None:
    exact = {"nats": 4 * math.log(10), "likeliest": [1, 2, 3, 4]}
    here = {"fp32": exact, "int8": {"nats": 4 * math.log(10.1), "likeliest": [1, 2, 3, 5]}}
    there = {"int8": {"nats": 4 * math.log(10.2), "likeliest": [1, 2, 0, 5]}}
    assert table({"x86, avx2": here, "neoverse-v1, i8mm": there}).splitlines() == [
        "4 tokens",
        "",
        "| processor, level | precision | perplexity over FP32 | same most likely token as FP32 | as x86 |",
        "|---|---|---|---|---|",
        "| x86, avx2 | int8 | 1.0100 | 75.0% | 100.0% |",
        "| neoverse-v1, i8mm | int8 | 1.0200 | 50.0% | 75.0% |",
    ]
