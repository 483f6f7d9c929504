"""text-embeddings-inference's, Cohere's and vLLM's bodies for encoders, and what a body of another dialect is told."""

from __future__ import annotations

import base64
import math
from dataclasses import replace
from typing import Any

import httpx
import numpy
import pytest

from app.errors import InvalidRequest
from app.models.encoders.config import EncoderConfig, PoolingConfig
from app.service.served_model import apply_score_function, to_numpy
from fake_encoder import (
    CLASSIFIER,
    CONFIG,
    CROSS_ENCODER,
    LIMITS,
    PROMPTED,
    SIZE,
    array,
    ids_of,
    logits,
    tokenizer,
    vector,
)
from tests.api.encoder_client import answer_of, asking

LONG = "the fox said " * 9
TEXTS = ["hello", "the fox", "green world"]
PROMPTS = {"query": "the fox ", "passage": "hello ", "clustering": "green "}
WIDE = replace(CONFIG, hidden_size=8, head_dim=8)


def tokens(*texts: Any) -> int:
    return sum(len(text.token_ids) for text in ids_of(*texts))


def cosine(first: str, second: str) -> float:
    one, other = (numpy.array(vector(text)) for text in ids_of(first, second))
    return float(one @ other / numpy.linalg.norm(one) / numpy.linalg.norm(other))


def sigmoid(pair: tuple[str, str]) -> float:
    return 1 / (1 + math.exp(-logits(ids_of(pair)[0], 1)[0]))


# ---- text-embeddings-inference -------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/embed", "/"])
async def test_embed_returns_bare_vectors(path: str) -> None:
    async with asking() as (client, worker):
        response = await client.post(path, json={"inputs": TEXTS[:2], "dimensions": 3})
        assert response.json() == [vector(text)[:3] for text in ids_of(*TEXTS[:2])]
        assert response.headers["x-compute-tokens"] == str(tokens(*TEXTS[:2]))
        assert (await client.post(path, json={"inputs": "hello"})).json() == [vector(ids_of("hello")[0])]
        assert (await client.post(path, json={"inputs": [[2, 9, 3]]})).json() == [[9.0, 9.0, 3.0, 0.25]]
        assert [order.normalize for order in worker.encodes] == [True] * 3, "unlike /encode, which asks the checkpoint"


async def test_embed_reads_every_field() -> None:
    async with asking(PROMPTED) as (client, worker):
        body = {"inputs": LONG, "truncate": True, "truncation_direction": "Left", "prompt_name": "query"}
        assert (await client.post("/embed", json=body | {"normalize": False})).status_code == 200
        order = worker.encodes[0]
        assert (len(order.texts[0].token_ids), order.normalize) == (16, False)
        assert order.texts[0].token_ids[-8:] == ids_of(LONG)[0].token_ids[-8:], "its end is kept"


async def test_the_root_classifies_with_a_classifier() -> None:
    response = await answer_of(CLASSIFIER, "/", {"inputs": [["hello"], ["the fox", "said"]]})
    assert [{each["label"] for each in row} for row in response.json()] == [set(CLASSIFIER.labels)] * 2


@pytest.mark.parametrize(("config", "instead"), [(CONFIG, "/embed"), (CLASSIFIER, "/predict")])
async def test_sparse_vectors_are_refused_by_name(config: Any, instead: str) -> None:
    response = await answer_of(config, "/embed_sparse", {"inputs": "hello"})
    assert response.status_code == 400
    assert "no sparse vectors" in response.json()["error"]
    assert instead in response.json()["error"]


async def test_a_clients_parameters_of_predict() -> None:
    body: dict[str, Any] = {"inputs": "hello", "parameters": {"function_to_apply": None, "top_k": 2}}
    async with asking(CLASSIFIER) as (client, _):
        assert len((await client.post("/predict", json=body)).json()) == 2
        body["parameters"]["function_to_apply"] = "softmax"
        refused = await client.post("/predict", json=body)
        assert (refused.status_code, "function_to_apply" in refused.text) == (400, True)


