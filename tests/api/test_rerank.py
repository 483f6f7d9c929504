"""Relevance and labels over HTTP: our routes and text-embeddings-inference's, on cross-encoders, classifiers and embedding models."""

from __future__ import annotations

import math
from typing import Any

import numpy
import pytest

from app.api.encoders import routes as encoders
from app.models.encoders.config import EncoderConfig
from app.service.served_model import apply_score_function, to_numpy
from fake_encoder import CLASSIFIER, CONFIG, CROSS_ENCODER, PROMPTED, SIZE, array, ids_of, logits, vector
from tests.api.encoder_client import answer_of, asking

QUERY, DOCUMENTS = "the fox", ["hello", "said", "green world"]
LONG = "the fox said " * 9


def relevance(document: str) -> float:
    return 1 / (1 + math.exp(-logits(ids_of((QUERY, document))[0], 1)[0]))


def cosine(document: str) -> float:
    query, other = (numpy.array(vector(text)) for text in ids_of(QUERY, document))
    return float(query @ other / numpy.linalg.norm(query) / numpy.linalg.norm(other))


@pytest.mark.parametrize(("config", "score"), [(CROSS_ENCODER, relevance), (CONFIG, cosine)])
async def test_documents_come_in_order_of_their_relevance(config: EncoderConfig, score: Any) -> None:
    body = {
        "model": "tiny",
        "query": QUERY,
        "documents": [*DOCUMENTS[:2], {"text": DOCUMENTS[2]}],
        "top_n": 2,
        "return_documents": True,
    }
    response = await answer_of(config, "/v1/rerank", body)
    said = response.json()
    scores = [score(document) for document in DOCUMENTS]
    best = sorted(range(3), key=lambda index: -scores[index])[:2]
    assert [result["index"] for result in said["results"]] == best
    assert [result["relevance_score"] for result in said["results"]] == pytest.approx(
        [scores[index] for index in best], rel=1e-5
    )
    assert [result["document"]["text"] for result in said["results"]] == [DOCUMENTS[index] for index in best]
    inputs: list[Any] = [(QUERY, document) for document in DOCUMENTS] if config.labels else [QUERY, *DOCUMENTS]
    number = sum(len(text.token_ids) for text in ids_of(*inputs))
    assert said["usage"] == {"prompt_tokens": number, "total_tokens": number}
    assert (said["model"], response.headers["server-timing"]) == ("tiny", "queue;dur=1.0, encode;dur=2.0")


async def test_raw_scores_are_logits() -> None:
    said = (
        await answer_of(CROSS_ENCODER, "/v1/rerank", {"query": QUERY, "documents": DOCUMENTS, "raw_scores": True})
    ).json()
    found = {result["index"]: result["relevance_score"] for result in said["results"]}
    pairs = ids_of(*((QUERY, document) for document in DOCUMENTS))
    assert [found[index] for index in range(3)] == pytest.approx([logits(text, 1)[0] for text in pairs])
    assert "document" not in said["results"][0]


async def test_queries_and_documents_have_their_own_prompts() -> None:
    async with asking(PROMPTED) as (client, worker):
        await client.post("/v1/rerank", json={"query": "a", "documents": ["b"]})
        assert list(worker.encodes[0].texts) == ids_of("the fox a", "hello b")


async def test_labels_with_scores() -> None:
    body = {"input": ["hello", {"text": "the fox", "text_pair": "said"}]}
    response = await answer_of(CLASSIFIER, "/v1/classify", body)
    said = response.json()
    for one, text in zip(said["data"], ids_of("hello", ("the fox", "said")), strict=True):
        shares = apply_score_function(to_numpy(array([logits(text, 3)])), "softmax")[0].tolist()
        wanted = sorted(zip(CLASSIFIER.labels, shares, strict=True), key=lambda pair: -pair[1])
        assert [(each["label"], each["score"]) for each in one["predictions"]] == wanted
        assert (one["prediction"], one["score"]) == wanted[0]
    assert [one["index"] for one in said["data"]] == [0, 1]
    assert said["usage"]["prompt_tokens"] == sum(len(text.token_ids) for text in ids_of("hello", ("the fox", "said")))


