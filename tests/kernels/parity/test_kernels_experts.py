"""Routers and experts against their references at every level of this processor, in all forms and for odd sizes. A row's
result has the same bits alone as among others.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from armature_kernels.elementwise.routing import route, route_torch
from armature_kernels.elementwise.routing_rule import GroupRating, Routing, Scoring
from armature_kernels.linear.experts import ExpertForms, ExpertStack, run_experts_torch
from armature_kernels.linear.linear import FORMS, QUANTIZED_FORMS
from armature_kernels.native.library import native_library
from armature_kernels.native.recording import ResultPool, record_operations
from native_levels import at_level, levels

LEVELS = levels()
pytestmark = pytest.mark.skipif(not LEVELS, reason=native_library().reason)
at_every_level = pytest.mark.parametrize("level", LEVELS)
FORM_DTYPES = {
    "int4/32 double quantized": torch.bfloat16,
    "int4/32 with zero points": torch.bfloat16,
    "int8/32": torch.bfloat16,
    "panels": torch.bfloat16,
    "panels/fixed": torch.bfloat16,
    "panels/widened": torch.bfloat16,
    "panels/fp32": torch.float32,
}


@at_every_level
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("rating", ["best", "two best"])
@pytest.mark.parametrize("groups", [1, 4])
def test_routes_as_torch_does(level: str, scoring: Scoring, rating: GroupRating, groups: int) -> None:
    generator = torch.Generator().manual_seed(3)
    for count in (8, 60):
        for bias in (None, torch.randn(count, generator=generator)):
            routing = Routing(count, 4, scoring, bias is None, 2.5, 1e-20, groups, max(1, groups // 2), rating)
            logits = torch.randn(33, count + 1, generator=generator)
            with at_level(level):
                ids, weights = route(logits, routing, bias)
            expected_ids, expected = route_torch(logits, routing, bias)
            assert torch.equal(ids, expected_ids)
            torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-7)


@at_every_level
def test_sparsemixer_routes_as_transformers_does(level: str) -> None:
    from transformers.models.phimoe.modeling_phimoe import sparsemixer

    generator = torch.Generator().manual_seed(4)
    for count, jitter in ((5, 0.01), (16, 0.01), (16, 0.4), (60, 0.4)):
        logits = torch.randn(33, count + 1, generator=generator)[:, :count]
        logits[:3] -= 10  # all of them are negative
        logits[3] = 0
        routing = Routing(count, 2, "sparsemixer", renormalize=False, jitter=jitter)
        expected, expected_ids = sparsemixer(logits, jitter, training=False)
        with at_level(level):
            ids, weights = route(logits, routing)
        for found_ids, found in ((ids, weights), route_torch(logits, routing)):
            assert torch.equal(found_ids, expected_ids)
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
        assert jitter < 0.1 or bool((weights < 0.9).any()), "several logits are near"


def test_equal_scores_select_the_lower_ids_and_nan_makes_nan() -> None:
    logits = torch.zeros(2, 6)
    logits[1, 2] = torch.nan
    ids, weights = route(logits, Routing(6, 3))
    assert ids.tolist()[0] == [0, 1, 2]
    torch.testing.assert_close(weights[0], torch.full((3,), 1 / 3))
    assert weights[1].isnan().all() and len(set(ids[1].tolist())) == 3


def _experts(name: str, hidden: int, inner: int, count: int, *, bias: bool, gates: bool = True) -> list[ExpertForms]:
    form = {**FORMS, **QUANTIZED_FORMS}[name]

    def packed(outputs: int, inputs: int) -> object:
        return form.pack(torch.randn(outputs, inputs) / inputs**0.5, torch.randn(outputs) if bias else None)

    return [ExpertForms(packed((1 + gates) * inner, hidden), packed(hidden, inner), gates) for _ in range(count)]  # type: ignore[arg-type]


def _routed(rows: int, count: int, k: int) -> tuple[Tensor, Tensor]:
    return torch.stack([torch.randperm(count)[:k] for _ in range(rows)]), torch.rand(rows, k)


@at_every_level
@pytest.mark.parametrize("name", FORM_DTYPES)
def test_experts_equal_the_reference(level: str, name: str) -> None:
    torch.manual_seed(0)
    dtype = FORM_DTYPES[name]
    with at_level(level):
        if not {**FORMS, **QUANTIZED_FORMS}[name].supports(64, 64, dtype):
            pytest.skip(f"{level} has no {name}")
        for hidden, inner, count, k in (
            (192, 96, 16, 4),
            (64, 96, 6, 3),
            (100, 44, 5, 3),
            (96, 64, 6, 3),
            (192, 96, 6, 1),
        ):
            activation = {192: "silu", 96: "relu2"}.get(hidden, "swiglu_oai")
            gates = activation != "relu2"
            experts = _experts(name, hidden, inner, count, bias=activation != "silu", gates=gates)
            experts = [one._replace(scales_inputs=k == 1) for one in experts]
            stack = ExpertStack.of(experts)
            assert stack is not None, "all forms are panels"
            for rows in (1, 7, 200):
                x, (ids, weights) = torch.randn(rows, hidden).to(dtype), _routed(rows, count, k)
                found = torch.randn(rows, hidden)
                expected = found.clone()
                stack.add_to(found, x, ids, weights, activation)
                run_experts_torch(experts, expected, x, ids, weights, activation)
                # The reference rounds what is between the two products to the model's dtype.
                tolerance = 1e-5 if dtype == torch.float32 else 0.02
                assert (found - expected).abs().max() < tolerance * expected.abs().max()


@at_every_level
@pytest.mark.parametrize("name", ["panels/fixed", "panels/fp32", "panels/widened"])
def test_a_row_has_the_same_bits_among_others(level: str, name: str) -> None:
    torch.manual_seed(1)
    dtype = FORM_DTYPES[name]
    with at_level(level):
        if not FORMS[name].supports(64, 64, dtype):
            pytest.skip(f"{level} has no {name}")
        stack = ExpertStack.of(_experts(name, 96, 64, 4, bias=False))
        assert stack is not None, "all forms are panels"
        x, (ids, weights) = torch.randn(70, 96).to(dtype), _routed(70, 4, 2)
        together = torch.zeros(70, 96)
        stack.add_to(together, x, ids, weights, "silu")
        for row in (0, 33, 69):
            alone, one = torch.zeros(1, 96), slice(row, row + 1)
            stack.add_to(alone, x[one], ids[one], weights[one], "silu")
            assert torch.equal(alone[0], together[row])


def test_a_recorded_operation_follows_other_routes() -> None:
    torch.manual_seed(2)
    experts = _experts("panels/fp32", 64, 32, 6, bias=False)
    stack = ExpertStack.of(experts)
    assert stack is not None, "all forms are panels"
    x, (ids, weights), hidden = torch.randn(5, 64), _routed(5, 6, 2), torch.zeros(5, 64)
    recorded = record_operations(ResultPool(), lambda: stack.add_to(hidden, x, ids, weights, "silu"))
    for _ in range(3):
        other_ids, other_weights = _routed(5, 6, 2)
        ids.copy_(other_ids), weights.copy_(other_weights)
        hidden.zero_()
        recorded.run()
        expected = torch.zeros(5, 64)
        run_experts_torch(experts, expected, x, ids, weights, "silu")
        torch.testing.assert_close(hidden, expected, rtol=1e-4, atol=1e-5)
