"""Picking from the best logits alone is picking from all of them, wherever it is allowed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from app.engine.sampling.sampler import Sampler, sample_top_logits, top_logits_request
from app.engine.scheduler.batch import NOT_SAMPLED, SampledTokens, Sequence
from app.messages import SamplingParams
from armature_kernels.elementwise.activations import MAX_TOP_LOGITS, TopLogitsRequest, top_logits_torch
from sequences import rows_of

VOCAB = 1000


def sequence_with(seed: int = 0, **params: Any) -> Sequence:
    return Sequence("r", 0, SamplingParams(**params), [5, 6, 7], 3, seed=seed)


def logits_of(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn((rows, VOCAB), generator=torch.Generator().manual_seed(seed)) * 2


def both(logits: torch.Tensor, sequences: list[Sequence]) -> tuple[list[SampledTokens], list[SampledTokens]]:
    wanted = top_logits_request(rows_of(sequences))
    assert wanted is not None
    return sample_top_logits(top_logits_torch(logits, wanted), rows_of(sequences)), Sampler(VOCAB).sample(
        logits.clone(), rows_of(sequences)
    )


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 0.7, "top_k": 40},
        {"temperature": 1.5, "top_k": MAX_TOP_LOGITS, "top_p": 0.8},
        {"temperature": 1.0, "top_k": 20, "min_p": 0.1},
    ],
    ids=str,
)
def test_the_same_tokens(params: dict[str, Any]) -> None:
    sequences = [sequence_with(seed, **params) for seed in range(60)]
    few, whole = both(logits_of(60), sequences)
    assert few == whole
    assert len({one.token_ids for one in few}) > 1


def test_rows_of_several_kinds_keep_to_themselves() -> None:
    sequences = [
        sequence_with(row, **[{"temperature": 0.0}, {"top_k": 3}, {"top_k": 50, "top_p": 0.5}][row % 3])
        for row in range(30)
    ]
    few, whole = both(logits_of(30, seed=4), sequences)
    assert few == whole


def test_logprobs_are_over_the_whole_vocabulary() -> None:
    sequences = [
        sequence_with(1, temperature=0.0, logprobs=5),
        sequence_with(2, top_k=10, logprobs=2),
        sequence_with(3, top_k=4),
    ]
    few, whole = both(logits_of(3, seed=5), sequences)
    for mine, theirs in zip(few, whole, strict=True):
        assert mine.token_ids == theirs.token_ids
        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)
        assert [token for token, _ in mine.top] == [token for token, _ in theirs.top]
        assert [value for _, value in mine.top] == pytest.approx([value for _, value in theirs.top], abs=1e-5)


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0},
        {"top_k": MAX_TOP_LOGITS + 1},
        {"temperature": 0.0, "repetition_penalty": 1.1},
        {"top_k": 5, "frequency_penalty": 0.5},
    ],
    ids=str,
)
def test_one_that_needs_more_asks_for_whole_rows(params: dict[str, Any]) -> None:
    assert top_logits_request(rows_of([sequence_with(temperature=0.0), sequence_with(**params)])) is None


def test_as_many_as_the_most_demanding_needs() -> None:
    sequences = [sequence_with(temperature=0.0), sequence_with(top_k=7), sequence_with(temperature=0.0, logprobs=3)]
    assert top_logits_request(rows_of(sequences)) == TopLogitsRequest(7, with_logsumexp=True)
    assert top_logits_request(rows_of([])) is None


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"top_k": 4}, {"temperature": 0.0, "logprobs": 2}], ids=str)
def test_a_row_that_is_not_finite_is_not_sampled_and_changes_no_other(params: dict[str, Any]) -> None:
    logits, rows = logits_of(3), rows_of([sequence_with(seed=3, **params)] * 3)
    request = top_logits_request(rows)
    assert request is not None
    expected = sample_top_logits(top_logits_torch(logits, request), rows)
    logits[1, 3] = torch.nan
    found = sample_top_logits(top_logits_torch(logits, request), rows)
    assert found == [expected[0], NOT_SAMPLED, expected[2]]