async def test_decode() -> None:
    ids = ids_of("the fox", "hello")
    async with asking() as (client, _):
        assert (await client.post("/decode", json={"ids": list(ids[0].token_ids)})).json() == ["the fox"]
        both = [list(text.token_ids) for text in ids]
        assert (await client.post("/decode", json={"ids": both})).json() == ["the fox", "hello"]
        whole = (await client.post("/decode", json={"ids": both[0], "skip_special_tokens": False})).json()
        assert whole == [tokenizer().decode(both[0], skip_special_tokens=False)] != ["the fox"]
        for wrong, said in (([], "ids"), ([[]], "ids"), ([9999], "ids must be in"), ("x", "ids")):
            refused = await client.post("/decode", json={"ids": wrong})
            assert (refused.status_code, said in refused.json()["error"]) == (400, True), wrong


async def test_tokenize_with_places() -> None:
    async with asking(PROMPTED) as (client, _):
        (found,) = (await client.post("/tokenize", json={"inputs": "Hello the fox"})).json()
        assert [token["id"] for token in found] == list(ids_of("Hello the fox")[0].token_ids)
        assert [token["text"] for token in found[1:-1]] == ["Hello", "the", "fox"]
        assert [(token["start"], token["stop"]) for token in found[1:-1]] == [(0, 5), (6, 9), (10, 13)]
        assert [token["special"] for token in found] == [True, False, False, False, True]
        assert (found[0]["text"], found[0]["start"], found[0]["stop"]) == ("[CLS]", None, None)
        body: dict[str, Any] = {"inputs": ["hello", "said"], "add_special_tokens": False, "prompt_name": "query"}
        rows = (await client.post("/tokenize", json=body)).json()
        assert [[token["text"] for token in row] for row in rows] == [["the", "fox", "hello"], ["the", "fox", "said"]]
        refused = await client.post("/tokenize", json=body | {"prompt_name": "other"})
        assert refused.json() == {
            "error": "This checkpoint has no prompt 'other'; it has: passage, query.",
            "error_type": "Validation",
        }


async def test_a_long_text_has_tokens_without_places() -> None:
    (found,) = (await answer_of(CONFIG, "/tokenize", {"inputs": "the fox " * 9000})).json()
    assert len(found) == 18_002
    assert {token["start"] for token in found} == {None}
    assert (found[1]["text"], found[1]["special"], found[-1]["special"]) == ("the", False, True)


async def test_tokens_with_places_are_bounded() -> None:
    body: dict[str, Any] = {"inputs": ["a" * 2**19, "a" * (2**19 + 1)]}
    response = await answer_of(CONFIG, "/tokenize", body)
    assert (response.status_code, response.json()["error_type"]) == (400, "Validation")
    assert "1048576 characters in total" in response.json()["error"]


async def test_info_has_the_fields_of_both() -> None:
    async with asking(CROSS_ENCODER) as (client, _):
        known = (await client.get("/info")).json()
        assert known["model_id"] == "tiny"
        assert known["max_input_length"] == 16
        assert known["model_type"] == {"reranker": {"id2label": {"0": "relevant"}, "label2id": {"relevant": 0}}}
    async with asking() as (client, _):
        known = (await client.get("/info")).json()
        assert known["model_type"] == {"embedding": {"pooling": "mean"}}
        assert (known["model_dtype"], known["stage"]) == ("float32", "ready")


# ---- Cohere, Jina --------------------------------------------------------------------------------------------------


async def test_version_1_returns_numbers() -> None:
    response = await answer_of(CONFIG, "/v1/embed", {"texts": TEXTS, "model": "tiny", "input_type": "search_document"})
    body = response.json()
    assert (body["response_type"], body["texts"]) == ("embeddings_floats", TEXTS)
    assert body["embeddings"] == [vector(text) for text in ids_of(*TEXTS)]
    assert body["meta"]["api_version"] == {"version": "1"}
    assert body["meta"]["tokens"] == body["meta"]["billed_units"] == {"input_tokens": tokens(*TEXTS)}


