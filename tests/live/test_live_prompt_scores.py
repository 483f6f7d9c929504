"""Scores of prompts, gaps and beams over a real connection, with other requests beside them."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from reference_models import reference_logits
from tests.live.live_server import LiveServer, live

PROMPT = list(range(20, 120))


def completion(server: LiveServer, **body: Any) -> dict[str, Any]:
    response = server.client.post("/v1/completions", json={"prompt": [PROMPT], "temperature": 0, **body})
    assert response.status_code == 200, response.text
    whole: dict[str, Any] = response.json()
    return whole


def test_an_echo_is_scored_as_transformers_does_beside_other_requests(server: LiveServer, tiny: Any) -> None:
    """The second time too, when the prompt is in the prefix cache."""
    expected = torch.log_softmax(reference_logits(tiny, PROMPT).double(), -1)[:-1]
    own = expected.gather(1, torch.tensor(PROMPT[1:]).unsqueeze(1)).squeeze(1).tolist()
    plain = completion(server, max_tokens=30)["choices"][0]["text"]
    with ThreadPoolExecutor(4) as clients:
        others = [clients.submit(completion, server, max_tokens=30) for _ in range(3)]
        scored = completion(server, max_tokens=0, echo=True, logprobs=2, prompt_logprobs=1)
        assert [other.result()["choices"][0]["text"] for other in others] == [plain] * 3
    (choice,) = scored["choices"]
    lists = choice["logprobs"]
    assert lists["token_logprobs"] == [None, *[pytest.approx(value, abs=1e-3) for value in own]]
    assert lists["text_offset"] == [sum(map(len, lists["tokens"][:end])) for end in range(len(PROMPT))]
    best = [pytest.approx(float(row.max()), abs=1e-3) for row in expected]
    assert [max(top.values()) for top in lists["top_logprobs"][1:]] == best
    places = choice["prompt_logprobs"]
    assert [place[str(token)]["logprob"] for place, token in zip(places[1:], PROMPT[1:], strict=True)] == lists[
        "token_logprobs"
    ][1:]
    first = [min(place.values(), key=lambda score: score["rank"]) for place in places[1:]]
    assert [(score["rank"], score["logprob"]) for score in first] == [(1, value) for value in best]
    usage = scored["usage"]
    assert (usage["completion_tokens"], usage["prompt_tokens_details"]["cached_tokens"]) == (0, 0)


def test_all_log_probabilities_if_the_server_gives_them(server: LiveServer, tiny: Any) -> None:
    body = {"prompt": [PROMPT[:9]], "max_tokens": 1, "logprobs": -1, "prompt_logprobs": -1, "temperature": 0}
    named = body | {"return_tokens_as_token_ids": True}  # several tokens may have the same text
    refused = server.client.post("/v1/completions", json=named)
    assert refused.status_code == 400 and "max_logprobs" in refused.json()["error"]["message"]
    with live(tiny, max_logprobs=-1) as generous:
        (choice,) = completion(generous, **named)["choices"]
    expected = torch.log_softmax(reference_logits(tiny, PROMPT[:9]).double(), -1)
    (top,) = choice["logprobs"]["top_logprobs"]
    places = [[place[str(one)]["logprob"] for one in range(len(place))] for place in choice["prompt_logprobs"][1:]]
    assert len(top) == expected.shape[1]
    found = torch.tensor([*places, [top[f"token_id:{one}"] for one in range(len(top))]]).double()
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=0)


def test_beams_are_the_likeliest_choices_best_first(server: LiveServer) -> None:
    length: dict[str, Any] = {"max_tokens": 6, "ignore_eos": True, "return_token_ids": True}
    body: dict[str, Any] = {"use_beam_search": True, "logprobs": 0, **length}
    three = completion(server, **body, n=3)["choices"]
    scores = [math.fsum(choice["logprobs"]["token_logprobs"]) for choice in three]
    assert scores == sorted(scores, reverse=True) and len({tuple(choice["token_ids"]) for choice in three}) == 3
    two = completion(server, **body, n=2, best_of=3)["choices"]
    assert [choice["token_ids"] for choice in two] == [choice["token_ids"] for choice in three[:2]]
    (one,), (greedy,) = completion(server, **body, n=1)["choices"], completion(server, **length)["choices"]
    assert one["token_ids"] == greedy["token_ids"], "one beam is greedy"


def test_a_gap_is_refused_by_a_model_that_knows_none(server: LiveServer) -> None:
    refused = server.client.post("/v1/completions", json={"prompt": "a", "suffix": "b"})
    error = refused.json()["error"]
    assert (refused.status_code, error["code"], error["param"]) == (400, "unsupported_parameter", "suffix")
    infill = server.client.post("/infill", json={"input_prefix": "a", "input_suffix": "b"})
    assert infill.status_code == 400 and "input_suffix needs a model" in infill.json()["error"]["message"]
