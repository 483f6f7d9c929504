"""Vectors over HTTP: OpenAI's shapes of input and output, our own, and what either refuses."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from app.api.encoders.vectors import join_with_pauses, to_json_list
from app.api.encoders.vectors import to_base64_json as base64_of
from app.messages import Text
from app.service.encode import MAX_TEXTS
from fake_encoder import CLASSIFIER, CONFIG, PROMPTED, ids_of, vector
from tests.api.encoder_client import answer_of, asking

TIMING = "queue;dur=1.0, encode;dur=2.0"


@pytest.mark.parametrize(
    ("given", "texts"),
    [
        ("the fox", ids_of("the fox")),
        (["the fox", "said"], ids_of("the fox", "said")),
        ([2, 9, 3], [Text((2, 9, 3))]),
        ([[2, 9, 3], [2, 8, 8, 3]], [Text((2, 9, 3)), Text((2, 8, 8, 3))]),
    ],
)
async def test_openais_four_shapes_of_input(given: Any, texts: list[Text]) -> None:
    response = await answer_of(CONFIG, "/v1/embeddings", {"input": given, "model": "tiny"})
    said = response.json()
    number = sum(len(text.token_ids) for text in texts)
    assert said == {
        "object": "list",
        "data": [{"object": "embedding", "index": i, "embedding": vector(text)} for i, text in enumerate(texts)],
        "model": "tiny",
        "usage": {"prompt_tokens": number, "total_tokens": number},
    }
    assert (response.headers["server-timing"], response.headers["content-type"]) == (TIMING, "application/json")


FOX, SAID = (text.token_ids for text in ids_of("the fox", "said"))


@pytest.mark.parametrize(
    ("given", "inputs"),
    [
        ({"prompt_string": "the fox"}, [FOX]),
        ({"content": [{"type": "text", "text": "the "}, {"type": "text", "text": "fox"}]}, [FOX]),
        (["said", {"prompt_string": "the fox"}, [2, 9, 3]], [SAID, FOX, (2, 9, 3)]),
        ([2, "the fox", 3], [FOX]),
        ([["the fox", 7], "said"], [(*FOX, 7), SAID]),
    ],
)
async def test_llama_cpps_shapes_of_input(given: Any, inputs: list[tuple[int, ...]]) -> None:
    """A text in the middle of token ids gets no special tokens."""
    said = (await answer_of(CONFIG, "/v1/embeddings", {"input": given})).json()
    assert [one["embedding"] for one in said["data"]] == [vector(Text(ids)) for ids in inputs]
    assert said["usage"]["prompt_tokens"] == sum(map(len, inputs))


async def test_base64_holds_the_same_vectors_and_dimensions_cut_them() -> None:
    body = {"input": ["the fox", "said"], "encoding_format": "base64", "dimensions": 3, "user": "u"}
    said = (await answer_of(CONFIG, "/v1/embeddings", body)).json()
    found = [numpy.frombuffer(base64.b64decode(one["embedding"]), "<f4").tolist() for one in said["data"]]
    assert found == [vector(text)[:3] for text in ids_of("the fox", "said")]


async def test_our_own_route_takes_texts_and_ids_and_says_what_they_were() -> None:
    async with asking(PROMPTED) as (client, worker):
        body = {
            "inputs": "fox",
            "normalize": False,
            "truncate": True,
            "truncation_direction": "Left",
            "prompt_name": "query",
        }
        response = await client.post("/encode", json=body)
        order = worker.encodes[0]
        assert (list(order.texts), order.normalize, order.outputs) == (ids_of("the fox fox"), False, ("embedding",))
        assert response.json() == {"embeddings": [vector(order.texts[0])], "usage": {"prompt_tokens": 5}}
        assert response.headers["server-timing"] == TIMING
        assert (await client.post("/encode", json={"inputs": [[2, 9, 3]]})).json()["usage"] == {"prompt_tokens": 3}


LONG = "the fox said " * 9


@pytest.mark.parametrize(
    ("path", "body", "code", "field"),
    [
        ("/v1/embeddings", {}, "invalid_request", "input"),
        ("/v1/embeddings", {"input": []}, "invalid_request", "input"),
        ("/v1/embeddings", {"input": ""}, "invalid_request", "input"),
        ("/v1/embeddings", {"input": ["x", ""]}, "invalid_request", "input[1]"),
        ("/v1/embeddings", {"input": [["x", 1.5]]}, "invalid_request", "input"),
        ("/v1/embeddings", {"input": ["x", []]}, "invalid_request", "input"),
        ("/v1/embeddings", {"input": {"content": "x"}}, "invalid_request", "input"),
        ("/v1/embeddings", {"input": {"content": [{"type": "image_url"}]}}, "invalid_request", "input"),
        ("/v1/embeddings", {"input": {"prompt_string": "x", "multimodal_data": ["x"]}}, "invalid_request", "input"),
        ("/v1/embeddings", {"input": [["x"] * 100, ["x"] * 100]}, "invalid_request", "input"),
        ("/v1/embeddings", {"input": ["x"] * (MAX_TEXTS + 1)}, "invalid_request", "input"),
        ("/v1/embeddings", {"input": LONG}, "context_length_exceeded", "input"),
        ("/v1/embeddings", {"input": "x", "dimensions": 5}, "invalid_request", "dimensions"),
        ("/v1/embeddings", {"input": "x", "encoding_format": "int8"}, "invalid_request", "encoding_format"),
        ("/v1/embeddings", {"input": "x", "stream": True}, "unsupported_parameter", "stream"),
        ("/v1/embeddings", {"input": "x", "model": "other"}, "model_not_found", "model"),
        ("/encode", {"inputs": ["x", ""]}, "invalid_request", "inputs[1]"),
        ("/encode", {"inputs": LONG}, "context_length_exceeded", "inputs"),
        ("/encode", {"inputs": [[1, 999]]}, "invalid_request", "inputs"),
        ("/encode", {"inputs": "x", "prompt_name": "query"}, "invalid_request", "prompt_name"),
        ("/generate", {"prompt": "x"}, "wrong_model_kind", "model"),
        ("/v1/completions", {"prompt": "x"}, "wrong_model_kind", "model"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}, "wrong_model_kind", "model"),
        ("/v1/classify", {"input": "x"}, "wrong_model_kind", "model"),
    ],
)
async def test_refusals_name_the_field(path: str, body: Any, code: str, field: str) -> None:
    async with asking() as (client, worker):
        response = await client.post(path, json=body)
        error = response.json()["error"]
        assert (error["code"], error.get("param", error.get("field"))) == (code, field)
        assert response.status_code == (404 if code == "model_not_found" else 400)
        assert worker.commands == []


@pytest.mark.parametrize("path", ["/v1/embeddings", "/encode", "/embed", "/embed_all", "/similarity"])
async def test_a_classifier_makes_no_vectors(path: str) -> None:
    inputs: Any = {"source_sentence": "a", "sentences": ["b"]} if path == "/similarity" else "x"
    response = await answer_of(CLASSIFIER, path, {"input" if path.startswith("/v1") else "inputs": inputs})
    if path == "/embed_all":
        assert response.status_code == 200, "hidden states are every encoder's"
    else:
        assert (response.status_code, "classification head" in response.text) == (400, True)


async def test_a_text_that_is_too_long_is_cut_on_openais_route_too() -> None:
    response = await answer_of(CONFIG, "/v1/embeddings", {"input": LONG, "truncate": True})
    assert response.json()["usage"]["prompt_tokens"] == 16


@given(arrays.arrays("<f4", st.integers(0, 9), elements=st.floats(width=32, allow_nan=False, allow_infinity=False)))
def test_what_is_written_is_what_was_computed(numbers: Any) -> None:
    written = to_json_list(numbers)
    assert numpy.array(json.loads(written), dtype="<f4").tobytes() == numbers.tobytes()
    assert base64.b64decode(json.loads(base64_of(numbers))) == numbers.tobytes()


def test_nine_digits_are_enough_and_no_more_are_written() -> None:
    shares = numpy.random.default_rng(0).normal(size=1000).astype("<f4")
    assert len(to_json_list(shares)) < 14 * 1000


async def test_long_answers_let_others_have_their_turn() -> None:
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    beside = asyncio.ensure_future(other())
    body = await join_with_pauses(b"[", (b"1" * 40_000 for _ in range(40)), b"]")
    beside.cancel()
    assert turns >= 15
    assert json.loads(body.replace(b"1" * 40_000, b"1")) == [1] * 40
