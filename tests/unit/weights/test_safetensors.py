"""The safetensors header: read as the library writes it, and nothing that a damaged or malicious file can say gets further."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from app.errors import CheckpointInvalid
from app.weights.safetensors import TensorEntry, read_header


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield tmp_path_factory.mktemp("headers")


def write(file: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return file


def tensor(start: int, end: int, shape: list[int], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def test_reads_what_the_library_writes(folder: Path) -> None:
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16), "none": torch.empty(0)}
    save_file(tensors, folder / "whole.safetensors", metadata={"format": "pt"})
    entries = read_header(folder / "whole.safetensors")
    assert set(entries) == set(tensors)
    assert entries["a"].shape == (2, 3) and entries["b"].dtype == "BF16" and entries["b"].nbytes == 8
    held = (folder / "whole.safetensors").read_bytes()[entries["a"].start : entries["a"].end]
    assert torch.frombuffer(bytearray(held), dtype=torch.float32).tolist() == [0, 1, 2, 3, 4, 5]


REFUSALS: dict[str, tuple[Any, bytes, str]] = {
    "cut short": ({"a": tensor(0, 8, [2])}, b"1234", "has been cut short"),
    "too long": ({"a": tensor(0, 4, [1])}, b"12345678", "longer than its header says"),
    "overlap": ({"a": tensor(0, 8, [2]), "b": tensor(4, 8, [1])}, b"12345678", "b overlaps"),
    "hole": ({"a": tensor(0, 4, [1]), "b": tensor(8, 12, [1])}, b"123456789012", "b leaves a hole"),
    "dtype": ({"a": tensor(0, 4, [1], "F4")}, b"1234", "dtype 'F4'; known are"),
    "size": ({"a": tensor(0, 4, [3])}, b"1234", "cannot be 4 bytes"),
    "negative shape": ({"a": tensor(0, 4, [-1, -1])}, b"1234", "no proper shape"),
    "negative offset": ({"a": tensor(-4, 0, [1])}, b"1234", "no proper shape"),
    "offsets": ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}, b"1234", "no proper shape"),
    "entry": ({"a": 5}, b"", "is not an object"),
    "list": ([1], b"", "not a JSON object"),
    "text": (b"not json", b"", "is not JSON"),
    "deep": (b"[" * 100_000, b"", "is not JSON"),
    "bytes": (b"\xff\xfe\xfd", b"", "is not JSON"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(folder: Path, name: str) -> None:
    header, data, sentence = REFUSALS[name]
    with pytest.raises(CheckpointInvalid) as caught:
        read_header(write(folder / "bad.safetensors", header, data))
    assert sentence in caught.value.message and "bad.safetensors" in caught.value.message


@pytest.mark.parametrize("length", [3, 2**40, 2**64 - 1])
def test_a_header_longer_than_the_file_is_never_read(folder: Path, length: int) -> None:
    with pytest.raises(CheckpointInvalid):
        read_header(write(folder / "long.safetensors", b"{}", length=length))


@pytest.mark.parametrize("size", [0, 1, 7])
def test_a_file_of_a_few_bytes(folder: Path, size: int) -> None:
    (folder / "short.safetensors").write_bytes(b"\0" * size)
    with pytest.raises(CheckpointInvalid, match="not a whole safetensors file"):
        read_header(folder / "short.safetensors")


def check(entries: dict[str, TensorEntry], file: Path) -> None:
    """Whatever is accepted lies in the file, end to end."""
    places = sorted((entry.start, entry.end) for entry in entries.values())
    assert all(left[1] == right[0] for left, right in pairwise(places))
    assert all(0 <= start <= end <= file.stat().st_size for start, end in places)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-8, 40) | st.floats() | st.sampled_from(["F32", "BF16", "x"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets"]), inner, max_size=3)
    ),
    max_leaves=12,
)
tensors = st.builds(
    lambda start, count, dtype, slack: tensor(
        start, start + count * (4 if dtype == "F32" else 2) + slack, [count], dtype
    ),
    st.integers(0, 12),
    st.integers(0, 3),
    st.sampled_from(["F32", "BF16"]),
    st.sampled_from([0, 0, 0, 1, -1]),
)


@given(st.dictionaries(st.text(max_size=3), tensors | json_values, max_size=4) | json_values, st.binary(max_size=24))
def test_any_header_is_accepted_whole_or_refused(folder: Path, header: Any, data: bytes) -> None:
    file = write(folder / "any.safetensors", header, data)
    with suppress(CheckpointInvalid):
        check(read_header(file), file)


@given(st.binary(max_size=64))
def test_any_bytes_are_accepted_whole_or_refused(folder: Path, data: bytes) -> None:
    file = folder / "bytes.safetensors"
    file.write_bytes(data)
    with suppress(CheckpointInvalid):
        check(read_header(file), file)