@pytest.mark.parametrize(
    ("config", "path", "body", "code", "field"),
    [
        (CLASSIFIER, "/v1/rerank", {"query": "a", "documents": ["b"]}, "wrong_model_kind", "model"),
        (CROSS_ENCODER, "/v1/rerank", {"query": "", "documents": ["b"]}, "invalid_request", "query"),
        (CROSS_ENCODER, "/v1/rerank", {"query": "a", "documents": []}, "invalid_request", "documents"),
        (
            CROSS_ENCODER,
            "/v1/rerank",
            {"query": "a", "documents": ["b", LONG]},
            "context_length_exceeded",
            "documents[1]",
        ),
        (CONFIG, "/v1/rerank", {"query": LONG, "documents": ["b"]}, "context_length_exceeded", "query"),
        (CROSS_ENCODER, "/v1/rerank", {"query": "a", "documents": ["b"], "top_n": 0}, "invalid_request", "top_n"),
        (
            CROSS_ENCODER,
            "/v1/rerank",
            {"query": "a", "documents": ["b"], "max_chunks_per_doc": 3},
            "unsupported_parameter",
            None,
        ),
        (CLASSIFIER, "/v1/classify", {"input": []}, "invalid_request", "input"),
        (CLASSIFIER, "/v1/classify", {"input": ["a", LONG]}, "context_length_exceeded", "input[1]"),
    ],
)
async def test_refusals_name_the_field(
    config: EncoderConfig, path: str, body: Any, code: str, field: str | None
) -> None:
    response = await answer_of(config, path, body)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, code, field or "max_chunks_per_doc")


# ---- text-embeddings-inference -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inputs", "texts"),
    [
        ("hello", ["hello"]),
        (["hello"], ["hello"]),
        (["hello", "said"], [("hello", "said")]),
        ([["hello"], ["hello", "said"]], ["hello", ("hello", "said")]),
    ],
)
async def test_predict(inputs: Any, texts: list[Any]) -> None:
    response = await answer_of(CLASSIFIER, "/predict", {"inputs": inputs, "raw_scores": True, "truncate": True})
    wanted = []
    for text in ids_of(*texts):
        scores = to_numpy(array([logits(text, 3)]))[0].tolist()
        wanted.append(
            [{"score": score, "label": label} for score, label in zip(scores, CLASSIFIER.labels, strict=True)]
        )
    assert response.json() == (wanted if isinstance(inputs[0], list) else wanted[0]), (
        "these logits fall from label to label"
    )
    number = sum(len(text.token_ids) for text in ids_of(*texts))
    assert (response.headers["x-compute-tokens"], "encode" in response.headers["server-timing"]) == (str(number), True)


@pytest.mark.parametrize(("config", "score"), [(CROSS_ENCODER, relevance), (CONFIG, cosine)])
async def test_reranked_in_the_other_dialect(config: EncoderConfig, score: Any) -> None:
    body = {"query": QUERY, "texts": DOCUMENTS, "return_text": True, "truncation_direction": "Right"}
    ranks = (await answer_of(config, "/rerank", body)).json()
    assert sorted(rank["index"] for rank in ranks) == [0, 1, 2]
    assert [rank["score"] for rank in ranks] == pytest.approx(
        [score(DOCUMENTS[rank["index"]]) for rank in ranks], rel=1e-5
    )
    assert [rank["text"] for rank in ranks] == [DOCUMENTS[rank["index"]] for rank in ranks]
    assert [rank["score"] for rank in ranks] == sorted((rank["score"] for rank in ranks), reverse=True)


async def test_how_alike_sentences_are() -> None:
    body = {"inputs": {"source_sentence": QUERY, "sentences": DOCUMENTS}, "parameters": {"truncate": True}}
    found = (await answer_of(CONFIG, "/similarity", body)).json()
    assert found == pytest.approx([cosine(document) for document in DOCUMENTS], rel=1e-5)


async def test_vectors_of_all_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = ["hello", "the fox", "fox " * 14]
    async with asking() as (client, _):
        for piece in (16, 5, 1):
            monkeypatch.setattr(encoders, "CHUNK_TOKENS", piece)
            found = (await client.post("/embed_all", json={"inputs": inputs})).json()
            assert found == [[[float(token)] * SIZE for token in text.token_ids] for text in ids_of(*inputs)]


@pytest.mark.parametrize(
    ("config", "path", "body"),
    [
        (CLASSIFIER, "/predict", {"inputs": ["a", "b", "c"]}),
        (CLASSIFIER, "/predict", {"inputs": [["a"], "b"]}),
        (CLASSIFIER, "/predict", {"inputs": LONG}),
        (CONFIG, "/predict", {"inputs": "a"}),
        (CROSS_ENCODER, "/rerank", {"query": "", "texts": ["a"]}),
        (CONFIG, "/similarity", {"inputs": {"source_sentence": "a", "sentences": []}}),
        (CONFIG, "/embed_all", {"inputs": ""}),
    ],
)
async def test_refusals_in_the_other_dialect(config: EncoderConfig, path: str, body: Any) -> None:
    response = await answer_of(config, path, body)
    assert (response.status_code, response.json()["error_type"]) == (400, "Validation")
    assert isinstance(response.json()["error"], str)
