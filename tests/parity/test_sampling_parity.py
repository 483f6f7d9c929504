"""Our filters and penalties against transformers' logits processors: the same tokens survive, with the same probabilities."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from app.engine.sampling.rows import apply_penalties, filtered_probabilities
from app.engine.scheduler.batch import Sequence
from app.messages import SamplingParams

PROMPT, COMPLETION = [3, 14, 15, 3, 400], [92, 65, 3, 92]
CASES: list[dict[str, Any]] = [
    {"temperature": 0.7},
    {"top_k": 20},
    {"top_p": 0.9},
    {"min_p": 0.08},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.8},
    {"temperature": 1.6, "top_k": 100, "top_p": 0.8},
    {"temperature": 0.4, "top_p": 0.97, "min_p": 0.02},
    {"temperature": 1.2, "top_k": 300, "top_p": 0.6, "min_p": 0.2, "repetition_penalty": 1.1},
]


def theirs(logits: torch.Tensor, token_ids: list[int], params: SamplingParams) -> torch.Tensor:
    """In the order in which transformers' `generate` applies them."""
    processors = LogitsProcessorList()
    if params.repetition_penalty != 1.0:
        processors.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    processors.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        processors.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        processors.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        processors.append(MinPLogitsWarper(params.min_p))
    return processors(torch.tensor([token_ids] * len(logits)), logits.clone()).softmax(-1)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("scale", [0.5, 2.0, 6.0])
def test_the_same_tokens_survive_with_the_same_probabilities(case: dict[str, Any], scale: float) -> None:
    params = SamplingParams(**case)
    logits = torch.randn((8, 5000), generator=torch.Generator().manual_seed(int(scale * 10))) * scale
    sequence = Sequence("r", 0, params, PROMPT + COMPLETION, len(PROMPT))
    ours = filtered_probabilities(apply_penalties(logits, [sequence] * 8), [params] * 8)
    expected = theirs(logits, PROMPT + COMPLETION, params)
    # A border token may fall on the other side by a rounding of the running sum, theirs in float32 from the small end.
    assert int(((ours > 0) != (expected > 0)).sum(-1).max()) <= (1 if params.top_p < 1.0 else 0)
    torch.testing.assert_close(
        ours / ours.sum(-1, keepdim=True), expected, rtol=1e-3 if params.top_p < 1.0 else 1e-5, atol=1e-4
    )
