"""Numbers of log-probabilities: the server's limit, all of the vocabulary, and the bound on a response."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest

from app.errors import InvalidRequest
from app.messages import SamplingParams
from app.service.prompt import MAX_SCORES, SCORE_BYTES, resolve_logprobs
from app.service.served_model import ServingLimits
from fake_worker import LIMITS, request, serving

VOCABULARY, CONTEXT = 5_000, 1_000


def limits(max_logprobs: int = -1) -> ServingLimits:
    return ServingLimits(CONTEXT, 8, 8, 60.0, VOCABULARY, max_logprobs=max_logprobs)


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_no_more_than_the_server_gives(name: str) -> None:
    for asked, most in ((21, 20), (-1, 20), (-1, VOCABULARY - 1), (1, 0)):
        with pytest.raises(
            InvalidRequest, match=f"^{name} must be at most {most}, this server's max_logprobs"
        ) as caught:
            resolve_logprobs(limits(most), SamplingParams(max_tokens=1, **{name: asked}), 1)
        assert caught.value.field == name
        assert (f"all {VOCABULARY} tokens" in caught.value.message) == (asked == -1)


@pytest.mark.parametrize("most", [-1, VOCABULARY])
@pytest.mark.parametrize("asked", [-1, VOCABULARY, VOCABULARY + 1])
def test_all_are_those_of_the_vocabulary(asked: int, most: int) -> None:
    if asked > most > 0:
        return
    wanted = SamplingParams(max_tokens=1, logprobs=asked, prompt_logprobs=asked)
    params, number = resolve_logprobs(limits(most), wanted, 3)
    assert params.logprobs == params.prompt_logprobs == VOCABULARY
    assert number == 4 * VOCABULARY


def test_few_are_not_counted() -> None:
    params = SamplingParams(logprobs=20, prompt_logprobs=20, n=16)
    assert resolve_logprobs(limits(), params, 999) == (params, 0)
    assert resolve_logprobs(limits(), SamplingParams(), 999) == (SamplingParams(), 0)


@pytest.mark.parametrize(
    "fields, num_prompt, field",
    [
        ({"logprobs": -1, "max_tokens": 53}, 1, "logprobs"),
        ({"logprobs": -1, "max_tokens": 27, "n": 2}, 1, "logprobs"),
        ({"logprobs": -1}, 900, "logprobs"),
        ({"prompt_logprobs": -1, "max_tokens": 1}, 53, "prompt_logprobs"),
    ],
)
def test_a_response_has_no_more_than_its_bound(fields: dict[str, Any], num_prompt: int, field: str) -> None:
    assert 52 * VOCABULARY <= MAX_SCORES < 53 * VOCABULARY
    with pytest.raises(InvalidRequest, match=f"at most {MAX_SCORES}") as caught:
        resolve_logprobs(limits(), SamplingParams(**fields), num_prompt)
    assert caught.value.field == field
    less = {"max_tokens": 1} if "max_tokens" not in fields else {"max_tokens": fields["max_tokens"] - 1}
    resolve_logprobs(limits(), SamplingParams(**{**fields, **less}), min(num_prompt, 52))


def test_a_beam_search_has_few() -> None:
    with pytest.raises(InvalidRequest, match="of a beam search must be at most 20"):
        resolve_logprobs(limits(), SamplingParams(beam_width=2, logprobs=21, max_tokens=1), 1)


async def test_admission_counts_the_memory_of_many() -> None:
    """The worker gets the number of tokens, and nothing is held once the response has ended."""
    async with serving(replace(LIMITS, max_logprobs=-1)) as (service, worker, _):
        admission = service._client.admission
        async with aclosing(service.generate(request(params={"max_tokens": 2, "logprobs": -1}))) as stream:
            await anext(stream)
            (command,) = await worker.orders()
            assert command.params.logprobs == LIMITS.vocab_size
            held_for_text = admission.num_held_bytes - 2 * LIMITS.vocab_size * SCORE_BYTES
            assert 0 <= held_for_text < 100
        assert admission.num_held_bytes == 0
