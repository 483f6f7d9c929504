"""The four API dialects of embeddings: OpenAI, native, text-embeddings-inference, and the Open Inference Protocol."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

Json = dict[str, Any]
Texts = Sequence[str]
_USAGE = b'"prompt_tokens"'


@dataclass(frozen=True, slots=True)
class EmbedDialect:
    """Request and response format of one dialect.

    `path` takes the model name, which only some dialects use. `sizes` takes a whole answer and returns the length of
    each vector.
    """

    path: Callable[[str | None], str]
    body: Callable[[Texts, str | None], Json]
    sizes: Callable[[Any], list[int]]


def counted_tokens(body: bytes) -> int | None:
    """Return the number of prompt tokens that the server reports, or None.

    Finds the number without parsing the vectors: parsing would take processor time from the server.
    """
    _, found, after = body.rpartition(_USAGE)
    digits = after[1:12].lstrip(b" :").split(b",")[0].split(b"}")[0].strip() if found else b""
    return int(digits) if digits.isdigit() else None


def _openai_body(texts: Texts, model: str | None) -> Json:
    return {"input": list(texts), "encoding_format": "float"} | ({"model": model} if model else {})


def _inputs_body(texts: Texts, model: str | None) -> Json:
    return {"inputs": list(texts)}


def _oip_body(texts: Texts, model: str | None) -> Json:
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
        lambda model: "/v1/embeddings", _openai_body, lambda answer: _sizes([each["embedding"] for each in answer["data"]])
    ),
    "native": EmbedDialect(lambda model: "/embed", _inputs_body, lambda answer: _sizes(answer["embeddings"])),
    "tei": EmbedDialect(lambda model: "/embed", _inputs_body, _sizes),
    "oip": EmbedDialect(lambda model: f"/v2/models/{quote(model or '', safe='')}/infer", _oip_body, _oip_sizes),
}
