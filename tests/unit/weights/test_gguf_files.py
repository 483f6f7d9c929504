"""The GGUF header: what a damaged or malicious file can say is refused with a sentence, before memory is reserved."""

from __future__ import annotations

import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.errors import CheckpointInvalid
from app.text.tokenizer import Tokenizer
from app.weights.gguf.reader import GgufModel, read_gguf
from app.weights.open import open_model
from gguf_files import convert, write_gguf
from hypothesis_examples import examples
from tiny_checkpoints import write_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gguf")


@pytest.fixture(scope="module")
def whole(folder: Path) -> bytes:
    return write_gguf(folder / "whole", kind="Q8_0", hidden_size=64, intermediate_size=96).read_bytes()


def refusal(file: Path, content: bytes) -> str:
    file.write_bytes(content)
    with pytest.raises(CheckpointInvalid) as caught:
        open_model(file)
    return caught.value.message


def pair(name: str, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", kind) + value


def row(name: str, sizes: list[int], kind: int, offset: int) -> bytes:
    start = struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", len(sizes))
    return start + struct.pack(f"<{len(sizes)}Q", *sizes) + struct.pack("<IQ", kind, offset)


def header(pairs: list[bytes] = [], rows: list[bytes] = [], data: bytes = b"") -> bytes:  # noqa: B006
    content = b"GGUF" + struct.pack("<IQQ", 3, len(rows), len(pairs)) + b"".join(pairs) + b"".join(rows)
    return content + bytes(-len(content) % 32) + data


def strings(count: int) -> bytes:
    return struct.pack("<IQ", 8, count)


REFUSALS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is not a whole GGUF file: it has 0 bytes"),
    "magic": (b"GGML" + bytes(40), "is not a whole GGUF file"),
    "version": (b"GGUF" + struct.pack("<IQQ", 9, 0, 0), "is GGUF version 9; supported are 2 and 3"),
    "big endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "for big-endian machines"),
    "tensors": (b"GGUF" + struct.pack("<IQQ", 3, 2**40, 0), "claims 1099511627776 tensors"),
    "pairs": (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**40), "claims 1099511627776 key-value pairs"),
    "no pairs": (b"GGUF" + struct.pack("<I", 3), "its header is cut short"),
    "key": (header([struct.pack("<Q", 2**60) + bytes(40)]), "bytes of a key"),
    "text": (header([pair("a", 8, struct.pack("<Q", 2**60))]), "bytes of a"),
    "not UTF-8": (header([pair("a", 8, struct.pack("<Q", 1) + b"\xff")]), "a is not UTF-8"),
    "kind": (header([pair("a", 99, b"")]), "a value of unknown type 99"),
    "array": (header([pair("a", 9, strings(2**60))]), "values of a"),
    "arrays of arrays": (header([pair("a", 9, struct.pack("<IQ", 9, 1))]), "an array of values of type 9"),
    "twice": (header([pair("a", 0, b"1"), pair("a", 0, b"1")]), "a occurs twice"),
    "alignment": (header([pair("general.alignment", 4, struct.pack("<I", 24))]), "must be a power of two, not 24"),
    "dimensions": (header(rows=[row("t", [], 0, 0)]), "has 0 dimensions"),
    "many dimensions": (header(rows=[row("t", [1] * 9, 0, 0)]), "has 9 dimensions"),
    "empty tensor": (header(rows=[row("t", [0], 0, 0)]), "cannot have the sizes [0]"),
    "huge tensor": (header(rows=[row("t", [2**39, 2**39], 0, 0)]), "cannot have the sizes"),
    "half a block": (header(rows=[row("t", [48], 8, 0)]), "of type Q8_0 cannot have the sizes [48]"),
    "an IQ type": (header(rows=[row("t", [256], 23, 0)]), "has type IQ4_XS; supported are F32, F16"),
    "a new type": (header(rows=[row("t", [256], 99, 0)]), "has type number 99"),
    "cut short": (header(rows=[row("t", [64], 0, 0)], data=bytes(200)), "has been cut short"),
    "offset": (header(rows=[row("t", [4], 0, 4)], data=bytes(64)), "t is not aligned"),
    "overlap": (header(rows=[row("a", [64], 0, 0), row("b", [4], 0, 32)], data=bytes(512)), "b overlaps the tensor"),
    "same name": (header(rows=[row("a", [4], 0, 0), row("a", [4], 0, 32)], data=bytes(512)), "a occurs twice"),
    "vocabulary": (
        header([pair("general.architecture", 8, struct.pack("<Q", 1) + b"x")]),
        "a vocabulary without weights",
    ),
    "imatrix": (header([pair("general.type", 8, struct.pack("<Q", 7) + b"imatrix")]), "an importance matrix"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(folder: Path, name: str) -> None:
    content, sentence = REFUSALS[name]
    said = refusal(folder / "bad.gguf", content)
    assert sentence in said and "bad.gguf" in said


CHANGES: dict[str, tuple[str, Any, str]] = {
    "architecture": ("general.architecture", "mamba", "architecture 'mamba' is not supported; supported are llama"),
    "experts": ("llama.expert_count", 8, "expert_used_count is missing"),
    "layers": ("llama.block_count", 3, "lack 9 of the 30 tensors"),
    "fewer layers": ("llama.block_count", 1, "hold 9 tensors that the LlamaForCausalLM of the metadata of"),
    "heads": ("llama.attention.head_count_kv", 3, "4 attention heads cannot share 3 key/value heads"),
    "no heads": ("llama.attention.head_count", None, "attention.head_count is missing"),
    "a text": ("llama.block_count", "two", "block_count must be an integer"),
    "tokenizer": ("tokenizer.ggml.model", "bert", "has a tokenizer of kind 'bert'"),
    "no tokenizer": ("tokenizer.ggml.model", None, "has no tokenizer"),
    "splitting": ("tokenizer.ggml.pre", "unknown-one", "tokenizer.ggml.pre is 'unknown-one'"),
    "tokens": ("tokenizer.ggml.tokens", ("a", "a"), "is empty or has a token twice"),
    "types": ("tokenizer.ggml.token_type", (1, 2), "must be one number for each token"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_refusals_of_values(folder: Path, whole: bytes, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    key, value, sentence = CHANGES[name]
    (folder / "changed.gguf").write_bytes(whole)
    model = read_gguf(folder / "changed.gguf")
    metadata = {**model.metadata, key: value}
    if value is None:
        del metadata[key]
    monkeypatch.setattr("app.weights.checkpoint.read_gguf", lambda file: GgufModel(file, metadata, model.tensors))
    with pytest.raises(CheckpointInvalid) as caught:
        open_model(folder / "changed.gguf")
    assert sentence in caught.value.message


def test_an_unknown_tensor_is_named(tmp_path: Path) -> None:
    convert(write_checkpoint(tmp_path / "exact"), tmp_path / "a.gguf", added={"blk.0.more": np.zeros(4, np.float32)})
    with pytest.raises(CheckpointInvalid, match=r"hold 1 tensors that .* does not use: blk.0.more"):
        open_model(tmp_path / "a.gguf")


def test_a_file_cut_short_anywhere_is_refused(folder: Path, whole: bytes) -> None:
    for end in (*range(0, 4000, 97), len(whole) // 2, len(whole) - 33):
        assert refusal(folder / "short.gguf", whole[:end])


@settings(max_examples=examples(400))
@given(st.lists(st.tuples(st.integers(0, 2**16), st.binary(min_size=1, max_size=8)), min_size=1, max_size=4))
def test_a_changed_file_is_read_or_refused(folder: Path, whole: bytes, changes: list[tuple[int, bytes]]) -> None:
    content = bytearray(whole)
    for place, new in changes:
        at = place % len(content)
        content[at : at + len(new)] = new
    file = folder / "mutated.gguf"
    file.write_bytes(content)
    with suppress(CheckpointInvalid):
        open_model(file)
        Tokenizer(file)


@given(st.binary(max_size=80))
def test_any_bytes_are_refused(folder: Path, data: bytes) -> None:
    assert refusal(folder / "any.gguf", b"GGUF\3\0\0\0" + data)
