"""Unchanged clients of encoders (Cohere, Triton, the hub, frameworks), and other servers' bodies, with real encoders."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import numpy
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from tests.live.live_server import LiveServer, live
from tiny_encoders import Modules, write_encoder

TEXTS = ["the fox said hello", "hello", "green world"]


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    path = write_encoder(tmp_path_factory.mktemp("encoders") / "embedder", "BertModel", modules=Modules())
    with live(path, any_model_name="off") as server:
        yield server


@pytest.fixture(scope="module")
def cross_encoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    path = write_encoder(tmp_path_factory.mktemp("encoders") / "cross", "BertForSequenceClassification", num_labels=1)
    with live(path) as server:
        yield server


def native(server: LiveServer, texts: list[str]) -> Any:
    response = server.client.post("/encode", json={"inputs": texts, "normalize": True})
    assert response.status_code == 200, response.text
    return numpy.array(response.json()["embeddings"], dtype="f4")


# ---- Cohere --------------------------------------------------------------------------------------------------------


@contextmanager
def cohere_clients(server: LiveServer) -> Iterator[tuple[Any, Any]]:
    """The clients of both versions."""
    cohere: Any = pytest.importorskip("cohere", reason="the client is not installed: pip install cohere")
    with httpx.Client(timeout=60) as connections:
        given: Any = {"api_key": "none", "base_url": server.url, "httpx_client": connections}
        yield cohere.Client(**given), cohere.ClientV2(**given)


def test_cohere_reranks(cross_encoder: LiveServer, embedder: LiveServer) -> None:
    for server, model in ((cross_encoder, "cross"), (embedder, "embedder")):
        asked: Any = {"model": model, "query": "hello", "documents": TEXTS, "top_n": 2}
        with cohere_clients(server) as (client, client_v2):
            second = client_v2.rerank(**asked)
            first = client.rerank(**asked, return_documents=True)
        assert [each.index for each in second.results] == [each.index for each in first.results]
        assert [each.relevance_score for each in second.results] == [each.relevance_score for each in first.results]
        assert [each.document.text for each in first.results] == [TEXTS[each.index] for each in first.results]
        assert len(second.results) == 2
        assert second.meta.api_version.version == "2"
        assert first.meta.tokens.input_tokens > 0


@pytest.mark.filterwarnings(r"ignore::DeprecationWarning:cohere\..*")  # the client's own, in `embed`
def test_cohere_embeds(embedder: LiveServer) -> None:
    wanted = native(embedder, TEXTS)
    asked: Any = {"model": "embedder", "texts": TEXTS, "input_type": "search_document"}
    kinds = ["float", "binary", "ubinary", "base64"]
    with cohere_clients(embedder) as (client, client_v2):
        first = client.embed(**asked)
        by_type = client.embed(**asked, embedding_types=["float", "base64"])
        second = client_v2.embed(**asked, embedding_types=kinds)
        short = client_v2.embed(**asked, embedding_types=["float"], output_dimension=8)
    assert numpy.abs(numpy.array(first.embeddings) - wanted).max() < 1e-5
    assert first.texts == TEXTS
    assert numpy.abs(numpy.array(by_type.embeddings.float_) - wanted).max() < 1e-5
    assert numpy.abs(numpy.array(second.embeddings.float_) - wanted).max() < 1e-5
    bits = numpy.packbits(numpy.array(second.embeddings.float_) >= 0, axis=1)
    assert (numpy.array(second.embeddings.ubinary) == bits).all()
    assert (numpy.array(second.embeddings.binary) == bits.astype("i2") - 128).all()
    assert len(short.embeddings.float_[0]) == 8


def test_cohere_reads_our_refusals(embedder: LiveServer) -> None:
    cohere: Any = pytest.importorskip("cohere", reason="the client is not installed: pip install cohere")
    with cohere_clients(embedder) as (_, client):
        with pytest.raises(cohere.BadRequestError, match="embedding_types") as refused:
            client.embed(model="embedder", texts=TEXTS, input_type="search_query", embedding_types=["int8"])
        assert "message" in refused.value.body
        with pytest.raises(cohere.NotFoundError, match="is not served here"):
            client.rerank(model="rerank-v3.5", query="a", documents=["b"])


# ---- Triton --------------------------------------------------------------------------------------------------------


def test_triton_reads_the_repository_and_statistics(embedder: LiveServer) -> None:
    with triton.InferenceServerClient(embedder.url.removeprefix("http://")) as client:
        (model,) = client.get_model_repository_index()
        assert (model["name"], model["state"]) == ("embedder", "READY")
        before = client.get_inference_statistics("embedder")["model_stats"][0]
        native(embedder, TEXTS)
        after = client.get_inference_statistics("embedder", "1")["model_stats"][0]
        assert after["inference_count"] == before["inference_count"] + 1
        assert after["inference_stats"]["success"]["ns"] > before["inference_stats"]["success"]["ns"]
        assert client.get_inference_statistics()["model_stats"][0]["name"] == "embedder"
        for refuse in (client.load_model, client.unload_model):
            with pytest.raises(InferenceServerException, match="not loaded or unloaded") as refused:
                refuse("embedder")
            assert refused.value.status() == "400"


# ---- the Hugging Face hub's client, text-embeddings-inference ------------------------------------------------------


@pytest.fixture
def hub_client(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Make a client of a URL on this machine, which the tests' offline mode would not let it reach."""
    hub: Any = pytest.importorskip("huggingface_hub", reason="the client is not installed: pip install huggingface_hub")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    return lambda url: hub.InferenceClient(model=url, token="none", timeout=60)


