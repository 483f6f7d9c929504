"""Encoders over a real connection: OpenAI's own client, every route on the kind of model that it is for, neighbours and crowds."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy
import pytest

from app.service.encode import MAX_TEXTS
from tests.live.live_server import LiveServer, live
from tiny_encoders import Modules, write_encoder

TEXTS = ["the fox said hello", "hello", "green world", "the wood " * 12]


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    directory = write_encoder(tmp_path_factory.mktemp("encoders") / "embedder", "BertModel", modules=Modules())
    with live(directory) as server:
        yield server


@pytest.fixture(scope="module")
def cross_encoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    directory = write_encoder(
        tmp_path_factory.mktemp("encoders") / "cross", "BertForSequenceClassification", num_labels=1
    )
    with live(directory) as server:
        yield server


def posted(server: LiveServer, path: str, body: Any) -> Any:
    response = server.client.post(path, json=body)
    assert response.status_code == 200, response.text
    assert response.headers["server-timing"].startswith("queue;dur=")
    return response.json()


def vectors(server: LiveServer, texts: Any) -> Any:
    return numpy.array(posted(server, "/encode", {"inputs": texts})["embeddings"], dtype="f4")


def test_the_official_client_gets_the_vectors_of_our_own_route(embedder: LiveServer) -> None:
    import openai

    official = openai.OpenAI(base_url=f"{embedder.url}/v1", api_key="none", max_retries=0, timeout=60)
    wanted = vectors(embedder, TEXTS)
    assert numpy.linalg.norm(wanted, axis=1) == pytest.approx(1, abs=1e-5)
    said = official.embeddings.create(model="embedder", input=TEXTS)  # base64 unless numpy is absent
    assert numpy.array([one.embedding for one in said.data], dtype="f4").tolist() == wanted.tolist()
    assert [one.index for one in said.data] == [0, 1, 2, 3]
    assert said.usage.prompt_tokens == said.usage.total_tokens > 20
    floats = official.embeddings.create(model="embedder", input=TEXTS, encoding_format="float")
    assert numpy.array([one.embedding for one in floats.data], dtype="f4").tolist() == wanted.tolist()
    short = official.embeddings.create(model="embedder", input=TEXTS, dimensions=8)
    assert len(short.data[0].embedding) == 8
    assert numpy.linalg.norm(short.data[0].embedding) == pytest.approx(1, abs=1e-5), "unit length after the cut"
    with pytest.raises(openai.BadRequestError) as caught:
        official.chat.completions.create(model="embedder", messages=[{"role": "user", "content": "x"}])
    assert caught.value.code == "wrong_model_kind"


def test_a_text_has_the_same_vector_alone_in_company_and_as_ids(embedder: LiveServer) -> None:
    together = vectors(embedder, TEXTS)
    alone = numpy.concatenate([vectors(embedder, text) for text in TEXTS])
    ids = embedder.client.post("/tokenize", json={"prompt": TEXTS[0]}).json()["token_ids"]
    assert numpy.abs(together - alone).max() < 1e-5
    assert numpy.abs(vectors(embedder, [ids]) - together[:1]).max() < 1e-5


def test_one_bad_text_does_not_fail_its_neighbours(embedder: LiveServer) -> None:
    bodies = [{"inputs": [text, "hello"]} for text in ("the fox", "", "green " * 500, "wood")] * 8
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda body: embedder.client.post("/encode", json=body), bodies))
    assert [answer.status_code for answer in answers] == [200, 400, 400, 200] * 8
    hello = {tuple(numpy.round(answer.json()["embeddings"][1], 4)) for answer in answers if answer.status_code == 200}
    assert len(hello) == 1
    assert embedder.idle
    assert not embedder.fatal


def test_as_many_texts_as_a_request_may_have(embedder: LiveServer) -> None:
    before = embedder.metric("armature_vectors_total")
    texts = [TEXTS[number % 3] for number in range(MAX_TEXTS)]
    said = posted(embedder, "/v1/embeddings", {"input": texts, "encoding_format": "base64"})
    found = numpy.array([numpy.frombuffer(base64.b64decode(one["embedding"]), "<f4") for one in said["data"]])
    assert numpy.abs(found - vectors(embedder, TEXTS[:3])[numpy.arange(MAX_TEXTS) % 3]).max() < 1e-5
    assert embedder.metric("armature_vectors_total") == before + MAX_TEXTS + 3


def test_relevance_on_an_embedding_model_is_the_cosine(embedder: LiveServer) -> None:
    said = posted(embedder, "/v1/rerank", {"query": "hello", "documents": TEXTS})
    found = {one["index"]: one["relevance_score"] for one in said["results"]}
    of_query, *of_texts = vectors(embedder, ["hello", *TEXTS])
    assert [found[index] for index in range(4)] == pytest.approx(
        [float(of_query @ other) for other in of_texts], abs=1e-5
    )
    assert said["results"][0]["index"] == 1
    alike = posted(embedder, "/similarity", {"inputs": {"source_sentence": "hello", "sentences": TEXTS}})
    assert alike == pytest.approx([found[index] for index in range(4)], abs=1e-5)


def test_a_cross_encoder_ranks_and_labels_alike(cross_encoder: LiveServer) -> None:
    said = posted(cross_encoder, "/v1/rerank", {"query": "the fox", "documents": TEXTS})
    scores = [one["relevance_score"] for one in said["results"]]
    assert scores == sorted(scores, reverse=True)
    assert all(0 < score < 1 for score in scores)
    other = posted(cross_encoder, "/rerank", {"query": "the fox", "texts": TEXTS})
    assert [(one["index"], one["score"]) for one in other] == [
        (one["index"], one["relevance_score"]) for one in said["results"]
    ]
    pairs = [{"text": "the fox", "text_pair": text} for text in TEXTS]
    labels = posted(cross_encoder, "/v1/classify", {"input": pairs})["data"]
    assert [labels[one["index"]]["score"] for one in other] == pytest.approx([one["score"] for one in other], abs=1e-6)
    response = cross_encoder.client.post("/v1/embeddings", json={"input": "x"})
    assert (response.status_code, response.json()["error"]["code"]) == (400, "wrong_model_kind")


def test_hidden_states_of_every_token(embedder: LiveServer) -> None:
    hidden = posted(embedder, "/embed_all", {"inputs": TEXTS[:2]})
    pooled = numpy.array([numpy.mean(states, axis=0) for states in hidden])
    pooled /= numpy.linalg.norm(pooled, axis=1, keepdims=True)
    assert numpy.abs(pooled - vectors(embedder, TEXTS[:2])).max() < 1e-5
