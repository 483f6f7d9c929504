"""Requests that `infer` of the Open Inference Protocol refuses: wrong inputs, binary data, headers and parameters."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.api.oip_fakes import Served, decoder, encoder, serving, tensor

TEXTS = tensor("text", "BYTES", [2], ["the fox", "said"])
IDS = tensor("input_ids", "INT64", [1, 2], [1, 2])


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with serving(encoder()) as server:
        yield server


@pytest.mark.parametrize(
    ("inputs", "word"),
    [
        ([], "inputs"),
        ([tensor("text", "BYTES", [2], ["a"])], "has 2 values, and data has 1"),
        ([tensor("text", "BYTES", [1, 1], ["a"])], "must have the shape [-1]"),
        ([tensor("text", "FP32", [1], [1])], "must be BYTES"),
        ([tensor("text", "STRING", [1], ["a"])], "is not a datatype"),
        ([tensor("text", "BYTES", [1], [1])], "must be strings"),
        ([tensor("text", "BYTES", [1])], "needs either data or the parameter binary_data_size"),
        (
            [tensor("text", "BYTES", [1], ["a"], binary_data_size=5)],
            "needs either data or the parameter binary_data_size",
        ),
        ([tensor("text", "BYTES", [1], binary_data_size=5)], "needs the header inference-header-content-length"),
        ([tensor("text", "BYTES", [1], ["a"], shared_memory_region="x")], "shared_memory_region is not supported"),
        ([tensor("text", "BYTES", [-1], ["a"])], "shape"),
        ([tensor("text", "BYTES", [2.0], ["a"])], "shape"),  # type: ignore[list-item]
        ([tensor("text", "BYTES", [2**70], ["a"])], "shape"),
        ([tensor("text", "BYTES", [1] * 17, ["a"])], "shape"),
        ([tensor("text", "BYTES", [5_000], ["a"] * 5_000)], "BYTES may have 4096"),
        ([tensor("text", "BYTES", [3_000], ["a"] * 3_000)], "2048"),
        ([tensor("text", "BYTES", [0], [])], "empty"),
        ([tensor("text", "BYTES", [2], ["a", ""])], "text[1] is empty"),
        ([tensor("text", "BYTES", [1], ["a " * 100])], "maximum context length is 64 tokens"),
        ([TEXTS, TEXTS], "given twice in inputs"),
        ([TEXTS, IDS], "must be equal"),
        ([tensor("text", "BYTES", [1], ["a"]), IDS], "either the input text or the input input_ids"),
        ([tensor("text_pair", "BYTES", [1], ["a"])], "either the input text or the input input_ids"),
        ([IDS, tensor("attention_mask", "INT64", [1, 3], [1, 1, 1])], "must have the shape of input_ids"),
        ([IDS, tensor("attention_mask", "INT64", [1, 2], [1, 2])], "must be 1 where there is a token"),
        ([IDS, tensor("attention_mask", "INT64", [1, 2], [0, 0])], "input_ids is empty"),
        ([IDS, tensor("token_type_ids", "INT64", [1, 2], [0, 2])], "token_type_ids must be in [0, 2)"),
        ([tensor("input_ids", "INT64", [1, 2], [1, 340])], "must be in [0, 340)"),
        ([tensor("input_ids", "INT64", [1, 2], [1, -1])], "must be in [0, 340)"),
        ([tensor("input_ids", "INT32", [1, 2], [1, 2])], "must be INT64"),
        ([tensor("input_ids", "INT64", [1, 0], [])], "input_ids is empty"),
    ],
)
async def test_inputs_that_are_refused(served: Served, inputs: list[Any], word: str) -> None:
    response = await served.infer(inputs)
    assert response.status_code == 400
    assert list(response.json()) == ["error"]
    assert word in response.json()["error"]
    assert not served.orders


@pytest.mark.parametrize(
    ("size", "tail", "word"),
    [
        (6, b"\1\0\0\0ab", "its binary data has more"),
        (5, b"\1\0\0\0ab", "add up to 5"),
        (7, b"\1\0\0\0ab", "only 6 bytes are left"),
        (5, b"\1\0\0\0", "only 4 bytes are left"),
        (6, b"\3\0\0\0ab", "ends within an element"),
        (3, b"\1\0\0", "ends within an element"),
        (0, b"", "ends within an element"),
        (8, b"\1\0\0\0a\0\0\0\0"[:8], "its binary data has more"),
        (5, b"\1\0\0\0\xff", "UTF-8"),
        (6, b"\xff\xff\xff\xffab", "ends within an element"),
        (-1, b"\1\0\0\0a", "must be 0 or more"),
    ],
)
async def test_binary_tails_that_lie(served: Served, size: int, tail: bytes, word: str) -> None:
    response = await served.infer([tensor("text", "BYTES", [1], binary_data_size=size)], tail)
    assert (response.status_code, word in response.json()["error"]) == (400, True), response.text
    assert not served.orders


@pytest.mark.parametrize("declared", ["-1", "x", "1e3", "999999", "٣", "9" * 30])
async def test_headers_that_lie(served: Served, declared: str) -> None:
    body = json.dumps({"inputs": [TEXTS]}).encode()
    headers = {"inference-header-content-length": declared.encode()}
    response = await served.client.post(f"{served.path}/infer", content=body, headers=headers)  # type: ignore[arg-type]
    assert response.status_code == 400


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"outputs": [{"name": "logits"}]}, "no output 'logits'"),
        ({"outputs": [{"name": "embedding"}, {"name": "embedding"}]}, "twice"),
        ({"outputs": [{"name": "embedding", "parameters": {"classification": 2}}]}, "classification is not supported"),
        ({"parameters": {"sequence_id": 7}}, "sequence_id is not supported"),
        ({"parameters": {"dimensions": 3}}, "dimensions must be in [1, 2]"),
        ({"id": 7}, "id"),
        ({"text_input": "x"}, "text_input is not a parameter"),
    ],
)
async def test_requests_that_are_refused(served: Served, fields: dict[str, Any], word: str) -> None:
    response = await served.infer([TEXTS], **fields)
    assert (response.status_code, word in response.json()["error"]) == (400, True), response.text


async def test_a_decoder_has_no_tensors() -> None:
    async with serving(decoder()) as served:
        response = await served.infer([TEXTS])
        assert response.status_code == 400
        assert "/v2/models/tiny/generate" in response.json()["error"]


async def test_hidden_states_are_bounded(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.api.oip.models.MAX_PADDED_BYTES", 2 * 64 * 2 * 4 - 1)
    ids = tensor("input_ids", "INT64", [2, 64], [1] * 128)
    mask = tensor("attention_mask", "INT64", [2, 64], [1, *[0] * 63] * 2)
    assert (await served.infer([ids, mask])).status_code == 400
    assert not served.orders
    assert (await served.infer([ids, mask], outputs=[{"name": "embedding"}])).status_code == 200


async def test_a_timeout_of_the_requests_own(served: Served) -> None:
    served.worker.send_error = lambda command: None  # and no answer
    response = await served.infer([TEXTS], parameters={"timeout": 1000})
    assert (response.status_code, "1000 microseconds" in response.json()["error"]) == (504, True)
    assert len(served.worker.aborts) == 1
    assert served.service.num_open == 0


async def test_a_page_of_another_site_cannot_ask_without_being_asked_back(served: Served) -> None:
    """Its scripts may send any plain body, but they say where they come from."""
    body = json.dumps({"inputs": [TEXTS]})
    for headers, expected in [({"origin": "https://example.org", "content-type": "text/plain"}, 400), ({}, 200)]:
        response = await served.client.post(f"{served.path}/infer", content=body, headers=headers)
        assert response.status_code == expected
