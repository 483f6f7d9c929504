"""Routes of encoders: embeddings, classification, relevance and reranking, in the dialects of five servers.

They share inputs, limits, scores and the encodings of vectors; only bodies differ. TEI is text-embeddings-inference.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate, pairwise
from typing import Any

import numpy
from pydantic_core import from_json, to_json
from starlette.responses import Response

from app.api.encoders.schemas import (
    COHERE_ERRORS,
    TEI_ERRORS,
    ClassificationObject,
    ClassifyBody,
    ClassifyResponse,
    CohereEmbedBody,
    CohereEmbedResponse,
    CohereEmbedV2Body,
    CohereMeta,
    DecodeBody,
    EmbedAllBody,
    EmbedBody,
    EmbeddingsBody,
    EmbeddingsResponse,
    EmbedResponse,
    LabelScore,
    ListResponse,
    PoolingBody,
    PoolingResponse,
    PredictBody,
    RankedText,
    RelevanceQuery,
    RerankBody,
    RerankResponse,
    RerankResult,
    ScoreBody,
    ScoreObject,
    ScoreResponse,
    SimilarityBody,
    SimilarityParameters,
    SparseBody,
    TeiEmbedBody,
    TeiError,
    TextsBody,
)
from app.api.encoders.vectors import VECTOR_WRITERS, join_with_pauses, to_base64_json, to_json_list
from app.api.llama_cpp.routes import joined_ids
from app.api.openai.schemas import OPENAI_ERRORS
from app.api.routing import ApiCall, Dialect, Encoding, new_response_id, renamed_fields, run_beside_loop
from app.api.streaming import server_timing
from app.api.tasks.requests import split_pictures
from app.errors import InvalidRequest, UnsupportedParameter, WrongModelKind
from app.messages import Text
from app.service.encode import MAX_TEXTS
from app.service.requests import Encoded, EncodingRequest, TaskRequest, TextInput, Truncation
from app.service.served_model import (
    FloatArray,
    ServedEncoder,
    ServedModel,
    ServedTasks,
    paired_similarities,
    to_numpy,
    wrong_kind_error,
)

OPENAI = Dialect("OpenAI", OPENAI_ERRORS)
NATIVE = Dialect("Native")
VLLM = Dialect("vLLM", OPENAI_ERRORS)
COHERE = Dialect("Cohere", COHERE_ERRORS)
TEI = Dialect("text-embeddings-inference", TEI_ERRORS)

# ---- embeddings ------------------------------------------------------------------------------------------------------


async def embeddings_by_task(call: ApiCall, body: EmbeddingsBody, served: ServedTasks) -> Response:
    """Embed texts, and pictures that are data URLs, with a model that has both in one space."""
    if not served.config.reads_pictures or "feature-extraction" not in served.tasks:
        raise wrong_kind_error(served)
    if not all(isinstance(one, str) for one in body.input):
        raise InvalidRequest(f"{served.name!r} reads texts and pictures, not token ids.", field="input")
    if body.dimensions is not None or body.truncation.truncates:
        field = "truncate" if body.dimensions is None else "dimensions"
        raise UnsupportedParameter(f"{field} is not offered for {served.name!r}.", field=field)
    size = sum(len(one) for one in body.input)
    listed, files = await run_beside_loop(size, split_pictures, body.input)
    parameters = to_json({"normalize": body.use_activation is not False})
    task = TaskRequest(
        "feature-extraction", to_json(listed), parameters, call.route.api, call.id, size, tuple(files), len(listed) > 1
    )
    with renamed_fields({"inputs": "input"}):
        result = await call.service.run_task(task)
    vectors = numpy.array(from_json(result.content), numpy.float32).reshape(len(listed), -1)
    written = await _write_embeddings(body, vectors, served.name, result.num_tokens)
    timing = server_timing([result.timings], "queue", "encode")
    return Response(written, media_type="application/json", headers=timing)


async def _write_embeddings(body: EmbeddingsBody, vectors: FloatArray, name: str, number: int) -> bytes:
    to_bytes = VECTOR_WRITERS[body.encoding_format or "float"]
    rows = (
        b'{"object":"embedding","index":%d,"embedding":%b}' % (index, to_bytes(vector))
        for index, vector in enumerate(vectors)
    )
    tail = b'],"model":%b,"usage":{"prompt_tokens":%d,"total_tokens":%d}}' % (to_json(name), number, number)
    return await join_with_pauses(b'{"object":"list","data":[', rows, tail)


@OPENAI.encodes(
    ("/v1/embeddings", "/embeddings"),
    "OpenAI: embeddings of texts, and of pictures where the model reads them",
    operation="embeddings",
    by_task=embeddings_by_task,
)
async def embeddings(call: ApiCall, body: EmbeddingsBody, served: ServedEncoder) -> Encoding[EmbeddingsResponse]:
    """Embed texts or token ids."""

    async def write(encoded: Encoded) -> bytes:
        vectors = to_numpy(encoded.arrays["embedding"])
        return await _write_embeddings(body, vectors, served.name, encoded.usage.prompt_tokens)

    inputs = [one if isinstance(one, str) else await joined_ids(call.service, one) for one in body.input]
    return Encoding(_pooling_request(call, body, inputs, "embedding"), write)


def _pooling_request(
    call: ApiCall, body: EmbeddingsBody | PoolingBody, inputs: Iterable[str | tuple[int, ...]], output: str
) -> EncodingRequest:
    return EncodingRequest(
        inputs=text_inputs(inputs),
        outputs=(output,),
        api=call.route.api,
        request_id=call.id,
        truncation=body.truncation,
        normalize=body.use_activation,
        dimensions=body.dimensions,
    )


def text_inputs(given: Iterable[str | tuple[int, ...]]) -> tuple[TextInput, ...]:
    """Convert a body's inputs: texts are kept, lists of token ids become a `Text`."""
    return tuple(one if isinstance(one, str) else Text(one) for one in given)


