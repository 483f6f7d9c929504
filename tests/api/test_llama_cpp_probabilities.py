"""llama.cpp's `post_sampling_probs`: the probabilities that tokens are sampled from, or a refusal where they are unknown."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from app.api.llama_cpp.routes import num_scored_tokens, sampled_probabilities
from app.engine.sampling.rows import filtered_probabilities
from app.messages import SamplingParams, Timings
from app.service.requests import ChoiceFinished, ScoredToken, TextDelta, Usage
from tests.api.scripted_service import ScriptedService, events

VOCABULARY = 30


def scored(logits: torch.Tensor, token_id: int, num_top: int) -> ScoredToken:
    logprobs = logits.double().log_softmax(-1)
    best = sorted(range(VOCABULARY), key=lambda one: (-float(logprobs[one]), one))[:num_top]
    top = tuple(ScoredToken(one, str(one), b"", float(logprobs[one])) for one in best)
    return ScoredToken(token_id, str(token_id), b"", float(logprobs[token_id]), top)


@given(
    st.integers(0, 10**6),
    st.sampled_from([0.0, 0.3, 1.0, 1.9]),
    st.integers(1, 20),
    st.sampled_from([1.0, 0.95, 0.5, 0.01]),
    st.sampled_from([0.0, 0.05, 0.5]),
)
def test_they_are_those_of_the_sampler(seed: int, temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    logits = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 3
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    expected = filtered_probabilities(logits.clone().unsqueeze(0), [params])[0] if temperature else None
    if expected is not None:
        expected /= expected.sum()
    token_id = int(logits.argmax())
    token = scored(logits, token_id, num_scored_tokens(params, 5, has_grammar=False))
    (shown,) = sampled_probabilities([token], params, 5)
    found = {one["id"]: one["prob"] for one in shown["top_probs"]}
    if expected is None:
        assert found == {token_id: 1.0} and shown["prob"] == 1.0
        return
    best = {int(one): float(expected[one]) for one in expected.topk(5).indices if expected[one] > 0}
    assert found == pytest.approx(best, abs=1e-5)
    assert shown["prob"] == pytest.approx(best[token_id], abs=1e-5)


def test_without_filters_they_are_the_models() -> None:
    logits = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(1))
    (shown,) = sampled_probabilities([scored(logits, 7, 3)], SamplingParams(temperature=1.0), 3)
    probabilities = logits.softmax(-1)
    assert shown["prob"] == pytest.approx(float(probabilities[7]), abs=1e-6)
    assert [one["prob"] for one in shown["top_probs"]] == pytest.approx(probabilities.topk(3).values.tolist(), abs=1e-6)


@pytest.mark.parametrize("stream", [False, True])
async def test_the_body(client: httpx.AsyncClient, service: ScriptedService, stream: bool) -> None:
    token = ScoredToken(5, "Hi", b"Hi", -0.5, (ScoredToken(5, "Hi", b"Hi", -0.5), ScoredToken(6, "Ho", b"Ho", -1.5)))
    service.scripts = [[TextDelta(0, "Hi", (5,), (token,)), ChoiceFinished(0, "stop", Usage(1, 0, 1), 1, Timings())]]
    body: dict[str, Any] = {"prompt": "a", "n_probs": 1, "post_sampling_probs": True, "top_k": 2, "stream": stream}
    answer = await client.post("/completion", json=body)
    first = events(answer)[0] if stream else answer.json()
    share = 1 / (1 + 2.718281828459045**-1)
    shown = {"id": 5, "token": "Hi", "bytes": [72, 105], "prob": pytest.approx(share)}
    assert first["completion_probabilities"] == [shown | {"top_probs": [shown]}]
    assert service.requests[-1].params.logprobs == 2


@pytest.mark.parametrize(
    "change",
    [{"temperature": 0.5}, {"top_p": 0.9}, {"top_k": 21}, {"repeat_penalty": 1.1, "top_k": 5}, {"grammar": 'root ::= "a"', "top_k": 5},
     {"logit_bias": [[5, 1.0]], "top_k": 5}],
)  # fmt: skip
async def test_what_is_not_known_is_refused(client: httpx.AsyncClient, change: dict[str, Any]) -> None:
    body = {"prompt": "a", "n_probs": 2, "post_sampling_probs": True, "temperature": 1.0, **change}
    refused = await client.post("/completion", json=body)
    assert refused.status_code == 400
    assert "post_sampling_probs needs" in refused.text
    assert (await client.post("/completion", json=body | {"n_probs": 0})).status_code == 200
