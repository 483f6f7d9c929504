"""Tokenization of texts and pairs for encoders: equal to transformers' tokenizers, truncated or whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Inner

from app.errors import InvalidRequest
from app.messages import Text
from app.text.tokenizer import Tokenizer, truncated_lengths
from tiny_encoders import SPECIALS, write_word_pieces

LONG = "the fox said hello to the green world"
PAIR = ("hello", LONG)
INPUTS = [LONG, "fox", PAIR, PAIR[::-1], (LONG, LONG)]


@pytest.mark.parametrize("specials", SPECIALS)
@pytest.mark.parametrize("truncate_left", [False, True])
@pytest.mark.parametrize("max_tokens", [None, 64, 9, 8, 5])
def test_texts_are_those_of_transformers(
    tmp_path: Path, specials: str, truncate_left: bool, max_tokens: int | None
) -> None:
    transformers = pytest.importorskip("transformers")
    write_word_pieces(tmp_path, SPECIALS[specials])
    reference = transformers.AutoTokenizer.from_pretrained(
        tmp_path, truncation_side="left" if truncate_left else "right"
    )
    found = Tokenizer(tmp_path).encode_texts(INPUTS, max_tokens, truncate_left)
    for one, text in zip(INPUTS, found, strict=True):
        parts = [one] if isinstance(one, str) else list(one)
        wanted = reference(*parts, truncation=max_tokens is not None, max_length=max_tokens, return_token_type_ids=True)
        assert list(text.token_ids) == wanted["input_ids"]
        assert list(text.type_ids or [0] * len(text.token_ids)) == wanted["token_type_ids"]


@given(st.lists(st.integers(0, 40), min_size=1, max_size=2), st.integers(0, 60))
def test_a_pair_is_cut_as_the_library_cuts_it(lengths: list[int], room: int) -> None:
    kept = truncated_lengths(lengths, room)
    assert sum(kept) == min(sum(lengths), room) and all(k <= n for k, n in zip(kept, lengths, strict=True))
    if len(lengths) == 2:
        assert kept[0] == lengths[0] or kept[1] == lengths[1] or abs(kept[0] - kept[1]) <= 1


def test_padding_of_the_training_is_off(tmp_path: Path) -> None:
    write_word_pieces(tmp_path)
    plain = Tokenizer(tmp_path).encode_texts([LONG])
    inner = Inner.from_file(str(tmp_path / "tokenizer.json"))
    inner.enable_truncation(4)
    inner.enable_padding(length=64)
    inner.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer(tmp_path).encode_texts([LONG]) == plain


def test_lowercase_texts_keep_their_special_tokens(tmp_path: Path) -> None:
    write_word_pieces(tmp_path)
    inner = Inner.from_file(str(tmp_path / "tokenizer.json"))
    inner.normalizer = None
    inner.save(str(tmp_path / "tokenizer.json"))
    small, plain = Tokenizer(tmp_path, lowercases=True), Tokenizer(tmp_path)
    assert (
        small.encode_texts(["FOX [MASK]"]) == plain.encode_texts(["fox [MASK]"]) != plain.encode_texts(["FOX [MASK]"])
    )
    assert plain.encode_texts(["fox"]) == [Text((2, plain.token_id("fox") or 0, 3))]


def test_segments_are_not_passed_to_a_model_that_does_not_use_them(tmp_path: Path) -> None:
    write_word_pieces(tmp_path)
    assert Tokenizer(tmp_path).encode_texts([PAIR])[0].type_ids
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "model_input_names": ["input_ids", "attention_mask"]}))
    assert not Tokenizer(tmp_path).encode_texts([PAIR])[0].type_ids


@pytest.mark.parametrize(
    ("name", "model_type", "segments"),
    [
        ("BertTokenizer", "bert", True),
        ("BertTokenizerFast", "xlm-roberta", True),
        ("ElectraTokenizer", "electra", True),
        ("TokenizersBackend", "bert", False),
        ("PreTrainedTokenizerFast", "bert", False),
        ("DistilBertTokenizer", "distilbert", False),
        (None, "bert", True),
        (None, "roberta", False),
    ],
)
def test_segments_are_those_that_transformers_class_returns(
    tmp_path: Path, name: str | None, model_type: str, segments: bool
) -> None:
    write_word_pieces(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "tokenizer_class": name}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    assert bool(Tokenizer(tmp_path).encode_texts([PAIR])[0].type_ids) is segments
    if name not in ("BertTokenizerFast", "DistilBertTokenizer"):  # transformers makes others of these in this place
        transformers = pytest.importorskip("transformers")
        wanted = transformers.AutoTokenizer.from_pretrained(tmp_path)(*PAIR)
        assert ("token_type_ids" in wanted) is segments


@pytest.mark.parametrize(("number", "kept"), [(0, LONG), (1, "the "), (3, "the fox said "), (99, LONG)])
def test_the_first_tokens_of_a_text_as_text(tmp_path: Path, number: int, kept: str) -> None:
    write_word_pieces(tmp_path)
    found = Tokenizer(tmp_path).first_tokens(LONG, number)
    assert found == kept
    if number:
        assert len(Tokenizer(tmp_path).encode(found, add_special_tokens=False)) <= number


def test_the_first_tokens_of_a_long_text(tmp_path: Path) -> None:
    write_word_pieces(tmp_path)
    tokenizer = Tokenizer(tmp_path)
    long = "the fox said hello " * 10_000
    assert len(tokenizer.encode(tokenizer.first_tokens(long, 30_001), add_special_tokens=False)) == 30_001


@pytest.mark.parametrize("bad", ["a\ud800", ("fine", "a\ud800")])
def test_half_a_character_is_refused(tmp_path: Path, bad: str | tuple[str, str]) -> None:
    write_word_pieces(tmp_path)
    with pytest.raises(InvalidRequest, match="lone surrogate at character 1"):
        Tokenizer(tmp_path).encode_texts(["fox", bad])