@NATIVE.encodes("/encode", "Embeddings of texts or token ids", api="native", operation="embeddings")
async def encode(call: ApiCall, body: EmbedBody, served: ServedEncoder) -> Encoding[EmbedResponse]:
    """Embed texts or token ids."""

    async def write(encoded: Encoded) -> bytes:
        rows = (to_json_list(vector) for vector in to_numpy(encoded.arrays["embedding"]))
        tail = b'],"usage":{"prompt_tokens":%d}}' % encoded.usage.prompt_tokens
        return await join_with_pauses(b'{"embeddings":[', rows, tail)

    return Encoding(_texts_request(call, body, "embedding", body.normalize, body.dimensions), write)


def _texts_request(
    call: ApiCall, body: TextsBody, output: str, normalize: bool | None = None, dimensions: int | None = None
) -> EncodingRequest:
    return EncodingRequest(
        inputs=text_inputs(body.inputs),
        outputs=(output,),
        api=call.route.api,
        request_id=call.id,
        truncation=body.truncation,
        normalize=normalize,
        dimensions=dimensions,
        prompt=body.prompt_name,
        field="inputs",
    )


def token_header(encoded: Encoded) -> dict[str, str]:
    """Return the header with the number of tokens read, for bodies of TEI, which have no field for it."""
    return {"x-compute-tokens": str(encoded.usage.prompt_tokens)}


@TEI.encodes(
    "/embed", "text-embeddings-inference: embeddings of texts or token ids", api="native", operation="embeddings"
)
async def embed(call: ApiCall, body: TeiEmbedBody, served: ServedEncoder) -> Encoding[list[list[float]]]:
    """Embed texts or token ids. Vectors have length 1 unless `normalize` is false."""

    async def write(encoded: Encoded) -> bytes:
        rows = (to_json_list(vector) for vector in to_numpy(encoded.arrays["embedding"]))
        return await join_with_pauses(b"[", rows, b"]")

    request = _texts_request(call, body, "embedding", body.normalize is not False, body.dimensions)
    return Encoding(request, write, token_header)


