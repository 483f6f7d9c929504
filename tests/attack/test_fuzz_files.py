"""Mutated files of a checkpoint: each is read or refused with a sentence, by nothing but `CheckpointInvalid`.

The corpus is the files of the embedded models, templates of `hostile_templates.py`, and `CORPUS`, edits that once went wrong.
`FUZZ_EXAMPLES=10000` tries more; hypothesis keeps failing examples in .hypothesis and tries them first.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from app.errors import CheckpointInvalid, InvalidRequest
from app.settings import DEMO_DIRECTORY
from app.text.chat import ChatTemplate
from app.text.tokenizer import Tokenizer
from app.weights.checkpoint import open_checkpoint
from app.weights.open import open_model
from exported_programs import write_program
from hypothesis_examples import FUZZ_EXAMPLES, examples

# A mutation replaces the bytes at a place (a share of the length) by others; several are made one after the other.
MUTATIONS = st.lists(
    st.tuples(st.floats(0, 1), st.integers(0, 64), st.one_of(st.binary(max_size=64), st.sampled_from(
        [b"null", b"-1", b"1e999", b"[]", b"{}", b'"', b"\x00" * 8, b"\xff" * 8, b"9" * 400, b"[" * 2_000, b"../" * 8]
    ))),
    min_size=1, max_size=4,
)  # fmt: skip
CORPUS: list[list[tuple[float, int, bytes]]] = [
    [(0.0, 8, b"\xff" * 8)],  # a header of 2^64 bytes
    [(0.0, 64, b"[" * 100_000)],  # deeper than any parser goes
    [(1.0, 0, b"\x00")],
    [(0.0, 64, b"")],
]
COUNT = FUZZ_EXAMPLES or examples(100)
CHECKED = settings(
    max_examples=COUNT, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


def mutated(content: bytes, mutations: list[tuple[float, int, bytes]]) -> bytes:
    for share, removed, added in mutations:
        place = int(share * len(content))
        content = content[:place] + added + content[place + removed :]
    return content


def with_corpus(test: Any) -> Any:
    for mutations in CORPUS:
        test = example(mutations=mutations)(test)
    return test


def read(directory: Path) -> None:
    open_checkpoint(directory)
    Tokenizer(directory)


@pytest.mark.parametrize("kind", ["llama", "bert"])
@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "tokenizer.json"])
@with_corpus
@CHECKED
@given(mutations=MUTATIONS)
def test_mutated_json(kind: str, name: str, tmp_path: Path, mutations: list[tuple[float, int, bytes]]) -> None:
    directory = tmp_path / "model"
    if not directory.exists():
        shutil.copytree(DEMO_DIRECTORY.parent / kind, directory)
    (directory / name).write_bytes(mutated((DEMO_DIRECTORY.parent / kind / name).read_bytes(), mutations))
    try:
        read(directory)
    except CheckpointInvalid as error:
        assert 0 < len(error.message) < 20_000


@with_corpus
@CHECKED
@given(mutations=MUTATIONS)
def test_mutated_weights(tmp_path: Path, mutations: list[tuple[float, int, bytes]]) -> None:
    """The header alone: the values of tensors are any bytes."""
    directory = tmp_path / "model"
    if not directory.exists():
        shutil.copytree(DEMO_DIRECTORY, directory)
    original = (DEMO_DIRECTORY / "model.safetensors").read_bytes()
    header = 8 + int.from_bytes(original[:8], "little")
    (directory / "model.safetensors").write_bytes(mutated(original[:header], mutations) + original[header:])
    try:
        open_checkpoint(directory)
    except CheckpointInvalid as error:
        assert len(error.message) < 20_000


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """An archive as torch.export.save writes it."""
    return write_program(tmp_path_factory.mktemp("programs"), "recommender").read_bytes()


@with_corpus
@CHECKED
@given(mutations=MUTATIONS)
def test_mutated_programs(program: bytes, tmp_path: Path, mutations: list[tuple[float, int, bytes]]) -> None:
    path = tmp_path / "mutant.pt2"
    path.write_bytes(mutated(program, mutations))
    try:
        open_model(path)
    except CheckpointInvalid as error:
        assert len(error.message) < 20_000


WORDS = st.sampled_from(
    "{{ }} {% %} for endfor in if endif set endset messages [0] .content role loop.index ~ + * ** ( ) | tojson length join('a') "
    "macro endmacro m() call endcall namespace() 'a' 9 range(9) [] {} . __class__ - -% {%- -}} is defined not true none else".split()
)


@settings(max_examples=max(COUNT // 4, 10), deadline=None)
@given(source=st.one_of(st.lists(WORDS, max_size=40).map(" ".join), st.text(max_size=60)))
def test_generated_templates(source: str) -> None:
    """A template renders, or is refused; its process is ended or goes on, and nothing else happens."""
    try:
        template = ChatTemplate(source, {"bos_token": "<s>"})
    except CheckpointInvalid:
        return
    try:
        assert isinstance(template.render([{"role": "user", "content": "hello"}]), str)
    except InvalidRequest:
        pass
    finally:
        template.close()
