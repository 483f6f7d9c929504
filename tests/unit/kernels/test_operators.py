"""Our kernels as operators: schema, shapes without data, and a compiled block that says what the eager one does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from app.kernels import operators
from app.kernels.elementwise import norms
from app.kernels.elementwise.activations import TopLogitsRequest
from app.kernels.linear.activations import quantise
from app.kernels.linear.int_panels import (
    IntPanelFactory,
    IntPanelLinear,
)
from app.kernels.native.library import native_library
from app.kernels.native.operations import (
    OpCode,
    has_kernel,
)

EPS = 1e-5
needs_library = pytest.mark.skipif(not has_kernel(OpCode.LINEAR_INT), reason="no native kernels here")
whole_tiles = pytest.mark.skipif(
    native_library().align > 1, reason="rows that fill up a tile are not initialised, which a comparison sees"
)


def form_of(outputs: int, inputs: int, bits: int = 4, zero_points: bool = False, bias: bool = False) -> IntPanelLinear:
    packing = IntPanelFactory(bits, None if bits == 8 else 32, zero_points)
    return packing.pack(torch.randn(outputs, inputs) / inputs**0.5, torch.randn(outputs) if bias else None)


def product_of(form: IntPanelLinear, x: Tensor) -> tuple[Any, ...]:
    panels, bias, sizes, zero_points = operators.form_arguments(form)
    rows = quantise(x, form.group)
    return ([rows.codes, rows.scales, rows.sums], panels, bias, len(x), sizes, zero_points)


def cases() -> list[tuple[Any, Callable[[], tuple[Any, ...]]]]:
    """Operators with arguments; numbers of rows below and above a tile's."""
    return [
        (operators.rms_norm_op, lambda: (torch.randn(3, 40), torch.randn(40), EPS)),
        (operators.gate_op, lambda: (torch.randn(3, 2 * 40).bfloat16(), "gelu_tanh")),
    ]


def cases_of_library() -> list[tuple[Any, Callable[[], tuple[Any, ...]]]]:
    return [
        (operators.quantise_op, lambda: (torch.randn(21, 100).bfloat16(), 32)),
        (operators.rms_norm_quantised_op, lambda: (torch.randn(5, 100), torch.randn(100), EPS, 64)),
        (operators.gate_quantised_op, lambda: (torch.randn(9, 2 * 100).bfloat16(), "silu", 32)),
        (operators.linear_int_op, lambda: product_of(form_of(70, 100, bias=True), torch.randn(19, 100).bfloat16())),
        (operators.linear_int_op, lambda: product_of(form_of(70, 100, 8), torch.randn(2, 100).bfloat16())),
        (
            operators.top_logits_op,
            lambda: (*without_bias(product_of(form_of(70, 96, 4, True), torch.randn(3, 96).bfloat16())), 5),
        ),
    ]


def without_bias(product: tuple[Any, ...]) -> tuple[Any, ...]:
    return (*product[:2], *product[3:])


def name_of(value: Any) -> str | None:
    return str(value._name) if hasattr(value, "_name") else None


@pytest.mark.parametrize(("operator", "arguments"), cases(), ids=name_of)
def test_an_operator_is_what_torch_asks_of_one(operator: Any, arguments: Callable[[], tuple[Any, ...]]) -> None:
    torch.library.opcheck(operator, arguments())


@needs_library
@whole_tiles
@pytest.mark.parametrize(("operator", "arguments"), cases_of_library(), ids=name_of)
def test_so_is_one_that_the_library_alone_has(operator: Any, arguments: Callable[[], tuple[Any, ...]]) -> None:
    torch.library.opcheck(operator, arguments())


class Block(torch.nn.Module):
    """hidden + down(act(gate x) * up x) of a norm's x, by operators alone."""

    def __init__(self, size: int, inner: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(size), requires_grad=False)
        self.forms = form_of(2 * inner, size), form_of(size, inner, 8, bias=True)

    def forward(self, hidden: Tensor) -> Tensor:
        (gate_up, down), rows = self.forms, hidden.shape[0]
        x = torch.ops.armature.rms_norm_quantised(hidden, self.weight, EPS, gate_up.group)
        panels, bias, sizes, zero_points = operators.form_arguments(gate_up)
        both = torch.ops.armature.linear_int(x, panels, bias, rows, sizes, zero_points)
        y = torch.ops.armature.gate_quantised(both, "silu", down.group)
        panels, bias, sizes, zero_points = operators.form_arguments(down)
        return hidden + torch.ops.armature.linear_int(y, panels, bias, rows, sizes, zero_points)

    def directly(self, hidden: Tensor) -> Tensor:
        """As a step does it: the functions themselves."""
        gate_up, down = self.forms
        x = norms.rms_norm(hidden, self.weight, EPS, torch.bfloat16, gate_up.group)
        return hidden + down.multiply(norms.gate(gate_up.multiply(x), "silu", down.group))


@needs_library
@torch.inference_mode()
def test_a_compiled_block_says_what_an_eager_one_does() -> None:
    block = Block(96, 160)
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True, dynamic=True)
    for rows in (1, 2, 7, 33):
        hidden = torch.randn(rows, 96)
        assert torch.equal(compiled(hidden), block.directly(hidden))
        assert torch.equal(block(hidden), block.directly(hidden))


@needs_library
def test_the_best_are_those_of_the_form() -> None:
    form, x = form_of(300, 64), torch.randn(4, 64).bfloat16()
    values, ids = operators.top_logits_op(*without_bias(product_of(form, x)), 6)
    best = form.top_logits(x, TopLogitsRequest(6))
    assert torch.equal(values, best.values)
    assert torch.equal(ids, best.ids)


def test_norm_and_gate_are_their_twins_where_there_is_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norms, "has_kernel", lambda code: False)
    hidden, weight, gate_up = torch.randn(3, 40), torch.randn(40), torch.randn(3, 80).bfloat16()
    meant = norms.rms_norm_torch(hidden, weight, EPS, torch.bfloat16)
    assert torch.equal(torch.ops.armature.rms_norm(hidden, weight, EPS), meant)
    assert torch.equal(torch.ops.armature.gate(gate_up, "gelu"), norms.gate_torch(gate_up, "gelu"))