CHUNK_TOKENS = 16


@TEI.encodes("/embed_all", "text-embeddings-inference: embeddings of all tokens", api="native", operation="embeddings")
async def embed_all(call: ApiCall, body: EmbedAllBody, served: ServedEncoder) -> Encoding[list[list[list[float]]]]:
    """Embed each token."""

    async def write(encoded: Encoded) -> bytes:
        return await join_with_pauses(b"[", _token_vectors(encoded), b"]")

    return Encoding(_texts_request(call, body, "last_hidden_state"), write, token_header)


def _token_vectors(encoded: Encoded) -> Iterator[bytes]:
    """Yield the JSON of each text's list of vectors, a few tokens at a time.

    The event loop can run other tasks between them.
    """
    hidden = to_numpy(encoded.arrays["last_hidden_state"])
    for start, end in pairwise(accumulate(encoded.lengths, initial=0)):
        for first in range(start, end, CHUNK_TOKENS):
            last = min(first + CHUNK_TOKENS, end)
            rows = to_json_list(hidden[first:last])
            yield rows[first != start : len(rows) - (last != end)]


@TEI.encodes(
    "/embed_sparse",
    "text-embeddings-inference: refused, since no model here has sparse vectors",
    api="native",
    response=TeiError,
    openapi={"status_code": 400},
)
async def embed_sparse(call: ApiCall, body: SparseBody, served: ServedEncoder) -> Encoding[None]:
    """Refuse, and name what the served model gives instead."""
    instead = "scores at /predict" if served.labels else "dense vectors at /embed"
    raise WrongModelKind(f"{served.name!r} has no sparse vectors; it has {instead}.", field="model")


# Names of a checkpoint's prompts for each use of the vectors, in the order in which they are looked for.
_PROMPTS: Mapping[str, tuple[str, ...]] = {
    "search_query": ("query", "search_query"),
    "search_document": ("document", "passage", "corpus", "search_document"),
    "classification": ("classification",),
    "clustering": ("clustering",),
}


@COHERE.encodes("/v1/embed", "Cohere: embeddings of texts, version 1", operation="embeddings")
async def cohere_embed(call: ApiCall, body: CohereEmbedBody, served: ServedEncoder) -> Encoding[CohereEmbedResponse]:
    """Embed texts; without `embedding_types`, as numbers alone."""
    return _cohere_embedding(call, body, served)


@COHERE.encodes(
    "/v2/embed",
    "Cohere: embeddings of texts",
    operation="embeddings",
    field_names={"dimensions": "output_dimension"},
)
async def cohere_embed_v2(
    call: ApiCall, body: CohereEmbedV2Body, served: ServedEncoder
) -> Encoding[CohereEmbedResponse]:
    """Embed texts."""
    return _cohere_embedding(call, body, served)


def _cohere_embedding(call: ApiCall, body: CohereEmbedBody, served: ServedEncoder) -> Encoding[CohereEmbedResponse]:
    texts, kinds, version = body.given_texts, body.embedding_types or ("float",), _cohere_version(call)
    _check_binary(served, kinds, body.dimensions)

    async def write(encoded: Encoded) -> bytes:
        vectors = to_numpy(encoded.arrays["embedding"])
        if version == "1" and body.embedding_types is None:
            kind, written = "embeddings_floats", await join_with_pauses(b"[", _rows("float", vectors), b"]")
        else:
            parts = [
                await join_with_pauses(b'"%b":[' % kind.encode(), _rows(kind, vectors), b"]")
                for kind in dict.fromkeys(kinds)
            ]
            kind, written = "embeddings_by_type", b"{%b}" % b",".join(parts)
        meta = response_meta(call, encoded)
        if version == "2":
            meta["billed_units"]["image_tokens"] = 0
        fields: dict[str, Any] = {"id": new_response_id(""), "texts": texts, "meta": meta}
        fields |= {"response_type": kind} if version == "1" else {}
        return b'%b,"embeddings":%b}' % (to_json(fields)[:-1], written)

    request = EncodingRequest(
        inputs=texts,
        outputs=("embedding",),
        api=call.route.api,
        request_id=call.id,
        truncation=Truncation(body.truncate != "NONE", left=body.truncate == "START"),
        dimensions=body.dimensions,
        prompt=_prompt(served, body.input_type),
        field="texts",
    )
    return Encoding(request, write)


