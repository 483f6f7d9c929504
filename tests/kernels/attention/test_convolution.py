"""Short convolutions with a state, against their definition: at every level, for each dtype, in any parts, with drafts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from armature_kernels.attention.convolution import convolve, convolve_torch
from armature_kernels.attention.recurrence import StateRun, StateStep
from armature_kernels.native.arguments import OpCode
from armature_kernels.native.operations import has_kernel
from native_levels import at_level, levels

LEVELS = levels()
# A prompt whose state is saved in its midst, one that is continued, one after which a draft is verified, and decodes between them.
RUNS = [
    StateRun(0, 1, 9, 2),
    StateRun(1, 3, 0, 0, saved=5),
    StateRun(4, 4, 3, 0),
    StateRun(8, 1, 1, 4),
    StateRun(9, 5, 3, 1),
    StateRun(14, 4, 6, 3, True),
]
TOKENS, SLOTS = 18, 6


def inputs_of(channels: int, dtype: torch.dtype) -> Tensor:
    made = torch.Generator().manual_seed(channels)
    return torch.randn(TOKENS, 3 * channels + 5, generator=made).to(dtype)[:, : 3 * channels]


def states_of(width: int, channels: int) -> Tensor:
    made = torch.Generator().manual_seed(width)
    return torch.randn(SLOTS, (width - 1) * channels + 16, generator=made)


def defined(x: Tensor, filters: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
    """One token after the other, channel by channel; and the states after all of them but drafts."""
    width, channels = filters.shape
    first, second, third = x.float().split(channels, 1)
    out, after = torch.empty(TOKENS, channels), states.clone()
    for run in RUNS:
        tail = after[run.slot, : (width - 1) * channels].view(width - 1, channels)
        known = list(tail.clone() if run.start else torch.zeros(width - 1, channels))
        for row in range(run.first, run.first + run.num_tokens):
            known.append(first[row] * third[row])
            last = known[len(known) - width :]
            out[row] = second[row] * sum(
                (one * own for one, own in zip(last, filters, strict=True)), torch.zeros(channels)
            )
        if not run.drafts:
            after[run.slot, : (width - 1) * channels] = torch.cat(known[len(known) - width + 1 :])
        if run.saved >= 0:
            after[run.saved, : (width - 1) * channels] = after[run.slot, : (width - 1) * channels]
    return out, after


def step_of(runs: list[StateRun]) -> StateStep:
    step = StateStep(1)
    step.fill(runs)
    return step


@pytest.mark.parametrize("level", ["torch", *LEVELS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("width", "channels"), [(3, 72), (2, 8), (4, 520), (8, 33)])
def test_it_equals_the_definition(level: str, dtype: torch.dtype, width: int, channels: int) -> None:
    x, states, kept = inputs_of(channels, dtype), states_of(width, channels), torch.zeros(TOKENS, channels)
    filters = torch.randn(width, channels, generator=torch.Generator().manual_seed(3))
    expected, after = defined(x, filters, states)
    accepted = StateRun(14, 3, 6, 3)
    products = x[:, :channels].float() * x[:, 2 * channels :].float()
    if level == "torch":
        found = convolve_torch(x, filters, states, RUNS, kept)
        torch.testing.assert_close(states[:, :-16], after[:, :-16], rtol=1e-5, atol=1e-5)
        convolve_torch(kept, filters, states, [accepted], gated=False)
    else:
        with at_level(level):
            assert has_kernel(OpCode.RECUR_INPUTS)
            found = convolve(x, filters, states, step_of(RUNS), kept)
            torch.testing.assert_close(states[:, :-16], after[:, :-16], rtol=1e-5, atol=1e-5)
            convolve(kept, filters, states, step_of([accepted]), gated=False)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    whole = torch.cat((after[3, : (width - 1) * channels].view(-1, channels), products[14:17]))
    torch.testing.assert_close(states[3, : (width - 1) * channels], whole[3:].flatten(), rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not LEVELS, reason="no native library")
def test_a_prompt_in_parts_has_the_bits_of_the_whole() -> None:
    x, filters, states = inputs_of(72, torch.bfloat16), torch.randn(3, 72), torch.empty(1, 144)
    whole = convolve(x, filters, states, step_of([StateRun(0, TOKENS, 0, 0)]))
    for cut in range(1, TOKENS):
        parts = [
            convolve(x[first:end], filters, states, step_of([StateRun(0, end - first, first, 0)]))
            for first, end in ((0, cut), (cut, TOKENS))
        ]
        assert torch.equal(torch.cat(parts), whole)
