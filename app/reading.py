"""Conversion of a client's prompt to token ids that fit the model: chat template, tokenizer, and validation.

It runs in the service's thread pool and depends on the loaded model only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from app.errors import ContextLengthExceeded, InvalidRequest, UnsupportedParameter
from app.generation import GenerationRequest
from app.served import ServedDecoder


def read(model: ServedDecoder, request: GenerationRequest) -> tuple[int, ...]:
    """Return the prompt's token ids. Raises an `InvalidRequest` that names the field."""
    if request.echo and request.params.logprobs is not None:
        raise UnsupportedParameter(
            "echo with logprobs is not supported: the prompt's own log-probabilities are not computed.", field="echo"
        )
    field, ids = _ids(model, request)
    if not ids:
        raise InvalidRequest(f"{field} has no tokens: there is nothing to continue.", field=field)
    _check_length(model.limits.max_model_len, len(ids), request, field)
    check_ids(request.params.stop_token_ids, model.limits.vocab_size, "stop_token_ids")
    return tuple(ids)


def chat_ids(model: ServedDecoder, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]) -> list[int]:
    """Return a conversation's token ids.

    The template writes all special tokens, so none are added, as in transformers.
    """
    if model.chat is None:
        raise InvalidRequest("This model has no chat template: send a prompt to the completions route instead.", field="messages")
    return model.tokenizer.encode(model.chat.render(messages, arguments), add_special_tokens=False)


def check_ids(ids: Sequence[int], vocab_size: int, field: str) -> None:
    """Check that every id is in the vocabulary. Raises an `InvalidRequest` that names `field`."""
    wrong = next((token_id for token_id in (min(ids), max(ids)) if not 0 <= token_id < vocab_size), None) if ids else None
    if wrong is not None:
        raise InvalidRequest(f"{field} must be in [0, {vocab_size}), not {wrong}.", field=field)


def _ids(model: ServedDecoder, request: GenerationRequest) -> tuple[str, Sequence[int]]:
    if request.messages is not None:
        return "messages", chat_ids(model, request.messages, request.template_arguments)
    if request.prompt is not None:
        return "prompt", model.tokenizer.encode(request.prompt, request.add_special_tokens)
    ids = request.token_ids or ()
    check_ids(ids, model.limits.vocab_size, "token_ids")
    return "token_ids", ids


def _check_length(context: int, num_prompt: int, request: GenerationRequest, field: str) -> None:
    """Check the context length. The message has the wording that OpenAI clients look for."""
    limit = f"This model's maximum context length is {context} tokens."
    if num_prompt >= context:
        told = f"However, the {field} have {num_prompt} tokens, and the answer needs one at least."
        raise ContextLengthExceeded(f"{limit} {told} Please shorten the {field}.", field=field)
    asked = request.params.max_tokens
    if asked is not None and num_prompt + asked > context:
        told = f"However, you requested {num_prompt + asked} tokens ({num_prompt} in the {field}, {asked} in the completion)."
        raise ContextLengthExceeded(f"{limit} {told} Please reduce max_tokens or shorten the {field}.", field="max_tokens")