async def test_version_2_bills_no_images() -> None:
    meta = (await answer_of(CONFIG, "/v2/embed", {"texts": TEXTS})).json()["meta"]
    assert meta["billed_units"] == {"input_tokens": tokens(*TEXTS), "image_tokens": 0}
    assert meta["tokens"] == {"input_tokens": tokens(*TEXTS)}


async def test_types_of_vectors() -> None:
    kinds = ["float", "base64"]
    body = (await answer_of(CONFIG, "/v2/embed", {"texts": TEXTS, "embedding_types": kinds})).json()
    assert list(body["embeddings"]) == kinds
    assert "response_type" not in body
    assert body["embeddings"]["float"] == [vector(text) for text in ids_of(*TEXTS)]
    read = [numpy.frombuffer(base64.b64decode(each), "<f4").tolist() for each in body["embeddings"]["base64"]]
    assert read == body["embeddings"]["float"]
    by_type = (await answer_of(CONFIG, "/v1/embed", {"texts": TEXTS, "embedding_types": ["base64"]})).json()
    assert (by_type["response_type"], list(by_type["embeddings"])) == ("embeddings_by_type", ["base64"])


async def test_bits_of_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [[1.0, -1.0, 0.0, 2.0, -3.0, -1.0, -1.0, 1.0], [-1.0] * 8]
    monkeypatch.setattr("fake_encoder.vector", lambda text: rows[len(text.token_ids) == 4])
    body = {"texts": ["hello", "the fox"], "embedding_types": ["binary", "ubinary"]}
    found = (await answer_of(WIDE, "/v2/embed", body)).json()["embeddings"]
    assert found == {"binary": [[0b10110001 - 128], [-128]], "ubinary": [[0b10110001], [0]]}
    refused = await answer_of(CONFIG, "/v2/embed", body)
    assert (refused.status_code, "not a multiple of 8" in refused.json()["message"]) == (400, True)


@pytest.mark.parametrize(
    ("input_type", "prompt"),
    [("search_query", "the fox "), ("search_document", "hello "), ("clustering", "green "), ("classification", "")],
)
async def test_the_input_type_names_the_prompt(input_type: str, prompt: str) -> None:
    prompted = replace(CONFIG, pooling=PoolingConfig(prompts=PROMPTS))
    async with asking(prompted) as (client, worker):
        body = {"inputs": [{"content": [{"type": "text", "text": "said"}]}], "input_type": input_type}
        assert (await client.post("/v2/embed", json=body)).status_code == 200
        assert list(worker.encodes[0].texts) == ids_of(f"{prompt}said")


