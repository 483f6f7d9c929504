"""`infer` of the Open Inference Protocol: texts, ids and program tensors, as JSON and as binary tensors."""

from __future__ import annotations

import struct
from array import array
from collections.abc import AsyncIterator
from typing import Any

import pytest

from app.api.oip import tensors
from app.messages import Signature, TensorSpec, Text
from tests.api.oip_fakes import Served, encoder, outputs, program, serving, tensor

TEXTS = tensor("text", "BYTES", [2], ["the fox", "said"])


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with serving(encoder()) as server:
        yield server


@pytest.fixture
async def computing() -> AsyncIterator[Served]:
    async with serving(program()) as server:
        yield server


def ids_of(served: Served, *texts: str) -> list[tuple[int, ...]]:
    return [text.token_ids for text in served.service.encoder.tokenizer.encode_texts(texts)]


def binary_strings(*texts: str) -> bytes:
    return b"".join(struct.pack("<I", len(text.encode())) + text.encode() for text in texts)


async def test_texts_become_vectors(served: Served) -> None:
    response = await served.infer([TEXTS], id="42", outputs=[{"name": "embedding"}])
    expected = [value for ids in ids_of(served, "the fox", "said") for value in (len(ids), sum(ids))]
    body = response.json()
    assert body["outputs"] == [{"name": "embedding", "datatype": "FP32", "shape": [2, 2], "data": expected}]
    assert (body["id"], body["model_name"], body["model_version"]) == ("42", "tiny/encoder", "1")
    assert body["parameters"] == {"prompt_tokens": sum(expected[::2])}
    assert response.headers["server-timing"] == "queue;dur=1.0, encode;dur=2.0"


async def test_without_outputs_come_all_and_without_an_id_none(served: Served) -> None:
    body = (await served.infer([TEXTS])).json()
    assert [output["name"] for output in body["outputs"]] == ["embedding", "last_hidden_state"]
    assert "id" not in body


@pytest.mark.parametrize(
    ("binary_output", "own"), [(True, None), (None, True), (False, True), (True, False), (None, None), (None, False)]
)
async def test_json_and_binary_say_the_same(served: Served, binary_output: bool | None, own: bool | None) -> None:
    """An output's own `binary_data` overrides the request's `binary_data_output`."""
    tail = binary_strings("the fox", "said")
    sent = tensor("text", "BYTES", [2], binary_data_size=len(tail))
    wanted = {"name": "embedding"} | ({} if own is None else {"parameters": {"binary_data": own}})
    parameters = {} if binary_output is None else {"binary_data_output": binary_output}
    response = await served.infer([sent], tail, outputs=[wanted], parameters=parameters)
    binary = binary_output if own is None else own
    assert (response.headers["content-type"] == "application/octet-stream") == bool(binary)
    assert outputs(response) == outputs(await served.infer([TEXTS], outputs=[{"name": "embedding"}]))


async def test_hidden_states_stand_where_their_tokens_do(served: Served) -> None:
    ids = tensor("input_ids", "INT64", [2, 4], [[5, 6, 7, 8], [9, 10, 11, 12]])
    mask = tensor("attention_mask", "INT64", [2, 4], [[0, 1, 1, 0], [1, 0, 0, 1]])
    types = tensor("token_type_ids", "INT64", [2, 4], [0, 0, 1, 0, 0, 0, 0, 1])
    response = await served.infer([ids, mask, types], outputs=[{"name": "last_hidden_state"}])
    assert response.status_code == 200, response.text
    assert response.json()["outputs"][0]["shape"] == [2, 4, 2]
    assert outputs(response)["last_hidden_state"] == [0, 0, 6, 0, 7, 1, 0, 0, 9, 0, 0, 0, 0, 0, 12, 1]
    assert served.orders[0].texts == (Text((6, 7), (0, 1)), Text((9, 12), (0, 1)))


