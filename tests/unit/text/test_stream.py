"""Streamed text equals decoding everything at once, for every form of tokenizer, and no piece has half a character."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.text import detokenizer
from app.text.detokenizer import IncrementalDetokenizer
from app.text.tokenizer import Tokenizer
from small_tokenizers import FORMS, write_tokenizer

WHOLE = ["byte_level", "sentence_piece"]  # forms that can spell any character


@cache
def tokenizer(form: str) -> Tokenizer:
    with TemporaryDirectory() as directory:
        return Tokenizer(write_tokenizer(Path(directory), FORMS[form]()))


def pieces_of(stream: IncrementalDetokenizer, ids: list[int]) -> list[str]:
    pieces = [stream.push(token_id) for token_id in ids if stream.matched_stop is None]
    return [*pieces, stream.flush()]


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=60) | st.text(
    "the fox 你好🙂\u200d👩é�▁ \n", max_size=60
)


@pytest.mark.parametrize("form", WHOLE)
@given(text=texts)
def test_pieces_joined_are_the_text(form: str, text: str) -> None:
    ids = tokenizer(form).encode(text, add_special_tokens=False)
    assert "".join(pieces_of(IncrementalDetokenizer(tokenizer(form)), ids)) == tokenizer(form).decode(ids)


@pytest.mark.parametrize("form", WHOLE)
@given(text=texts.filter(lambda text: "\ufffd" not in text))
def test_no_piece_has_half_a_character(form: str, text: str) -> None:
    ids = tokenizer(form).encode(text, add_special_tokens=False)
    assert not any("\ufffd" in piece for piece in pieces_of(IncrementalDetokenizer(tokenizer(form)), ids))


@pytest.mark.parametrize("form", ["byte_level", "meta_space"])
@given(seed=st.integers(0, 2**32), length=st.integers(0, 150))
def test_any_ids_decode_as_they_do_at_once(form: str, seed: int, length: int) -> None:
    # Bytes that are no characters, special tokens, ids beyond the vocabulary: what a model with random weights says.
    ids = [random.Random(seed + place).randrange(tokenizer(form).vocab_size + 9) for place in range(length)]
    assert "".join(pieces_of(IncrementalDetokenizer(tokenizer(form)), ids)) == tokenizer(form).decode(ids)


@pytest.mark.parametrize("form", WHOLE)
@given(text=texts, stops=st.lists(st.text("the fox你🙂 ", min_size=1, max_size=4), max_size=3))
def test_pieces_joined_are_the_text_up_to_the_first_stop_string(form: str, text: str, stops: list[str]) -> None:
    ids = tokenizer(form).encode(text, add_special_tokens=False)
    stream = IncrementalDetokenizer(tokenizer(form), stops)
    joined, whole = "".join(pieces_of(stream, ids)), tokenizer(form).decode(ids)
    ends = [(whole.index(stop) + len(stop), -len(stop)) for stop in stops if stop in whole]
    assert joined == (whole[: sum(min(ends))] if ends else whole)
    assert (stream.matched_stop is not None) == bool(ends)


@pytest.mark.parametrize("count", range(14, 40))
def test_a_character_after_bytes_that_are_none(count: int) -> None:
    inner = tokenizer("byte_level")
    garbage = inner.token_id("\xff")
    assert garbage is not None
    ids = [garbage] * count + inner.encode("ᚠ!", add_special_tokens=False)
    assert "".join(pieces_of(IncrementalDetokenizer(inner), ids)) == "\ufffd" * count + "ᚠ!"


@given(prompt=texts.filter(bool), text=texts)
def test_a_completion_continues_its_prompt(prompt: str, text: str) -> None:
    inner = tokenizer("sentence_piece")
    before = inner.encode(prompt, add_special_tokens=False)
    ids = inner.encode(text, add_special_tokens=False)
    joined = inner.decode(before) + "".join(pieces_of(IncrementalDetokenizer(inner, context=before), ids))
    assert joined == inner.decode(before + ids)


def test_a_sentence_piece_completion_keeps_its_first_space_and_a_chat_drops_it() -> None:
    inner = tokenizer("sentence_piece")
    before, ids = inner.encode("Once upon"), inner.encode("a time", add_special_tokens=False)
    assert "".join(pieces_of(IncrementalDetokenizer(inner, context=before), ids)) == " a time"
    assert "".join(pieces_of(IncrementalDetokenizer(inner), ids)) == "a time"


def test_a_space_after_many_special_tokens_is_kept() -> None:
    inner = tokenizer("sentence_piece")
    hello, silence = inner.encode("hello", add_special_tokens=False), [inner.token_id("<|end|>")] * 50
    ids = [*hello, *(token_id for token_id in silence if token_id is not None), *hello]
    assert "".join(pieces_of(IncrementalDetokenizer(inner), ids)) == "hello hello"


def test_a_character_comes_whole_with_its_last_byte() -> None:
    inner = tokenizer("byte_level")
    ids = inner.encode("aᚠb", add_special_tokens=False)  # not in the training text: one token a byte
    assert pieces_of(IncrementalDetokenizer(inner), ids) == ["a", "", "", "ᚠ", "b", ""]


def test_a_character_cut_off_by_the_end_becomes_a_replacement_character() -> None:
    inner = tokenizer("byte_level")
    ids = inner.encode("aᚠ", add_special_tokens=False)[:-1]
    assert pieces_of(IncrementalDetokenizer(inner), ids) == ["a", "", "", "\ufffd"]


def test_a_prompt_that_ends_within_a_character_is_completed() -> None:
    inner = tokenizer("byte_level")
    ids = inner.encode("aᚠ!", add_special_tokens=False)
    assert "".join(pieces_of(IncrementalDetokenizer(inner, context=ids[:3]), ids[3:])) == "ᚠ!"


@pytest.mark.parametrize("form", FORMS)
def test_a_piece_is_what_decoding_the_window_returns(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = tokenizer(form)
    numbers = random.Random(0)
    for _ in range(30):
        ids = [numbers.randrange(inner.vocab_size + 2) for _ in range(60)]
        context = ids[:4] if numbers.random() < 0.5 else []
        with monkeypatch.context() as patch:
            patch.setattr(detokenizer, "_MAX_WHOLE_TOKENS", numbers.choice((9, 24, 128)))
            known = pieces_of(IncrementalDetokenizer(inner, context=context), ids)
        with monkeypatch.context() as patch:
            patch.setattr(Tokenizer, "piece", lambda self, token_id: None)
            assert pieces_of(IncrementalDetokenizer(inner, context=context), ids) == known


def test_most_tokens_of_joining_decoders_have_pieces() -> None:
    inner = tokenizer("byte_level")
    assert inner.piece(inner.encode("a", False)[0]) == "a"
    assert inner.piece(inner.token_id("\xff") or 0) is None  # part of a character
    assert inner.piece(next(iter(inner.special_tokens))) is None
    assert inner.piece(inner.vocab_size + 5) is None


class Counting:
    """Stands in for a tokenizer and counts the tokens that are decoded."""

    def __init__(self, inner: Tokenizer) -> None:
        self.inner, self.decoded, self.longest = inner, 0, 0
        self.has_text, self.token_bytes, self.piece = inner.has_text, inner.token_bytes, inner.piece

    def decode(self, ids: list[int]) -> str:
        self.decoded += len(ids)
        self.longest = max(self.longest, len(ids))
        return self.inner.decode(ids)


@pytest.mark.parametrize("letters", ["hello world ", "\xff", "🦉"])
def test_a_token_costs_the_same_at_any_length(letters: str) -> None:
    inner = tokenizer("byte_level")
    ids = inner.encode(letters, add_special_tokens=False) if letters != "\xff" else [inner.token_id("\xff")]
    counting = Counting(inner)
    stream = IncrementalDetokenizer(counting)  # type: ignore[arg-type]
    many = [token_id for token_id in ids * 400 if token_id is not None]
    assert "".join(pieces_of(stream, many)) == inner.decode(many)
    assert counting.longest <= 24
    assert counting.decoded <= 24 * len(many)


def test_special_tokens_in_stops_and_the_first_tokens(tmp_path: Path) -> None:
    one = Tokenizer(write_tokenizer(tmp_path, FORMS["byte_level"]()))
    special_id, name = next(iter(one.special_tokens.items()))
    ids = [*one.encode("a", False), special_id, *one.encode("bc", False)]
    for stop, shown in ((name, "a"), (name + "b", "a"), ("a" + name, ""), ("ab", ""), (name + "x", "abc")):
        stream = IncrementalDetokenizer(one, [stop])
        assert "".join(pieces_of(stream, ids)) == shown
        assert stream.matched_stop == (None if shown == "abc" else stop)
    assert "".join(pieces_of(IncrementalDetokenizer(one, [name], include_stop=True), ids)) == "a" + name
    literal = IncrementalDetokenizer(one, [name], literals={special_id: name})
    assert ("".join(pieces_of(literal, ids)), literal.matched_stop) == ("a", name)
    for min_tokens, shown in ((0, ""), (1, "a"), (2, "a"), (3, f"a{name}bc")):
        stream = IncrementalDetokenizer(one, ["a", name], literals={special_id: name}, min_tokens=min_tokens)
        assert "".join(pieces_of(stream, ids)) == (shown if min_tokens != 2 else f"a{name}bc")
