"""Recurrent layers against transformers' functions and the reference: at every level, for each dtype, in any parts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from armature_kernels.attention.convolution import convolve_torch
from armature_kernels.attention.device_recurrence import RowRun, StateRows, convolve_on_device, recur_on_device
from armature_kernels.attention.recurrence import (
    Recurrence,
    RecurrentInputs,
    StateRun,
    StateStep,
    kept_inputs,
    recur,
    recur_torch,
)
from armature_kernels.attention.recurrent_sizes import RecurrentSizes
from armature_kernels.elementwise.norms import GatedNorm, gated_norm, gated_norm_torch
from armature_kernels.linear.activations import QuantizedActivations, RowGroups, unpack_tiles
from armature_kernels.native.arguments import OpCode
from armature_kernels.native.operations import has_kernel
from native_levels import at_level, levels

LEVELS = levels()
DELTA, ODD_DELTA = RecurrentSizes(4, 2, 128, 128, 4, True), RecurrentSizes(6, 2, 20, 36, 3, True)
SCAN, ODD_SCAN = RecurrentSizes(8, 1, 64, 64, 4, False), RecurrentSizes(6, 3, 13, 10, 8, False)
SIZES = [DELTA, ODD_DELTA, SCAN, ODD_SCAN]
# Two prompts, one of them continued, and decodes between them.
RUNS = [StateRun(0, 1, 9, 2), StateRun(1, 7, 0, 0), StateRun(8, 1, 30, 4), StateRun(9, 5, 3, 1), StateRun(14, 1, 0, 3)]


def layer_of(sizes: RecurrentSizes) -> Recurrence:
    made = torch.Generator().manual_seed(sizes.heads)
    filters, bias = (
        torch.randn(sizes.width, sizes.channels, generator=made),
        torch.randn(sizes.channels, generator=made),
    )
    rates, steps = torch.rand(sizes.heads, generator=made) * 4, torch.randn(sizes.heads, generator=made)
    if sizes.has_delta:
        return Recurrence(sizes, filters, None, rates, steps, beta_scale=2.0 if sizes == ODD_DELTA else 1.0)
    return Recurrence(sizes, filters, bias, rates, steps, torch.randn(sizes.heads, generator=made), (0.05, 3.0), 0.7)


def inputs_of(sizes: RecurrentSizes, tokens: int, dtype: torch.dtype) -> RecurrentInputs:
    made = torch.Generator().manual_seed(tokens)
    wide = torch.randn(tokens, sizes.channels + sizes.heads + 3, generator=made).to(dtype)
    steps = wide[:, sizes.channels : sizes.channels + sizes.heads]
    betas = torch.randn(tokens, 2 * sizes.heads, generator=made).to(dtype)
    inputs = RecurrentInputs(wide[:, : sizes.channels], steps)
    return replace(inputs, steps=betas[:, sizes.heads :], betas=betas[:, : sizes.heads]) if sizes.has_delta else inputs


def states_of(sizes: RecurrentSizes, slots: int = 5) -> Tensor:
    """States of earlier tokens; padding is zero, as the kernels leave it."""
    known, before = torch.full((slots, sizes.state_elements + 16), torch.nan)[:, : sizes.state_elements], StateStep()
    inputs, layer = inputs_of(sizes, 4 * slots, torch.float32), layer_of(sizes)
    before.fill([StateRun(4 * slot, 4, 0, slot) for slot in range(slots)])
    recur_torch(inputs, layer, known, before.runs)
    return known


def step_of(runs: Sequence[StateRun]) -> StateStep:
    step = StateStep(2)  # a step with more sequences than expected
    step.fill(runs)
    return step


@pytest.mark.parametrize("sizes", [DELTA, ODD_DELTA], ids=["even", "odd"])
def test_the_delta_rule_equals_transformers(sizes: RecurrentSizes) -> None:
    from transformers.models.qwen3_next import modeling_qwen3_next as reference

    layer, inputs, tokens = layer_of(sizes), inputs_of(sizes, 70, torch.float32), 70
    mixed = reference.causal_conv1d_fn(inputs.channels.T[None], layer.filters.T.contiguous(), None, "silu")[0].T
    query, key, value = mixed.split((sizes.keys, sizes.keys, sizes.values), 1)
    assert inputs.betas is not None
    expected, _ = reference.torch_chunk_gated_delta_rule(
        query.reshape(1, tokens, sizes.key_heads, -1),
        key.reshape(1, tokens, sizes.key_heads, -1),
        value.reshape(1, tokens, sizes.heads, -1),
        (-layer.rates * torch.nn.functional.softplus(inputs.steps + layer.step_bias))[None],
        (inputs.betas.sigmoid() * layer.beta_scale)[None],
        use_qk_l2norm_in_kernel=True,
    )
    states = torch.empty(1, sizes.state_elements)
    found = recur_torch(inputs, layer, states, [StateRun(0, tokens, 0, 0)])
    torch.testing.assert_close(found, expected[0].flatten(1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("sizes", [SCAN, ODD_SCAN], ids=["even", "odd"])
def test_the_scan_equals_transformers(sizes: RecurrentSizes) -> None:
    from transformers.models.bamba import modeling_bamba as reference

    layer, inputs, tokens = layer_of(sizes), inputs_of(sizes, 70, torch.float32), 70
    mixed = reference.causal_conv1d_fn(inputs.channels.T[None], layer.filters.T.contiguous(), layer.bias, "silu")[0].T
    value, key, query = mixed.split((sizes.values, sizes.keys, sizes.keys), 1)
    expected = reference.mamba2_chunk_scan(
        value.reshape(1, tokens, sizes.heads, -1),
        inputs.steps[None] * layer.step_scale,
        -layer.rates,
        key.reshape(1, tokens, sizes.key_heads, -1),
        query.reshape(1, tokens, sizes.key_heads, -1),
        chunk_size=16,
        D=layer.skips,
        dt_bias=layer.step_bias,
        dt_softplus=True,
        dt_limit=layer.step_limits,
    )
    states = torch.empty(1, sizes.state_elements)
    found = recur_torch(inputs, layer, states, [StateRun(0, tokens, 0, 0)])
    torch.testing.assert_close(found, expected[0].flatten(1), rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not LEVELS, reason="no native library")
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", SIZES, ids=["delta", "odd-delta", "scan", "odd-scan"])
def test_the_kernels_equal_the_reference(level: str, dtype: torch.dtype, sizes: RecurrentSizes) -> None:
    layer, inputs, expected_states = layer_of(sizes), inputs_of(sizes, 15, dtype), states_of(sizes)
    states = expected_states.clone()
    expected = recur_torch(inputs, layer, expected_states, RUNS)
    with at_level(level):
        assert has_kernel(OpCode.RECUR)
        found = recur(inputs, layer, states, step_of(RUNS))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(states, expected_states, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not LEVELS, reason="no native library")
@pytest.mark.parametrize("sizes", [ODD_DELTA, ODD_SCAN], ids=["delta", "scan"])
def test_a_prompt_in_parts_by_token_has_the_bits_of_the_whole(sizes: RecurrentSizes) -> None:
    layer, inputs, tokens = layer_of(sizes), inputs_of(sizes, 12, torch.bfloat16), 12
    whole, states = torch.empty(1, sizes.state_elements), torch.empty(2, sizes.state_elements)
    expected = recur(inputs, layer, whole, step_of([StateRun(0, tokens, 0, 0)]), by_token=True)
    for cut in range(1, tokens):
        parts = []
        for first, end in ((0, cut), (cut, tokens)):
            rows = [None if one is None else one[first:end] for one in (inputs.channels, inputs.steps, inputs.betas)]
            assert rows[0] is not None and rows[1] is not None
            part = RecurrentInputs(rows[0], rows[1], rows[2])
            parts.append(recur(part, layer, states, step_of([StateRun(0, end - first, first, 1)]), by_token=True))
        assert torch.equal(torch.cat(parts), expected)
        assert torch.equal(states[1, sizes.tail_elements :], whole[0, sizes.tail_elements :])


@pytest.mark.skipif(not LEVELS, reason="no native library")
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("sizes", SIZES, ids=["delta", "odd-delta", "scan", "odd-scan"])
@pytest.mark.parametrize("by_token", [False, True], ids=["chunks", "tokens"])
def test_drafts_leave_the_state_and_accepted_ones_advance_it(level: str, sizes: RecurrentSizes, by_token: bool) -> None:
    """Beside a sequence without drafts; `RUNS` with other draft tokens, of which the first tokens are accepted."""
    drafted = [replace(run, drafts=run.num_tokens > 1 and run.start > 0) for run in RUNS]
    drafted[1] = replace(drafted[1], start=6, drafts=True)
    accepted = [replace(drafted[1], num_tokens=2, drafts=False), replace(drafted[3], num_tokens=5, drafts=False)]
    layer, inputs, expected_states = layer_of(sizes), inputs_of(sizes, 15, torch.bfloat16), states_of(sizes)
    states, before = expected_states.clone(), expected_states.clone()
    known, kept = (torch.full((15, sizes.input_elements), torch.nan) for _ in range(2))
    expected = recur_torch(inputs, layer, expected_states, drafted, known)
    with at_level(level):
        found = recur(inputs, layer, states, step_of(drafted), by_token, kept)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        assert torch.equal(states[[0, 1]], before[[0, 1]]) and not torch.equal(states[2:], before[2:])
        recur(kept_inputs(kept, sizes), layer, states, step_of(accepted), by_token)
    recur_torch(kept_inputs(known, sizes), layer, expected_states, accepted)
    plain = [
        replace(run, num_tokens=accepted[run.slot].num_tokens if run.drafts else run.num_tokens, drafts=False)
        for run in drafted
    ]
    again = before.clone()
    recur_torch(inputs, layer, again, plain)
    torch.testing.assert_close(expected_states, again, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(states, again, rtol=1e-4, atol=1e-4)


# Chunks have 32 tokens and less than 4 are no chunk; keys of more than 256 elements are computed by torch.
LARGE_DELTA = RecurrentSizes(2, 1, 256, 36, 2, True)


@pytest.mark.skipif(not LEVELS, reason="no native library")
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("sizes", [*SIZES, LARGE_DELTA], ids=["delta", "odd-delta", "scan", "odd-scan", "large-delta"])
def test_chunks_equal_tokens_one_after_the_other(level: str, sizes: RecurrentSizes) -> None:
    counts = (1, 3, 4, 31, 32, 33, 70)
    runs, first = [], 0
    for slot, count in enumerate(counts):
        runs.append(StateRun(first, count, slot % 2, slot))
        first += count
    layer, inputs, expected_states = (
        layer_of(sizes),
        inputs_of(sizes, first, torch.float32),
        states_of(sizes, len(runs)),
    )
    states = expected_states.clone()
    expected = recur_torch(inputs, layer, expected_states, runs)
    with at_level(level):
        found = recur(inputs, layer, states, step_of(runs))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(states, expected_states, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not LEVELS, reason="no native library")
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("sizes", SIZES, ids=["delta", "odd-delta", "scan", "odd-scan"])
def test_a_step_saves_states_and_goes_on(level: str, sizes: RecurrentSizes) -> None:
    """One prompt in three runs of one step, whose states are in slots of their own then."""
    layer, inputs = layer_of(sizes), inputs_of(sizes, 70, torch.bfloat16)
    runs = [StateRun(0, 33, 0, 0, saved=1), StateRun(33, 1, 33, 0, saved=2), StateRun(34, 36, 34, 0)]
    states = torch.zeros(3, sizes.state_elements)
    with at_level(level):
        found = recur(inputs, layer, states, step_of(runs))
    for slot, end in ((1, 33), (2, 34), (0, 70)):
        known = torch.zeros(1, sizes.state_elements)
        expected = recur_torch(inputs, layer, known, [StateRun(0, end, 0, 0)])
        torch.testing.assert_close(states[slot], known[0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found[:end], expected[:end], rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not LEVELS, reason="no native library")
@pytest.mark.parametrize("sizes", [ODD_DELTA, ODD_SCAN], ids=["delta", "scan"])
@pytest.mark.parametrize("rate", [0.0, 300.0], ids=["no decay", "decays of zero"])
def test_chunks_bear_extreme_decays(sizes: RecurrentSizes, rate: float) -> None:
    layer, inputs = layer_of(sizes), inputs_of(sizes, 70, torch.float32)
    layer = replace(layer, rates=torch.full_like(layer.rates, rate))
    known, states = torch.empty(1, sizes.state_elements), torch.empty(1, sizes.state_elements)
    expected = recur_torch(inputs, layer, known, [StateRun(0, 70, 0, 0)])
    found = recur(inputs, layer, states, step_of([StateRun(0, 70, 0, 0)]))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)


NORMS = {
    "each head": (GatedNorm("silu", 36, torch.rand(36) + 0.5, 1e-6), 216),
    "groups": (GatedNorm("silu", 20, torch.rand(60) + 0.5, 1e-5, gate_first=True), 60),
    "one group": (GatedNorm("silu", 1536, torch.rand(1536) + 0.5, 1e-5, gate_first=True, gate_scale=0.7), 1536),
    "no norm": (GatedNorm("silu", 0, torch.rand(100), gate_scale=1.3), 100),
    "a gate alone": (GatedNorm("sigmoid"), 1100),
}


@pytest.mark.skipif(not LEVELS, reason="no native library")
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NORMS)
def test_gated_norms_equal_the_reference(level: str, dtype: torch.dtype, name: str) -> None:
    norm, size = NORMS[name]
    made = torch.Generator().manual_seed(size)
    x, gates = torch.randn(5, size, generator=made), torch.randn(5, size + 3, generator=made).to(dtype)[:, :size]
    expected = gated_norm_torch(x, gates, norm)
    with at_level(level):
        assert has_kernel(OpCode.GATED_NORM)
        found = gated_norm(x, gates, norm, dtype)
        codes = gated_norm(x, gates, norm, dtype, RowGroups(32))
        assert isinstance(found, torch.Tensor) and isinstance(codes, QuantizedActivations)
        whole, scales = unpack_tiles(codes)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(found.float(), expected, rtol=tolerance, atol=tolerance)
    rounded = (whole * scales[..., None]).flatten(1)[:, :size]
    assert float((rounded - expected).abs().max()) <= float(scales.max()) * 0.51
    assert math.isfinite(float(scales.sum()))


# On a device: two sequences of one token, a new prompt longer than two chunks, the rest of another one, and draft tokens. Slot s reads
# row 2 s, where the reference has its state, and writes the next one; row 10 is zero.
DEVICE_TOKENS = 2 + 150 + 9 + 4
READS, WRITES = torch.tensor([0, 2]), torch.tensor([1, 3])
DEVICE_ROWS = StateRows(READS, WRITES, [RowRun(2, 150, 10, 5), RowRun(152, 9, 6, 7), RowRun(161, 4, 8, -1)])
DEVICE_RUNS = [
    StateRun(0, 1, 9, 0),
    StateRun(1, 1, 30, 2),
    StateRun(2, 150, 0, 4),
    StateRun(152, 9, 5, 6),
    StateRun(161, 4, 7, 8, drafts=True),
]


def device_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-4)


def written(states: torch.Tensor) -> torch.Tensor:
    return states[[1, 3, 5, 7]]


@pytest.mark.parametrize("sizes", [ODD_DELTA, ODD_SCAN])
def test_chunks_and_single_tokens_give_what_tokens_give(sizes: RecurrentSizes) -> None:
    layer, inputs = layer_of(sizes), inputs_of(sizes, DEVICE_TOKENS, torch.float32)
    plain = torch.zeros(12, sizes.state_elements)
    recur_torch(inputs, layer, plain, [StateRun(5 * slot, 5, 0, 2 * slot) for slot in range(5)])
    states, kept, known = plain.clone(), *(torch.zeros(DEVICE_TOKENS, sizes.input_elements) for _ in range(2))
    before = states[8].clone()
    device_close(
        recur_on_device(inputs, layer, states, DEVICE_ROWS, kept), recur_torch(inputs, layer, plain, DEVICE_RUNS, known)
    )
    device_close(written(states), plain[[0, 2, 4, 6]])
    assert torch.equal(kept, known) and torch.equal(states[8], before)
    recur_torch(kept_inputs(known, sizes), layer, plain, [StateRun(161, 3, 7, 8)])
    accepted = StateRows(READS[:0], WRITES[:0], [RowRun(161, 3, 8, 9)])
    recur_on_device(kept_inputs(kept, sizes), layer, states, accepted)
    device_close(states[9], plain[8])


def test_a_short_convolution_goes_on_from_its_rows() -> None:
    made = torch.Generator().manual_seed(0)
    x, filters = torch.randn(DEVICE_TOKENS, 3 * 24, generator=made), torch.randn(3, 24, generator=made)
    plain = torch.randn(12, 2 * 24, generator=made)
    plain[10] = 0.0
    states, kept, known = plain.clone(), *(torch.zeros(DEVICE_TOKENS, 24) for _ in range(2))
    device_close(
        convolve_on_device(x, filters, states, DEVICE_ROWS, kept), convolve_torch(x, filters, plain, DEVICE_RUNS, known)
    )
    device_close(written(states), plain[[0, 2, 4, 6]])
    assert torch.equal(kept, known)
