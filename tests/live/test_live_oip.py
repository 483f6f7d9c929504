"""The Open Inference Protocol's official client, unchanged, against real servers of an encoder, a classifier and a decoder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import numpy
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from tests.live.live_server import LiveServer, live
from tiny_encoders import write_encoder

TEXTS = numpy.array(["the fox said hello", "world", "ein grüner Wald"], dtype=numpy.object_)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with live(write_encoder(tmp_path_factory.mktemp("encoders") / "tiny")) as server:
        yield server


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    path = tmp_path_factory.mktemp("classifiers") / "tiny"
    with live(write_encoder(path, "BertForSequenceClassification", num_labels=3)) as server:
        yield server


@pytest.fixture
def client(encoder: LiveServer) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(encoder.url.removeprefix("http://")) as client:
        yield client


def tensor(name: str, values: Any, datatype: str, binary: bool = True) -> triton.InferInput:
    made = triton.InferInput(name, list(values.shape), datatype)
    return made.set_data_from_numpy(values, binary_data=binary)


def native(server: LiveServer, texts: Any) -> Any:
    answer = server.client.post("/encode", json={"inputs": list(texts)})
    assert answer.status_code == 200, answer.text
    return numpy.array(answer.json()["embeddings"], dtype=numpy.float32)


def test_what_the_client_asks_about_the_server(client: triton.InferenceServerClient, encoder: LiveServer) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("tiny")
    assert client.is_model_ready("tiny", "1")
    assert not client.is_model_ready("other")
    assert client.get_server_metadata()["name"] == "armature"
    assert client.get_model_metadata("tiny")["outputs"][0]["name"] == "embedding"
    assert client.get_model_config("tiny")["name"] == "tiny"


@pytest.mark.parametrize("binary_in", [True, False])
@pytest.mark.parametrize("binary_out", [True, False])
def test_texts(client: triton.InferenceServerClient, encoder: LiveServer, binary_in: bool, binary_out: bool) -> None:
    wanted = [triton.InferRequestedOutput("embedding", binary_data=binary_out)]
    result = client.infer("tiny", [tensor("text", TEXTS, "BYTES", binary_in)], outputs=wanted, request_id="42")
    assert result.get_response()["id"] == "42"
    assert numpy.array_equal(result.as_numpy("embedding"), native(encoder, TEXTS))


@pytest.mark.parametrize("compression", ["gzip", "deflate"])
def test_compressed_requests(client: triton.InferenceServerClient, encoder: LiveServer, compression: str) -> None:
    inputs = [tensor("text", TEXTS, "BYTES")]
    result = client.infer(
        "tiny", inputs, request_compression_algorithm=compression, response_compression_algorithm=compression
    )
    assert numpy.array_equal(result.as_numpy("embedding"), native(encoder, TEXTS))


def test_ids_with_a_mask_are_the_text(client: triton.InferenceServerClient, encoder: LiveServer) -> None:
    """Padded on either side: what is masked is not there."""
    rows = [encoder.client.post("/tokenize", json={"prompt": text}).json()["token_ids"] for text in TEXTS]
    width = max(map(len, rows)) + 1
    ids, mask = numpy.zeros((3, width), dtype=numpy.int64), numpy.zeros((3, width), dtype=numpy.int64)
    for row, tokens in enumerate(rows):
        places = slice(0, len(tokens)) if row % 2 else slice(width - len(tokens), width)
        ids[row, places], mask[row, places] = tokens, 1
    result = client.infer(
        "tiny", [tensor("input_ids", ids, "INT64"), tensor("attention_mask", mask, "INT64", binary=False)]
    )
    assert numpy.allclose(result.as_numpy("embedding"), native(encoder, TEXTS), atol=1e-6)
    states = result.as_numpy("last_hidden_state")
    assert states.shape[:2] == (3, width)
    assert numpy.array_equal(numpy.abs(states).sum(axis=2) > 0, mask > 0)


def test_pooled_hidden_states_are_the_embedding(client: triton.InferenceServerClient) -> None:
    one = [tensor("text", TEXTS[:1], "BYTES")]
    result = client.infer("tiny", one, parameters={"normalize": False})
    mean = result.as_numpy("last_hidden_state").mean(axis=1)
    assert numpy.allclose(mean, result.as_numpy("embedding"), atol=1e-5)


def test_the_client_reads_our_refusals(client: triton.InferenceServerClient) -> None:
    with pytest.raises(InferenceServerException, match="must be BYTES, not INT64") as refused:
        client.infer("tiny", [tensor("text", numpy.array([1]), "INT64")])
    assert refused.value.status() == "400"
    with pytest.raises(InferenceServerException, match="'other' is not served here"):
        client.infer("other", [tensor("text", TEXTS, "BYTES")])


def test_a_request_asked_without_waiting(client: triton.InferenceServerClient, encoder: LiveServer) -> None:
    asked = [client.async_infer("tiny", [tensor("text", TEXTS[row : row + 1], "BYTES")]) for row in range(3)]
    rows = [answer.get_result().as_numpy("embedding")[0] for answer in asked]
    assert numpy.allclose(rows, native(encoder, TEXTS), atol=1e-6)


def test_a_classifier(classifier: LiveServer) -> None:
    with triton.InferenceServerClient(classifier.url.removeprefix("http://")) as client:
        result = client.infer(
            "tiny", [tensor("text", TEXTS, "BYTES"), tensor("text_pair", TEXTS[::-1].copy(), "BYTES")]
        )
        logits, scores = result.as_numpy("logits"), result.as_numpy("scores")
    powers = numpy.exp(logits - logits.max(axis=1, keepdims=True))
    assert scores.shape == (3, 3)
    assert numpy.allclose(scores, powers / powers.sum(axis=1, keepdims=True), atol=1e-6)


def test_a_decoder_generates(server: LiveServer) -> None:
    asked = {"text_input": "Once upon", "parameters": {"temperature": 0, "max_tokens": 8}}
    path = "/v2/models/tiny"
    whole = server.client.post(f"{path}/generate", json=asked).json()
    assert whole["text_output"] == server.generate(max_tokens=8).json()["text"]
    with server.client.stream("POST", f"{path}/versions/1/generate_stream", json=asked) as stream:
        events = [json.loads(line.removeprefix("data: ")) for line in stream.iter_lines() if line]
    assert "".join(event["text_output"] for event in events) == whole["text_output"]
    with (
        triton.InferenceServerClient(server.url.removeprefix("http://")) as client,
        pytest.raises(InferenceServerException) as no,
    ):
        client.infer("tiny", [tensor("text", TEXTS, "BYTES")])
    assert "generates text" in no.value.message()


def test_one_bad_text_fails_its_own_request_alone(encoder: LiveServer) -> None:
    with httpx.Client(base_url=encoder.url) as other:
        bad = {"inputs": [{"name": "text", "datatype": "BYTES", "shape": [2], "data": ["a", ""]}]}
        assert other.post("/v2/models/tiny/infer", json=bad).status_code == 400
        good = {"inputs": [{"name": "text", "datatype": "BYTES", "shape": [1], "data": ["a"]}]}
        assert other.post("/v2/models/tiny/infer", json=good).status_code == 200
    assert encoder.idle