def _cohere_version(call: ApiCall) -> str:
    return "2" if call.route.path.startswith("/v2/") else "1"


def response_meta(call: ApiCall, encoded: Encoded) -> CohereMeta:
    number = encoded.usage.prompt_tokens
    return {
        "api_version": {"version": _cohere_version(call)},
        "billed_units": {"input_tokens": number},
        "tokens": {"input_tokens": number},
    }


def _prompt(served: ServedEncoder, input_type: str | None) -> str | None:
    """Return the name of the checkpoint's prompt for a use of the vectors; None means the default one."""
    prompts = served.config.pooling.prompts
    return next((name for name in _PROMPTS.get(input_type or "", ()) if name in prompts), None)


def _check_binary(served: ServedEncoder, kinds: tuple[str, ...], dimensions: int | None) -> None:
    size = dimensions or served.sizes.get("embedding", 0)
    if size % 8 and not {"binary", "ubinary"}.isdisjoint(kinds):
        raise InvalidRequest(
            f"Binary vectors have 8 dimensions in a byte, and {size} is not a multiple of 8: ask for float or base64.",
            field="embedding_types",
        )


def _rows(kind: str, vectors: FloatArray) -> Iterator[bytes]:
    write = _WRITERS[kind]
    return (write(vector) for vector in vectors)


def _to_signed_bits(vector: FloatArray) -> bytes:
    """Return the packed signs as numbers in [-128, 128): `ubinary` less 128, as Cohere defines them."""
    return to_json((numpy.packbits(vector >= 0).astype(numpy.int16) - 128).tolist())


_WRITERS: Mapping[str, Callable[[FloatArray], bytes]] = {
    "float": to_json_list,
    "base64": to_base64_json,
    "binary": _to_signed_bits,
    "ubinary": lambda vector: to_json(numpy.packbits(vector >= 0).tolist()),  # the first dimension is the highest bit
}


_OUTPUTS: Mapping[str, str] = {"embed": "embedding", "classify": "logits", "token_embed": "last_hidden_state"}


@VLLM.encodes("/pooling", "vLLM: vectors, scores, or the vectors of all tokens", operation="embeddings")
async def pooling(call: ApiCall, body: PoolingBody, served: ServedEncoder) -> Encoding[PoolingResponse]:
    """Return vectors, scores, or the vectors of all tokens. Without `task`, what the model gives."""
    output = _requested_output(served, body.task)

    async def write(encoded: Encoded) -> bytes:
        arrays = encoded.arrays[output]
        if output == "logits" and body.use_activation is not False:
            arrays = served.scores(arrays)
        to_bytes = VECTOR_WRITERS[body.encoding_format or "float"]
        items = [
            await _item(b'{"index":%d,"object":"pooling","data":' % index, values, to_bytes)
            for index, values in enumerate(_values_by_text(output, to_numpy(arrays), encoded))
        ]
        head = to_json(list_fields("pool", served, encoded))[:-1] + b',"data":['
        return await join_with_pauses(head, items, b"]}")

    return Encoding(_pooling_request(call, body, body.input, output), write)


def list_fields(kind: str, served: ServedEncoder, encoded: Encoded) -> ListResponse:
    """Return the fields common to vLLM's responses. Their `id` begins with `kind`."""
    number = encoded.usage.prompt_tokens
    return {
        "id": new_response_id(f"{kind}-"),
        "object": "list",
        "created": int(time.time()),
        "model": served.name,
        "usage": {"prompt_tokens": number, "total_tokens": number},
    }