@pytest.mark.parametrize("path", ["", "/", "/embed"])
def test_the_hubs_client_gets_features(embedder: LiveServer, hub_client: Callable[[str], Any], path: str) -> None:
    client = hub_client(f"{embedder.url}{path}")
    found = client.feature_extraction(TEXTS, truncate=True, normalize=True)
    assert (found.dtype, numpy.abs(found - native(embedder, TEXTS)).max() < 1e-6) == (numpy.float32, True)
    assert client.feature_extraction("hello").shape == (1, found.shape[1])


def test_the_hubs_client_compares_sentences(embedder: LiveServer, hub_client: Callable[[str], Any]) -> None:
    found = hub_client(f"{embedder.url}/similarity").sentence_similarity("hello", other_sentences=TEXTS)
    of_source, *others = native(embedder, ["hello", *TEXTS])
    assert found == pytest.approx([float(of_source @ other) for other in others], abs=1e-5)


# ---- frameworks ----------------------------------------------------------------------------------------------------


def framework(name: str, package: str) -> Any:
    """Import a module of a framework, or skip the test."""
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it is fetched otherwise
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(name, reason=f"the client is not installed: pip install {package}, or make clients")


def test_llama_index_embeds_by_text_embeddings_inference(embedder: LiveServer) -> None:
    package = "llama-index-embeddings-text-embeddings-inference"
    module = framework("llama_index.embeddings.text_embeddings_inference", package)
    model = module.TextEmbeddingsInference(base_url=embedder.url, model_name="any")
    assert numpy.array(model.get_text_embedding_batch(TEXTS)) == pytest.approx(native(embedder, TEXTS), abs=1e-5)


def test_llama_index_reranks_by_text_embeddings_inference(cross_encoder: LiveServer) -> None:
    module = framework("llama_index.postprocessor.tei_rerank", "llama-index-postprocessor-tei-rerank")
    schema = framework("llama_index.core.schema", "llama-index-core")
    nodes = [schema.NodeWithScore(node=schema.TextNode(text=text)) for text in TEXTS]
    model = module.TextEmbeddingInference(base_url=cross_encoder.url, model_name="any", top_n=2)
    expected = cross_encoder.client.post("/rerank", json={"query": "hello", "texts": TEXTS}).json()
    found = model.postprocess_nodes(nodes, query_str="hello")
    assert [node.text for node in found] == [TEXTS[one["index"]] for one in expected[:2]]


def test_langchain_with_coheres_client(embedder: LiveServer, cross_encoder: LiveServer) -> None:
    module = framework("langchain_cohere", "langchain-cohere")
    cohere, documents = framework("cohere", "cohere"), framework("langchain_core.documents", "langchain-core")
    vectors = module.CohereEmbeddings(cohere_api_key="none", base_url=embedder.url, model=embedder_name(embedder))
    assert numpy.array(vectors.embed_documents(TEXTS)) == pytest.approx(native(embedder, TEXTS), abs=1e-5)
    client = cohere.ClientV2(api_key="none", base_url=cross_encoder.url)
    ranker = module.CohereRerank(client=client, model=embedder_name(cross_encoder), top_n=2)
    ranked = ranker.compress_documents([documents.Document(text) for text in TEXTS], "hello")
    assert len(ranked) == 2


