"""Keys and unique items are written once: what is noticed, and what is forbidden before it is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.messages import GrammarSource
from app.text.grammar import CompiledGrammar, GrammarCompiler
from app.text.json_repeats import JsonRepeats, SchemaPlaces, TextBefore, TokenBytes
from app.text.schema_logic import same
from app.text.tokenizer import Tokenizer
from hypothesis_examples import examples
from small_tokenizers import byte_level, write_tokenizer

WORDS = [b'{"a"', b'"a"', b'a"', b'": ', b', "a', b", ", b'", "a"', b"1,", b"1]", b'x"]', b"true", b"[1", b"}, {"]
TEXTS = TokenBytes([*(bytes([byte]) for byte in range(256)), *WORDS])
UNIQUE = {"type": "array", "uniqueItems": True}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory: Path = tmp_path_factory.mktemp("tokenizer")
    return Tokenizer(write_tokenizer(directory, byte_level()))


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, tokenizer.vocab_size)


def grammar(compiler: GrammarCompiler, schema: Any, **more: str) -> CompiledGrammar:
    return compiler.compile(GrammarSource("json_schema", json.dumps(schema), "f", **more))


def follow(compiled: CompiledGrammar, tokenizer: Tokenizer, text: str) -> str:
    """Follow a text and return the part whose tokens were possible, with the error that came."""
    state = compiled.start()
    row = numpy.zeros(-(-tokenizer.vocab_size // 32), numpy.uint32)
    ids = tokenizer.encode(text, add_special_tokens=False)
    for place, token_id in enumerate(ids):
        state.fill_masks(row.ctypes.data, row.nbytes, ())
        if state.error or not row[token_id // 32] >> (token_id % 32) & 1:
            return tokenizer.decode(ids[:place]) + (f"!{state.error}" if state.error else "")
        state.advance(token_id)
        if state.error:
            return tokenizer.decode(ids[: place + 1]) + f"!{state.error}"
    return text


LISTED = {**UNIQUE, "items": {"enum": ["a", "ab", "b"]}}
NUMBERS = {**UNIQUE, "items": {"enum": [1, 12]}}


@pytest.mark.parametrize(
    ("schema", "text", "until"),
    [
        ({"type": "object"}, '{"a": 1, "b": {"a": 2}, "ab": 1}', None),
        ({"type": "object"}, '{"a": 1, "a": 2}', '{"a": 1, "a'),
        ({"type": "object"}, r'{"a": 1, "\u0061": 2}', r'{"a": 1, "\u0061"!'),
        ({"type": "object"}, '{"b": {"x": [{"c": 1, "c": 2}]}}', '{"b": {"x": [{"c": 1, "c'),
        (LISTED, '["ab", "b", "a"]', None),
        (LISTED, '["a", "a"]', '["a", "a'),
        (LISTED, '["a", "ab", "b", "b"]', '["a", "ab", "b"'),
        (NUMBERS, "[1, 12]", None),
        (NUMBERS, "[12, 12]", "[12, 1"),
        ({**UNIQUE, "items": {"type": "number"}}, "[1, 12, 1.5]", None),
        ({**UNIQUE, "items": {"type": "number"}}, "[1, 1]", "[1, 1"),
        ({**UNIQUE, "items": {"type": "number"}}, "[1, 1.0]", "[1, 1.0]!"),
        ({**UNIQUE, "items": {"type": "object"}}, '[{"a": 1}, {"a": 1}]', '[{"a": 1}, {"a": 1'),
        ({**UNIQUE, "items": {"type": "object"}}, '[{"a": 1, "b": 2}, {"b": 2, "a": 1}]', '[{"a": 1, "b": 2}, {"b": 2, "a": 1}!'),
        ({"properties": {"u": {"$ref": "#/$defs/u"}}, "$defs": {"u": UNIQUE}}, '{"u": [[1], [1]]}', '{"u": [[1], [1'),
        ({"anyOf": [{"items": {}}, {"type": "string"}], "type": ["array", "string"]}, "[1, 1]", None),
    ],
)  # fmt: skip
def test_repetitions_are_impossible(
    compiler: GrammarCompiler, tokenizer: Tokenizer, schema: Any, text: str, until: str | None
) -> None:
    reached = follow(grammar(compiler, schema), tokenizer, text)
    assert reached == text if until is None else reached.startswith(until) and reached != text


def test_a_value_for_which_only_a_repetition_is_left_is_an_error(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    schema = {**UNIQUE, "items": {"type": "string", "pattern": "^xy$"}}
    assert follow(grammar(compiler, schema), tokenizer, '["xy", "xy"]').endswith(
        "!no token that the grammar allows was possible"
    )


def test_the_text_before_the_json_is_free(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    compiled = grammar(compiler, LISTED, after="</think>")
    text = '["a", "a"]</think>["a", "b"]'
    assert follow(compiled, tokenizer, text) == text
    assert follow(compiled, tokenizer, '</think>["a", "a"]') == '</think>["a", "a'


def test_drafts_are_read_and_forgotten(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    state = grammar(compiler, {"type": "object"}).start()
    ids = tokenizer.encode('{"a": 1, "a', add_special_tokens=False)
    quote = tokenizer.encode('"', add_special_tokens=False)
    assert state.count_valid([*ids, *quote]) == len(ids)
    rows = numpy.zeros((len(ids) + 1, -(-tokenizer.vocab_size // 32)), numpy.uint32)
    for _ in range(2):
        state.fill_masks(rows.ctypes.data, rows.strides[0], ids)
        bits = numpy.unpackbits(rows.view(numpy.uint8), bitorder="little", axis=1)
        assert not bits[-1, quote[0]] and all(bits[place, token_id] for place, token_id in enumerate(ids))
    for token_id in ids:
        state.advance(token_id)
    assert not state.error
    state.advance(quote[0])
    assert "twice" in state.error


KEYS = st.sampled_from(["a", "b", 'a"', "ä", "\\", "aa"])
VALUES = st.recursive(
    st.sampled_from([0, 1, 1.0, 1e2, 100, -1.5, "a", "1", "ä\n", True, False, None, "1, 1", "[", '"']),
    lambda inner: st.lists(inner, max_size=4) | st.lists(st.tuples(KEYS, inner), max_size=4).map(tuple),
    max_leaves=10,
)  # fmt: skip


def written(value: Any) -> str:
    """JSON of lists and of tuples of pairs, which are objects whose keys may be repeated."""
    if isinstance(value, tuple):
        return f"{{{', '.join(f'{json.dumps(name)}: {written(one)}' for name, one in value)}}}"
    return f"[{', '.join(map(written, value))}]" if isinstance(value, list) else json.dumps(value)


def has_repeats(value: Any) -> bool:
    """What is noticed, by comparison."""
    if isinstance(value, tuple):
        return len(dict(value)) < len(value) or any(has_repeats(one) for _, one in value)
    if not isinstance(value, list):
        return False
    plain = [json.loads(written(one)) for one in value]
    pairs = [(one, other) for place, one in enumerate(plain) for other in plain[:place]]
    return any(has_repeats(one) for one in value) or any(same(one, other) for one, other in pairs)


@settings(max_examples=examples(200), deadline=None)
@given(VALUES, st.data())
def test_all_repetitions_are_noticed_and_nothing_else(value: Any, data: st.DataObject) -> None:
    """In a text of random tokens, of which some are tried and forgotten."""
    text, place = written(value).encode(), 0
    everywhere: dict[str, Any] = {"uniqueItems": True, "items": {"$ref": "#"}, "additionalProperties": {"$ref": "#"}}
    repeats = JsonRepeats(SchemaPlaces(everywhere), TEXTS)
    noticed = False
    while place < len(text):
        possible = [token_id for token_id, one in enumerate(TEXTS.texts) if text.startswith(one, place)]
        forbidden = set(repeats.forbidden())
        for token_id in possible:
            before = repeats.copy_of_state()
            if token_id in forbidden and not noticed:
                assert has_repeats(value)
            repeats.read(token_id)
            repeats.restore(before)
        token_id = data.draw(st.sampled_from(possible))
        noticed |= not repeats.read(token_id)
        place += len(TEXTS.texts[token_id])
    assert noticed == has_repeats(value)


@pytest.mark.parametrize(
    ("before", "text", "is_noticed"),
    [
        (TextBefore(b"</t>"), b'{"a"</t> {"a": 1, "a"', True),
        (TextBefore(b"</t>"), b'{"a": 1, "a"', False),  # still the reasoning
        (TextBefore(b"</t>", b"<t>"), b'<t>{"a": 1, "a"</t>\n\n{"a": 1, "b"', False),
        (TextBefore(b"</t>", b"<t>"), b'<t>no</t>{"a": 1, "a"', True),
        (TextBefore(b"</t>", b"<t>"), b'{"a": 1, "a"', True),  # no reasoning
        (TextBefore(b"</t>", b"<t>", b"<final>"), b'<t>no</t> <final>{"a": 1, "a"', True),
        (TextBefore(answer=b"<final>"), b'<final>{"a": 1, "a"', True),
        (TextBefore(answer=b"<final>"), b'<final>{"a": 1, "b"', False),
        (TextBefore(answer=b"<final>"), b'<call>{"a": 1, "a"', False),  # an alternative, which is no JSON
    ],
)
def test_what_is_written_before_the_json_is_not_part_of_it(before: TextBefore, text: bytes, is_noticed: bool) -> None:
    repeats = JsonRepeats(SchemaPlaces({}), TEXTS, before)
    assert [repeats.read(byte) for byte in text][-1] != is_noticed


def test_items_that_are_nested_deeply_are_compared_as_they_are_written() -> None:
    repeats = JsonRepeats(SchemaPlaces(UNIQUE), TEXTS)
    item = b"[" * 3000 + b"]" * 3000
    assert all(repeats.read(byte) for byte in b"[" + item + b", ")
    assert not all(repeats.read(byte) for byte in item)
