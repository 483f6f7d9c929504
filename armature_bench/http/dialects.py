"""The API dialects that benches send: three for streamed answers and four for embeddings.

Streamed answers: native `/generate`, and OpenAI's completions and chat completions, one of which most servers
implement. Embeddings: OpenAI, native, text-embeddings-inference, and the Open Inference Protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class StreamRequest:
    """One greedy generation request. `prompt` is token ids if client and server support them, else text.

    `picture` is the data URL of one before the text, which only chats have.
    """

    prompt: str | list[int]
    max_tokens: int
    ignore_eos: bool = True
    model: str | None = None
    picture: str | None = None


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """Prompt and completion tokens as counted by the server."""

    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class GenerateDialect:
    """Request and response format of one dialect.

    `num_tokens` returns the number of tokens with text in an event, as far as the event shows it; 0 for other events.
    """

    path: str
    takes_ids: bool
    body: Callable[[StreamRequest], Json]
    num_tokens: Callable[[Json], int]


def parse_usage(event: Json) -> TokenUsage | None:
    """Return the usage that an event reports, or None. All three dialects report it under `usage` in a late event."""
    usage = event.get("usage")
    if not usage or usage.get("completion_tokens") is None:
        return None
    return TokenUsage(usage.get("prompt_tokens") or 0, usage["completion_tokens"])


def _native_body(ask: StreamRequest) -> Json:
    prompt = {"prompt": ask.prompt} if isinstance(ask.prompt, str) else {"token_ids": ask.prompt}
    return {**prompt, "max_tokens": ask.max_tokens, "temperature": 0, "ignore_eos": ask.ignore_eos, "stream": True}


def _openai_body(ask: StreamRequest) -> Json:
    body: Json = {
        "max_tokens": ask.max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if ask.ignore_eos:
        body["ignore_eos"] = True  # not an OpenAI field; vLLM, llama.cpp and Armature support it
    return body | ({"model": ask.model} if ask.model else {})


def _completions_body(ask: StreamRequest) -> Json:
    return _openai_body(ask) | {"prompt": ask.prompt}


def _chat_body(ask: StreamRequest) -> Json:
    content: Any = ask.prompt
    if ask.picture is not None:
        picture = {"type": "image_url", "image_url": {"url": ask.picture}}
        content = [picture, {"type": "text", "text": ask.prompt}]
    return _openai_body(ask) | {"messages": [{"role": "user", "content": content}]}


def _choice(event: Json) -> Json:
    choices = event.get("choices")
    return choices[0] if choices else {}


def _chat_tokens(event: Json) -> int:
    delta = _choice(event).get("delta") or {}
    return 1 if delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning") else 0


GENERATE_DIALECTS: Mapping[str, GenerateDialect] = {
    "native": GenerateDialect("/generate", True, _native_body, lambda event: len(event.get("token_ids") or ())),
    "completions": GenerateDialect(
        "/v1/completions", True, _completions_body, lambda event: 1 if _choice(event).get("text") else 0
    ),
    "openai": GenerateDialect("/v1/chat/completions", False, _chat_body, _chat_tokens),
}


EmbedJson = dict[str, Any]
TextBatchInput = Sequence[str]
_USAGE = b'"prompt_tokens"'


@dataclass(frozen=True, slots=True)
class EmbedDialect:
    """Request and response format of one dialect.

    `path` takes the model name, which only some dialects use. `sizes` takes a whole answer and returns the length of
    each vector.
    """

    path: Callable[[str | None], str]
    body: Callable[[TextBatchInput, str | None], EmbedJson]
    sizes: Callable[[Any], list[int]]


def parse_prompt_tokens(body: bytes) -> int | None:
    """Return the number of prompt tokens that the server reports, or None.

    Finds the number without parsing the vectors: parsing would take processor time from the server.
    """
    _, found, after = body.rpartition(_USAGE)
    digits = after[1:12].lstrip(b" :").split(b",")[0].split(b"}")[0].strip() if found else b""
    return int(digits) if digits.isdigit() else None


def _openai_embed_body(texts: TextBatchInput, model: str | None) -> EmbedJson:
    return {"input": list(texts), "encoding_format": "float"} | ({"model": model} if model else {})


def _inputs_body(texts: TextBatchInput, model: str | None) -> EmbedJson:
    return {"inputs": list(texts)}


def _oip_body(texts: TextBatchInput, model: str | None) -> EmbedJson:
    tensor = {"name": "text", "shape": [len(texts)], "datatype": "BYTES", "data": list(texts)}
    return {"inputs": [tensor], "outputs": [{"name": "embedding"}]}


def _sizes(vectors: Any) -> list[int]:
    if not isinstance(vectors, list):
        raise TypeError("vectors must be a list")
    return [len(vector) for vector in vectors]


def _oip_sizes(answer: Any) -> list[int]:
    tensor = next(output for output in answer["outputs"] if output["name"] == "embedding")
    num_texts, size = tensor["shape"]
    if len(tensor["data"]) != num_texts * size:
        raise ValueError("a tensor's shape does not match its data")
    return [size] * num_texts


EMBED_DIALECTS: Mapping[str, EmbedDialect] = {
    "openai": EmbedDialect(
        lambda model: "/v1/embeddings",
        _openai_embed_body,
        lambda answer: _sizes([each["embedding"] for each in answer["data"]]),
    ),
    "native": EmbedDialect(lambda model: "/encode", _inputs_body, lambda answer: _sizes(answer["embeddings"])),
    "tei": EmbedDialect(lambda model: "/embed", _inputs_body, _sizes),
    "oip": EmbedDialect(lambda model: f"/v2/models/{quote(model or '', safe='')}/infer", _oip_body, _oip_sizes),
}