async def _item(head: bytes, values: FloatArray, write: Callable[[FloatArray], bytes]) -> bytes:
    """Return the JSON of one text. Many rows are written one by one; the event loop runs other tasks between them."""
    if values.ndim == 1 or write is not VECTOR_WRITERS["float"]:
        return head + write(values) + b"}"
    return await join_with_pauses(head + b"[", map(write, values), b"]}")


def _requested_output(served: ServedEncoder, task: str | None) -> str:
    if task is None:
        return next(iter(served.sizes))
    output = _OUTPUTS[task]
    if output not in served.sizes:
        known = ", ".join(name for name, each in _OUTPUTS.items() if each in served.sizes)
        raise WrongModelKind(f"{served.name!r} has no output for the task {task!r}; it has: {known}.", field="task")
    return output


def _values_by_text(output: str, values: FloatArray, encoded: Encoded) -> Iterator[Any]:
    if output != "last_hidden_state":
        yield from values
        return
    for start, end in pairwise(accumulate(encoded.lengths, initial=0)):
        yield values[start:end]


# ---- classification --------------------------------------------------------------------------------------------------


def _classification_request(
    call: ApiCall, texts: tuple[TextInput, ...], truncation: Truncation, field: str
) -> EncodingRequest:
    return EncodingRequest(
        inputs=texts,
        outputs=("logits",),
        api=call.route.api,
        request_id=call.id,
        truncation=truncation,
        field=field,
    )


def _label_scores(served: ServedEncoder, encoded: Encoded, is_raw: bool) -> list[list[float]]:
    """Return the scores of each text in the order of the labels; the logits if they are wanted."""
    logits = encoded.arrays["logits"]
    rows: list[list[float]] = to_numpy(logits if is_raw else served.scores(logits)).tolist()
    return rows


@OPENAI.encodes(("/v1/classify", "/classify"), "Classify texts: labels with scores; also vLLM's", operation="classify")
async def classify(call: ApiCall, body: ClassifyBody, served: ServedEncoder) -> Encoding[ClassifyResponse]:
    """Classify texts or pairs."""
    is_raw = bool(body.raw_scores) or body.use_activation is False

    async def write(encoded: Encoded) -> bytes:
        rows = _label_scores(served, encoded, is_raw)
        response: ClassifyResponse = {
            **list_fields("classify", served, encoded),
            "data": [_classification(served, index, row) for index, row in enumerate(rows)],
        }
        return to_json(response)

    return Encoding(_classification_request(call, body.texts, body.truncation, "input"), write)


def _classification(served: ServedEncoder, index: int, scores: list[float]) -> ClassificationObject:
    ranked = labels_by_score(served, scores)
    return {
        "object": "classification",
        "index": index,
        "label": ranked[0]["label"],
        "probs": scores,
        "num_classes": len(scores),
        "prediction": ranked[0]["label"],
        "score": ranked[0]["score"],
        "predictions": ranked,
    }


@TEI.encodes("/predict", "text-embeddings-inference: labels with scores", operation="classify")
async def predict(
    call: ApiCall, body: PredictBody, served: ServedEncoder
) -> Encoding[list[LabelScore] | list[list[LabelScore]]]:
    """Classify a text, a pair, or a batch of these."""
    is_batch, texts = body.inputs

    async def write(encoded: Encoded) -> bytes:
        top_k = body.parameters.top_k if body.parameters else None
        rows = _label_scores(served, encoded, bool(body.raw_scores))
        predictions = [labels_by_score(served, row)[:top_k] for row in rows]
        return to_json(predictions if is_batch else predictions[0])

    return Encoding(_classification_request(call, texts, body.truncation, "inputs"), write, token_header)


# ---- relevance -------------------------------------------------------------------------------------------------------