async def test_hidden_states_of_texts_are_as_wide_as_the_longest(served: Served) -> None:
    one, two = ids_of(served, "the fox", "said")
    response = await served.infer([TEXTS], outputs=[{"name": "last_hidden_state"}])
    width = max(len(one), len(two))
    rows = [[*ids, *[0] * (width - len(ids))] for ids in (one, two)]
    assert outputs(response)["last_hidden_state"] == [
        value for row in rows for token_id in row for value in (token_id, 0)
    ]


async def test_ids_that_are_cut_leave_no_gap(served: Served) -> None:
    ids = tensor("input_ids", "INT64", [1, 70], list(range(1, 71)))
    response = await served.infer([ids], outputs=[{"name": "last_hidden_state"}], parameters={"truncate": True})
    assert outputs(response)["last_hidden_state"][::2] == [*range(1, 65), *[0] * 6]
    assert (await served.infer([ids])).status_code == 400


async def test_what_a_client_says_of_texts_reaches_the_engine(served: Served) -> None:
    await served.infer([TEXTS], outputs=[{"name": "embedding"}], parameters={"normalize": False, "dimensions": 1})
    assert (served.orders[0].normalize, served.orders[0].dimensions) == (False, 1)


async def test_pairs_and_scores() -> None:
    async with serving(encoder(("yes", "no"))) as served:
        pair = tensor("text_pair", "BYTES", [2], ["a", "b"])
        response = await served.infer([TEXTS, pair], outputs=[{"name": "scores"}, {"name": "logits"}])
        found = outputs(response)
        assert list(found) == ["scores", "logits"]
        assert [sum(found["scores"][row : row + 2]) for row in (0, 2)] == pytest.approx([1, 1])
        assert served.orders[0].outputs == ("logits",)
        assert served.orders[0].texts[0].token_ids != ids_of(served, "the fox")[0]


async def test_a_bare_body_is_one_text(served: Served) -> None:
    headers = {"inference-header-content-length": "0"}
    response = await served.client.post("/v2/models/tiny/encoder/infer", content=b"the fox", headers=headers)
    (ids,) = ids_of(served, "the fox")
    assert outputs(response)["embedding"] == [len(ids), sum(ids)]
    assert response.headers["content-type"] == "application/octet-stream"
    wrong = await served.client.post("/v2/models/tiny/encoder/infer", content=b"\xff", headers=headers)
    assert wrong.status_code == 400
    headers["content-type"] = "application/json"
    json = await served.client.post("/v2/models/tiny/encoder/infer", content=b'"the fox"', headers=headers)
    assert json.status_code == 400 and "application/octet-stream" in json.text


# ---- programs ------------------------------------------------------------------------------------------------------


async def test_a_program_of_several_inputs(computing: Served) -> None:
    """One as JSON, one as binary, in any order."""
    pixels = array("f", [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]).tobytes()
    flags = tensor("flags", "BOOL", [2], [True, False])
    sent = [tensor("pixels", "FP32", [2, 2, 3], binary_data_size=len(pixels)), flags]
    response = await computing.infer(sent, pixels, outputs=[{"name": "sum"}])
    assert outputs(response) == {"sum": [21, 57]}
    assert computing.orders[0].inputs["flags"].data == b"\1\0"
    assert computing.orders[0].outputs == ("sum",)


