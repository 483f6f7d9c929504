"""Tensors on the wire: whatever is said as JSON and as bytes is the same, and no lie about a tensor gets through. Properties."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.api.oip.tensors import (
    LARGEST_FP32,
    MAX_JSON_VALUES,
    VALUE_BYTES,
    from_binary,
    from_json,
    from_strings,
    json_slices,
    to_strings,
)
from app.errors import InvalidRequest
from app.messages import Array

SHAPES = st.lists(st.integers(0, 4), min_size=0, max_size=4).map(tuple)
WHOLE = {
    f"{sign}INT{bits}": (0 if sign else -(2 ** (bits - 1)), 2 ** (bits - (not sign)) - 1)
    for sign in ("U", "")
    for bits in (8, 16, 32, 64)
}
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "BOOL": st.booleans(),
    "BYTES": st.text(max_size=5),
    "FP32": st.floats(width=32, allow_nan=False, allow_infinity=False),
    "FP64": st.floats(allow_nan=False, allow_infinity=False),
    **{datatype: st.integers(low, high) for datatype, (low, high) in WHOLE.items()},
}


@st.composite
def tensors(draw: st.DrawFn) -> tuple[str, tuple[int, ...], list[Any]]:
    """A datatype, a shape and its values in a row."""
    datatype, shape = draw(st.sampled_from(sorted(VALUES))), draw(SHAPES)
    count = math.prod(shape)
    return datatype, shape, draw(st.lists(VALUES[datatype], min_size=count, max_size=count))


def nested(values: list[Any], shape: tuple[int, ...]) -> Any:
    if not shape:
        return values[0]
    step = len(values) // shape[0] if shape[0] else 0
    return [nested(values[row * step : (row + 1) * step], shape[1:]) for row in range(shape[0])]


def told(array: Array) -> list[Any]:
    """As a client reads it: FP32 comes in as many digits as say which one it is."""
    values = json.loads(b"[" + b"".join(json_slices("x", array)) + b"]")
    return numpy.array(values, numpy.float32).tolist() if array.datatype == "FP32" else list(values)


@given(tensors())
def test_json_and_bytes_say_the_same(tensor: tuple[str, tuple[int, ...], list[Any]]) -> None:
    datatype, shape, values = tensor
    array = from_json("x", datatype, shape, values)
    assert from_binary("x", datatype, shape, array.data) == array
    assert told(array) == values
    if shape:
        assert from_json("x", datatype, shape, nested(values, shape)) == array


@given(tensors(), SHAPES)
def test_a_dimension_that_lies_is_refused(tensor: tuple[str, tuple[int, ...], list[Any]], lie: tuple[int, ...]) -> None:
    datatype, shape, values = tensor
    data = from_json("x", datatype, shape, values).data
    if math.prod(lie) != len(values):
        with pytest.raises(InvalidRequest):
            from_json("x", datatype, lie, values)
        with pytest.raises(InvalidRequest):
            from_binary("x", datatype, lie, data)
    elif lie != shape and len(shape) > 1 and values:
        with pytest.raises(InvalidRequest):
            from_json("x", datatype, lie, nested(values, shape))


@given(tensors(), st.data())
def test_every_truncated_or_longer_tail_is_refused(
    tensor: tuple[str, tuple[int, ...], list[Any]], data: st.DataObject
) -> None:
    datatype, shape, values = tensor
    whole = from_json("x", datatype, shape, values).data
    cut = data.draw(st.integers(0, max(len(whole) - 1, 0)))
    for wrong in (whole[:cut], whole + b"\0"):
        if wrong != whole:
            with pytest.raises(InvalidRequest):
                from_binary("x", datatype, shape, wrong)


@given(st.sampled_from([*VALUE_BYTES, "BYTES"]), SHAPES, st.binary(max_size=64))
def test_any_bytes_are_a_tensor_of_their_size_or_refused(datatype: str, shape: tuple[int, ...], data: bytes) -> None:
    try:
        array = from_binary("x", datatype, shape, data)
    except InvalidRequest:
        return
    assert array.data == data
    assert datatype == "BYTES" or len(data) == math.prod(shape) * VALUE_BYTES[datatype]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4),
)


@given(st.sampled_from([*VALUE_BYTES, "BYTES", "STRING", ""]), SHAPES, JSON)
def test_any_json_is_a_tensor_or_refused(datatype: str, shape: tuple[int, ...], values: Any) -> None:
    try:
        array = from_json("x", datatype, shape, values)
    except InvalidRequest:
        return
    assert from_binary("x", datatype, shape, array.data) == array


@pytest.mark.parametrize(
    ("datatype", "value"),
    [
        *((datatype, value) for datatype, (low, high) in WHOLE.items() for value in (low - 1, high + 1)),
        ("INT64", 1.0), ("INT64", True), ("INT64", "1"), ("INT64", None), ("BOOL", 1), ("BYTES", 1), ("FP32", True), ("FP32", "1"),
        ("FP32", LARGEST_FP32 * 1.0000001), ("FP32", 10**400), ("FP64", 10**400), ("FP64", math.inf), ("FP32", math.nan),
        ("FP16", 1.0), ("BF16", 1.0), ("BYTES", "\ud800"),
    ],
)  # fmt: skip
def test_values_that_a_datatype_cannot_hold(datatype: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match="'x'"):
        from_json("x", datatype, (1,), [value])


def test_the_largest_fp32_is_held() -> None:
    assert told(from_json("x", "FP32", (2,), [LARGEST_FP32, -LARGEST_FP32])) == [LARGEST_FP32, -LARGEST_FP32]


def test_a_bool_is_zero_or_one() -> None:
    with pytest.raises(InvalidRequest, match="0 or 1"):
        from_binary("x", "BOOL", (2,), b"\1\2")


def test_strings_are_utf8() -> None:
    assert to_strings("x", from_strings(["", "ü", "\0"], (3,))) == ["", "ü", "\0"]
    with pytest.raises(InvalidRequest, match="UTF-8"):
        to_strings("x", Array("BYTES", (1,), b"\1\0\0\0\xff"))


@pytest.mark.parametrize(
    "array",
    [
        Array("FP16", (1,), b"\0\0"),
        Array("FP32", (1,), b"\0\0\x80\x7f"),
        Array("FP32", (1,), b"\0\0\xc0\x7f"),
        Array("BOOL", (MAX_JSON_VALUES + 1,), b""),
    ],
)
def test_what_json_cannot_say_is_asked_for_as_binary(array: Array) -> None:
    with pytest.raises(InvalidRequest, match="binary_data"):
        list(json_slices("x", array))


def test_many_values_are_written_in_slices() -> None:
    array = Array("UINT8", (40_000,), bytes(range(200)) * 200)
    assert len(list(json_slices("x", array))) == 3
    assert told(array) == list(range(200)) * 200