def relevance_request(call: ApiCall, served: ServedEncoder, query: RelevanceQuery) -> EncodingRequest:
    """Return the encoding request for the relevance of documents.

    For a cross-encoder, query and document are one text; for an embedding model, separate texts. Raises
    `WrongModelKind` if the model has several labels, and `InvalidRequest` for several queries, but not as many as
    documents.
    """
    if len(served.labels) > 1:
        raise WrongModelKind(
            f"{served.name!r} has {len(served.labels)} labels, and relevance is one score: use /v1/classify, "
            "or serve a cross-encoder or an embedding model.",
            field="model",
        )
    num_queries, num_documents = len(query.queries), len(query.documents)
    if num_queries not in (1, num_documents):
        raise InvalidRequest(
            f"{query.query_field} takes 1 text, or as many as {query.field}, which are {num_documents}: not {num_queries}.",
            field=query.query_field,
        )
    queries = query.queries * num_documents if num_queries == 1 else query.queries
    pairs = tuple(zip(queries, query.documents, strict=True))
    inputs: tuple[TextInput, ...] = pairs if served.labels else (*query.queries, *query.documents)
    return EncodingRequest(
        inputs=inputs,
        outputs=("logits",) if served.labels else ("embedding",),
        api=call.route.api,
        request_id=call.id,
        truncation=query.truncation,
        num_queries=0 if served.labels else num_queries,
        field=query.field,
        query_field=query.query_field,
    )


def relevance_scores(served: ServedEncoder, encoded: Encoded, query: RelevanceQuery) -> list[float]:
    """Return one relevance per document.

    It is a cross-encoder's score, or its logit with `raw_scores`, or an embedding model's cosine similarity.
    """
    if not served.labels:
        vectors, number = to_numpy(encoded.arrays["embedding"]), len(query.queries)
        return [float(score) for score in paired_similarities(vectors[:number], vectors[number:])]
    logits = encoded.arrays["logits"]
    return [float(score) for score in to_numpy(logits if query.raw_scores else served.scores(logits))[:, 0]]


def sort_by_score(scores: list[float]) -> list[tuple[int, float]]:
    """Return (index, score) pairs, best first; equal scores keep their order."""
    return sorted(enumerate(scores), key=lambda ranked: -ranked[1])


def labels_by_score(served: ServedEncoder, scores: list[float]) -> list[LabelScore]:
    return [{"label": served.labels[place], "score": score} for place, score in sort_by_score(scores)]


@VLLM.encodes(("/v1/score", "/score"), "vLLM: scores of pairs of texts", operation="score")
async def score(call: ApiCall, body: ScoreBody, served: ServedEncoder) -> Encoding[ScoreResponse]:
    """Score one query with every document, or pairs."""
    query = body.relevance_query()

    async def write(encoded: Encoded) -> bytes:
        scores = relevance_scores(served, encoded, query)
        data: list[ScoreObject] = [
            {"index": index, "object": "score", "score": value} for index, value in enumerate(scores)
        ]
        response: ScoreResponse = {**list_fields("score", served, encoded), "data": data}
        return to_json(response)

    return Encoding(relevance_request(call, served, query), write)


@TEI.encodes("/similarity", "text-embeddings-inference: sentence similarity", api="native", operation="score")
async def similarity(call: ApiCall, body: SimilarityBody, served: ServedEncoder) -> Encoding[list[float]]:
    """Return the cosine similarities of one sentence to others."""
    parameters = body.parameters or SimilarityParameters()

    async def write(encoded: Encoded) -> bytes:
        vectors = to_numpy(encoded.arrays["embedding"])
        return to_json_list(paired_similarities(vectors[:1], vectors[1:]))

    request = EncodingRequest(
        inputs=(body.inputs.source_sentence, *body.inputs.sentences),
        outputs=("embedding",),
        api=call.route.api,
        request_id=call.id,
        truncation=parameters.truncation,
        prompt=parameters.prompt_name,
        field="inputs",
    )
    return Encoding(request, write, token_header)