@pytest.mark.parametrize(("truncate", "kept"), [(None, "first"), ("END", "first"), ("START", "last"), ("NONE", "")])
async def test_cohere_truncates_unless_told_not_to(truncate: str | None, kept: str) -> None:
    async with asking() as (client, worker):
        response = await client.post("/v2/embed", json={"texts": [LONG], "truncate": truncate})
        if not kept:
            assert (response.status_code, "texts has" in response.json()["message"]) == (400, True)
            return
        found, whole = worker.encodes[0].texts[0].token_ids[1:-1], ids_of(LONG)[0].token_ids[1:-1]
        assert found == (whole[: len(found)] if kept == "first" else whole[-len(found) :])


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/v1/embed", {}, "texts: Field required"),
        ("/v2/embed", {"model": "tiny"}, "either texts, or inputs"),
        ("/v2/embed", {"texts": ["a"], "embedding_types": ["int8"]}, "'float', 'base64', 'binary' or 'ubinary'"),
        ("/v2/embed", {"texts": ["a"], "output_dimension": 5}, f"output_dimension must be in [1, {SIZE}]"),
        ("/v2/embed", {"texts": ["a"], "images": ["data:"]}, "images is not supported"),
        ("/v2/embed", {"texts": ["a"], "input_type": "image"}, "input_type"),
        ("/v2/embed", {"texts": ["a", ""]}, "texts[1] is empty"),
        ("/v2/embed", {"input": "a"}, "/v1/embeddings (OpenAI)"),
        ("/v1/embed", {"inputs": "a"}, "/embed (text-embeddings-inference)"),
        ("/v2/rerank", {"query": "a"}, "either documents (Cohere, Jina, vLLM), or texts"),
        ("/v2/rerank", {"query": "a", "documents": ["b"], "max_tokens_per_doc": -1}, "max_tokens_per_doc"),
    ],
)
async def test_coheres_errors_have_a_message(path: str, body: Any, said: str) -> None:
    response = await answer_of(CONFIG, path, body)
    assert response.status_code == 400
    assert list(response.json()) == ["message"]
    assert said in response.json()["message"]


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
async def test_every_rerank_route_takes_every_body(path: str) -> None:
    async with asking(CROSS_ENCODER) as (client, _):
        body = {"query": "the fox", "documents": [TEXTS[0], {"text": TEXTS[1]}, TEXTS[2]], "top_n": 2}
        found = (await client.post(path, json=body | {"return_documents": True})).json()
        scores = [sigmoid(("the fox", text)) for text in TEXTS]
        best = sorted(range(3), key=lambda index: -scores[index])[:2]
        assert [each["index"] for each in found["results"]] == best
        assert [each["document"]["text"] for each in found["results"]] == [TEXTS[index] for index in best]
        assert found["usage"]["total_tokens"] == found["meta"]["tokens"]["input_tokens"] > 0
        assert found["meta"]["api_version"]["version"] == ("2" if path == "/v2/rerank" else "1")
        ranks = (await client.post(path, json={"query": "the fox", "texts": TEXTS, "top_n": 2})).json()
        assert [rank["index"] for rank in ranks] == best
        assert [rank["score"] for rank in ranks] == pytest.approx([scores[index] for index in best], rel=1e-5)


@pytest.mark.parametrize(
    ("body", "names"),
    [
        ({"query": "a", "documents": []}, {"message", "type", "param", "code"}),
        ({"query": "a", "documents": ["b"], "instruction": "c"}, {"message", "type", "param", "code"}),
        ({"query": "a", "texts": []}, None),
        ({"query": "a", "texts": ["documents"], "instruction": "c"}, None),
    ],
)
async def test_an_error_of_rerank_has_the_format_of_the_body(body: Any, names: set[str] | None) -> None:
    error = (await answer_of(CONFIG, "/rerank", body)).json()
    assert (set(error["error"]) if names else set(error)) == (names or {"error", "error_type"})


@pytest.mark.parametrize("config", [CONFIG, CROSS_ENCODER])
@pytest.mark.parametrize(
    ("path", "field"), [("/v1/rerank", "documents"), ("/v2/rerank", "documents"), ("/rerank", "texts")]
)
async def test_a_document_without_text_is_scored_beside_the_others(
    config: EncoderConfig, path: str, field: str
) -> None:
    async with asking(config) as (client, _):
        alone = (await client.post(path, json={"query": "the fox", field: ["hello"]})).json()
        response = await client.post(path, json={"query": "the fox", field: ["hello", "", "  ", ""]})
        assert response.status_code == 200, response.text
        found = response.json()
        found, alone = (found["results"], alone["results"]) if field == "documents" else (found, alone)
        name = "relevance_score" if field == "documents" else "score"
        scores = {one["index"]: one[name] for one in found}
        assert scores.keys() == {0, 1, 2, 3}
        assert scores[0] == pytest.approx(alone[0][name], rel=1e-6)
        body = {"text_1": "the fox", "text_2": ["hello", ""]}
        pairs = (await client.post("/v1/score", json=body)).json()["data"]
        assert [one["score"] for one in pairs] == pytest.approx([scores[0], scores[1]], rel=1e-6)


