"""Probabilities of a completion's tokens in llama.cpp's form: of the model, or those that the token was sampled from."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from app.api.openai.responses import chat_logprobs
from app.errors import UnsupportedParameter
from app.messages import MAX_LOGPROBS, SamplingParams
from app.service.requests import ScoredToken

Json = dict[str, Any]


def num_scored_tokens(params: SamplingParams, num_probs: int, has_grammar: bool) -> int:
    """Return how many of the most likely tokens must be known to give the probabilities after sampling of some.

    Raises:
        UnsupportedParameter: They depend on more tokens than can be known.
    """
    penalties = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty - 1)
    rules = (params.logit_bias, params.bad_words, params.allowed_token_ids, params.min_tokens, has_grammar)
    if not any(penalties) and not any(rules):
        if params.temperature == 0:
            return num_probs
        if 0 < params.top_k <= MAX_LOGPROBS:
            return max(num_probs, params.top_k)
        if params.temperature == 1 and params.top_k == 0 and params.top_p == 1 and params.min_p == 0:
            return num_probs
    raise UnsupportedParameter(
        f"post_sampling_probs needs top_k from 1 to {MAX_LOGPROBS}, or temperature 0, or temperature 1 without top_k, "
        "top_p and min_p; and no penalties, biases, rules about tokens or grammar.",
        field="post_sampling_probs",
    )


def model_probabilities(tokens: Iterable[ScoredToken]) -> Json:
    """Return the log-probabilities of the model; nothing if there are none."""
    each = list(tokens)
    scored = chat_logprobs(each)
    if scored is None:
        return {}
    bodies: list[Json] = scored["content"]
    for token, body in zip(each, bodies, strict=True):
        body["id"] = token.token_id
        for other, top in zip(token.top, body["top_logprobs"], strict=True):
            top["id"] = other.token_id
    return {"completion_probabilities": bodies}


def sampled_probabilities(tokens: Iterable[ScoredToken], params: SamplingParams, num_probs: int) -> Json:
    """Return the probabilities that each token was sampled from. Those that are 0 are left out."""
    bodies = []
    for token in tokens:
        kept = _kept_probabilities(token, params)
        likely = [(one, kept[one.token_id]) for one in token.top if kept.get(one.token_id, 0.0) > 0.0]
        # A token whose probability was rounded differently at the edge of top_p is never shown with none.
        own = kept.get(token.token_id) or math.exp(token.logprob)
        bodies.append(_body(token, own) | {"top_probs": [_body(one, share) for one, share in likely[:num_probs]]})
    return {"completion_probabilities": bodies} if bodies else {}


def _kept_probabilities(token: ScoredToken, params: SamplingParams) -> Mapping[int, float]:
    """Return the probability of each of the most likely tokens after temperature, top_k, top_p and min_p."""
    if params.temperature == 0:
        return {token.token_id: 1.0}
    if params.top_k == 0:
        return {one.token_id: math.exp(one.logprob) for one in (*token.top, token)}
    top = token.top[: params.top_k]
    best = top[0].logprob
    weights = [math.exp((one.logprob - best) / params.temperature) for one in top]
    shares = [weight / sum(weights) for weight in weights]
    kept: dict[int, float] = {}
    nucleus = 0.0
    for one, share in zip(top, shares, strict=True):
        if nucleus >= params.top_p or share < params.min_p * shares[0]:
            break
        kept[one.token_id] = share
        nucleus += share
    return {token_id: share / nucleus for token_id, share in kept.items()}


def _body(token: ScoredToken, probability: float) -> Json:
    shown = {"id": token.token_id, "token": token.text, "bytes": list(token.bytes)}
    return {**shown, "prob": min(probability, 1.0)}
