"""Schemas in words that the library knows accept nothing that they refused before."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from app.errors import InvalidRequest
from app.messages import GrammarSource
from app.text.grammar import GrammarCompiler
from app.text.grammar_definition import LIMITS, define
from app.text.json_repeats import JsonRepeats, SchemaPlaces, TokenBytes
from app.text.schema_logic import SchemaLogic, all_but, patterns_without_look_ahead
from app.text.schema_narrowing import close_schema, narrow_schema
from app.text.tokenizer import Tokenizer
from hypothesis_examples import examples
from small_tokenizers import BYTE_VOCABULARY, ByteTokens, byte_level, write_tokenizer

TEXTS = TokenBytes(list(ByteTokens.tokens))


def compiled(schema: Any, is_open: bool = True) -> LLMatcher:
    definition = define(GrammarSource("json_schema", json.dumps(schema), "f", is_open=is_open))
    return LLMatcher(BYTE_VOCABULARY, definition, log_level=0, limits=LIMITS)


def accepts(schema: Any, value: Any, is_open: bool = True) -> bool:
    matcher = compiled(schema, is_open)
    assert not matcher.is_error(), matcher.get_error()
    return follows(matcher, schema, value)


def follows(matcher: LLMatcher, schema: Any, value: Any) -> bool:
    ids = list(json.dumps(value, ensure_ascii=False).encode())
    repeats = JsonRepeats(SchemaPlaces(schema), TEXTS)
    for token_id in ids:
        if token_id in repeats.forbidden() or not repeats.read(token_id):
            return False
    one = matcher.deep_copy()
    return one.try_consume_tokens(ids) == len(ids) and one.is_accepting()


A, B = {"required": ["a"]}, {"required": ["b"]}
KIND = {"kind": {"enum": ["x", "y", "z"]}, "a": {"type": "integer"}, "b": {"type": "integer"}}


def kind(value: str) -> dict[str, Any]:
    return {"properties": {"kind": {"const": value}}}


CASES: list[tuple[str, Any, list[Any], list[Any]]] = [
    ("if with else", {"if": kind("x"), "then": A, "else": B, "properties": KIND, "required": ["kind"]},
     [{"kind": "x", "a": 1}, {"kind": "y", "b": 1}], [{"kind": "x", "b": 1}, {"kind": "y", "a": 1}]),
    ("if of each kind", {"properties": KIND, "required": ["kind"], "allOf": [
        {"if": kind(one), "then": {"required": [need]}} for one, need in (("x", "a"), ("y", "b"))]},
     [{"kind": "x", "a": 1}, {"kind": "y", "b": 1}, {"kind": "z"}], [{"kind": "x"}, {"kind": "y", "a": 1}]),
    ("not a property", {"type": "object", "not": {"required": ["x"]}}, [{"y": 1}, {}], [{"x": 1}]),
    ("not a value", {"type": "string", "not": {"enum": ["ab", "b"]}}, ["a", "abc", "", "c"], ["ab", "b"]),
    ("not a number", {"type": "integer", "not": {"const": 3}}, [2, 4], [3]),
    ("not a type", {"not": {"type": ["object", "string"]}}, [1, [], None], [{}, "x"]),
    ("one of two properties", {"type": "object", "oneOf": [A, B], "properties": KIND},
     [{"a": 1}, {"b": 1}], [{"a": 1, "b": 1}, {}]),
    ("one of closed objects", {"oneOf": [{"properties": {n: {}}, "additionalProperties": False} for n in "ab"]},
     [{"a": 1}, {"b": 1}], [{}, {"a": 1, "b": 1}]),
    ("one of numbers", {"oneOf": [{"properties": {"v": {"const": n}}, "required": ["v"]} for n in (1, 2)]},
     [{"v": 1}, {"v": 2}], [{"v": 3}]),
    ("one of a list and a pattern", {"oneOf": [{"enum": ["a", "b"]}, {"type": "string", "pattern": "^x"}]},
     ["a", "xy"], ["c"]),
    ("a dependency", {"properties": KIND, "dependentRequired": {"a": ["b"]}}, [{"b": 1}, {"a": 1, "b": 1}], [{"a": 1}]),
    ("an old dependency", {"properties": KIND, "dependencies": {"a": {"required": ["b"]}}},
     [{"a": 1, "b": 1}, {}], [{"a": 1}]),
    ("names by a pattern", {"propertyNames": {"pattern": "^x"}, "type": "object"}, [{"x1": 1}, {}], [{"y": 1}]),
    ("names by a list", {"propertyNames": {"enum": ["p", "q"]}, "additionalProperties": {"type": "integer"}},
     [{"p": 1, "q": 2}], [{"r": 1}, {"p": "x"}]),
    ("names but some", {"propertyNames": {"not": {"enum": ["p"]}}, "type": "object"}, [{"q": 1}], [{"p": 1}]),
    ("contains", {"contains": {"const": 5}, "items": {"type": "integer"}}, [[5, 1], [5]], [[], [1]]),
    ("contains at most", {"contains": {"const": 5}, "maxContains": 1, "type": "array"}, [[5, 1]], [[5, 5]]),
    ("some property", {"properties": {"a": {}, "b": {}}, "minProperties": 1}, [{"a": 1}, {"b": 1}], [{}]),
    ("one property", {"properties": {"a": {}, "b": {}}, "maxProperties": 1, "additionalProperties": False},
     [{"a": 1}, {"b": 1}, {}], [{"a": 1, "b": 1}]),
    ("unique", {"uniqueItems": True, "items": {"type": "string"}}, [["a", "b", "ab"], []], [["a", "a"], ["a", "b", "a"]]),
    ("unique of a list", {"uniqueItems": True, "type": "array", "items": {"enum": [1, 12, "x"]}},
     [[12, 1], [1, 12, "x"]], [[1, 1], [12, 1, 12]]),
    ("unevaluated", {"allOf": [{"properties": {"a": {}}}], "properties": {"b": {}}, "unevaluatedProperties": False},
     [{"a": 1, "b": 1}], [{"c": 1}]),
    ("an old limit", {"type": "integer", "minimum": 3, "exclusiveMinimum": True}, [4], [3]),
    ("an old anchor", {"$schema": "http://json-schema.org/draft-07/schema#", "$ref": "#x",
                       "definitions": {"x": {"$id": "#x", "type": "integer"}}}, [1], ["x"]),
    ("an anchor as an id", {"$ref": "#x", "$defs": {"x": {"$id": "#x", "type": "integer"}}}, [1], ["x"]),
    ("an anchor", {"$ref": "#x", "$defs": {"x": {"$anchor": "x", "type": "integer"}}}, [1], ["x"]),
    ("recursive", {"$ref": "#/$defs/t", "$defs": {"t": {"properties": {"t": {"$ref": "#/$defs/t"}},
                                                        "additionalProperties": False}}}, [{"t": {"t": {}}}], [{"u": 1}]),
    ("a password", {"type": "string", "pattern": r"^(?=.*[A-Z])(?=.*\d)[A-Za-z\d]{3,}$"}, ["aB3", "3zZZ"], ["abc", "A3"]),
    ("not a word", {"type": "string", "pattern": "^(?!no$|nil)[a-z]+$"}, ["not", "yes"], ["no", "nil", "nils"]),
    ("no such character", {"type": "string", "pattern": "^(?!.*[-_])[a-z_]+$"}, ["ab"], ["a_b"]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "schema", "good", "bad"), CASES, ids=[case[0] for case in CASES])
def test_keywords_that_the_library_does_not_know(name: str, schema: Any, good: list[Any], bad: list[Any]) -> None:
    check = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)(schema)
    matcher = compiled(schema)
    assert not matcher.is_error(), matcher.get_error()
    for value in good:
        assert "old" in name or "as an id" in name or check.is_valid(value)
        assert follows(matcher, schema, value), value
    for value in bad:
        assert not follows(matcher, schema, value), value


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": [{"properties": {"a": {"type": "string"}}}, {"properties": {"b": {"type": "string"}}}]},
        {"not": {"pattern": "^[a-z]"}},
        {"allOf": [{"if": {"minLength": n}, "then": {"maxLength": 9 - n}} for n in range(4)]},
        {"unevaluatedProperties": False, "anyOf": [{"properties": {"a": {}}, "additionalProperties": True}]},
        {"$ref": "https://example.com/x.json"},
        {"propertyNames": {"maxLength": 3, "pattern": "^a"}},
    ],
    ids=json.dumps,
)
def test_what_cannot_be_said_otherwise_is_refused(schema: Any) -> None:
    try:
        matcher = compiled(schema)
    except InvalidRequest as refusal:
        assert len(refusal.message) > 40
    else:
        assert matcher.is_error()


PLAIN = st.sampled_from(
    [
        True, {"type": "string"}, {"type": "integer"}, {"type": ["string", "null"]}, {"const": "x"}, {"const": 1},
        {"enum": ["x", "y", 1]}, {"minimum": 2}, {"maxLength": 1}, {"type": "string", "pattern": "^x"},
        {"required": ["a"]}, {"required": ["b"], "type": "object"}, {"type": "array", "uniqueItems": True},
        {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True}, {"minProperties": 1}, {"type": "boolean"},
        {"properties": {"a": {"const": 1}}}, {"properties": {"a": {"const": "x"}}, "required": ["a"]},
        {"properties": {"a": {}, "b": {}}, "additionalProperties": False}, {"propertyNames": {"enum": ["a", "b"]}},
    ]
)  # fmt: skip


def wider(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    several = st.lists(inner, min_size=1, max_size=3)
    words = {
        "allOf": several,
        "anyOf": several,
        "oneOf": several,
        "not": inner,
        "if": inner,
        "then": inner,
        "else": inner,
        "contains": inner,
        "items": inner,
        "properties": st.dictionaries(st.sampled_from("abc"), inner, min_size=1, max_size=2),
        "additionalProperties": inner,
        "dependentRequired": st.just({"a": ["b"]}),
        "dependentSchemas": st.dictionaries(st.sampled_from("ab"), inner, min_size=1, max_size=1),
        "uniqueItems": st.just(True),
        "minProperties": st.sampled_from([1, 2]),
        "maxProperties": st.sampled_from([1, 2]),
        "maxContains": st.just(1),
        "required": st.just(["a"]),
        "type": st.sampled_from(["object", "array", "string", ["object", "string"]]),
    }
    return st.lists(st.sampled_from(sorted(words)), min_size=1, max_size=4, unique=True).flatmap(
        lambda chosen: st.fixed_dictionaries({word: words[word] for word in chosen})
    )


SCHEMAS = st.recursive(PLAIN, wider, max_leaves=6)
SCALARS = st.sampled_from(["x", "y", "xx", 1, 2, 3, True, None])
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abcd"), inner, max_size=3),
    max_leaves=5,
)


@pytest.mark.full
@settings(max_examples=examples(400), deadline=None)
@given(SCHEMAS, st.lists(VALUES, min_size=10, max_size=30), st.booleans())
def test_nothing_is_accepted_that_a_schema_refuses(schema: Any, values: list[Any], is_open: bool) -> None:
    try:
        matcher = compiled(schema, is_open)
    except InvalidRequest:
        return
    if matcher.is_error():
        return
    check = jsonschema.Draft202012Validator(schema)
    for value in values:
        if not check.is_valid(value):
            assert not follows(matcher, schema, value), value


@pytest.mark.full
@settings(max_examples=examples(400), deadline=None)
@given(SCHEMAS, SCHEMAS, st.lists(VALUES, min_size=10, max_size=30))
def test_refusals_and_exclusions_are_true(one: Any, other: Any, values: list[Any]) -> None:
    logic = SchemaLogic({}, ignores_siblings=False)
    checks = [jsonschema.Draft202012Validator(schema) for schema in (one, other)]
    excluded = logic.exclude_each_other(one, other)
    refused = [jsonschema.Draft202012Validator(schema) for schema in logic.refusals(one)]
    for value in values:
        assert not (excluded and all(check.is_valid(value) for check in checks))
        assert not (any(check.is_valid(value) for check in refused) and checks[0].is_valid(value))


WORDS = st.lists(st.text("abn\n", max_size=3), max_size=5)


@settings(max_examples=examples(100), deadline=None)
@given(WORDS, WORDS, st.lists(st.text("abn\n", max_size=4), min_size=20, max_size=40))
def test_all_texts_but_some(whole: list[str], begun: list[str], texts: list[str]) -> None:
    pattern = all_but(whole, [text for text in begun if text])
    assert pattern is not None
    one = re.compile(pattern.removesuffix("$") + r"\Z")
    for text in [*texts, *whole, *begun]:
        refused = text in whole or any(text.startswith(start) for start in begun if start)
        assert (one.match(text) is None) == refused


DECIMALS = [
    "1",
    "1.5",
    "-12.25",
    "+.5",
    "7.",
    "",
    "-",
    ".",
    "123456",
    "0.001",
    "00012.3400",
    "1.23456",
    "1e5",
    "12345.6",
]


@pytest.mark.parametrize(("most", "after"), [(None, None), (5, None), (None, 2), (5, 2), (2, 2), (3, 0)])
def test_decimals_of_pydantic(most: int | None, after: int | None) -> None:
    """Its patterns before version 2.14 begin with a look-ahead. Those that have no end may be followed by anything."""
    pattern = r"^(?!^[-+.]*$)[+-]?0*"
    if most is not None:
        before, points = (most - after, f"{{0,{after}}}") if after is not None else (most, "*")
        digits = f"{{0,{before}}}" if after is not None else "*"
        pattern += rf"(?:\d{{0,{before}}}|(?=[\d.]{{1,{most + 1}}}0*$)\d{digits}\.\d{points}0*$)"
    else:
        pattern += r"\d*\.?\d*$" if after is None else rf"\d*\.?\d{{0,{after}}}0*$"
    (one,) = patterns_without_look_ahead(pattern)
    assert "(?" not in one.replace("(?:", "")
    accepted = [text for text in DECIMALS if re.search(one, text)]
    assert "+.5" in accepted or after == 0
    assert accepted == [text for text in accepted if re.search(pattern, text)]
    assert ("1.5" in accepted) == ((most != after and after != 0) or (most is None and after is None))


def test_a_schema_itself_does_not_change_and_what_is_none_stays() -> None:
    schema = {"if": A, "then": B, "oneOf": [A, B], "uniqueItems": True}
    text = json.dumps(schema)
    assert narrow_schema(schema, has_repeats=True) != schema and json.dumps(schema) == text
    assert narrow_schema([1]) == [1]
    assert narrow_schema({"uniqueItems": True}) == {"uniqueItems": True}


@pytest.mark.parametrize(
    "schema",
    [{"not": 3}, {"oneOf": 3}, {"if": []}, {"contains": 1, "minContains": "x"}, {"propertyNames": 3}, {"required": 3},
     {"dependencies": [1]}, {"dependentRequired": {"a": 3}}, {"enum": 3}, {"minProperties": "x", "properties": {"a": 1}},
     {"properties": {"a": 3}, "patternProperties": 4, "propertyNames": {"enum": 5}}, {"allOf": [3], "pattern": 4}],
    ids=json.dumps,
)  # fmt: skip
def test_what_is_no_schema_is_refused_or_has_no_effect(schema: Any) -> None:
    try:
        compiled(schema)
    except InvalidRequest as refusal:
        assert len(refusal.message) > 20


A, B = {"a": {"type": "integer"}}, {"b": {"type": "boolean"}}
OBJECT = {"type": "object", "properties": A}
REFERENCE = {"$ref": "#/$defs/base"}
DEFS = {"$defs": {"base": OBJECT}}


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> GrammarCompiler:
    tokenizer = Tokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer"), byte_level()))
    return GrammarCompiler(tokenizer, tokenizer.vocab_size)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory: Path = tmp_path_factory.mktemp("tokenizer")
    return Tokenizer(write_tokenizer(directory, byte_level()))


def accepts_closed(compiler: GrammarCompiler, tokenizer: Tokenizer, schema: Any, text: str) -> bool:
    state = compiler.compile(GrammarSource("json_schema", json.dumps(schema), "f")).start()
    ids = tokenizer.encode(text, add_special_tokens=False)
    if state.count_valid(ids) < len(ids) - 1:
        return False
    for token_id in ids:
        state.advance(token_id)
    for end in tokenizer.eos_token_ids if not state.finished else ():
        state.advance(end)
    return not state.error


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (OBJECT, ['{"a": 1}', "{}"], ['{"a": 1, "a": 2}', '{"a": 1, "x": 2}', '{"x": 1}']),
        ({"properties": A}, ['{"a": 1}', "[1]"], ['{"x": 1}']),
        ({"type": "object", "properties": {}}, ["{}"], ['{"x": 1}']),
        ({"type": "object"}, ['{"x": 1, "y": {"z": 1}}'], []),
        ({"type": ["object", "null"], "properties": A}, ["null", '{"a": 1}'], ['{"x": 1}']),
        ({**OBJECT, "required": ["a", "b"]}, ['{"a": 1, "b": "x"}'], ['{"a": 1}', '{"a": 1, "b": 1, "c": 1}']),
        ({**OBJECT, "additionalProperties": True}, ['{"a": 1, "x": 2}'], ['{"a": 1, "a": 2}']),
        ({**OBJECT, "additionalProperties": {"type": "null"}}, ['{"a": 1, "x": null}'], ['{"a": 1, "x": 2}']),
        ({"type": "array", "items": OBJECT}, ['[{"a": 1}, {}]'], ['[{"x": 1}]']),
        ({"properties": {"o": OBJECT}}, ['{"o": {"a": 1}}'], ['{"o": {"x": 1}}']),
        ({"anyOf": [OBJECT, {"type": "null"}]}, ["null", '{"a": 1}'], ['{"x": 1}']),
        ({**DEFS, **REFERENCE}, ['{"a": 1}'], ['{"x": 1}']),
        ({**DEFS, "properties": {"o": REFERENCE}}, ['{"o": {"a": 1}}'], ['{"o": {"x": 1}}']),
        ({"allOf": [OBJECT, {"properties": B}]}, ['{"a": 1, "b": true}', "{}"], ['{"a": 1, "x": 2}']),
        ({**DEFS, "allOf": [REFERENCE, {"properties": B}]}, ['{"a": 1, "b": true}'], ['{"a": 1, "x": 2}']),
        ({**DEFS, **REFERENCE, "properties": B}, ['{"a": 1, "b": true}'], ['{"a": 1, "x": 2}']),
        (
            {**DEFS, "properties": {"o": REFERENCE, "p": {"allOf": [REFERENCE, {"properties": B}]}}},
            ['{"o": {"a": 1}, "p": {"a": 1, "b": true}}'],
            ['{"o": {"a": 1, "b": true}}', '{"p": {"x": 1}}'],
        ),
        ({"allOf": [{**OBJECT, "additionalProperties": True}, {"properties": B}]}, ['{"a": 1, "x": 2}'], []),
        ({"patternProperties": {"^x": {"type": "null"}}, "type": "object"}, ['{"x1": null}'], ['{"y": null}']),
        ({"$defs": {"t": {"properties": {"next": {"$ref": "#/$defs/t"}}, "type": "object"}}, "$ref": "#/$defs/t"},
         ['{"next": {"next": {}}}'], ['{"next": {"x": 1}}']),
        ({"type": "string", "format": "password"}, ['"x"'], []),
        ({"type": "string", "format": "date"}, ['"2026-01-01"'], ['"x"']),
        ({"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"}, ['"-1.50"', '".5"', '"7."'], ['"-"', '"."', '""']),
        ({"enum": [{"properties": {"x": 1}}]}, ['{"properties": {"x": 1}}'], []),
        (True, ["1"], []),
    ],
    ids=lambda value: json.dumps(value)[:70] if isinstance(value, dict) else "",
)  # fmt: skip
def test_what_a_schema_allows(
    compiler: GrammarCompiler, tokenizer: Tokenizer, schema: Any, good: list[str], bad: list[str]
) -> None:
    for text in good:
        assert accepts_closed(compiler, tokenizer, schema, text), text
    for text in bad:
        assert not accepts_closed(compiler, tokenizer, schema, text), text


def test_a_schema_itself_does_not_change() -> None:
    schema = {**DEFS, "allOf": [REFERENCE, {"properties": B}]}
    text = json.dumps(schema)
    assert close_schema(schema) != schema and json.dumps(schema) == text
    assert close_schema([1]) == [1]


@pytest.mark.parametrize(
    "schema",
    [{"$ref": "#/nowhere"}, {"$ref": 3}, {"properties": [1], "allOf": 2}, {"required": 3, "properties": {"a": 4}}],
)
def test_what_is_no_schema_is_refused_by_the_library(compiler: GrammarCompiler, schema: Any) -> None:
    with pytest.raises(InvalidRequest, match="f cannot be followed"):
        compiler.compile(GrammarSource("json_schema", json.dumps(schema), "f"))


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"allOf": [{"type": "object"}, {"$ref": "#"}]},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"allOf": [{"$ref": "#/$defs/a"}]}}},
    ],
)
def test_a_reference_that_leads_to_itself_for_the_same_value_is_refused(schema: Any) -> None:
    with pytest.raises(InvalidRequest, match="leads to itself"):
        compiled({"properties": {"x": schema}, **schema})


@pytest.mark.parametrize("name", ["größe", "gr%C3%B6%C3%9Fe", "a b", "a~1b"])
def test_references_have_names_of_any_letters(name: str) -> None:
    target = {"type": "integer"}
    definitions = {"größe": target, "a b": target, "a/b": target}
    schema = {"properties": {"n": {"$ref": f"#/$defs/{name}"}}, "required": ["n"], "$defs": definitions}
    assert accepts(schema, {"n": 5}) and not accepts(schema, {"n": "x"})


@pytest.mark.parametrize("kind", ["integer", "number"])
def test_limits_that_no_number_in_use_reaches_are_none(kind: str) -> None:
    for low, high in ((-(2**63), 2**63 - 1), (-1e300, 1e300), (-(2**80), 7)):
        schema = {"type": kind, "minimum": low, "maximum": high}
        assert accepts(schema, -5) and (high == 7) is not accepts(schema, 8)