def embedder_name(server: LiveServer) -> str:
    return str(server.client.get("/v1/models").json()["data"][0]["id"])


@pytest.mark.parametrize("provider", ["hosted_vllm", "cohere", "jina_ai", "huggingface"])
def test_litellm_reranks(cross_encoder: LiveServer, provider: str) -> None:
    litellm = framework("litellm", "litellm")
    base = cross_encoder.url + ("/v1/rerank" if provider == "cohere" else "")
    model = f"{provider}/{embedder_name(cross_encoder)}"
    answer = litellm.rerank(model=model, query="hello", documents=TEXTS, top_n=2, api_base=base, api_key="none")
    expected = cross_encoder.client.post("/rerank", json={"query": "hello", "texts": TEXTS}).json()
    assert [one["index"] for one in answer.results] == [one["index"] for one in expected[:2]]


def test_haystack_embeds(embedder: LiveServer) -> None:
    embedders = framework("haystack.components.embedders", "haystack-ai")
    secret = framework("haystack.utils", "haystack-ai").Secret.from_token("none")
    model = embedders.OpenAITextEmbedder(
        api_key=secret, model=embedder_name(embedder), api_base_url=f"{embedder.url}/v1"
    )
    assert numpy.array(model.run(TEXTS[0])["embedding"]) == pytest.approx(native(embedder, TEXTS[:1])[0], abs=1e-5)


# ---- bodies --------------------------------------------------------------------------------------------------------


def test_bodies_of_text_embeddings_inference(embedder: LiveServer, cross_encoder: LiveServer) -> None:
    vectors = embedder.client.post("/embed", json={"inputs": TEXTS, "truncate": True}).json()
    assert numpy.abs(numpy.array(vectors) - native(embedder, TEXTS)).max() < 1e-6
    rows = embedder.client.post("/tokenize", json={"inputs": TEXTS}).json()
    assert [TEXTS[0][token["start"] : token["stop"]] for token in rows[0] if not token["special"]] == [
        token["text"] for token in rows[0] if not token["special"]
    ]
    ids = [[token["id"] for token in row] for row in rows]
    assert embedder.client.post("/decode", json={"ids": ids}).json() == TEXTS
    assert embedder.client.post("/embed_sparse", json={"inputs": TEXTS}).status_code == 400
    assert embedder.client.get("/health").status_code == 200
    assert embedder.client.get("/info").json()["model_type"] == {"embedding": {"pooling": "mean"}}
    ranks = cross_encoder.client.post("/rerank", json={"query": "hello", "texts": TEXTS}).json()
    jina = cross_encoder.client.post("/rerank", json={"query": "hello", "documents": TEXTS}).json()["results"]
    assert [(rank["index"], rank["score"]) for rank in ranks] == [
        (each["index"], each["relevance_score"]) for each in jina
    ]


# ---- vLLM ----------------------------------------------------------------------------------------------------------


def test_bodies_of_vllm(embedder: LiveServer, cross_encoder: LiveServer) -> None:
    wanted = native(embedder, TEXTS)
    scores = embedder.client.post("/v1/score", json={"text_1": TEXTS[0], "text_2": TEXTS}).json()["data"]
    assert [each["score"] for each in scores] == pytest.approx((wanted @ wanted[0]).tolist(), abs=1e-5)
    pairs = cross_encoder.client.post("/score", json={"queries": ["hello"] * 3, "documents": TEXTS}).json()["data"]
    ranks = cross_encoder.client.post("/rerank", json={"query": "hello", "texts": TEXTS}).json()
    by_place = {rank["index"]: rank["score"] for rank in ranks}
    assert [each["score"] for each in pairs] == pytest.approx([by_place[place] for place in range(3)], abs=1e-6)
    pooled = embedder.client.post("/pooling", json={"input": TEXTS}).json()["data"]
    assert numpy.abs(numpy.array([each["data"] for each in pooled]) - wanted).max() < 1e-6
    labels = cross_encoder.client.post("/classify", json={"input": TEXTS}).json()["data"]
    assert [each["num_classes"] for each in labels] == [1, 1, 1]