LONGER = f"{LONG} world green"  # of which the end differs from the beginning


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/rerank", {"query": "a", "documents": [LONGER]}),
        ("/v2/rerank", {"query": "a", "documents": [LONGER]}),
        ("/rerank", {"query": "a", "documents": [LONGER]}),
        ("/rerank", {"query": "a", "texts": [LONGER]}),
        ("/score", {"text_1": "a", "text_2": LONGER}),
        ("/v1/classify", {"input": LONGER}),
        ("/pooling", {"input": LONGER, "task": "classify"}),
        ("/v1/embeddings", {"input": LONGER}),
        ("/pooling", {"input": LONGER, "task": "embed"}),
    ],
)
async def test_vllms_truncation_is_the_same_on_every_route(path: str, body: Any) -> None:
    vectors = path == "/v1/embeddings" or body.get("task") == "embed"
    async with asking(CONFIG if vectors else CROSS_ENCODER) as (client, worker):

        async def read(**fields: Any) -> tuple[int, ...]:
            response = await client.post(path, json=body | fields)
            assert response.status_code == 200, response.text
            return worker.encodes[-1].texts[-1].token_ids

        limit = LIMITS.max_model_len
        whole = await read(truncate=True)
        assert len(whole) == limit
        assert await read(truncate_prompt_tokens=-1) == await read(truncate_prompt_tokens=limit) == whole
        right, left = await read(truncate_prompt_tokens=8), await read(truncate_prompt_tokens=8, truncation_side="left")
        assert len(right) == len(left) == 8
        assert right != left
        assert (right[0], right[-1]) == (left[0], left[-1]), "special tokens"
        for number in (0, -2, limit + 1, 1):
            refused = await client.post(path, json=body | {"truncate_prompt_tokens": number})
            assert (refused.status_code, "truncate_prompt_tokens" in refused.text or "cut to 1" in refused.text) == (
                400,
                True,
            )


async def test_queries_and_documents_have_limits_of_their_own() -> None:
    async with asking(CROSS_ENCODER) as (client, worker):
        body = {"query": "the fox said", "documents": ["hello world green"]}
        for limits, wanted in (
            ({"max_tokens_per_query": 1}, ("the", "hello world green")),
            ({"max_tokens_per_doc": 2, "max_tokens_per_query": 0}, ("the fox said", "hello world")),
        ):
            assert (await client.post("/v2/rerank", json=body | limits)).status_code == 200
            assert list(worker.encodes[-1].texts) == ids_of(wanted)
        scored = {"text_1": "the fox said", "text_2": "hello world", "max_tokens_per_query": 2, "max_tokens_per_doc": 1}
        assert (await client.post("/score", json=scored)).status_code == 200
        assert list(worker.encodes[-1].texts) == ids_of(("the fox", "hello"))


async def test_a_cross_encoders_prompt_precedes_the_query() -> None:
    prompted = replace(CROSS_ENCODER, pooling=replace(CROSS_ENCODER.pooling, prompts={"q": "the "}, default_prompt="q"))
    async with asking(prompted) as (client, worker):
        await client.post("/rerank", json={"query": "fox", "texts": ["hello"]})
        await client.post("/predict", json={"inputs": [["fox", "hello"], ["fox"]]})
        assert list(worker.encodes[0].texts) == ids_of(("the fox", "hello"))
        assert list(worker.encodes[1].texts) == ids_of(("the fox", "hello"), "the fox")