async def test_json_that_is_repeated_before_other_bytes_is_read_as_the_first_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each model checks it, ignored fields are counted each time, and a wrong number of bytes is refused."""
    wide, narrow = (
        program(Signature((TensorSpec("pixels", "FP32", (-1, width)),), (TensorSpec("sum", "FP32", (-1,)),)))
        for width in (3, 2)
    )
    sent = [tensor("pixels", "FP32", [2, 3], binary_data_size=24)]
    first, second = (array("f", values).tobytes() for values in ([1, 2, 3, 4, 5, 6], [7, 8, 9, 1, 1, 1]))
    monkeypatch.setattr(tensors, "_known_heads", {})
    async with serving(wide) as served:
        assert outputs(await served.infer(sent, first)) == {"sum": [6, 15]}
        with monkeypatch.context() as patch:
            patch.setattr(tensors, "parse_body", None)  # is not called again
            assert outputs(await served.infer(sent, second)) == {"sum": [24, 3]}
        (known,) = tensors._known_heads.values()
        assert not known._request.inputs, "no client's values are kept"
        for tail in (first[:-4], first + b"1234", b""):
            assert (await served.infer(sent, tail)).status_code == 400
        for _ in range(2):
            assert outputs(await served.infer(sent, first, unknown=1)) == {"sum": [6, 15]}
        ignored = served.metrics.samples("ignored_fields")
        assert sum(one.value for one in ignored if one.name.endswith("_total")) == 2
    async with serving(narrow) as served:
        refused = await served.infer(sent, first)
        assert refused.status_code == 400 and "must have the shape [-1, 2]" in refused.text


async def test_values_that_are_checked_are_checked_each_time(computing: Served) -> None:
    sent = [
        tensor("pixels", "FP32", [1, 2, 1], binary_data_size=8),
        tensor("flags", "BOOL", [1], binary_data_size=1),
    ]
    wanted = [{"name": "sum"}]
    assert outputs(await computing.infer(sent, bytes(8) + b"\1", outputs=wanted)) == {"sum": [0]}
    assert "a BOOL is one byte" in (await computing.infer(sent, bytes(8) + b"\2", outputs=wanted)).text


async def test_bf16_comes_as_bytes_alone(computing: Served) -> None:
    sent = [tensor("pixels", "FP32", [1, 2, 1], [1, 2]), tensor("flags", "BOOL", [1], [True])]
    refused = await computing.infer(sent)
    assert refused.status_code == 400
    assert "binary_data" in refused.json()["error"]
    response = await computing.infer(sent, parameters={"binary_data_output": True})
    assert response.content.endswith(array("f", [3]).tobytes() + b"\x80\x3f")


@pytest.mark.parametrize(
    ("pixels", "flags", "word"),
    [
        (tensor("pixels", "FP64", [1, 2, 1], [1, 2]), [True], "must be FP32, not FP64"),
        (tensor("pixels", "FP32", [1, 3, 1], [1, 2, 3]), [True], "must have the shape [-1, 2, -1]"),
        (tensor("pixels", "FP32", [1, 2], [1, 2]), [True], "must have the shape [-1, 2, -1]"),
        (tensor("pixels", "FP32", [0, 2, 1], []), [], "empty"),
        (tensor("pixels", "FP32", [1, 2, 1], [1, 2]), [True, True], "must be equal"),
        (tensor("pixel", "FP32", [1, 2, 1], [1, 2]), [True], "no input 'pixel'"),
    ],
)
async def test_inputs_are_held_against_the_signature(
    computing: Served, pixels: Any, flags: list[bool], word: str
) -> None:
    response = await computing.infer([pixels, tensor("flags", "BOOL", [len(flags)], flags)])
    assert response.status_code == 400
    assert word in response.json()["error"]
    assert not computing.orders


async def test_an_input_may_not_be_missing(computing: Served) -> None:
    response = await computing.infer([tensor("flags", "BOOL", [1], [True])])
    assert (response.status_code, response.json()) == (400, {"error": "The model also needs the input 'pixels'."})


async def test_texts_parameters_are_nothing_for_a_program(computing: Served) -> None:
    sent = [tensor("pixels", "FP32", [1, 2, 1], [1, 2]), tensor("flags", "BOOL", [1], [True])]
    assert (await computing.infer(sent, parameters={"normalize": True})).status_code == 400


@pytest.mark.parametrize(
    ("shape", "body", "expected"), [((-1, 2, -1), 24, 200), ((-1, 2, -1), 20, 400), ((-1, 2, -1), 0, 400)]
)
async def test_a_bare_body_for_a_program(shape: tuple[int, ...], body: int, expected: int) -> None:
    signature = Signature((TensorSpec("pixels", "FP32", shape),), (TensorSpec("sum", "FP32", (-1,)),))
    async with serving(program(signature)) as served:
        headers = {"inference-header-content-length": "0"}
        response = await served.client.post(f"{served.path}/infer", content=bytes(body), headers=headers)
        assert response.status_code == expected
        if expected == 200:
            assert served.orders[0].inputs["pixels"].shape == (1, 2, 3)