Reranked = Encoding[RerankResponse | list[RankedText]]


async def _rerank(call: ApiCall, body: RerankBody, served: ServedEncoder) -> Reranked:
    """Rank documents (Cohere, Jina, vLLM), or texts (TEI), by their relevance to a query."""
    query = body.relevance_query()

    async def write(encoded: Encoded) -> bytes:
        ranked = sort_by_score(relevance_scores(served, encoded, query))[: body.top_n]
        if body.texts is not None:
            return to_json([_ranked_text(index, score, body) for index, score in ranked])
        results = [_rerank_result(index, score, query, bool(body.return_documents)) for index, score in ranked]
        number = encoded.usage.prompt_tokens
        response: RerankResponse = {
            "id": new_response_id("rerank-"),
            "model": served.name,
            "results": results,
            "usage": {"prompt_tokens": number, "total_tokens": number},
            "meta": response_meta(call, encoded),
        }
        return to_json(response)

    headers = token_header if body.texts is not None else lambda encoded: {}
    return Encoding(relevance_request(call, served, query), write, headers)


def _ranked_text(index: int, score: float, body: RerankBody) -> RankedText:
    rank: RankedText = {"index": index, "score": score}
    if body.return_text and body.texts is not None:
        rank["text"] = body.texts[index]
    return rank


def _rerank_result(index: int, score: float, query: RelevanceQuery, has_text: bool) -> RerankResult:
    result: RerankResult = {"index": index, "relevance_score": score}
    if has_text:
        result["document"] = {"text": query.documents[index]}
    return result


rerank = OPENAI.encodes("/v1/rerank", "Cohere, Jina, vLLM: rank documents by relevance to a query", operation="rerank")(
    _rerank
)
COHERE.encodes("/v2/rerank", "Cohere: rank documents by relevance to a query", operation="rerank")(_rerank)
# A body with documents gets errors in the format of `/v1/rerank`.
TEI.encodes(
    "/rerank",
    "text-embeddings-inference, Jina, vLLM: rank texts or documents by relevance",
    operation="rerank",
    other_errors=OPENAI_ERRORS,
    other_field="documents",
)(_rerank)


# ---- text-embeddings-inference ---------------------------------------------------------------------------------------


@TEI.post("/decode", "text-embeddings-inference: texts of token ids", field_names={"token_ids": "ids"})
async def decode(call: ApiCall, body: DecodeBody) -> list[str]:
    """Return texts of token ids, for every model with a tokenizer."""
    skips = body.skip_special_tokens is not False
    return [await call.service.detokenize(ids, skips) for ids in body.ids]


_DTYPES: Mapping[str, str] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def model_information(model: ServedModel, plan: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of text-embeddings-inference's `/info`, which the native response of `/info` has too.

    `plan` is the serving plan as JSON: decisions by name, each with its `value`.
    """
    known: dict[str, Any] = {"model_id": model.name, "max_input_length": model.limits.max_model_len}
    if not isinstance(model, ServedEncoder):
        return known
    precision = str(plan.get("precision", {}).get("value", "fp32"))
    return known | {
        "model_sha": None,
        "model_dtype": _DTYPES.get(precision, precision),
        "model_type": _model_type(model),
        "max_concurrent_requests": model.limits.max_running_seqs + model.limits.max_waiting_requests,
        "max_batch_tokens": plan.get("max_batch_tokens", {}).get("value"),
        "max_client_batch_size": MAX_TEXTS,
        "auto_truncate": False,
        "tokenization_workers": model.limits.tokenizer_threads,
    }


def _model_type(model: ServedEncoder) -> dict[str, Any]:
    if not model.labels:
        return {"embedding": {"pooling": "_".join(model.config.pooling.modes)}}
    id2label = {str(place): label for place, label in enumerate(model.labels)}
    label2id = {label: place for place, label in enumerate(model.labels)}
    return {"reranker" if len(model.labels) == 1 else "classifier": {"id2label": id2label, "label2id": label2id}}