# ---- vLLM ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
@pytest.mark.parametrize("sides", [("text_1", "text_2"), ("queries", "documents"), ("data_1", "data_2")])
async def test_scores_of_pairs(path: str, sides: tuple[str, str]) -> None:
    async with asking(CROSS_ENCODER) as (client, _):
        one = (await client.post(path, json={sides[0]: "the fox", sides[1]: TEXTS, "model": "tiny"})).json()
        scores = [each["score"] for each in one["data"]]
        assert scores == pytest.approx([sigmoid(("the fox", text)) for text in TEXTS], rel=1e-5)
        assert [(each["index"], each["object"]) for each in one["data"]] == [(place, "score") for place in range(3)]
        assert (one["object"], one["model"]) == ("list", "tiny")
        assert one["usage"]["total_tokens"] == tokens(*(("the fox", text) for text in TEXTS))
        each = (await client.post(path, json={sides[0]: TEXTS, sides[1]: TEXTS[::-1]})).json()["data"]
        wanted = [sigmoid(pair) for pair in zip(TEXTS, TEXTS[::-1], strict=True)]
        assert [one["score"] for one in each] == pytest.approx(wanted, rel=1e-5)
        raw = {sides[0]: "a", sides[1]: "hello", "use_activation": False, "truncate_prompt_tokens": -1}
        found = (await client.post(path, json=raw)).json()["data"][0]["score"]
        assert found == pytest.approx(logits(ids_of(("a", "hello"))[0], 1)[0], rel=1e-5)


async def test_scores_of_an_embedding_model_are_cosines() -> None:
    async with asking() as (client, _):
        found = (await client.post("/score", json={"queries": TEXTS, "documents": TEXTS[::-1]})).json()["data"]
        wanted = [cosine(*pair) for pair in zip(TEXTS, TEXTS[::-1], strict=True)]
        assert [each["score"] for each in found] == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"text_1": ["a", "b"], "text_2": ["c", "d", "e"]}, "text_1 takes 1 text, or as many as text_2, which are 3"),
        ({"text_1": "a"}, "Send queries and documents"),
        ({"text_1": "a", "documents": "b"}, "Send queries and documents"),
        ({"text_1": "a", "text_2": "b", "queries": "c"}, "Send queries and documents"),
        ({"query": "a", "documents": ["b"]}, "send query and documents to /rerank"),
        ({"text_1": ["a", LONG], "text_2": ["a", "b"]}, "text_1[1] has"),
        ({"text_1": "a", "text_2": ["b", LONG]}, "text_2[1] has"),
    ],
)
async def test_refused_scores_name_the_side(body: Any, said: str) -> None:
    response = await answer_of(CONFIG, "/score", body)
    assert (response.status_code, said in response.json()["error"]["message"]) == (400, True), response.text


@pytest.mark.parametrize("path", ["/classify", "/v1/classify"])
async def test_classify_has_vllms_fields_and_ours(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    row = [-0.3, 0.1, 0.9]
    monkeypatch.setattr("fake_encoder.logits", lambda text, labels: row)
    body = (await answer_of(CLASSIFIER, path, {"input": TEXTS, "truncate_prompt_tokens": -1})).json()
    shares = apply_score_function(to_numpy(array([row])), "softmax")[0].tolist()
    for one in body["data"]:
        assert (one["probs"], one["num_classes"]) == (shares, 3), "in the order of the labels"
        assert one["label"] == one["prediction"] == CLASSIFIER.labels[2]
        assert [each["score"] for each in one["predictions"]] == shares[::-1]
    assert (body["object"], body["id"][:9]) == ("list", "classify-")


async def test_pooling_by_task() -> None:
    async with asking() as (client, worker):
        body = (await client.post("/pooling", json={"input": TEXTS})).json()
        assert [one["data"] for one in body["data"]] == [vector(text) for text in ids_of(*TEXTS)]
        states = (await client.post("/pooling", json={"input": TEXTS, "task": "token_embed"})).json()["data"]
        assert [one["data"] for one in states] == [
            [[float(token)] * SIZE for token in text.token_ids] for text in ids_of(*TEXTS)
        ]
        encoded = {"input": [[2, 9, 3]], "task": "token_embed", "encoding_format": "base64", "use_activation": False}
        (one,) = (await client.post("/pooling", json=encoded)).json()["data"]
        assert numpy.frombuffer(base64.b64decode(one["data"]), "<f4").tolist() == [2.0] * 4 + [9.0] * 4 + [3.0] * 4
        assert worker.encodes[-1].normalize is False
        refused = (await client.post("/pooling", json={"input": "a", "task": "classify"})).json()["error"]
        assert (refused["code"], "it has: embed, token_embed" in refused["message"]) == ("wrong_model_kind", True)


async def test_pooling_of_a_classifier_is_its_scores() -> None:
    async with asking(CLASSIFIER) as (client, _):
        (one,) = (await client.post("/pooling", json={"input": "hello"})).json()["data"]
        raw = (await client.post("/pooling", json={"input": "hello", "use_activation": False})).json()["data"][0]
    wanted = logits(ids_of("hello")[0], 3)
    assert raw["data"] == pytest.approx(wanted, rel=1e-6)
    assert one["data"] == pytest.approx(apply_score_function(to_numpy(array([wanted])), "softmax")[0].tolist())


# ---- bodies of other dialects --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "field", "instead"),
    [
        ("/v1/embeddings", {"inputs": "a"}, "inputs", "/embed"),
        ("/v1/embeddings", {"texts": ["a"]}, "texts", "/v2/embed"),
        ("/v1/embeddings", {"input": "a", "texts": ["a"]}, "texts", "/v2/embed"),
        ("/v1/embeddings", {"messages": []}, "messages", "input"),
        ("/encode", {"input": "a"}, "input", "/v1/embeddings"),
        ("/v1/rerank", {"inputs": ["a"]}, "inputs", "documents"),
        ("/v1/rerank", {"queries": "a", "documents": ["a"]}, "queries", "/score"),
        ("/v1/classify", {"inputs": "a"}, "inputs", "/predict"),
        ("/pooling", {"inputs": "a"}, "inputs", "/embed"),
        ("/detokenize", {"ids": [1]}, "ids", "/decode"),
    ],
)
async def test_a_body_of_another_dialect_is_told_where_it_belongs(
    path: str, body: Any, field: str, instead: str
) -> None:
    response = await answer_of(CONFIG, path, body)
    error = response.json()["error"]
    assert (response.status_code, error.get("param", error.get("field"))) == (400, field)
    assert error["code"] == InvalidRequest.code or error["code"] == "unsupported_parameter"
    assert instead in error["message"]
    assert "Field required" not in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "instead"),
    [
        ("/embed", {"input": "a"}, "/v1/embeddings"),
        ("/embed", {"texts": ["a"]}, "/v2/embed"),
        ("/predict", {"input": "a"}, "/v1/classify"),
        ("/similarity", {"source_sentence": "a", "sentences": ["b"]}, "inputs with source_sentence"),
        ("/decode", {"tokens": [1]}, "/detokenize"),
    ],
)
async def test_and_in_the_format_of_the_other_server(path: str, body: Any, instead: str) -> None:
    response = await answer_of(CONFIG, path, body)
    assert (response.status_code, response.json()["error_type"]) == (400, "Validation")
    assert instead in response.json()["error"]
    assert "Field required" not in response.json()["error"]


@pytest.mark.parametrize(
    ("path", "body", "instead"),
    [
        ("/v1/chat/completions", {"prompt": "a"}, "/v1/completions"),
        ("/v1/completions", {"messages": []}, "/v1/chat/completions"),
        ("/generate", {"inputs": "a"}, "send prompt or token_ids"),
        ("/v2/models/demo/generate", {"prompt": "a"}, "send text_input"),
    ],
)
async def test_and_on_the_routes_of_decoders(client: httpx.AsyncClient, path: str, body: Any, instead: str) -> None:
    response = await client.post(path, json=body)
    assert (response.status_code, instead in response.text) == (400, True), response.text
